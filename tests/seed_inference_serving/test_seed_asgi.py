# SPDX-License-Identifier: Apache-2.0
"""The seed's example 1, `uvicorn app:app`, with the seed's model; other hosts are in `tests/apps/test_asgi_app.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ports import free_port
from seed_models import expected
from seed_programs import PLAIN, ROW, Client


def test_uvicorn_serves_the_model(tmp_path: Path, seed_models: Path) -> None:
    port = free_port()
    environment = PLAIN | {"INFERENCE_MODEL_PATH": str(seed_models / "versions/production")}
    command = [sys.executable, "-m", "uvicorn", "headrace.asgi:app", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        answer = None
        while answer is None or answer.status == 503:
            assert process.poll() is None, (tmp_path / "log").read_text()
            client = Client(port)
            try:
                answer = client.ask("/healthz")
            except ConnectionRefusedError:
                time.sleep(0.05)
            finally:
                client.close()
        assert answer.document == {"status": "healthy", "model_version": "v1.2.0"}
        client = Client(port)
        answer = client.ask(body={"inputs": ROW})
        assert answer.document["predictions"] == pytest.approx(expected(ROW, "v1.2.0"))
        assert client.ask(body={"inputs": []}).error == "inputs cannot be empty"
        client.close()
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
    # uvicorn ends itself by the signal, once its applications have ended.
    assert process.wait(180) in (0, -signal.SIGTERM)


def test_a_wrong_setting_is_told_by_the_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uvicorn", "headrace.asgi:app", "--host", "127.0.0.1", "--port", str(free_port())]
    environment = PLAIN | {"INFERENCE_MAX_BATCH_SIZE": "many"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode != 0
    assert "INFERENCE_MAX_BATCH_SIZE: takes a whole number" in done.stderr
    assert "Traceback" not in done.stderr
