# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests, each with a number of its own, while everything around them is killed: an account of every one.

    HEADRACE_CHAOS_REQUESTS=100000 .venv/bin/python -m pytest tests/chaos/test_every_request.py -s

Each is answered exactly once with its own number, or its sender is told that it was not, or sees its connection end.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_server import STARTED, Server, chaos_models, served
from load_clients import LoadClients

from support.waiting import eventually

pytestmark = pytest.mark.slow
REQUESTS = int(os.environ.get("HEADRACE_CHAOS_REQUESTS", "4000"))
TURNS = max(12, REQUESTS // 2500)


def kill_a_worker(server: Server, turn: int) -> None:
    # One at a time: with the last one dead there would be nothing to learn but that nobody answers.
    eventually(lambda: server.log.count("ready: ") == len(STARTED.findall(server.log)), message=lambda: server.log)
    os.kill(server.worker(turn % 2), signal.SIGKILL)


def stop_a_worker_for_a_moment(server: Server, turn: int) -> None:
    pid = server.worker(turn % 2)
    os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(0.3)
    os.kill(pid, signal.SIGCONT)


def reload_the_model(server: Server, turn: int) -> None:
    # A worker that has just been killed cannot be told; the answer says so, and the next reload finds it there.
    assert server.post("/v2/repository/models/echo/load") in {200, 503, 500, 400}


def hang_up(server: Server, turn: int) -> None:
    body = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[-1]}]}'
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    for length in range(0, len(head + body) + 1, 7):
        with socket.create_connection(("127.0.0.1", server.ports.http), timeout=100) as client:
            client.sendall((head + body)[:length])


FAULTS: tuple[Callable[[Server, int], None], ...] = (
    kill_a_worker,
    hang_up,
    stop_a_worker_for_a_moment,
    reload_the_model,
)


@pytest.mark.timeout(300 + REQUESTS // 50)
def test_each_request_is_answered_once_or_its_sender_gets_an_error(tmp_path: Path) -> None:
    models = chaos_models(tmp_path, ("echo", "repeater"))
    options = ("--workers", "2", "--model-control-mode", "explicit", "--load-model", "*")
    injected = 0
    with served(models, tmp_path / "log", *options) as server:
        eventually(lambda: server.log.count("ready: ") == 2, message=lambda: server.log)
        with LoadClients(server.ports, each=2, most=REQUESTS) as clients:
            # A fault each time that a part of the requests is over: as many with a slow machine as with a quick one.
            for turn in range(TURNS):
                due = (turn + 1) * REQUESTS // (TURNS + 2)
                eventually(
                    lambda due=due: clients.total("over") >= due, within=300 + REQUESTS / 50, message=clients.__str__
                )
                try:
                    FAULTS[turn % len(FAULTS)](server, turn // len(FAULTS))
                except OSError:
                    pass  # our own request met the worker that was killed
                injected += 1
            clients.join(300 + REQUESTS / 50)
        clients.check()
        assert clients.total("sent") == REQUESTS
        assert server.process.poll() is None
    # Cut are those that were with a worker when it was killed, on its connections or still on their way to them.
    assert clients.total("answered") > REQUESTS * 0.5, (
        f"{clients} {clients.texts('error_answers')} {clients.texts('cut')}"
    )
    print(f"{injected} faults, {REQUESTS} requests, 0 lost, 0 wrong. {clients}; {clients.texts('error_answers')}")
