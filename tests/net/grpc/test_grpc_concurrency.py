# SPDX-License-Identifier: Apache-2.0
"""Many calls on one channel, keep-alive, reconnecting, draining: what a connection goes through in its life."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_echo_client import (
    SECONDS,
    aio_channel,
    channel_to,
    chat,
    expand,
    open_streams,
    options,
    raised,
    unary,
)

from headrace.core.limits import Limits
from headrace.net.grpc.services import MessageStream
from support.serving import EchoCalls, Serving, echo_site, serving
from support.waiting import eventually, eventually_async


def the_connection(server: Serving) -> Any:
    (connection,) = server.call(lambda: list(server.site.connections))
    return connection


# Crowds.


async def _thousand_chats(server: Serving) -> None:
    async with aio_channel(server) as channel:
        await unary(channel)(b"connect", timeout=SECONDS)
        chats = [chat(channel)(timeout=6 * SECONDS) for _ in range(1000)]

        async def say(number: int, word: bytes) -> bytes:
            await chats[number].write(b"%b from %d" % (word, number))
            return bytes(await chats[number].read())

        async def end(number: int) -> grpc.StatusCode:
            await chats[number].done_writing()
            assert await chats[number].read() is grpc.aio.EOF
            return await chats[number].code()

        for word in (b"hello", b"again"):
            answers = await asyncio.gather(*(say(number, word) for number in range(1000)))
            assert answers == [b"%b from %d" % (word, number) for number in range(1000)]
            assert len(await asyncio.to_thread(open_streams, server)) == 1000
        assert set(await asyncio.gather(*(end(number) for number in range(1000)))) == {grpc.StatusCode.OK}


def test_a_thousand_concurrent_streams_on_one_channel(server: Serving, calls: EchoCalls) -> None:
    asyncio.run(_thousand_chats(server))
    eventually(lambda: not open_streams(server))
    eventually(lambda: not calls._calls._tasks)


async def _queued(server: Serving, count: int) -> list[bytes]:
    async with aio_channel(server) as channel:

        async def talk(number: int) -> bytes:
            call = chat(channel)(timeout=6 * SECONDS)
            await call.write(b"%d" % number)
            answer = await call.read()
            await asyncio.sleep(0.001)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
            return bytes(answer)

        return list(await asyncio.gather(*(talk(number) for number in range(count))))


class Counted(EchoCalls):
    """Knows how many chats there were at once."""

    most = 0

    async def chat(self, stream: MessageStream) -> None:
        self.most = max(self.most, len(self._calls._tasks))
        await super().chat(stream)


def test_more_calls_than_streams_are_allowed_wait_their_turn() -> None:
    counted = Counted()
    with serving(echo_site(Limits(concurrent_streams=8), calls=counted)) as server:
        answers = asyncio.run(_queued(server, 300))
    assert answers == [b"%d" % number for number in range(300)]
    assert 1 < counted.most <= 8


async def _cancel_many(server: Serving, calls: EchoCalls, count: int) -> None:
    async with aio_channel(server) as channel:
        await unary(channel)(b"connect", timeout=SECONDS)
        connection = the_connection(server)
        held = [unary(channel, "Hold")(b"x", timeout=6 * SECONDS) for _ in range(count)]
        await eventually_async(lambda: len(calls.held) >= min(count, 1000))
        for call in held:
            call.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert await unary(channel)(b"still here", timeout=SECONDS) == b"still here"
        assert the_connection(server) is connection


def test_two_thousand_calls_cancelled_together(server: Serving, calls: EchoCalls) -> None:
    calls.held.clear()
    calls.events.clear()
    asyncio.run(_cancel_many(server, calls, 2000))
    eventually(lambda: not open_streams(server))
    assert calls.events == ["cancel"] * len(calls.held)


async def _unknown_many(server: Serving) -> None:
    """Refused at their head, before their message: each is answered and reset, and the rest of it is ignored."""
    async with aio_channel(server) as channel:
        await unary(channel)(b"connect", timeout=SECONDS)
        connection = the_connection(server)
        refused = [channel.unary_unary("/test.Echo/Nope")(bytes(3000), timeout=6 * SECONDS) for _ in range(3000)]
        errors = await asyncio.gather(*refused, return_exceptions=True)
        assert {error.code() for error in errors} == {grpc.StatusCode.UNIMPLEMENTED}
        assert await unary(channel)(b"still here", timeout=SECONDS) == b"still here"
        assert the_connection(server) is connection


def test_three_thousand_refused_calls_keep_their_connection(server: Serving) -> None:
    asyncio.run(_unknown_many(server))


# Keep-alive.


@pytest.mark.parametrize("with_call", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_keep_alive_pings_are_answered(server: Serving, calls: EchoCalls, with_call: bool) -> None:
    keepalive = [
        ("grpc.keepalive_time_ms", 30),  # grpcio makes one second of it
        ("grpc.keepalive_timeout_ms", 60_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    calls.held.clear()
    with channel_to(server, *keepalive) as channel:
        assert unary(channel)(b"x", timeout=SECONDS) == b"x"
        connection = the_connection(server)
        answered: list[bytes] = []
        honest = connection.acknowledge

        def count(data: bytes) -> None:
            answered.append(data)
            honest(data)

        server.call(setattr, connection, "acknowledge", count)
        future = unary(channel, "Hold").future(b"x", timeout=3 * SECONDS) if with_call else None
        eventually(lambda: len(answered) >= 2)
        if future is not None:
            server.call(lambda: calls.held[0].reply(b"held"))
            assert future.result() == b"held"
        assert unary(channel)(b"y", timeout=SECONDS) == b"y"
        assert the_connection(server) is connection


# Reconnecting.


def test_an_idle_connection_is_closed_and_the_channel_reconnects(server: Serving) -> None:
    with channel_to(server) as channel:
        for _ in range(3):
            assert unary(channel)(b"x", timeout=SECONDS) == b"x"
            assert server.connections() == 1
            server.sweep(seconds_later=server.site.limits.idle_seconds + 1)
            eventually(lambda: server.connections() == 0)
        assert unary(channel)(b"x", timeout=SECONDS) == b"x"


def test_a_connection_with_an_open_stream_is_not_idle(channel: grpc.Channel, server: Serving) -> None:
    outbox: queue.Queue[bytes | None] = queue.Queue()
    outbox.put(b"a")
    responses = chat(channel)(iter(outbox.get, None), timeout=SECONDS)
    assert next(responses) == b"a"
    server.sweep(seconds_later=server.site.limits.idle_seconds + 1)
    outbox.put(b"b")
    assert next(responses) == b"b"
    outbox.put(None)
    assert list(responses) == []


def test_a_cut_connection_fails_its_calls_and_the_next_one_works(
    channel: grpc.Channel, server: Serving, calls: EchoCalls
) -> None:
    future = unary(channel, "Hold").future(b"x", timeout=SECONDS)
    eventually(lambda: calls.held)
    server.call(lambda: [connection.abort() for connection in list(server.site.connections)])
    assert raised(future.result).code() is grpc.StatusCode.UNAVAILABLE
    eventually(lambda: calls.events)
    assert calls.events == ["cancel"]

    def works() -> bool:
        """grpcio may put one more call on the dead socket before it has seen that it is dead."""
        try:
            return bool(unary(channel)(b"next", wait_for_ready=True, timeout=SECONDS) == b"next")
        except grpc.RpcError:
            return False

    eventually(works)


# Draining.


@pytest.fixture
def draining(calls: EchoCalls) -> Iterator[Serving]:
    """A server for a test that drains it."""
    with serving(echo_site(calls=calls)) as running:
        yield running


def start_drain(server: Serving, grace_seconds: float = 3 * SECONDS) -> Any:
    return asyncio.run_coroutine_threadsafe(server.server.drain(grace_seconds), server.loop)


def test_open_chats_continue_while_the_server_drains(draining: Serving) -> None:
    outbox: queue.Queue[bytes | None] = queue.Queue()
    with channel_to(draining) as channel:
        responses = chat(channel)(iter(outbox.get, None), timeout=3 * SECONDS)
        outbox.put(b"before")
        assert next(responses) == b"before"
        drain = start_drain(draining)
        connection = the_connection(draining)
        eventually(lambda: connection._last_allowed is not None)
        for number in range(20):
            outbox.put(b"during %d" % number)
            assert next(responses) == b"during %d" % number
        assert not drain.done()
        outbox.put(None)
        assert list(responses) == []
        assert responses.code() is grpc.StatusCode.OK
        assert drain.result(SECONDS) == 0


def test_a_large_answer_is_sent_whole_while_the_server_drains(draining: Serving) -> None:
    with channel_to(draining) as channel:
        responses = expand(channel)(b"300 100000", timeout=3 * SECONDS)
        first = next(responses)
        drain = start_drain(draining)
        connection = the_connection(draining)
        eventually(lambda: connection._last_allowed is not None)
        assert 1 + sum(1 for _ in responses) == 300
        assert len(first) == 100_004
        assert drain.result(SECONDS) == 0


def test_held_calls_are_answered_while_the_server_drains(draining: Serving, calls: EchoCalls) -> None:
    calls.held.clear()
    with channel_to(draining) as channel:
        futures = [unary(channel, "Hold").future(b"x", timeout=3 * SECONDS) for _ in range(50)]
        eventually(lambda: len(calls.held) == 50)
        drain = start_drain(draining)
        connection = the_connection(draining)
        eventually(lambda: connection._last_allowed is not None)
        for call in list(calls.held):
            draining.call(call.reply, b"late but whole")
        assert {future.result() for future in futures} == {b"late but whole"}
        assert drain.result(SECONDS) == 0


def test_calls_that_wait_for_ready_move_to_another_server(draining: Serving, server: Serving) -> None:
    """The channel knows both; the first drains with a chat still open on it, new calls go to the second."""
    outbox: queue.Queue[bytes | None] = queue.Queue()
    target = f"ipv4:127.0.0.1:{draining.port},127.0.0.1:{server.port}"
    with grpc.insecure_channel(target, options()) as channel:
        responses = chat(channel)(iter(outbox.get, None), timeout=3 * SECONDS)
        outbox.put(b"old")
        assert next(responses) == b"old"
        assert len(open_streams(draining)) == 1
        drain = start_drain(draining)
        # None of them may fail, whichever server they reach: those begun before the GOAWAY are served, later ones move.
        moved = False
        for number in range(10_000):
            assert unary(channel)(b"%d" % number, wait_for_ready=True, timeout=SECONDS) == b"%d" % number
            if server.connections():
                moved = True
                break
        assert moved
        outbox.put(b"still here")
        assert next(responses) == b"still here"
        outbox.put(None)
        assert list(responses) == []
        assert drain.result(SECONDS) == 0


def test_after_its_grace_a_drain_cancels_calls_and_notifies_handlers(draining: Serving, calls: EchoCalls) -> None:
    calls.held.clear()
    calls.events.clear()
    with channel_to(draining) as channel:
        future = unary(channel, "Hold").future(b"x", timeout=3 * SECONDS)
        eventually(lambda: calls.held)
        assert start_drain(draining, 0.5).result(SECONDS) == 1
        assert raised(future.result).code() is grpc.StatusCode.UNAVAILABLE
        eventually(lambda: calls.events)
        assert calls.events == ["cancel"]
