# SPDX-License-Identifier: Apache-2.0
"""Two echo servers behind a router for each file of tests, and a grpcio channel to the router for each test."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from grpc_router import Routing, channel_to, routing

from support.serving import EchoCalls, echo_site, serving


@pytest.fixture(scope="module")
def echoes() -> list[EchoCalls]:
    return [EchoCalls(), EchoCalls()]


@pytest.fixture(scope="module")
def router(echoes: list[EchoCalls]) -> Iterator[Routing]:
    one, two = echoes
    with serving(echo_site(calls=one)) as first, serving(echo_site(calls=two)) as second:
        with routing(first.port, second.port) as running:
            yield running


@pytest.fixture
def channel(router: Routing, echoes: list[EchoCalls]) -> Iterator[grpc.Channel]:
    for calls in echoes:
        calls.events.clear()
        calls.held.clear()
    with channel_to(router) as made:
        yield made
