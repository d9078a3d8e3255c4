# SPDX-License-Identifier: Apache-2.0
"""`headrace.asgi:app` under the servers that the seed runs its own application with."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.ports import free_port
from websockets.sync.client import connect

MODEL = """
import numpy as np


def predict(x: np.ndarray) -> np.ndarray:
    return (x * 2).astype(np.float32)
"""
CONFIG = """
options:
  model-repository: [models]
"""

HOSTS = {
    "uvicorn": ["uvicorn", "headrace.asgi:app", "--host", "127.0.0.1", "--port", "{port}"],
    "uvicorn-workers": ["uvicorn", "headrace.asgi:app", "--host", "127.0.0.1", "--port", "{port}", "--workers", "2"],
    "gunicorn": [
        *("gunicorn", "headrace.asgi:app", "-w", "2", "-k", "uvicorn_worker.UvicornWorker"),
        *("--bind", "127.0.0.1:{port}"),
    ],
}


@pytest.fixture(params=HOSTS)
def hosted(request, tmp_path):
    version = tmp_path / "models/double/1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    port = free_port()
    command = [sys.executable, "-m", *(word.format(port=port) for word in HOSTS[request.param])]
    (tmp_path / "inference.yaml").write_text(CONFIG)
    environment = {**os.environ, "INFERENCE_CONFIG": "inference.yaml"}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True)
    try:
        _wait_for(port, process)
        yield port, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(port, process):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if _ask(port, "GET", "/readyz")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    pytest.fail("the host does not answer")


def _ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def test_the_same_surface_under_another_server(hosted):
    port, process = hosted
    status, answer = _ask(port, "POST", "/predict", b'{"inputs": [1, 2, 3]}')
    assert (status, answer["predictions"], answer["model_version"]) == (200, [2, 4, 6], "1")
    assert _ask(port, "POST", "/predict", b'{"inputs": []}') == (400, {"error": "inputs cannot be empty"})
    assert _ask(port, "GET", "/v2/models/double")[1]["name"] == "double"
    assert _ask(port, "GET", "/nowhere") == (404, {"error": "Not Found"})
    with connect(f"ws://127.0.0.1:{port}/predict/stream") as socket:
        socket.send('{"inputs": [4]}')
        assert json.loads(socket.recv(timeout=60))["predictions"] == [8]
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) in (0, -signal.SIGTERM)
