# SPDX-License-Identifier: Apache-2.0
"""The seed's example 1, `uvicorn app:app`, with its model; other hosts are in `tests/programs/serve/test_asgi_app.py`."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import uvicorn
from seed_models import expected
from seed_programs import ROW, Client

from headrace.asgi import _settings
from headrace.programs.serve.asgi import HostedServer
from support.ports import free_port
from support.programs import Program
from support.waiting import eventually


class Uvicorn:
    """The application under a uvicorn in a thread of this process."""

    def __init__(self) -> None:
        self.port = free_port()
        config = uvicorn.Config(HostedServer(_settings), host="127.0.0.1", port=self.port, log_config=None)
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)
        self.ended_by: BaseException | None = None

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.ended_by = error

    def __enter__(self) -> Uvicorn:
        self._thread.start()
        eventually(lambda: self.server.started or not self._thread.is_alive())
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(100)


def check(port: int) -> None:
    client = Client(port)
    eventually(lambda: client.ask("/healthz").status == 200)
    assert client.ask("/healthz").document == {"status": "healthy", "model_version": "v1.2.0"}
    answer = client.ask(body={"inputs": ROW})
    assert answer.document["predictions"] == pytest.approx(expected(ROW, "v1.2.0"))
    assert client.ask(body={"inputs": []}).error == "inputs cannot be empty"
    client.close()


def test_uvicorn_serves_the_model(seed_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_MODEL_PATH", str(seed_models / "versions/production"))
    with Uvicorn() as hosted:
        check(hosted.port)


def test_a_wrong_setting_is_reported_by_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFERENCE_MAX_BATCH_SIZE", "many")
    for name in ("uvicorn", "uvicorn.error"):  # a uvicorn that another test ran may have silenced them
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
    caplog.set_level(logging.INFO, "uvicorn.error")
    with Uvicorn() as hosted:
        assert not hosted.server.started
        assert hosted.ended_by is not None
    assert "INFERENCE_MAX_BATCH_SIZE: takes a whole number" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_uvicorn_as_a_process_serves_the_model(tmp_path: Path, seed_models: Path) -> None:
    port = free_port()
    program = Program(
        command=(sys.executable, "-m", "uvicorn", "headrace.asgi:app", "--host", "127.0.0.1", "--port", str(port)),
        env={"INFERENCE_MODEL_PATH": str(seed_models / "versions/production")},
        log=tmp_path / "log",
        cwd=tmp_path,
        ready="Uvicorn running on",
    ).start()
    try:
        check(port)
    finally:
        # uvicorn ends itself by the signal, once its applications have ended.
        assert program.stop() in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_a_wrong_setting_ends_the_process_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_MAX_BATCH_SIZE", "many")
    command = [sys.executable, "-m", "uvicorn", "headrace.asgi:app", "--host", "127.0.0.1", "--port", str(free_port())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode != 0
    assert "INFERENCE_MAX_BATCH_SIZE: takes a whole number" in done.stderr
    assert "Traceback" not in done.stderr
