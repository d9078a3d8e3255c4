# SPDX-License-Identifier: Apache-2.0
"""Deadlines and cancelling: the handler is told, the stream is freed, the connection goes on."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_echo_client import (
    SECONDS,
    RawCall,
    aio_channel,
    channel_to,
    chat,
    collect,
    expand,
    open_streams,
    prefixed,
    raised,
    unary,
)

from headrace.core.errors import InvalidArgument
from headrace.net.grpc.messages import parse_timeout
from support.serving import EchoCalls, Serving
from support.waiting import eventually


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 3600),
        (b"2M", 120),
        (b"3S", 3),
        (b"100m", 0.1),
        (b"250u", 0.00025),
        (b"7n", 7e-9),
        (b"0S", 0),
        (b"00000001S", 1),
        (b"99999999S", 99_999_999),
        (b"99999999H", 99_999_999 * 3600),
    ],
)
def test_units(value: bytes, seconds: float) -> None:
    assert parse_timeout(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    [b"", b"S", b"1", b"1s", b"1h", b"-1S", b"+1S", b"1.5S", b"1 S", b" 1S", b"1S\n", b"123456789S", b"1SS", b"\xb2S"],
)
def test_invalid_timeouts(value: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse_timeout(value)


def test_a_wrong_timeout_is_refused_and_a_long_one_is_fine(server: Serving) -> None:
    with RawCall(server, "Unary", ("grpc-timeout", "soon")) as call:
        assert call.receive().status is grpc.StatusCode.INVALID_ARGUMENT
    with RawCall(server, "Unary", ("grpc-timeout", "99999999H")) as call:
        call.send(prefixed(b"x"), end=True)
        assert call.receive().status is grpc.StatusCode.OK


def test_the_server_ends_a_call_at_its_deadline(server: Serving, calls: EchoCalls) -> None:
    """A raw client has no clock of its own, so what it reads is the server's word."""
    calls.events.clear()
    calls.held.clear()
    for deadline in ("50m", "2S", "20S"):  # on a busy machine the message may come too late for the first
        with RawCall(server, "Hold", ("grpc-timeout", deadline)) as call:
            call.send(prefixed(b"x"), end=True)
            call.receive()
            assert call.status is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "deadline" in call.message
        if calls.held:
            break
    eventually(lambda: calls.events)
    assert calls.events == ["cancel"]
    assert not open_streams(server)


@pytest.mark.parametrize("end", [True, False])
def test_the_server_ends_a_stream_at_its_deadline(server: Serving, calls: EchoCalls, end: bool) -> None:
    with RawCall(server, "Chat" if not end else "Collect", ("grpc-timeout", "200m")) as call:
        call.send(prefixed(b"x"))
        call.receive()
        assert call.status is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: not calls._calls._tasks)
    assert not open_streams(server)


def test_a_call_without_its_message_ends_at_its_deadline(server: Serving) -> None:
    with RawCall(server, "Unary", ("grpc-timeout", "20m")) as call:
        assert call.receive().status is grpc.StatusCode.DEADLINE_EXCEEDED


def test_an_answer_after_the_deadline_changes_nothing(channel: grpc.Channel, server: Serving, calls: EchoCalls) -> None:
    for seconds in (0.1, 2.0, 20.0):  # on a busy machine it may not even get there in the first
        error = raised(lambda seconds=seconds: unary(channel, "Hold")(b"x", timeout=seconds))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if calls.held:
            break
    eventually(lambda: calls.events == ["cancel"])
    server.call(lambda: calls.held[0].reply(b"too late"))
    server.call(lambda: calls.held[0].fail(RuntimeError("too late")))
    assert unary(channel)(b"next", timeout=SECONDS) == b"next"


def test_a_call_answered_in_time_has_no_timer_left(channel: grpc.Channel, server: Serving, calls: EchoCalls) -> None:
    future = unary(channel, "Hold").future(b"x", timeout=SECONDS)
    eventually(lambda: calls.held)
    (call,) = calls.held
    # grpcio rounds what it has left up, to three digits of one unit.
    assert 0 < call.timeout_seconds <= SECONDS * 1.1
    server.call(lambda: call.reply(b"in time"))
    assert future.result() == b"in time"
    assert call._timer is None
    assert calls.events == []


def test_a_cancelled_unary_call_notifies_its_handler(channel: grpc.Channel, server: Serving, calls: EchoCalls) -> None:
    future = unary(channel, "Hold").future(b"x", timeout=SECONDS)
    eventually(lambda: calls.held)
    assert len(open_streams(server)) == 1
    future.cancel()
    eventually(lambda: calls.events == ["cancel"])
    assert not open_streams(server)
    server.call(lambda: calls.held[0].reply(b"too late"))
    assert unary(channel)(b"next", timeout=SECONDS) == b"next"
    assert calls.events == ["cancel"]


def test_a_cancelled_stream_stops_its_handler(channel: grpc.Channel, server: Serving, calls: EchoCalls) -> None:
    outbox: queue.Queue[bytes | None] = queue.Queue()
    outbox.put(b"x")
    responses = chat(channel)(iter(outbox.get, None), timeout=SECONDS)
    assert next(responses) == b"x"
    assert len(calls._calls._tasks) == 1
    responses.cancel()
    eventually(lambda: not calls._calls._tasks)
    assert not open_streams(server)
    outbox.put(None)


def test_cancelling_a_paused_stream_stops_its_handler(channel: grpc.Channel, server: Serving, calls: EchoCalls) -> None:
    responses = expand(channel)(b"10000 100000", timeout=3 * SECONDS)
    next(responses)
    eventually(lambda: any(stream.pending_bytes for stream in open_streams(server)))
    responses.cancel()
    eventually(lambda: not calls._calls._tasks)
    assert not open_streams(server)
    assert unary(channel)(b"next", timeout=SECONDS) == b"next"


def test_a_client_that_vanishes_cancels_its_calls(server: Serving, calls: EchoCalls) -> None:
    calls.events.clear()
    calls.held.clear()
    with RawCall(server, "Hold") as call:
        call.send(prefixed(b"x"), end=True)
        eventually(lambda: calls.held)
    eventually(lambda: calls.events == ["cancel"])
    with RawCall(server, "Chat") as call:
        call.send(prefixed(b"x"))
        call.receive(until=lambda: len(call.data) == 6)
    eventually(lambda: not calls._calls._tasks)
    eventually(lambda: server.connections() == 0)


def test_a_handler_that_has_answered_gets_no_cancel(server: Serving, calls: EchoCalls) -> None:
    """Its answer may still wait for the client's window when the client goes."""
    calls.events.clear()
    calls.held.clear()
    with RawCall(server, "Hold") as call:
        call.send(prefixed(b"x"), end=True)
        eventually(lambda: calls.held)
        (held,) = calls.held
        server.call(lambda: held.reply(bytes(1_000_000)))
        assert held.over
        assert held.pending_bytes > 0
        server.call(lambda: held.reply(b"again"))
        server.call(lambda: held.finish())
        call.receive(until=lambda: len(call.data) > 60_000, take=False)
        call.cancel()
        eventually(lambda: not open_streams(server))
    assert calls.events == []
    assert held.pending_bytes == 0


async def _aio_cancels(server: Serving, calls: EchoCalls) -> None:
    async with aio_channel(server) as channel:
        call = unary(channel, "Hold")(b"x", timeout=SECONDS)
        await asyncio.to_thread(eventually, lambda: calls.held)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        for seconds in (0.1, 2.0, 20.0):  # on a busy machine it may not even get there in the first
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await unary(channel, "Hold")(b"x", timeout=seconds)
            assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if len(calls.held) == 2:
                break


def test_the_aio_client_cancels_and_times_out(server: Serving, calls: EchoCalls) -> None:
    calls.events.clear()
    calls.held.clear()
    asyncio.run(_aio_cancels(server, calls))
    eventually(lambda: calls.events == ["cancel", "cancel"])


def test_a_deadline_in_the_middle_of_an_upload(server: Serving, calls: EchoCalls) -> None:
    stop = threading.Event()

    def messages() -> Iterator[bytes]:
        while not stop.is_set():
            yield bytes(1000)

    with channel_to(server) as channel:
        error = raised(lambda: collect(channel)(messages(), timeout=0.3))
        stop.set()
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: not calls._calls._tasks)
        assert unary(channel)(b"next", timeout=SECONDS) == b"next"
