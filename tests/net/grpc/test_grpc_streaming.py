# SPDX-License-Identifier: Apache-2.0
"""Calls with many messages, by grpcio: all three kinds, one message at a time and all at once."""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import Iterator

import grpc
import pytest
from grpc_echo_client import SECONDS, aio_channel, channel_to, chat, collect, expand, open_streams, raised
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import NotFound
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import CoroutineCalls, MessageStream, Services
from headrace.net.grpc.status import Status
from headrace.net.site import Site
from support.serving import EchoCalls, Serving, serving
from support.waiting import eventually

MB = 1_000_000


# Client streaming.


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 1000])
def test_all_messages_of_a_client_arrive_in_order(channel: grpc.Channel, count: int) -> None:
    sent = [b"%d" % number for number in range(count)]
    assert collect(channel)(iter(sent), timeout=SECONDS) == b",".join(sent)


def test_large_messages_of_a_client_arrive(channel: grpc.Channel) -> None:
    sent = [os.urandom(size) for size in (20 * MB, 0, 1, 5 * MB)]
    assert collect(channel)(iter(sent), timeout=3 * SECONDS) == b",".join(sent)


# Server streaming.


@pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 0), (1000, 10), (50, 100_000), (2, 20 * MB)])
def test_all_messages_of_the_server_arrive_in_order(channel: grpc.Channel, count: int, size: int) -> None:
    received = list(expand(channel)(b"%d %d" % (count, size), timeout=3 * SECONDS))
    assert received == [number.to_bytes(4, "big") + bytes(size) for number in range(count)]


# Both.


def test_ping_pong_one_message_at_a_time(channel: grpc.Channel) -> None:
    outbox: queue.Queue[bytes | None] = queue.Queue()
    responses = chat(channel)(iter(outbox.get, None), timeout=SECONDS)
    for number in range(200):
        outbox.put(b"ping %d" % number)
        assert next(responses) == b"ping %d" % number
    outbox.put(None)
    assert list(responses) == []
    assert responses.code() is grpc.StatusCode.OK


def test_everything_sent_before_anything_is_read(channel: grpc.Channel) -> None:
    sent = [os.urandom(1000) for _ in range(1000)]
    assert list(chat(channel)(iter(sent), timeout=SECONDS)) == sent


def test_large_messages_both_ways(channel: grpc.Channel) -> None:
    sent = [os.urandom(20 * MB), b"", os.urandom(3 * MB)]
    assert list(chat(channel)(iter(sent), timeout=3 * SECONDS)) == sent


def test_a_stream_without_messages(channel: grpc.Channel) -> None:
    assert list(chat(channel)(iter(()), timeout=SECONDS)) == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=20))
def test_messages_of_any_sizes_are_returned(server: Serving, sizes: list[int]) -> None:
    sent = [bytes([size % 251]) * size for size in sizes]
    with channel_to(server) as channel:
        assert list(chat(channel)(iter(sent), timeout=SECONDS)) == sent


async def _aio_kinds(server: Serving) -> None:
    async with aio_channel(server) as channel:
        assert await collect(channel)(iter([b"a", b"b"]), timeout=SECONDS) == b"a,b"
        received = [message async for message in expand(channel)(b"3 0", timeout=SECONDS)]
        assert received == [number.to_bytes(4, "big") for number in range(3)]
        call = chat(channel)(timeout=SECONDS)
        for number in range(50):
            await call.write(b"%d" % number)
            assert await call.read() == b"%d" % number
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


def test_the_aio_client_streams(server: Serving) -> None:
    asyncio.run(_aio_kinds(server))


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_streams(server: Serving, compression: grpc.Compression) -> None:
    sent = [b"x" * size for size in (0, 1, 1023, 1024, 100_000)]
    with channel_to(server, compression=compression) as channel:
        assert list(chat(channel)(iter(sent), timeout=SECONDS)) == sent
        assert collect(channel)(iter(sent), timeout=SECONDS) == b",".join(sent)


def test_a_unary_stub_on_a_streaming_method_works(channel: grpc.Channel) -> None:
    assert channel.unary_unary("/test.Echo/Chat")(b"one", timeout=SECONDS) == b"one"


# Handlers that go wrong, or their own way.


class Odd:
    """Streaming handlers beside the straight road."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled: list[str] = []
        self.never: asyncio.Future[None] | None = None
        self.coroutines = CoroutineCalls()

    def site(self) -> Site:
        services = Services()
        for name in ("Raise", "RaiseLater", "Refuse", "StopEarly", "Wait", "AwaitCancelled", "Late"):
            services.streaming("test.Odd", name, self.coroutines.serve(self.counted(getattr(self, name.lower()))))
        services.streaming("test.Odd", "OpenRaises", self.openraises)
        services.streaming("test.Odd", "CallbackRaises", self.callbackraises)
        services.streaming("test.Odd", "Early", self.early)
        services.streaming("test.Odd", "Callbacks", self.callbacks)
        return Site(services=services)

    def counted(self, coroutine):  # type: ignore[no-untyped-def]
        async def run(stream: MessageStream) -> None:
            self.running += 1
            try:
                await coroutine(stream)
            finally:
                self.running -= 1

        return run

    async def raise_(self, stream: MessageStream) -> None:
        raise RuntimeError("a secret of the handler")

    async def raiselater(self, stream: MessageStream) -> None:
        await stream.send(b"first")
        raise RuntimeError("a secret of the handler")

    async def refuse(self, stream: MessageStream) -> None:
        await stream.receive()
        raise NotFound("nothing here")

    async def stopearly(self, stream: MessageStream) -> None:
        first = await stream.receive()
        await stream.send(first or b"")

    async def wait(self, stream: MessageStream) -> None:
        async for _ in stream:
            pass

    async def awaitcancelled(self, stream: MessageStream) -> None:
        await stream.receive()
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async def late(self, stream: MessageStream) -> None:
        """Finishes the call by itself and goes on to send."""
        stream.call.finish(Status.ABORTED, "enough")
        await stream.send(b"too late")

    def openraises(self, call: GrpcCall) -> None:
        call.on_cancel = lambda: self.cancelled.append("open")
        raise RuntimeError("a secret of the handler")

    def callbackraises(self, call: GrpcCall) -> None:
        def on_message(_: object) -> None:
            raise RuntimeError("a secret of the handler")

        call.on_message = on_message
        call.on_cancel = lambda: self.cancelled.append("callback")

    def early(self, call: GrpcCall) -> None:
        """Sends its head before anything else, then answers as a unary handler does."""
        call.set_initial_metadata([("x-early", "yes")])
        call.start()
        call.on_half_close = lambda: call.reply(b"whole")

    def callbacks(self, call: GrpcCall) -> None:
        """No callback is set: messages are dropped, the end is not noticed; the handler ends the call by itself."""
        asyncio.get_running_loop().call_later(0.05, call.finish)


setattr(Odd, "raise", Odd.raise_)


@pytest.fixture(scope="module")
def odd() -> Odd:
    return Odd()


@pytest.fixture(scope="module")
def odd_server(odd: Odd) -> Iterator[Serving]:
    with serving(odd.site) as running:
        yield running


@pytest.fixture
def odd_channel(odd: Odd, odd_server: Serving) -> Iterator[grpc.Channel]:
    odd.cancelled.clear()
    with channel_to(odd_server) as channel:
        yield channel
        eventually(lambda: odd.running == 0)
        eventually(lambda: not open_streams(odd_server))


@pytest.mark.parametrize("method", ["Raise", "RaiseLater", "OpenRaises", "CallbackRaises"])
def test_an_exception_in_a_stream_is_internal(odd: Odd, odd_channel: grpc.Channel, method: str) -> None:
    responses = odd_channel.stream_stream(f"/test.Odd/{method}")(iter([b"x"]), timeout=SECONDS)
    error = raised(lambda: responses)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    if method in ("OpenRaises", "CallbackRaises"):
        eventually(lambda: odd.cancelled)


def test_a_refusal_in_a_stream_has_its_status(odd_channel: grpc.Channel) -> None:
    error = raised(lambda: odd_channel.stream_stream("/test.Odd/Refuse")(iter([b"x"]), timeout=SECONDS))
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "nothing here")


def test_a_handler_may_stop_before_its_client(odd_channel: grpc.Channel) -> None:
    """The client is still sending: it gets the answer and its status, not an error of the stream."""
    outbox: queue.Queue[bytes | None] = queue.Queue()
    for _ in range(100):
        outbox.put(bytes(10_000))
    responses = odd_channel.stream_stream("/test.Odd/StopEarly")(iter(outbox.get, None), timeout=SECONDS)
    assert list(responses) == [bytes(10_000)]
    assert responses.code() is grpc.StatusCode.OK
    outbox.put(None)


def test_a_cancelled_future_inside_a_handler_ends_the_call(odd_channel: grpc.Channel) -> None:
    error = raised(lambda: odd_channel.stream_stream("/test.Odd/AwaitCancelled")(iter([b"x"]), timeout=SECONDS))
    assert error.code() is grpc.StatusCode.CANCELLED


def test_a_handler_that_ends_its_call_itself(odd_channel: grpc.Channel) -> None:
    error = raised(lambda: odd_channel.stream_stream("/test.Odd/Late")(iter([b"x"]), timeout=SECONDS))
    assert (error.code(), error.details()) == (grpc.StatusCode.ABORTED, "enough")


def test_a_reply_after_the_head(odd_channel: grpc.Channel) -> None:
    response, call = odd_channel.stream_unary("/test.Odd/Early").with_call(iter([b"x"]), timeout=SECONDS)
    assert response == b"whole"
    assert ("x-early", "yes") in call.initial_metadata()


def test_a_handler_without_callbacks(odd_channel: grpc.Channel) -> None:
    assert list(odd_channel.stream_stream("/test.Odd/Callbacks")(iter([b"x", b"y"]), timeout=SECONDS)) == []


def test_streams_are_freed(channel: grpc.Channel, server: Serving, calls: EchoCalls) -> None:
    for _ in range(20):
        assert list(chat(channel)(iter([b"a", b"b"]), timeout=SECONDS)) == [b"a", b"b"]
    eventually(lambda: not open_streams(server))
    eventually(lambda: not calls._calls._tasks)
