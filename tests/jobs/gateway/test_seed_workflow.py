# SPDX-License-Identifier: Apache-2.0
"""The seed's complete workflow as it is printed, by bash, curl and jq, against a real gateway and a real microservice.

Changed are only what a reader has to fill in and the waits (10 s become a tenth); with the classifier, the media too, which
are data: URLs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gateway_process import Gateway, gateway
from picture_models import data_url, onnx_classifier, png
from seed_script import START
from seed_script import WAIT as PRINTED_WAIT
from store_stub import SECRET, StoreStub
from vl_model import mp4, tiny_qwen_vl

SETUP = r"""
export BASE_URL="http://127.0.0.1:$PORT/api/v1"
export NGC_ORG="acme"
TOKEN=$(curl -s -X POST $BASE_URL/login \
    -H "Content-Type: application/json" \
    -d '{
        "ngc_key": "'"$NGC_API_KEY"'",
        "ngc_org_name": "'"$NGC_ORG"'"
    }' | jq -r '.token')
echo "Authenticated with token"
"""
WAIT = PRINTED_WAIT.replace("sleep 10", "sleep 0.1")
INFER = r"""
echo "Running inference..."
RESULT=$(curl -s -X POST \
    $BASE_URL/orgs/$NGC_ORG/experiments/$EXPERIMENT_ID/jobs/$INFERENCE_MS_JOB_ID/inference_microservice/inference \
    -H "Authorization: Bearer $TOKEN" \
    -H "Content-Type: application/json" \
    -d '{
        "images": ["'"$IMAGE"'"],
        "batch_size": 1
    }')
echo "Inference result:"
echo $RESULT | jq -c '.'
"""
ASK_VLM = r"""
echo "Running inference..."
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
echo $RESULT | jq -c '.'
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
echo $RESULT2 | jq -c '.'
"""
STOP = r"""
echo "Stopping inference microservice..."
curl -s -X POST \
    $BASE_URL/orgs/$NGC_ORG/experiments/$EXPERIMENT_ID/jobs/$INFERENCE_MS_JOB_ID/inference_microservice/stop \
    -H "Authorization: Bearer $TOKEN" | jq -c '.'
echo "Inference microservice stopped"
"""

pytestmark = [
    pytest.mark.slow,  # quick: test_gateway_program.py, test_sdk_requests.py
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="the seed's script needs both"),
]


def registered(running: Gateway, model: Path) -> dict[str, str]:
    """A user's key, and a trained model's ids."""
    key = running.command("users", "add", "alice", "--org", "acme").strip()
    document = json.loads(
        running.command("jobs", "register", str(model), "--org", "acme", "--arch", "classification", "--json")
    )
    return {"NGC_API_KEY": key, "EXPERIMENT_ID": document["experiment_id"], "TRAIN_JOB_ID": document["job_id"]}


def bash(script: str, more: dict[str, str]) -> list[str]:
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], env=os.environ | more, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


def test_the_workflow_as_printed(tmp_path: Path) -> None:
    model = onnx_classifier(tmp_path / "model")
    with gateway(tmp_path) as running:
        given = registered(running, model) | {"PORT": str(running.port), "IMAGE": data_url(png())}
        lines = bash(SETUP + START + WAIT + INFER + STOP, given)
        result = json.loads(lines[lines.index("Inference result:") + 1])
        assert (result["status"], result["message"]) == ("completed", "Inference completed successfully")
        job_id = lines[2].rpartition(" ")[2]
        assert result["job_id"] == job_id
        stopped = json.loads(lines[lines.index("Stopping inference microservice...") + 1])
        message = "Inference microservice stopped successfully"
        assert stopped == {"status": "stopped", "message": message, "job_id": job_id}
        assert not running.processes()
        token = running.login(given["NGC_API_KEY"], "acme")
        base = f"/api/v1/orgs/acme/experiments/{given['EXPERIMENT_ID']}/jobs/{job_id}"
        for method, verb in (("GET", "status"), ("POST", "inference"), ("POST", "stop")):
            got = running.ask(method, f"{base}/inference_microservice/{verb}", {"a": 1}, token)
            assert (got.status, got.json["error_code"]) == (404, 1), (verb, got.body)
        assert running.ask("GET", base, token=token).json["status"] == "Done"
        text = running.log + (running.data_dir / "audit.jsonl").read_text()
        assert given["NGC_API_KEY"] not in text
        assert token not in text
        assert running.end() == 0


def test_the_workflow_with_the_gateway_killed_between_each_step(tmp_path: Path) -> None:
    model = onnx_classifier(tmp_path / "model")
    with gateway(tmp_path) as running:
        given = registered(running, model) | {"IMAGE": data_url(png())}

        def again() -> None:
            running.end(9)
            running.start()

        def step(script: str) -> list[str]:
            return bash(script, given | {"PORT": str(running.port)})

        given["TOKEN"] = step(SETUP + 'echo "$TOKEN"')[-1]
        given["BASE_URL"], given["NGC_ORG"] = f"http://127.0.0.1:{running.port}/api/v1", "acme"
        again()
        given["INFERENCE_MS_JOB_ID"] = step(START)[-1].rpartition(" ")[2]
        again()
        assert step(WAIT)[-1] == "Model is ready!"
        service = running.processes()
        assert len(service) == 1
        again()
        assert json.loads(step(INFER)[-1])["status"] == "completed"
        assert running.processes() == service  # the same one, taken up by three gateways
        again()
        assert json.loads(step(STOP)[-2])["status"] == "stopped"
        assert not running.processes()
        again()
        assert not running.processes()


def test_a_vision_language_model_with_its_media_in_a_bucket(tmp_path: Path) -> None:
    model = tiny_qwen_vl(tmp_path / "vlm", brief=True)
    pictures = {f"images/img{number}.jpg": png(seed=number) for number in (1, 2)}
    with (
        StoreStub({"my-bucket": {"videos/sample.mp4": mp4(), **pictures}, "others": {"x.jpg": png()}}) as store,
        gateway(tmp_path) as running,
    ):
        key = running.command("users", "add", "alice", "--org", "acme").strip()
        token = running.login(key, "acme")
        details = {"cloud_bucket_name": "my-bucket", **store.metadata("my-bucket")["aws"]["my-bucket"]}
        wish = {"name": "w", "cloud_type": "aws", "cloud_specific_details": details}
        answer = running.ask("POST", "/api/v1/orgs/acme/workspaces", wish, token)
        assert answer.status == 200, answer.body
        assert SECRET.encode() not in answer.body
        arguments = ("jobs", "register", str(model), "--org", "acme", "--arch", "cosmos-rl", "--json", "--workspace")
        document = json.loads(running.command(*arguments, answer.json["id"]))
        given = {"NGC_API_KEY": key, "EXPERIMENT_ID": document["experiment_id"], "TRAIN_JOB_ID": document["job_id"]}
        lines = bash(SETUP + START + WAIT + ASK_VLM, given | {"PORT": str(running.port)})
        for title in ("Inference result:", "Second inference result:"):
            result = json.loads(lines[lines.index(title) + 1])
            assert (result["status"], result["message"]) == ("completed", "Inference completed successfully"), result
            assert isinstance(result["results"]["response"], str)
        job = lines[2].rpartition(" ")[2]
        service = running.processes()[0]
        words_of_it = Path(f"/proc/{service}/cmdline").read_bytes() + Path(f"/proc/{service}/environ").read_bytes()
        assert SECRET.encode() not in words_of_it
        base = f"/api/v1/orgs/acme/experiments/{document['experiment_id']}/jobs/{job}/inference_microservice"
        elsewhere = {"media": "s3://others/x.jpg", "text": "What is this?"}
        got = running.ask("POST", f"{base}/inference", elsewhere, token)
        assert (got.status, got.json["status"]) == (400, "error")
        assert "others" in got.json["error"]
        assert running.ask("POST", f"{base}/stop", None, token).status == 200
        assert not running.processes()
        assert SECRET not in running.log
