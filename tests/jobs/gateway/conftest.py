# SPDX-License-Identifier: Apache-2.0
"""Gateways for these tests: each test has one on SQLite, and one on PostgreSQL in the platform tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gateway_process import Gateway, gateway
from gateway_thread import gateway_in_thread
from postgresql_servers import PostgresqlServer


@pytest.fixture(scope="module", autouse=True, params=["sqlite", pytest.param("postgresql", marks=pytest.mark.platform)])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """What gateways of this module keep their records in: each in a new one."""
    if request.param == "postgresql":
        server: PostgresqlServer = request.getfixturevalue("postgresql")
        Gateway.new_database = staticmethod(server.new_database)
    yield request.param
    Gateway.new_database = staticmethod(lambda: "")


@pytest.fixture(scope="module", params=["in this process", pytest.param("a process", marks=pytest.mark.slow)])
def open_gateway(request: pytest.FixtureRequest, database: str) -> Callable[..., Any]:
    """Use it as `gateway_process.gateway`, which it is, or the quicker `gateway_thread.gateway_in_thread`."""
    return gateway if request.param == "a process" else gateway_in_thread
