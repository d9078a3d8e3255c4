# SPDX-License-Identifier: Apache-2.0
"""Signals to a microservice, and to its model, while clients ask: each gets its own answer, is told, or sees the end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chaos_clients import PATIENCE_SECONDS, Cut, ErrorAnswer, Lost
from load_clients import Account
from service_process import Service, service

from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CLIENTS = 4


class InferenceClients:
    """Clients of `/api/v1/inference`; each ends with its first request that is not answered, if told to."""

    def __init__(self, port: int, *, until_gone: bool) -> None:
        self.account = Account()
        self._port = port
        self._until_gone = until_gone
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(CLIENTS)]

    def __enter__(self) -> InferenceClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS + 20)
            assert not thread.is_alive()
        assert self.account.wrong == []
        assert self.account.over == self.account.sent

    def wait_for(self, answers: int) -> None:
        wanted = self.account.answered + answers
        eventually(
            lambda: self.account.answered >= wanted,
            message=lambda: (self.account.error_answers[-3:], self.account.cut[-3:]),
        )

    def _run(self, number: int) -> None:
        value = number * 100_000
        while not self._stop.is_set():
            value += 1
            self.account.begin()
            got, error = None, None
            try:
                got = self._ask(value)
            except (ErrorAnswer, Cut, Lost) as caught:
                error = caught
            self.account.end(2 * value, got, error)
            if error is not None and self._until_gone:
                return

    def _ask(self, value: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_SECONDS)
        try:
            connection.request("POST", "/api/v1/inference", json.dumps({"inputs": {"x": [value]}}))
            answer = connection.getresponse()
            content = answer.read()
        except TimeoutError:
            raise Lost(str(value)) from None
        except (OSError, http.client.HTTPException) as error:
            raise Cut(repr(error)) from None
        finally:
            connection.close()
        if answer.status != 200:
            raise ErrorAnswer(f"{answer.status} {content[:300]!r}")
        return int(json.loads(content)["results"]["outputs"]["output"][0])


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.py").write_text(
        "import numpy as np\n\n\ndef predict(x: np.ndarray) -> np.ndarray:\n    return x * 2\n"
    )
    with service("--model-path", tmp_path / "model", folder=tmp_path) as made:
        made.until("model_loaded")
        yield made


def test_sigterm_loses_nothing(running: Service) -> None:
    with InferenceClients(running.port, until_gone=True) as asking:
        asking.wait_for(20)
        assert running.stop() == 0, running.log
    assert len(asking.account.cut) + len(asking.account.error_answers) == CLIENTS


def test_sigkill_leaves_no_client_waiting_and_nothing_behind(running: Service) -> None:
    family = psutil.Process(running.process.pid).children(recursive=True)
    with InferenceClients(running.port, until_gone=True) as asking:
        asking.wait_for(20)
        running.process.kill()
        running.process.wait(60)
    assert len(asking.account.cut) == CLIENTS
    assert not psutil.wait_procs(family, timeout=60)[1]


def test_sigstop_of_the_service_or_its_model_is_only_a_pause(running: Service) -> None:
    model = psutil.Process(running.process.pid).children(recursive=True)
    with InferenceClients(running.port, until_gone=False) as asking:
        for pid in (running.process.pid, *(item.pid for item in model)):
            asking.wait_for(10)
            os.kill(pid, signal.SIGSTOP)
            eventually(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            os.kill(pid, signal.SIGCONT)
        asking.wait_for(10)
    assert (asking.account.error_answers, asking.account.cut) == ([], [])
