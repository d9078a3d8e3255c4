#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Log in, start a service for a trained model, wait, ask, stop: `workflow.sh URL ORG`. Needs curl and jq.
# build/key is the user's key, build/ids.json names the experiment and the job that trained the model.
set -euo pipefail
url=$1/api/v1 org=$2

experiment=$url/orgs/$org/experiments/$(jq -r .experiment_id build/ids.json)
parent=$(jq -r .job_id build/ids.json)
# The key and the token go by files and standard input: a command line can be read by every user of the machine.
token=$(jq -nR --arg org "$org" '{ngc_key: input, ngc_org_name: $org}' build/key | curl -sf "$url/login" -d @- | jq -r .token)
ask() { curl -sS --fail-with-body -H @<(echo "Authorization: Bearer $token") "$@"; }

job=$(ask "$experiment/inference_microservice/start" -d "{\"parent_id\": \"$parent\"}" | jq -r .job_id)
service=$experiment/jobs/$job/inference_microservice
echo "started"

until [ "$(ask "$service/status" | jq -r .model_loaded)" = true ]; do sleep 0.5; done
echo "ready"

picture=data:image/png\;base64,$(base64 -w0 build/rose.png)
ask "$service/inference" -d "{\"images\": [\"$picture\"]}" | jq -r '.status + ": " + (.results.response // .error)'
ask -X POST "$service/stop" | jq -r .status
