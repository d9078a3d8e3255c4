# SPDX-License-Identifier: Apache-2.0
"""Neither side is read faster than the other takes: what the router holds of a call stays bounded, both ways."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_router import SECONDS, Routing, channel_to, routing, unary

from headrace.net.grpc.call import GrpcCall
from headrace.net.http.heads import Buffer
from headrace.net.site import Site
from support.serving import EchoCalls, Serving, echo_site, serving
from support.waiting import eventually

_MIB = 1024 * 1024


class _PausedReader(EchoCalls):
    """Has a method that reads nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.deaf: list[GrpcCall] = []
        self.received = 0

    def add_to(self, services: Any) -> None:
        super().add_to(services)
        services.streaming("test.Echo", "Deaf", self.open)

    def open(self, call: GrpcCall) -> None:
        call.on_message = self.count
        call.on_half_close = lambda: (call.send(b"%d" % self.received), call.finish())[1]
        call.pause()
        self.deaf.append(call)

    def count(self, message: Buffer) -> None:
        self.received += len(message)


@pytest.fixture
def calls() -> _PausedReader:
    return _PausedReader()


@pytest.fixture
def backend(calls: _PausedReader) -> Iterator[Serving]:
    build: Callable[[], Site] = echo_site(calls=calls)
    with serving(build) as running:
        yield running


def _held(router: Routing) -> int:
    """Bytes that the router has taken from one side and not given to the other."""

    def buffered_bytes() -> int:
        sites = (router.server.site, router.proxy.site)
        return sum(
            stream.pending_bytes + connection._transport.get_write_buffer_size()
            for site in sites
            for connection in site.connections
            for stream in getattr(connection, "streams", {}).values()
        )

    return int(router.call(buffered_bytes))


def _still(value: Callable[[], int]) -> int:
    """The value when it has stopped to change."""
    last, same = value(), 0
    while same < 20:
        threading.Event().wait(0.01)
        now = value()
        same = same + 1 if now == last else 0
        last = now
    return last


def test_a_client_that_does_not_read_pauses_its_backend(backend: Serving) -> None:
    with routing(backend.port) as router, channel_to(router) as channel:
        answers = channel.unary_stream("/test.Echo/Expand")(b"640 100000", timeout=3 * SECONDS)
        assert len(next(answers)) == 100_004
        assert 0 < _still(lambda: _held(router)) < 3 * _MIB
        # Others are not held up meanwhile, on the same connection to the backend.
        assert unary(channel)(b"x" * 10_000, timeout=SECONDS) == b"x" * 10_000
        assert sum(1 for _ in answers) == 639
        eventually(lambda: _held(router) == 0)


def test_a_backend_that_does_not_read_pauses_its_client(backend: Serving, calls: _PausedReader) -> None:
    sent = [0]

    def messages() -> Iterator[bytes]:
        for _ in range(400):
            sent[0] += 100_000
            yield bytes(100_000)

    with routing(backend.port) as router, channel_to(router) as channel:
        future = channel.stream_unary("/test.Echo/Deaf").future(messages(), timeout=3 * SECONDS)
        eventually(lambda: calls.deaf)
        assert _still(lambda: _held(router)) < 8 * _MIB
        assert sent[0] < 30_000_000
        assert unary(channel)(b"x", timeout=SECONDS) == b"x"
        backend.call(calls.deaf[0].resume)
        assert future.result() == b"40000000"
        eventually(lambda: _held(router) == 0)


def test_large_conversations_side_by_side(backend: Serving) -> None:
    """Streams that fill every window, both ways at once, all come through whole."""
    message = bytes(range(256)) * 2048  # 512 KiB

    def converse(channel: grpc.Channel, found: list[int]) -> None:
        answers = channel.stream_stream("/test.Echo/Chat")(iter([message] * 20), timeout=3 * SECONDS)
        found.append(sum(answer == message for answer in answers))

    results: list[int] = []
    with routing(backend.port) as router, channel_to(router) as one, channel_to(router) as two:
        threads = [threading.Thread(target=converse, args=(item, results)) for item in (one, one, two, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * SECONDS)
    assert results == [20] * 4
