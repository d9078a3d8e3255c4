# SPDX-License-Identifier: Apache-2.0
"""A server with the echo service for each file of tests, and a grpcio channel to it for each test."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from grpc_echo_client import channel_to

from support.serving import EchoCalls, Serving, echo_site, serving
from support.waiting import eventually


@pytest.fixture(scope="module")
def calls() -> EchoCalls:
    return EchoCalls()


@pytest.fixture(scope="module")
def server(calls: EchoCalls) -> Iterator[Serving]:
    with serving(echo_site(calls=calls)) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_open_calls(request: pytest.FixtureRequest) -> None:
    """The server may not have seen yet that the clients of the test before have gone; grpcio may not even have said so."""
    if "server" in request.fixturenames:
        running: Serving = request.getfixturevalue("server")
        running.call(lambda: [connection.abort() for connection in list(running.site.connections)])
        eventually(lambda: running.connections() == 0)


@pytest.fixture
def channel(server: Serving, calls: EchoCalls) -> Iterator[grpc.Channel]:
    calls.events.clear()
    calls.held.clear()
    with channel_to(server) as made:
        yield made
