# SPDX-License-Identifier: Apache-2.0
"""A server for each file of tests, raw clients to it, and a look at it after each test: it must still serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from adversary import Client
from http2_echo_server import Http2EchoServer, http2_echo_server, no_failures

from headrace.core.limits import Limits


@pytest.fixture(scope="module")
def shared_echo_server() -> Iterator[Http2EchoServer]:
    with http2_echo_server() as echo_server:
        yield echo_server


@pytest.fixture
def echo_server(shared_echo_server: Http2EchoServer) -> Iterator[Http2EchoServer]:
    """The file's server. When the test is over, it still serves, and nothing it did not expect has happened."""
    with no_failures():
        yield shared_echo_server
        shared_echo_server.disconnect()
        shared_echo_server.check_alive()
        shared_echo_server.disconnect()


@pytest.fixture
def client(echo_server: Http2EchoServer) -> Client:
    """A connection after the handshake."""
    return echo_server.connect()


@pytest.fixture
def limited() -> Iterator[Callable[..., Http2EchoServer]]:
    """Servers with limits of their own, for this test."""
    with no_failures(), ExitStack() as stack:
        servers: list[Http2EchoServer] = []

        def make(**limits: float) -> Http2EchoServer:
            servers.append(stack.enter_context(http2_echo_server(Limits(**limits))))  # type: ignore[arg-type]
            return servers[-1]

        yield make
        for echo_server in servers:
            echo_server.disconnect()
            echo_server.check_alive()
