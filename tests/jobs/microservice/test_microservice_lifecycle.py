# SPDX-License-Identifier: Apache-2.0
"""Every row of the table of states, over HTTP, driven by real downloads and loads that are slow, fail, or succeed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_hub import fake_hub
from picture_models import data_url, png, tiny_vit
from service_process import Service, ask, local_service, settings_for

from support.waiting import eventually

Open = Callable[..., Any]
SECRET = "hf_averysecrettokenvalue"
INITIALIZING = "Server is initializing (downloading files, setting up), please wait"
LOADING = "Model is currently loading, please wait and try again"
NOT_STARTED = "Model not loaded yet, please try again later"
BAD_BODIES: tuple[Any, ...] = (None, b"", b"{not json", {}, {"prompt": "hello"})


def assert_row(port: int, code: int, word: str, reason: str, error_type: str, text: str, *, waits: bool) -> None:
    """One row: readiness, inference and chat, whatever the body is."""
    ready = ask(port, "GET", "/api/v1/health/readiness")
    assert (ready.status, ready.body["status"], ready.body["reason"]) == (503, "not_ready", reason)
    assert ready.body["error"] == {"type": error_type, "message": ready.body["message"]}
    assert text in ready.body["message"]
    for body in BAD_BODIES:
        response = ask(port, "POST", "/api/v1/inference", body)
        assert (response.status, response.body["status"]) == (code, word)
        assert text in response.body["error" if word == "error" else "message"]
        assert response.body["job_id"] == ready.body["job_id"]
        chat = ask(port, "POST", "/v1/chat/completions", body)
        assert (chat.status, chat.body["error"]["type"]) == (code, error_type)
        assert text in chat.body["error"]["message"]
        for answer in (ready, response, chat):
            assert ("retry-after" in answer.fields) == waits
    alive = ask(port, "GET", "/api/v1/health/liveness")
    assert (alive.status, alive.body["status"]) == (200, "healthy")
    assert ask(port, "GET", "/v1/models").body == {"object": "list", "data": []}


def gated_model(folder: Path, gate: Path, more: str = "") -> Path:
    """A Python model whose load takes until `gate` exists, and whose answers take until `gate` is gone."""
    folder.mkdir()
    (folder / "model.py").write_text(
        f"""
import time
from pathlib import Path
import numpy as np

GATE = Path({str(gate)!r})
while not GATE.exists():
    time.sleep(0.01)
{more}

def predict(x: np.ndarray) -> np.ndarray:
    while x[0] < 0 and GATE.exists():
        time.sleep(0.01)
    return x * 2
"""
    )
    return folder


def test_a_slow_download_then_a_load_then_ready(tmp_path: Path, open_service: Open) -> None:
    created = tiny_vit(tmp_path / "vit")
    with fake_hub() as hub:
        hub.models["acme/tiny-vit"] = created
        hub.files_open.clear()
        job = {
            "job_id": "job-1",
            "specs": {"model_path": "hf_model://acme/tiny-vit"},
            "neural_network_name": "tao-dataservices",
        }
        variables = {"TAO_API_JOB_ID": "job-1", "CLOUD_BASED": "False", "HF_ENDPOINT": hub.url}
        arguments = ("--job", json.dumps(job), "--docker_env_vars", json.dumps(variables))
        with open_service(*arguments, folder=tmp_path, env={"HF_TOKEN": SECRET}) as running:
            assert "Listening on all interfaces" in running.log
            reported = running.until(lambda told: told["progress"]["stage"].startswith("downloading"))
            assert (reported["server_initializing"], reported["model_loading"], reported["model_loaded"]) == (
                True,
                False,
                False,
            )
            assert reported["initialization_error"] is None and reported["model_load_error"] is None
            assert reported["progress"]["remaining_steps"] == ["download model files", "load model"]
            assert_row(
                running.port,
                202,
                "initializing",
                "server_initializing",
                "server_initializing",
                INITIALIZING,
                waits=True,
            )
            hub.files_open.set()
            running.until("model_loaded")
            assert f"Bearer {SECRET}" in hub.tokens
            ready = running.get("/api/v1/health/readiness")
            assert (ready.status, ready.body["status"], ready.body["model_type"]) == (200, "ready", "classifier")
            body = {"images": [data_url(png(seed=1)), data_url(png(seed=2))], "batch_size": 1}
            answer = running.post("/api/v1/inference", body)
            assert answer.status == 200, answer.text
            assert answer.body["status"] == "completed"
            assert answer.body["message"] == "Inference completed successfully"
            state = tmp_path / "service-models" / "job-1_server.json"
            assert stat.S_IMODE(state.stat().st_mode) == 0o600
            assert json.loads(state.read_text())["model_loaded"] is True
            shown = state.read_text() + running.log + json.dumps(running.status())
            assert SECRET not in shown
            assert running.stop() == 0
            assert not state.exists()


def test_a_slow_load_then_ready_and_the_seeds_loop_sees_it(tmp_path: Path, open_service: Open) -> None:
    gate = tmp_path / "gate"
    model = gated_model(tmp_path / "model", gate)
    with open_service("--model-path", model, "--job-id", "job-2", folder=tmp_path) as running:
        reported = running.until("model_loading")
        assert reported["progress"]["stage"] == "loading_model"
        assert_row(running.port, 202, "loading", "model_loading", "model_loading", LOADING, waits=True)
        gate.touch()
        seen = subprocess.run(
            ["bash", "-c", SEED_LOOP], env=os.environ | {"PORT": str(running.port)}, capture_output=True, timeout=180
        )
        assert seen.stdout.decode().splitlines()[-1] == "Model is ready!", seen
        answer = running.post("/api/v1/inference", {"inputs": {"x": [1, 2]}}, {"Content-Type": "text/plain"})
        assert answer.status == 200, answer.text
        results = answer.body["results"]
        assert results["outputs"] == {"output": [2.0, 4.0]}
        assert {"inference_time", "timestamp", "model_type"} <= results.keys()
        assert_bad_bodies_when_ready(running)


SEED_LOOP = r"""
field() { sed -n "s/.*\"$1\":\([^,]*\).*/\1/p" <<< "$STATUS" | tr -d '"'; }
while true; do
    STATUS=$(curl -s http://127.0.0.1:$PORT/api/v1/status)
    MODEL_LOADED=$(field model_loaded)
    MODEL_LOADING=$(field model_loading)
    SERVER_INIT=$(field server_initializing)
    INIT_ERROR=$(field initialization_error)
    LOAD_ERROR=$(field model_load_error)
    if [ "$INIT_ERROR" != "null" ]; then
        echo "Initialization error: $INIT_ERROR"
        exit 1
    fi
    if [ "$LOAD_ERROR" != "null" ]; then
        echo "Model load error: $LOAD_ERROR"
        exit 1
    fi
    if [ "$MODEL_LOADED" == "true" ]; then
        echo "Model is ready!"
        break
    fi
    if [ "$SERVER_INIT" == "true" ]; then
        echo "Server initializing (downloading files)... waiting 10s"
    elif [ "$MODEL_LOADING" == "true" ]; then
        echo "Model loading... waiting 10s"
    else
        echo "Waiting for service... 10s"
    fi
    sleep 0.1
done
"""
"""The seed's, with a shorter pause and with sed for jq, which is not on every machine."""


def assert_bad_bodies_when_ready(running: Service) -> None:
    for body, text in (
        (None, "Request body is required"),
        ({}, "Request body is required"),
        (b"null", "Request body is required"),
        (b"{not json", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        ({"inputs": {"x": [1]}, "colour": 1}, "'colour' is not a parameter"),
        ({"inputs": 7}, "'inputs' is 7"),
        ({"inputs": {"y": [1]}}, "'y'"),
    ):
        answer = running.post("/api/v1/inference", body)
        assert (answer.status, answer.body["status"]) == (400, "error"), answer.text
        assert text in answer.body["error"]
    chat = running.post("/v1/chat/completions", {})
    assert (chat.status, chat.body["error"]["type"]) == (400, "invalid_request")
    chat = running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
    assert (chat.status, chat.body["error"]["type"]) == (400, "invalid_request")
    assert running.get("/api/v1/nowhere").status == 404
    assert running.get("/v1/nowhere").body["error"]["type"] == "not_found"
    wrong = running.get("/api/v1/inference")
    assert (wrong.status, wrong.fields["allow"]) == (405, "POST")
    assert running.post("/v1/models", {"a": 1}).status == 405


def test_a_download_that_fails(tmp_path: Path, open_service: Open) -> None:
    with fake_hub() as hub:
        arguments = ("--model-path", "hf_model://acme/gone", "--network-arch", "cosmos-rl")
        with open_service(*arguments, folder=tmp_path, env={"HF_ENDPOINT": hub.url}) as running:
            reported = running.until("initialization_error")
            assert "acme/gone" in reported["initialization_error"]
            assert (reported["status"], reported["model_state"]) == ("unhealthy", "initialization_failed")
            assert reported["progress"]["stage"] == "error"
            text = f"Server initialization failed: {reported['initialization_error']}"
            assert_row(running.port, 503, "error", "initialization_failed", "initialization_error", text, waits=False)
            assert running.stop() == 0


def test_a_load_that_fails_keeps_its_cause(tmp_path: Path, open_service: Open) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    model = gated_model(tmp_path / "model", gate, "raise RuntimeError('CUDA out of memory, or so')")
    with open_service("--model-path", model, folder=tmp_path) as running:
        reported = running.until("model_load_error")
        assert "CUDA out of memory, or so" in reported["model_load_error"]
        text = f"Model failed to load: {reported['model_load_error']}"
        assert_row(running.port, 503, "error", "model_load_failed", "model_load_error", text, waits=False)
        assert running.stop() == 0


def test_between_the_steps_no_flag_is_set(tmp_path: Path) -> None:
    """In this process: nothing outside could stop a real service at this point."""
    gate = tmp_path / "gate"
    gate.touch()
    model = gated_model(tmp_path / "model", gate)
    may_load = threading.Event()

    async def before_load() -> None:
        await asyncio.to_thread(may_load.wait, 240)

    with local_service(settings_for(model, tmp_path), before_load=before_load) as running:
        running.until(lambda told: not told["server_initializing"])
        assert_row(running.port, 503, "not_ready", "model_not_loaded", "model_not_ready", NOT_STARTED, waits=True)
        may_load.set()
        running.until("model_loaded")
        assert running.infer(inputs={"x": [3]})["outputs"] == {"output": [6.0]}


def test_sigterm_lets_a_request_in_flight_finish(tmp_path: Path, open_service: Open) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    model = gated_model(tmp_path / "model", gate)
    with open_service("--model-path", model, folder=tmp_path) as running:
        running.until("model_loaded")
        answers: list[Any] = []
        body = {"inputs": {"x": [-1, 5]}}
        asking = threading.Thread(target=lambda: answers.append(running.post("/api/v1/inference", body)))
        asking.start()
        eventually(lambda: running.status()["last_request_time"])
        running.send(signal.SIGTERM)
        eventually(lambda: "draining" in running.log)
        gate.unlink()
        asking.join(180)
        assert answers[0].status == 200
        assert answers[0].body["results"]["outputs"] == {"output": [-2.0, 10.0]}
        assert running.wait() == 0


def test_sigterm_during_a_load_or_a_download_ends_immediately(tmp_path: Path, open_service: Open) -> None:
    (tmp_path / "a").mkdir()
    model = gated_model(tmp_path / "model", tmp_path / "never")
    with open_service("--model-path", model, "--grace-seconds", 2, folder=tmp_path / "a") as running:
        running.until("model_loading")
        assert running.stop() == 0
    (tmp_path / "b").mkdir()
    with fake_hub() as hub:
        weights = tmp_path / "weights"
        weights.mkdir()
        (weights / "model.safetensors").write_bytes(bytes(100))
        hub.models["acme/tiny"] = weights
        hub.files_open.clear()
        arguments = ("--model-path", "hf_model://acme/tiny", "--grace-seconds", 2)
        with open_service(*arguments, folder=tmp_path / "b", env={"HF_ENDPOINT": hub.url}) as running:
            running.until(lambda told: told["progress"]["stage"].startswith("downloading"))
            assert running.stop() == 0
