# SPDX-License-Identifier: Apache-2.0
"""One server for each file of tests; each test starts from a clean log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

# As in the `conftest` above: the tools of these tests are modules beside them.
from http1_site import Handlers, http1_site  # noqa: E402
from http1_wire import Client  # noqa: E402

from support.serving import Serving, serving  # noqa: E402


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Serving, Handlers]]:
    handlers = Handlers()
    with serving(lambda: http1_site(handlers)) as running:
        yield running, handlers


@pytest.fixture
def server(shared: tuple[Serving, Handlers]) -> Iterator[Serving]:
    """The file's server; a test fails if anything flew out of a protocol into the loop."""
    running = shared[0]
    flown: list[dict[str, Any]] = []
    running.call(lambda: running.loop.set_exception_handler(lambda loop, context: flown.append(context)))
    yield running
    running.call(lambda: None)
    assert flown == []


@pytest.fixture
def handlers(shared: tuple[Serving, Handlers]) -> Handlers:
    shared[1].clear()
    return shared[1]


@pytest.fixture
def client(server: Serving, handlers: Handlers) -> Iterator[Client]:
    with Client(server.port) as connected:
        yield connected


@pytest.fixture
def wire_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "headrace.wire")
    return caplog
