# SPDX-License-Identifier: Apache-2.0
"""`headrace.asgi:app` under the servers that the seed runs its own application with."""

import http.client
import json
import os
import signal
import sys

import pytest
from websockets.sync.client import connect

from support.ports import free_port
from support.programs import Program
from support.waiting import eventually

MODEL = """
import numpy as np


def predict(x: np.ndarray) -> np.ndarray:
    return (x * 2).astype(np.float32)
"""
CONFIG = """
options:
  model-repository: [models]
"""

HOSTS = [
    ["uvicorn", "headrace.asgi:app", "--host", "127.0.0.1", "--port", "{port}"],
    ["uvicorn", "headrace.asgi:app", "--host", "127.0.0.1", "--port", "{port}", "--workers", "2"],
    [
        *("gunicorn", "headrace.asgi:app", "-w", "2", "-k", "uvicorn_worker.UvicornWorker"),
        *("--bind", "127.0.0.1:{port}"),
    ],
]
"""Those with several workers are slow: what the application does is the same in each of them."""


def _name(host):
    return f"{host[0]}-workers" if "--workers" in host else host[0]


@pytest.fixture(params=[HOSTS[0], *(pytest.param(host, marks=pytest.mark.slow) for host in HOSTS[1:])], ids=_name)
def hosted(request, tmp_path):
    version = tmp_path / "models/double/1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (tmp_path / "inference.yaml").write_text(CONFIG)
    port = free_port()
    program = Program(
        command=(sys.executable, "-m", *(word.format(port=port) for word in request.param)),
        env={"INFERENCE_CONFIG": "inference.yaml"},
        cwd=tmp_path,
        log=tmp_path / "log",
        new_session=True,
    ).start()
    try:
        eventually(lambda: _is_ready(port, program))
        yield port, program
    finally:
        if program.process.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.process.wait()


def _is_ready(port, program):
    if program.process.poll() is not None:
        raise RuntimeError(f"the host has ended:\n{program.log}")
    try:
        return _ask(port, "GET", "/readyz")[0] == 200
    except OSError:
        return False


def _ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def test_the_same_surface_under_another_server(hosted):
    port, program = hosted
    status, answer = _ask(port, "POST", "/predict", b'{"inputs": [1, 2, 3]}')
    assert (status, answer["predictions"], answer["model_version"]) == (200, [2, 4, 6], "1")
    assert _ask(port, "POST", "/predict", b'{"inputs": []}') == (400, {"error": "inputs cannot be empty"})
    assert _ask(port, "GET", "/v2/models/double")[1]["name"] == "double"
    assert _ask(port, "GET", "/nowhere") == (
        404,
        {"error": "Not Found: this server does not have this path; GET /openapi.json lists those it has"},
    )
    with connect(f"ws://127.0.0.1:{port}/predict/stream") as socket:
        socket.send('{"inputs": [4]}')
        assert json.loads(socket.recv(timeout=60))["predictions"] == [8]
    assert program.stop() in (0, -signal.SIGTERM)
