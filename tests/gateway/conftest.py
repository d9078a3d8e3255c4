# SPDX-License-Identifier: Apache-2.0
"""`import gateway_process` works from here: tools of these tests. Models and pictures are the microservice's, the
bucket is that of storage. Every test has its gateway on SQLite, and on PostgreSQL where that is installed on purpose."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "microservice"))
sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))

from gateway_process import Gateway
from jobs.postgresql_servers import PostgresqlServer


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    with PostgresqlServer() as server:
        yield server


@pytest.fixture(scope="module", autouse=True, params=["sqlite", pytest.param("postgresql", marks=pytest.mark.platform)])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """What gateways of this module keep their records in: each in a new one."""
    if request.param == "postgresql":
        server: PostgresqlServer = request.getfixturevalue("postgresql")
        Gateway.new_database = staticmethod(server.new_database)
    yield request.param
    Gateway.new_database = staticmethod(lambda: "")
