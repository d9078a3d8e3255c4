# SPDX-License-Identifier: Apache-2.0
"""PostgreSQL is stopped under a gateway that writes to it, and comes back: writers are told, and what was kept is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_records import Writers
from gateway_process import Gateway, gateway
from postgresql_servers import PostgresqlServer

from support.waiting import eventually

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]


def test_acknowledged_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PostgresqlServer() as server:
        monkeypatch.setattr(Gateway, "new_database", staticmethod(server.new_database))
        with gateway(tmp_path) as running, Writers(running) as writers:
            for _ in range(2):
                writers.wait_for(10)
                server.stop()
                eventually(lambda: len(writers.error_answers) >= 4, message=lambda: len(writers.made))
                server.start()
            writers.wait_for(10)
            writers.check_kept()
    assert all(status == 503 for status, _ in writers.error_answers), writers.error_answers[:3]
