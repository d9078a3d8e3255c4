# SPDX-License-Identifier: Apache-2.0
"""Flow control: neither a client that does not read nor a handler that does not take makes the server's memory grow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_echo_client import (
    SECONDS,
    RawCall,
    aio_channel,
    channel_to,
    collect,
    expand,
    messages_of,
    open_streams,
    prefixed,
    unary,
    wait_until_still,
)

from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import CoroutineCalls, MessageStream, Services
from headrace.net.grpc.status import Status
from headrace.net.http.heads import Buffer
from headrace.net.site import Site
from support.serving import Serving, serving
from support.waiting import eventually

MIB = 1 << 20
UNSENT_HIGH = 256 * 1024
MESSAGE = 100_000


class Paced:
    """Handlers that count what they send and take messages only when a test lets them."""

    def __init__(self) -> None:
        self.produced = 0
        self.go = asyncio.Event()
        self.largest_backlog = 0
        self.held: dict[bytes, GrpcCall] = {}
        self._calls = CoroutineCalls()

    def site(self) -> Site:
        services = Services()
        services.streaming("test.Echo", "Expand", self._calls.serve(self.expand))
        services.streaming("test.Echo", "Collect", self._calls.serve(self.collect))
        services.unary("test.Echo", "Unary", lambda call, message: call.reply(message))
        services.unary("test.Echo", "Big", self.big)
        services.unary("test.Echo", "Hold", self.hold)
        return Site(services=services)

    def reset(self) -> None:
        self.produced = 0
        self.largest_backlog = 0
        self.held.clear()
        self.go.clear()

    async def expand(self, stream: MessageStream) -> None:
        count = int(bytes(await stream.receive() or b"0"))
        for _ in range(count):
            await stream.send(bytes(MESSAGE))
            self.produced += 1

    async def collect(self, stream: MessageStream) -> None:
        total = 0
        await self.go.wait()
        async for message in stream:
            self.largest_backlog = max(self.largest_backlog, stream.call.received - total)
            total += len(message) + 5
        await stream.send(b"%d" % total)

    def hold(self, call: GrpcCall, message: Buffer) -> None:
        self.held[bytes(message)] = call

    def big(self, call: GrpcCall, message: Buffer) -> None:
        call.reply(bytes(int(bytes(message))))


@pytest.fixture(scope="module")
def paced() -> Paced:
    return Paced()


@pytest.fixture(scope="module")
def paced_server(paced: Paced) -> Iterator[Serving]:
    with serving(paced.site) as running:
        yield running


@pytest.fixture
def server(paced: Paced, paced_server: Serving) -> Serving:
    paced_server.call(paced.reset)
    return paced_server


def unsent(server: Serving) -> int:
    """What waits in the server for one client: in its streams and in its socket's buffer."""

    def count() -> int:
        total = 0
        for connection in server.site.connections:
            total += sum(stream.pending_bytes for stream in connection.streams.values())
            total += connection._transport.get_write_buffer_size()
        return total

    return int(server.call(count))


def test_a_reader_that_stops_stops_the_producer(server: Serving, paced: Paced) -> None:
    with channel_to(server) as channel:
        responses = expand(channel)(b"2000", timeout=6 * SECONDS)
        next(responses)
        produced = wait_until_still(lambda: paced.produced)
        # grpcio reads ahead by its windows, of some megabytes; 200 MB is far beyond them.
        assert produced < 1000
        (stream,) = open_streams(server)
        assert 0 < stream.pending_bytes <= UNSENT_HIGH + MESSAGE + 5
        assert unsent(server) <= UNSENT_HIGH + MESSAGE + 5 + 2 * MIB
        assert sum(len(message) for message in responses) == 1999 * MESSAGE
    assert paced.produced == 2000


def test_what_waits_for_a_client_without_window_is_bounded(server: Serving, paced: Paced) -> None:
    """This client gives nothing back, so the numbers are exact."""
    with RawCall(server, "Expand") as call:
        call.send(prefixed(b"50"), end=True)
        call.receive(until=lambda: len(call.data) >= 65_535, take=False)
        assert len(call.data) == 65_535
        eventually(lambda: unsent(server) > UNSENT_HIGH)
        (stream,) = open_streams(server)
        assert stream.pending_bytes == 4 * (MESSAGE + 5) - 65_535
        assert paced.produced == 3
        # Another stream of the same server is not held up by this one.
        with channel_to(server) as channel:
            assert unary(channel)(b"x", timeout=SECONDS) == b"x"


def test_a_client_that_floods_a_slow_handler_is_held_back(server: Serving, paced: Paced) -> None:
    sent = 0

    def messages() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(500):
            sent += 1
            yield bytes(MESSAGE)

    window = server.site.limits.stream_window_bytes
    bound = window + 2 * MIB
    with channel_to(server) as channel:
        future = collect(channel).future(messages(), timeout=6 * SECONDS)
        eventually(lambda: open_streams(server))
        (stream,) = open_streams(server)
        eventually(lambda: stream.paused)
        received = wait_until_still(lambda: stream.received)
        assert stream.paused
        assert MIB <= received <= bound
        assert sent < 500
        server.loop.call_soon_threadsafe(paced.go.set)
        assert int(future.result()) == 500 * (MESSAGE + 5)
    assert paced.largest_backlog <= bound


def test_small_messages_apply_backpressure_too(server: Serving, paced: Paced) -> None:
    count = 8_000
    with channel_to(server) as channel:
        future = collect(channel).future((b"x" * 1000 for _ in range(count)), timeout=6 * SECONDS)
        eventually(lambda: any(stream.paused for stream in open_streams(server)))
        (stream,) = open_streams(server)
        received = wait_until_still(lambda: stream.received)
        assert received <= server.site.limits.stream_window_bytes + MIB
        assert received < count * 1005
        server.loop.call_soon_threadsafe(paced.go.set)
        assert int(future.result()) == count * 1005


def test_a_large_message_cannot_wedge_a_stream(server: Serving, paced: Paced) -> None:
    """It is larger than all windows: the handler waits for it and the client must be let on."""
    with channel_to(server) as channel:
        future = collect(channel).future(iter([bytes(30 * MIB), b"", bytes(30 * MIB), b""]), timeout=6 * SECONDS)
        eventually(lambda: any(stream.paused for stream in open_streams(server)))
        (stream,) = open_streams(server)
        # One message waits; the second is held back before all of it has come.
        assert wait_until_still(lambda: stream.received) < 40 * MIB
        server.loop.call_soon_threadsafe(paced.go.set)
        assert int(future.result()) == 60 * MIB + 20


def test_calls_beside_a_paused_stream_continue(server: Serving, paced: Paced) -> None:
    """One stream's window is a quarter of the connection's, so three that are stuck leave room for others."""
    stop = threading.Event()

    def messages() -> Iterator[bytes]:
        while not stop.is_set():
            yield bytes(MESSAGE)

    with channel_to(server) as channel:
        futures = [collect(channel).future(messages(), timeout=6 * SECONDS) for _ in range(2)]
        eventually(lambda: sum(stream.paused for stream in open_streams(server)) == 2)
        for _ in range(20):
            assert unary(channel)(bytes(MESSAGE), timeout=SECONDS) == bytes(MESSAGE)
        stop.set()
        server.loop.call_soon_threadsafe(paced.go.set)
        for future in futures:
            assert int(future.result()) > 0


async def _many_large_answers(server: Serving) -> None:
    """More than the socket takes at once: streams that have only their status left to send must still send it."""
    async with aio_channel(server) as channel:
        wanted = [600_000, 0, 1] * 60
        calls = [channel.unary_unary("/test.Echo/Big")(b"%d" % size, timeout=6 * SECONDS) for size in wanted]
        sizes = [len(answer) for answer in await asyncio.gather(*calls)]
    assert sizes == wanted


def test_every_answer_arrives_when_the_socket_is_full(server: Serving) -> None:
    asyncio.run(_many_large_answers(server))


def test_a_status_is_not_forgotten_when_the_socket_fills_up_again(server: Serving, paced: Paced) -> None:
    """Two streams wait for a full socket, the second with nothing but its status; the first fills it up again."""
    with channel_to(server) as channel:
        first = unary(channel, "Hold").future(b"large", timeout=SECONDS)
        second = unary(channel, "Hold").future(b"bare", timeout=SECONDS)
        eventually(lambda: len(paced.held) == 2)

        def fill_and_free() -> None:
            large, bare = paced.held[b"large"], paced.held[b"bare"]
            connection = large.connection
            connection.pause_writing()
            large.reply(bytes(100_000))
            bare.start()
            bare.finish(Status.ABORTED, "all there is")
            honest = connection.write_many

            def write_many(buffers: list[Buffer]) -> None:
                honest(buffers)
                connection.pause_writing()

            connection.write_many = write_many
            connection.resume_writing()
            del connection.write_many
            assert connection.write_paused
            connection.resume_writing()

        server.call(fill_and_free)
        assert len(first.result()) == 100_000
        assert second.code() is grpc.StatusCode.ABORTED


def test_a_new_window_is_used_after_its_settings_are_acknowledged(server: Serving) -> None:
    """grpcio counts DATA that comes before the acknowledgement against the old window, and resets the stream."""
    with RawCall(server, "Big") as call:
        call.send(prefixed(b"300000"), end=True)
        call.receive(until=lambda: len(call.data) == 65_535, take=False)
        # The connection's window first, so that only the stream's is missing.
        call.widen(connection=1 << 20)
        order = call.settle(window=1 << 20)
    assert order[0] == "acknowledged"
    assert "data" in order


def test_an_answer_larger_than_all_windows(server: Serving) -> None:
    with RawCall(server, "Big") as call:
        call.send(prefixed(b"3000000"), end=True)
        assert [len(message) for message in messages_of(call.receive().data)] == [3_000_000]
        assert call.status is grpc.StatusCode.OK
