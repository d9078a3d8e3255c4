# SPDX-License-Identifier: Apache-2.0
"""A worker is killed while clients ask: each request is answered with its own number, or its sender sees the end. Quick.

The same with every fault and every protocol: `test_every_request`, `test_signals_under_load`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from chaos_server import chaos_models, served
from load_clients import LoadClients

from support.waiting import eventually

PROTOCOLS = ("v2 http", "v2 grpc", "v1 http", "predict", "websocket")
EACH = 3
"""15 connections: that all are with one worker happens once in 16,000 times, and then nobody is cut, which is right, too."""


def test_each_request_is_answered_once_or_its_sender_gets_an_error(tmp_path: Path) -> None:
    with served(chaos_models(tmp_path, ("echo",)), tmp_path / "log", "--workers", "2") as server:
        eventually(lambda: server.log.count("ready: ") == 2, message=lambda: server.log)
        with LoadClients(server.ports, PROTOCOLS, each=EACH) as clients:
            clients.wait_for(20)
            killed = server.worker(1)
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: server.worker(1) != killed, message=lambda: server.log)
            clients.wait_for(20)
        clients.check()
        assert clients.total("error_answers") == 0, clients.texts("error_answers")
        assert all(len(account.cut) <= EACH for account in clients.accounts.values()), clients.texts("cut")
        assert clients.total("sent") == clients.total("answered") + clients.total("cut")
        server.process.terminate()
        assert server.ended() == 0, server.log
