# SPDX-License-Identifier: Apache-2.0
"""SIGTERM while clients of every protocol ask: readiness goes first, what was accepted is answered, the exit is clean.

Real `headrace serve` in a process of its own. A client stops at the first sign that the server takes no more: a refused
connection, a connection that was closed before its request was read (RFC 9112, 9.3.1), or an answer that says so.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from chaos_server import chaos_models, served
from load_clients import LoadClients

from support.waiting import eventually

pytestmark = pytest.mark.slow
EACH = 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_that_was_accepted_is_lost(tmp_path: Path, workers: int) -> None:
    with served(chaos_models(tmp_path), tmp_path / "log", "--workers", str(workers)) as server:
        with LoadClients(server.ports, each=EACH, until_gone=True) as clients:
            clients.wait_for(20)
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: not server.is_ready(), message=lambda: "it is still ready")
            # 0 only if everything that it had read was answered before it closed a connection.
            assert server.ended() == 0, server.log
            clients.join()
    clients.check()
    for name, account in clients.accounts.items():
        assert (len(account.error_answers) + len(account.cut), account.answered >= 20) == (EACH, True), (
            f"{name}: {clients}"
        )
        assert all("503" in text or "UNAVAILABLE" in text or "stopping" in text for text in account.error_answers), (
            account.error_answers
        )
