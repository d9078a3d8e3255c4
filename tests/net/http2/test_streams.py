# SPDX-License-Identifier: Apache-2.0
"""RFC 9113 section 5.1 (stream states), 5.1.1 (identifiers), 5.1.2 (concurrency) and 5.4 (errors)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from adversary import Client
from http2_echo_server import Http2EchoServer
from raw_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_STREAMS,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    TOO_LARGE,
    WINDOW_UPDATE,
    literal,
    raw,
    request_fields,
)

from headrace.net.http2.frames import ErrorCode

GET = literal(request_fields())
HOLD = literal(request_fields("POST", "/hold"))

# 5.1, idle.


@pytest.mark.parametrize("stream_id", [1, 2, 101])
@pytest.mark.parametrize(
    "frame",
    [
        (DATA, 0, b"x"),
        (DATA, 0, b""),
        (DATA, END_STREAM, b""),
        (RST_STREAM, 0, bytes(4)),
        (WINDOW_UPDATE, 0, b"\0\0\0\1"),
        (WINDOW_UPDATE, 0, b"\0\0\0\0"),
        (CONTINUATION, END_HEADERS, GET),
    ],
    ids=["DATA", "empty DATA", "last DATA", "RST_STREAM", "WINDOW_UPDATE", "zero WINDOW_UPDATE", "CONTINUATION"],
)
def test_an_idle_stream_takes_only_headers_and_priority(
    client: Client, stream_id: int, frame: tuple[int, int, bytes]
) -> None:
    """5.1, idle: any frame but HEADERS or PRIORITY is a connection error of type PROTOCOL_ERROR."""
    kind, flags, payload = frame
    client.send(raw(kind, flags, stream_id, payload))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("stream_id", [1, 2, 101])
def test_an_idle_stream_takes_priority(client: Client, stream_id: int) -> None:
    """5.1, idle; 6.3: PRIORITY can be sent in any state, and opens nothing."""
    client.send(raw(PRIORITY, 0, stream_id, bytes(5)))
    client.request(1)
    client.expect_ok(1, b"hello")


# 5.1, half-closed (remote): the client has sent END_STREAM, the server has not answered.


@pytest.mark.parametrize(
    "frame",
    [
        (DATA, 0, b"x"),
        (DATA, 0, b""),
        (DATA, END_STREAM, b"x"),
        (DATA, END_STREAM, b""),
        (DATA, END_STREAM | 0x8, b"\0"),
        (DATA, 0x8, b"\2xyy"),
        (HEADERS, END_HEADERS | END_STREAM, literal([("a", "b")])),
        (HEADERS, END_HEADERS, literal([("a", "b")])),
        (HEADERS, END_HEADERS | END_STREAM, HOLD),
        (HEADERS, END_HEADERS | END_STREAM, literal([("A", "b")])),
    ],
    ids=[
        "DATA",
        "empty DATA",
        "last DATA",
        "empty last DATA",
        "padding only",
        "padded DATA",
        "trailers",
        "HEADERS",
        "the request again",
        "malformed HEADERS",
    ],
)
def test_a_half_closed_stream_takes_no_more_of_a_request(
    echo_server: Http2EchoServer, frame: tuple[int, int, bytes]
) -> None:
    """5.1, half-closed (remote): DATA and HEADERS are a stream error of type STREAM_CLOSED; the request counts once."""
    client = echo_server.connect()
    client.request(1, "POST", "/hold")
    client.ping()
    kind, flags, payload = frame
    client.send(raw(kind, flags, 1, payload))
    client.expect_error(1, ErrorCode.STREAM_CLOSED)
    assert len(echo_server.handlers.held) == 1
    assert echo_server.handlers.events == ["disconnect"]


def test_a_half_closed_stream_still_takes_control_frames(echo_server: Http2EchoServer) -> None:
    """5.1, half-closed (remote): WINDOW_UPDATE, PRIORITY and RST_STREAM may come."""
    client = echo_server.connect()
    client.request(1, "POST", "/hold")
    client.grant(1, 10)
    client.send(raw(PRIORITY, 0, 1, bytes(5)))
    client.ping()
    client.reset(1)
    client.ping()
    assert echo_server.handlers.events == ["disconnect"]


# 5.1, closed.


def _completed(client: Client) -> None:
    """Both sides have sent END_STREAM."""
    client.request(1)
    client.expect_ok(1)


def _reset_by_client(client: Client) -> None:
    client.request(1, "POST", "/hold", end=False)
    client.reset(1)


def _reset_by_server(client: Client) -> None:
    """The server has reset a stream; the client may not have read that yet."""
    client.request(1, "POST", "/echo", end=False, more=[("content-length", "1")])
    client.data(1, b"xy", end=True)
    client.expect_reset(1, ErrorCode.PROTOCOL_ERROR)


def _answered_early(client: Client) -> None:
    """A whole answer before the end of the request, then RST_STREAM(NO_ERROR)."""
    client.request(1, "POST", "/echo", end=False, more=TOO_LARGE)
    client.expect_reset(1, ErrorCode.NO_ERROR)


def _skipped(client: Client) -> None:
    """5.1.1: opening stream 3 closes stream 1, which was never used."""
    client.request(3)
    client.expect_ok(3)


CLOSED_WAYS = [_completed, _reset_by_client, _reset_by_server, _answered_early]
LATE_FRAMES = {
    "DATA": raw(DATA, 0, 1, b"x"),
    "empty DATA": raw(DATA, 0, 1, b""),
    "last DATA": raw(DATA, END_STREAM, 1, b"x"),
    "trailers": raw(HEADERS, END_HEADERS | END_STREAM, 1, literal([("a", "b")])),
    "a request": raw(HEADERS, END_HEADERS | END_STREAM, 1, GET),
    "malformed HEADERS": raw(HEADERS, END_HEADERS | END_STREAM, 1, literal([("A", "b"), (":path", "/")])),
}


@pytest.mark.parametrize("frame", LATE_FRAMES.values(), ids=LATE_FRAMES.keys())
@pytest.mark.parametrize("way", [_completed, _skipped, _reset_by_client])
def test_a_closed_stream_takes_no_request(client: Client, way: Callable[[Client], None], frame: bytes) -> None:
    """5.1, closed: DATA or HEADERS on a stream the client itself has ended is an error of type STREAM_CLOSED.

    Of the connection after END_STREAM; of the stream after RST_STREAM, or, as 5.4.1 allows, of the connection. For a
    number that was passed over, 5.1.1 asks for PROTOCOL_ERROR; a server that keeps no list of them cannot tell.
    """
    way(client)
    client.send(frame)
    allowed = {ErrorCode.STREAM_CLOSED, *([ErrorCode.PROTOCOL_ERROR] if way is _skipped else [])}
    if way is _completed:
        client.expect_goaway(ErrorCode.STREAM_CLOSED)
    else:
        client.expect_error(1, *allowed)


@pytest.mark.parametrize("frame", LATE_FRAMES.values(), ids=LATE_FRAMES.keys())
@pytest.mark.parametrize("way", [_reset_by_server, _answered_early])
def test_frames_in_flight_when_we_reset_are_ignored(
    client: Client, way: Callable[[Client], None], frame: bytes
) -> None:
    """5.1, closed: after sending RST_STREAM an endpoint MUST ignore what was on its way; windows still count it."""
    way(client)
    before = client.sending.connection
    client.send(frame)
    client.request(5)
    client.expect_ok(5)
    assert client.sending.connection <= before


@pytest.mark.parametrize("way", [*CLOSED_WAYS, _skipped])
def test_a_closed_stream_takes_control_frames(client: Client, way: Callable[[Client], None]) -> None:
    """5.1, closed: WINDOW_UPDATE, RST_STREAM and PRIORITY can arrive late; MUST NOT be an error."""
    way(client)
    client.send(raw(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), raw(PRIORITY, 0, 1, bytes(5)), raw(RST_STREAM, 0, 1, bytes(4)))
    client.request(5)
    client.expect_ok(5)


def test_data_for_a_closed_stream_counts_for_the_connection(client: Client) -> None:
    """5.1, 6.9: DATA of an ignored stream uses the connection's window and is given back: 32 MiB pass through 16."""
    _reset_by_server(client)
    chunk = raw(DATA, 0, 1, bytes(100_000))
    for _ in range(340):
        client.send(chunk)
        client.ping()
    client.request(3)
    client.expect_ok(3)


def test_every_stream_we_reset_may_have_had_frames_in_flight(limited: Callable[..., Http2EchoServer]) -> None:
    """5.1, closed: as many streams as may be open at once, all answered early, all with DATA behind them."""
    client = limited(concurrent_streams=3000).connect()
    client.grant(0, 10_000_000)
    ids = range(1, 5001, 2)
    block = literal(request_fields("POST", "/echo", TOO_LARGE))
    client.send(*(raw(HEADERS, END_HEADERS, stream_id, block) for stream_id in ids))
    client.send(*(raw(DATA, END_STREAM, stream_id, b"x") for stream_id in ids))
    client.ping()
    assert all(client.answers[stream_id].reset == ErrorCode.NO_ERROR for stream_id in ids)


# 5.1.1: stream identifiers.


@pytest.mark.parametrize("highest", [0, 5])
@pytest.mark.parametrize("stream_id", [2, 4, 6, 2**31 - 2])
def test_a_client_opens_no_even_stream(client: Client, highest: int, stream_id: int) -> None:
    """5.1.1: client streams are odd; an unexpected identifier is a connection error of type PROTOCOL_ERROR."""
    if highest:
        client.request(highest)
        client.expect_ok(highest)
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, stream_id, GET))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


def test_stream_numbers_only_grow(client: Client) -> None:
    """5.1.1: a new stream's number MUST be greater than all before. See `test_a_closed_stream_takes_no_request`."""
    client.request(5)
    client.expect_ok(5)
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 3, GET))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR, ErrorCode.STREAM_CLOSED)


def test_stream_numbers_may_leave_gaps_up_to_the_last(client: Client) -> None:
    """5.1.1: any greater odd number will do, 2^31-1 being the last."""
    for stream_id in (1, 7, 2**31 - 1):
        client.request(stream_id)
        client.expect_ok(stream_id, b"hello")


def test_a_client_does_not_push(client: Client) -> None:
    """6.6, 8.4: a client cannot push; PUSH_PROMISE is a connection error of type PROTOCOL_ERROR."""
    client.request(1, "POST", "/hold", end=False)
    client.send(raw(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2" + GET))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


# 5.1.2: concurrency.


def test_streams_over_the_limit_are_refused(limited: Callable[..., Http2EchoServer]) -> None:
    """5.1.2: a stream over the announced maximum is refused; REFUSED_STREAM tells that it was not looked at."""
    echo_server = limited(concurrent_streams=3)
    client = echo_server.connect()
    assert client.theirs[MAX_STREAMS] == 3
    for stream_id in (1, 3, 5, 7):
        client.request(stream_id, "POST", "/hold")
    client.expect_reset(7, ErrorCode.REFUSED_STREAM, ErrorCode.PROTOCOL_ERROR)
    assert len(echo_server.handlers.held) == 3
    client.reset(3)
    client.request(9)
    client.expect_ok(9)


@pytest.mark.parametrize("how", ["half-closed", "answered", "reset"])
def test_closed_streams_do_not_count(limited: Callable[..., Http2EchoServer], how: str) -> None:
    """5.1.2: open and half-closed streams count, others do not."""
    client = limited(concurrent_streams=2).connect()
    for stream_id in range(1, 21, 2):
        client.request(stream_id, "POST", "/echo" if how == "answered" else "/hold", end=how != "reset")
        if how == "answered":
            client.expect_ok(stream_id)
        else:
            client.reset(stream_id)
    client.request(21)
    client.expect_ok(21)


def test_a_refused_stream_does_not_disturb_the_table(limited: Callable[..., Http2EchoServer]) -> None:
    """4.3, 5.1.2: the block of a refused stream is decoded."""
    client = limited(concurrent_streams=1).connect()
    client.request(1, "POST", "/hold", more=[("x-first", "1")])
    client.request(3, "POST", "/hold", more=[("x-second", "2")])
    client.expect_reset(3, ErrorCode.REFUSED_STREAM)
    client.reset(1)
    client.request(5, more=[("x-second", "2"), ("x-first", "1")])
    client.expect_ok(5)


# 5.4: errors.


def test_a_connection_error_names_the_last_stream_and_closes(client: Client) -> None:
    """5.4.1: GOAWAY carries the last stream that was or may have been acted on, then the connection MUST be closed."""
    client.request(1)
    client.expect_ok(1)
    client.request(7, "POST", "/hold")
    client.send(raw(PRIORITY, 0, 0, bytes(5)))
    assert client.expect_goaway(ErrorCode.PROTOCOL_ERROR).last_stream_id == 7


def test_a_connection_error_ends_the_streams(echo_server: Http2EchoServer) -> None:
    """5.4.1: what was in flight is over for the handlers, too."""
    client = echo_server.connect()
    client.request(1, "POST", "/hold")
    client.request(3, "POST", "/hold")
    client.send(raw(DATA, 0, 0, b""))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)
    assert echo_server.handlers.events == ["disconnect", "disconnect"]
    for exchange in echo_server.handlers.held:
        echo_server.server.call(exchange.abort)


def test_nothing_is_done_after_a_connection_error(echo_server: Http2EchoServer) -> None:
    """5.4.1: requests behind the error, in the same packet, are not served."""
    client = echo_server.connect()
    client.send(raw(DATA, 0, 0, b""), raw(HEADERS, END_HEADERS | END_STREAM, 1, HOLD))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)
    assert echo_server.handlers.held == []


def test_a_stream_error_leaves_the_others_alone(echo_server: Http2EchoServer) -> None:
    """5.4.2: a stream error concerns one stream."""
    client = echo_server.connect()
    client.request(1, "POST", "/echo", end=False)
    client.request(3, "POST", "/hold")
    client.send(raw(WINDOW_UPDATE, 0, 3, bytes(4)))
    client.expect_reset(3, ErrorCode.PROTOCOL_ERROR)
    client.data(1, b"still here", end=True)
    client.expect_ok(1, b"still here")


def test_a_reset_is_never_answered_with_a_reset(client: Client) -> None:
    """5.4.2: to avoid loops, RST_STREAM MUST NOT be sent in response to RST_STREAM. (The client judges `seen`.)"""
    client.request(1, "POST", "/hold", end=False)
    client.reset(1)
    client.reset(1)
    client.ping()
    assert not any("RstStream" in words for words in client.seen)
