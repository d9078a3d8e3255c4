# SPDX-License-Identifier: Apache-2.0
"""The complete workflow that TAO's manual prints, word for word, and a bash that runs it.

A reader fills in what stands in angle brackets and after "your-"; so does `filled`. `sleep` is a shorter one. Between two
steps the bash waits, so that a test may do something to the gateway.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETUP = r"""
# Environment setup
export BASE_URL="http://<your-api-host>:<port>/api/v1"
export NGC_ORG="your-org-name"
export NGC_API_KEY="your-ngc-api-key"
# Authenticate
TOKEN=$(curl -s -X POST $BASE_URL/login \
    -H "Content-Type: application/json" \
    -d '{
        "ngc_key": "'"$NGC_API_KEY"'",
        "ngc_org_name": "'"$NGC_ORG"'"
    }' | jq -r '.token')
echo "Authenticated with token"
# Set experiment and training job IDs (from previous training)
EXPERIMENT_ID="your-experiment-id"
TRAIN_JOB_ID="your-completed-training-job-id"
"""
START = r"""
echo "Starting inference microservice..."
INFERENCE_MS_JOB_ID=$(curl -s -X POST \
    $BASE_URL/orgs/$NGC_ORG/experiments/$EXPERIMENT_ID/inference_microservice/start \
    -H "Authorization: Bearer $TOKEN" \
    -H "Content-Type: application/json" \
    -d '{
        "parent_id": "'"$TRAIN_JOB_ID"'"
    }' | jq -r '.job_id')
echo "Inference Microservice Job ID: $INFERENCE_MS_JOB_ID"
"""
WAIT = r"""
echo "Waiting for model to load..."
while true; do
    STATUS=$(curl -s -X GET \
        $BASE_URL/orgs/$NGC_ORG/experiments/$EXPERIMENT_ID/jobs/$INFERENCE_MS_JOB_ID/inference_microservice/status \
        -H "Authorization: Bearer $TOKEN")
    MODEL_LOADED=$(echo $STATUS | jq -r '.model_loaded')
    MODEL_LOADING=$(echo $STATUS | jq -r '.model_loading')
    SERVER_INIT=$(echo $STATUS | jq -r '.server_initializing')
    INIT_ERROR=$(echo $STATUS | jq -r '.initialization_error')
    LOAD_ERROR=$(echo $STATUS | jq -r '.model_load_error')
    # Check for errors
    if [ "$INIT_ERROR" != "null" ]; then
        echo "Initialization error: $INIT_ERROR"
        exit 1
    fi
    if [ "$LOAD_ERROR" != "null" ]; then
        echo "Model load error: $LOAD_ERROR"
        exit 1
    fi
    # Check if ready
    if [ "$MODEL_LOADED" == "true" ]; then
        echo "Model is ready!"
        break
    fi
    # Status message
    if [ "$SERVER_INIT" == "true" ]; then
        echo "Server initializing (downloading files)... waiting 10s"
    elif [ "$MODEL_LOADING" == "true" ]; then
        echo "Model loading... waiting 10s"
    else
        echo "Waiting for service... 10s"
    fi
    sleep 10
done
"""
FIRST = r"""
echo "Running inference..."
# Single video inference
RESULT=$(curl -s -X POST \
    $BASE_URL/orgs/$NGC_ORG/experiments/$EXPERIMENT_ID/jobs/$INFERENCE_MS_JOB_ID/inference_microservice/inference \
    -H "Authorization: Bearer $TOKEN" \
    -H "Content-Type: application/json" \
    -d '{
        "media": "s3://my-bucket/videos/sample.mp4",
        "text": "What is happening in this video?",
        "conv_mode": "auto"
    }')
echo "Inference result:"
echo $RESULT | jq '.'
"""
SECOND = r"""
# Multiple images inference
RESULT2=$(curl -s -X POST \
    $BASE_URL/orgs/$NGC_ORG/experiments/$EXPERIMENT_ID/jobs/$INFERENCE_MS_JOB_ID/inference_microservice/inference \
    -H "Authorization: Bearer $TOKEN" \
    -H "Content-Type: application/json" \
    -d '{
        "media": [
            "s3://my-bucket/images/img1.jpg",
            "s3://my-bucket/images/img2.jpg"
        ],
        "text": "Compare these two images",
        "conv_mode": "auto"
    }')
echo "Second inference result:"
echo $RESULT2 | jq '.'
"""
STOP = r"""
echo "Stopping inference microservice..."
curl -s -X POST \
    $BASE_URL/orgs/$NGC_ORG/experiments/$EXPERIMENT_ID/jobs/$INFERENCE_MS_JOB_ID/inference_microservice/stop \
    -H "Authorization: Bearer $TOKEN" | jq '.'
echo "Inference microservice stopped"
"""

STEPS = (SETUP, START, WAIT, FIRST, SECOND, STOP)
_BETWEEN = "@@ between two steps"
_BEFORE = f"""
sleep() {{ command sleep 0.1; }}
between() {{ echo "{_BETWEEN}"; read -r _; }}
"""


def filled(script: str, **given: str) -> str:
    """`given`: address, org, key, experiment, job, and the scheme of media."""
    places = {
        "<your-api-host>:<port>": given["address"],
        "your-org-name": given["org"],
        "your-ngc-api-key": given["key"],
        "your-experiment-id": given["experiment"],
        "your-completed-training-job-id": given["job"],
        "s3://my-bucket/": f"{given['scheme']}://my-bucket/",
    }
    for place, value in places.items():
        assert place in script
        script = script.replace(place, value)
    return script


def run_workflow(folder: Path, between: Callable[[int], None], **given: str) -> str:
    """What all of it prints. `between` is called after each step with its number, while the bash waits.

    `folder` is empty: the manual's script has `echo $RESULT`, in which bash looks for names of files.
    """
    script = _BEFORE + filled("\nbetween\n".join(STEPS), **given)
    with subprocess.Popen(
        ["bash", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        reported = ""
        step = 0
        for line in process.stdout:
            if line.strip() == _BETWEEN:
                between(step)
                step += 1
                process.stdin.write("\n")
                process.stdin.flush()
            else:
                reported += line
        wrong = process.stderr.read()
    assert process.returncode == 0 and step == len(STEPS) - 1, reported + wrong
    assert not wrong, wrong
    return reported


def after(told: str, title: str) -> Any:
    """The JSON that was printed after a line."""
    assert f"{title}\n" in told, told
    return json.JSONDecoder().raw_decode(told.partition(f"{title}\n")[2])[0]
