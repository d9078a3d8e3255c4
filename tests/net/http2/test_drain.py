# SPDX-License-Identifier: Apache-2.0
"""Draining (RFC 9113 section 6.8): a warning, a last word when the client must have seen it, then the end."""

from __future__ import annotations

from typing import Any

import pytest
from adversary import Client
from fake_transport import Http2Harness
from http2_echo_server import Http2EchoServer
from hyperframe.frame import GoAwayFrame, HeadersFrame, PingFrame, RstStreamFrame
from raw_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    TOO_LARGE,
    WINDOW_UPDATE,
    literal,
    raw,
    request_fields,
)

from headrace.net.http.heads import OK_PLAIN
from headrace.net.http2.frames import ErrorCode

GET = raw(HEADERS, END_HEADERS | END_STREAM, 1, literal(request_fields()))


def hold(stream_id: int, *, end: bool = True) -> bytes:
    return raw(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_id, literal(request_fields("POST", "/hold")))


def warned(client: Client) -> bytes:
    """The warning has come: GOAWAY with the highest number there is, and a PING to answer."""
    goaway = client.wait(lambda frame: isinstance(frame, GoAwayFrame))
    assert isinstance(goaway, GoAwayFrame)
    assert (goaway.last_stream_id, goaway.error_code) == (2**31 - 1, ErrorCode.NO_ERROR)
    ping = client.wait(lambda frame: isinstance(frame, PingFrame) and "ACK" not in frame.flags)
    assert isinstance(ping, PingFrame)
    return ping.opaque_data


def last_word(client: Client) -> int:
    goaway = client.wait(lambda frame: isinstance(frame, GoAwayFrame))
    assert isinstance(goaway, GoAwayFrame)
    assert goaway.error_code == ErrorCode.NO_ERROR
    return int(goaway.last_stream_id)


def test_streams_before_the_last_goaway_are_answered_and_later_ones_ignored(echo_server: Http2EchoServer) -> None:
    """6.8: the warning allows streams in flight; after the last word, what is above its number is not looked at."""
    client = echo_server.connect()
    client.request(1, "POST", "/hold")
    client.ping()
    echo_server.server.call(echo_server.connection().drain)
    mark = warned(client)
    client.request(3, "POST", "/hold")  # after the warning, before we say that we have seen it
    client.ping()
    assert len(echo_server.handlers.held) == 2
    client.send(raw(PING, ACK, 0, mark))
    assert last_word(client) == 3
    client.request(5, "POST", "/hold")
    client.data(5, b"a body nobody reads")
    client.headers(5, [("x-trailer", "1")])
    client.reset(5)
    client.ping()
    assert len(echo_server.handlers.held) == 2
    assert 5 not in client.answers
    for exchange in list(echo_server.handlers.held):
        echo_server.server.call(exchange.respond, OK_PLAIN, b"answered")
    client.expect_ok(1, b"answered")
    client.expect_ok(3, b"answered")
    client.expect_end()


def test_an_error_after_the_last_goaway_does_not_revoke_it(echo_server: Http2EchoServer) -> None:
    """6.8: the last stream MUST NOT increase from one GOAWAY to the next: what we ignored may be tried elsewhere."""
    client = echo_server.connect()
    client.request(1, "POST", "/hold")
    client.ping()
    echo_server.server.call(echo_server.connection().drain)
    client.send(raw(PING, ACK, 0, warned(client)))
    assert last_word(client) == 1
    client.request(3)
    client.send(raw(DATA, 0, 0, b""))
    assert client.expect_goaway(ErrorCode.PROTOCOL_ERROR).last_stream_id == 1


def test_an_idle_connection_closes_after_the_last_goaway(echo_server: Http2EchoServer) -> None:
    """6.8: nothing in flight: the last word is followed by the end."""
    client = echo_server.connect()
    client.request(1)
    client.expect_ok(1)
    echo_server.server.call(echo_server.connection().drain)
    client.send(raw(PING, ACK, 0, warned(client)))
    assert last_word(client) == 1
    client.expect_end()


def test_the_table_is_kept_through_the_drain(echo_server: Http2EchoServer) -> None:
    """4.3, 6.8: header blocks of ignored streams still change the compression state."""
    client = echo_server.connect()
    client.request(1, "POST", "/echo", end=False)
    client.ping()
    echo_server.server.call(echo_server.connection().drain)
    client.send(raw(PING, ACK, 0, warned(client)))
    last_word(client)
    client.request(3, more=[("x-added", "to the table")])
    client.headers(1, [("x-added", "to the table")])
    client.expect_ok(1)
    client.expect_end()


@pytest.mark.parametrize("forged", [b"whatever", b"headracx"])
def test_only_the_answer_to_our_ping_triggers_the_last_goaway(forged: bytes) -> None:
    """6.8: an ACK of another PING proves nothing about what the client has seen."""
    unplugged = Http2Harness()
    unplugged.feed(hold(1))
    unplugged.connection.drain()
    unplugged.frames()
    unplugged.feed(raw(PING, ACK, 0, forged))
    assert unplugged.frames() == []
    unplugged.feed(hold(3))
    assert len(unplugged.handlers.held) == 2


def test_the_answer_to_our_ping_has_no_effect_before_the_drain() -> None:
    """6.8: nor does one that comes early."""
    unplugged = Http2Harness()
    unplugged.feed(raw(PING, ACK, 0, b"headrace"))
    unplugged.feed(hold(1))
    assert unplugged.frames() == []
    assert len(unplugged.handlers.held) == 1


def test_a_client_that_does_not_answer_the_ping_gets_the_last_goaway_with_time() -> None:
    """6.8: a client need not be polite for the drain to end, nor does traffic on its streams put it off."""
    unplugged = Http2Harness()
    unplugged.feed(hold(1) + hold(3))
    unplugged.connection.drain()
    unplugged.frames()
    unplugged.sweep(0.5)
    unplugged.handlers.held[0].respond(OK_PLAIN, b"one")
    unplugged.frames()
    unplugged.sweep(1.2)
    (goaway,) = unplugged.frames()
    assert isinstance(goaway, GoAwayFrame)
    assert goaway.last_stream_id == 3
    unplugged.handlers.held[1].respond(OK_PLAIN, b"two")
    assert [type(frame) for frame in unplugged.frames()][:1] == [HeadersFrame]
    assert unplugged.closing


@pytest.mark.parametrize("warned_first", [True, False])
def test_when_the_grace_is_over_every_stream_is_notified(warned_first: bool) -> None:
    """6.8: an answer for those that can have one, the last word, the end; and a handler's mistake silences nobody."""
    unplugged = Http2Harness()
    unplugged.feed(raw(WINDOW_UPDATE, 0, 0, b"\0\1\0\0") + hold(1) + hold(3) + hold(5))
    unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 7, literal(request_fields(path="/big/70000"))))

    def fail() -> None:
        raise RuntimeError("a handler's mistake")

    exchange: Any = unplugged.handlers.held[0]
    exchange.on_disconnect = fail
    if warned_first:
        unplugged.connection.drain()
    unplugged.frames()
    unplugged.connection.expire()
    frames = unplugged.frames()
    assert isinstance(frames[-1], GoAwayFrame)
    assert [frame.stream_id for frame in frames if isinstance(frame, HeadersFrame)] == [1, 3, 5]
    assert [frame.stream_id for frame in frames if isinstance(frame, RstStreamFrame)] == [7]
    assert unplugged.handlers.events == ["disconnect", "disconnect"]
    assert unplugged.closing


def test_draining_twice_is_draining_once() -> None:
    unplugged = Http2Harness()
    unplugged.feed(hold(1))
    unplugged.connection.drain()
    assert len(unplugged.frames()) == 2
    unplugged.connection.drain()
    assert unplugged.frames() == []


def _respond_early(unplugged: Http2Harness) -> None:
    """The server answers the last stream before its request has ended: END_STREAM, then RST_STREAM(NO_ERROR)."""
    unplugged.feed(raw(HEADERS, END_HEADERS, 1, literal(request_fields("POST", "/upload"))))
    _to_the_last_word(unplugged)
    (stream,) = unplugged.connection.streams.values()
    exchange: Any = stream
    exchange.respond(OK_PLAIN, b"enough")


def _abort(unplugged: Http2Harness) -> None:
    unplugged.feed(hold(1))
    _to_the_last_word(unplugged)
    unplugged.handlers.held[0].abort()


def _client_fault(unplugged: Http2Harness) -> None:
    unplugged.feed(hold(1))
    _to_the_last_word(unplugged)
    unplugged.feed(raw(DATA, 0, 1, b"too much") + raw(PING, 0, 0, bytes(8)))


def _client_reset(unplugged: Http2Harness) -> None:
    """The client resets the last stream; more frames, each of which asks for an answer, lie in the same packet."""
    unplugged.feed(hold(1))
    _to_the_last_word(unplugged)
    unplugged.feed(
        raw(3, 0, 1, bytes(4)) + raw(PING, 0, 0, bytes(8)) + raw(4, 0, 0) + raw(HEADERS, 5, 3, literal([("A", "b")]))
    )


def _to_the_last_word(unplugged: Http2Harness) -> None:
    unplugged.connection.drain()
    unplugged.feed(raw(PING, ACK, 0, b"headrace"))
    unplugged.frames()


@pytest.mark.parametrize(
    ("way", "code"),
    [
        (_respond_early, ErrorCode.NO_ERROR),
        (_abort, ErrorCode.INTERNAL_ERROR),
        (_client_fault, ErrorCode.STREAM_CLOSED),
        (_client_reset, None),
    ],
)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_the_last_stream_may_end_in_any_way(way: Any, code: ErrorCode | None, tls: bool) -> None:
    """6.8: the end of the last stream is written before the end of the connection, and nothing after it."""
    unplugged = Http2Harness(tls=tls)
    way(unplugged)
    resets = [frame.error_code for frame in unplugged.frames() if isinstance(frame, RstStreamFrame)]
    assert resets == ([] if code is None else [code])
    assert unplugged.closing


def test_a_connection_that_is_closing_does_not_drain() -> None:
    unplugged = Http2Harness()
    unplugged.feed(raw(DATA, 0, 0, b""))
    assert [type(frame) for frame in unplugged.frames()] == [GoAwayFrame]
    unplugged.connection.drain()
    assert unplugged.frames() == []


def test_a_drained_connection_is_cut_if_the_client_does_not_close() -> None:
    """5.4.1: the end is ours to make: a client that keeps its side open does not keep the connection."""
    unplugged = Http2Harness()
    _to_the_last_word(unplugged)
    assert unplugged.closing
    assert not unplugged.transport.closed
    unplugged.sweep(1.0)
    assert not unplugged.transport.closed
    unplugged.sweep(5.0)
    assert unplugged.transport.closed


def test_early_answers_after_the_last_goaway(echo_server: Http2EchoServer) -> None:
    """The same over a socket: a refused upload during a drain, RST_STREAM(NO_ERROR) last, then a clean end."""
    client = echo_server.connect()
    client.request(1, "POST", "/hold")
    client.ping()
    echo_server.server.call(echo_server.connection().drain)
    mark = warned(client)
    client.request(3, "POST", "/echo", end=False, more=TOO_LARGE)
    client.expect_reset(3, ErrorCode.NO_ERROR)
    client.send(raw(PING, ACK, 0, mark))
    assert last_word(client) == 3
    echo_server.server.call(echo_server.handlers.held[0].abort)
    client.wait(lambda frame: isinstance(frame, RstStreamFrame))
    client.expect_end()
