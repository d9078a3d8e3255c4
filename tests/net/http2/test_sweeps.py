# SPDX-License-Identifier: Apache-2.0
"""Time-outs of HTTP/2 connections and streams: slow prefaces, slow heads, slow bodies, slow readers. Time is by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_transport import Http2Harness
from http2_echo_server import Http2EchoServer
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, RstStreamFrame
from raw_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    literal,
    raw,
    request_fields,
    settings,
)

from headrace.core.limits import Limits
from headrace.net.http.heads import OK_PLAIN
from headrace.net.http2.frames import ErrorCode

GET = literal(request_fields())


def post(path: str, *more: tuple[str, str]) -> bytes:
    return literal(request_fields("POST", path, more))


def goaways(unplugged: Http2Harness) -> list[int]:
    return [frame.error_code for frame in unplugged.frames() if isinstance(frame, GoAwayFrame)]


# Slow beginnings.


BEGINNINGS = {
    "nothing": b"",
    "half a preface": PREFACE[:20],
    "no SETTINGS": PREFACE,
    "half SETTINGS": PREFACE + settings({4: 70_000})[:12],
}


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS.keys())
def test_a_slow_preface(beginning: bytes) -> None:
    """From the first byte to the first SETTINGS in `header_seconds`."""
    unplugged = Http2Harness(shake_hands=False)
    unplugged.feed(beginning)
    unplugged.sweep(9.0)
    assert not unplugged.closing
    unplugged.sweep(11.0)
    assert goaways(unplugged) == [ErrorCode.ENHANCE_YOUR_CALM]
    assert unplugged.closing
    unplugged.sweep(14.0)
    assert unplugged.transport.closed


@pytest.mark.parametrize("sent", [3, 15, 20, 24])
def test_a_slow_preface_over_a_socket(limited: Callable[..., Http2EchoServer], sent: int) -> None:
    """The same with the protocol still being negotiated."""
    echo_server = limited()
    client = echo_server.connect(handshake=False)
    client.socket.sendall(PREFACE[:sent])
    echo_server.until(lambda: echo_server.server.site.connections)
    echo_server.server.sweep(11)
    while client.socket.recv(1000):
        pass
    echo_server.server.sweep(100)
    echo_server.until(lambda: not echo_server.server.site.connections)


BLOCKS = {
    "HEADERS": raw(HEADERS, END_STREAM, 1, GET),
    "CONTINUATION": raw(HEADERS, END_STREAM, 1, GET) + raw(CONTINUATION, 0, 1),
    "half a HEADERS frame": raw(HEADERS, END_HEADERS | END_STREAM, 1, GET)[:-1],
    "half a frame header": raw(HEADERS, END_HEADERS | END_STREAM, 1, GET)[:5],
    "half a control frame": raw(SETTINGS, 0, 0, bytes(6))[:-1],
}


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside an open stream"])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_a_slow_header_block(block: bytes, others: bool) -> None:
    """A head that has begun ends within `header_seconds`, whatever else the connection does."""
    unplugged = Http2Harness(Limits(idle_seconds=1e9, body_idle_seconds=1e9))
    offset = 0
    if others:
        unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 1, post("/hold")))
        offset = 2
    unplugged.sweep(100.0)
    unplugged.feed(_shifted(block, offset))
    unplugged.sweep(109.0)
    assert not unplugged.closing
    unplugged.sweep(111.0)
    assert goaways(unplugged) == [ErrorCode.ENHANCE_YOUR_CALM]
    assert unplugged.closing


def _shifted(data: bytes, offset: int) -> bytes:
    """The same frames on another stream."""
    if not offset:
        return data
    return data.replace(b"\0\0\0\1", b"\0\0\0\3")


def test_dripping_does_not_restart_the_clock_of_a_block() -> None:
    """Progress of a byte a second is not progress: the block as a whole has its time."""
    unplugged = Http2Harness(Limits(idle_seconds=1e9))
    unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 1, post("/hold")))
    unplugged.feed(raw(HEADERS, END_STREAM, 3, b""))
    for second in range(1, 12):
        unplugged.feed(raw(CONTINUATION, 0, 3, GET[second : second + 1]))
        if second == 5:
            # Another stream ends meanwhile: nor does that restart it.
            unplugged.handlers.held[0].respond(OK_PLAIN, b"done")
        unplugged.sweep(float(second))
    assert ErrorCode.ENHANCE_YOUR_CALM in goaways(unplugged)


def test_dripping_does_not_restart_the_clock_of_a_frame() -> None:
    """The same inside one HEADERS frame."""
    unplugged = Http2Harness(Limits(idle_seconds=1e9))
    frame = raw(HEADERS, END_HEADERS | END_STREAM, 1, GET)
    for second in range(12):
        unplugged.feed(frame[second : second + 1])
        unplugged.sweep(float(second))
    assert goaways(unplugged) == [ErrorCode.ENHANCE_YOUR_CALM]


def test_a_busy_connection_may_end_every_read_inside_a_frame() -> None:
    """That there is half a frame at every sweep says nothing, as long as it is another one."""
    unplugged = Http2Harness()
    stream_id = 1
    frame = raw(HEADERS, END_HEADERS | END_STREAM, stream_id, GET)
    unplugged.feed(frame[:20])
    for second in range(40):
        following = raw(HEADERS, END_HEADERS | END_STREAM, stream_id + 2, GET)
        unplugged.feed(frame[20:] + following[:20])
        frame = following
        stream_id += 2
        unplugged.sweep(float(second))
    assert goaways(unplugged) == []
    assert not unplugged.closing


def test_a_slow_header_block_over_a_socket(limited: Callable[..., Http2EchoServer]) -> None:
    echo_server = limited()
    client = echo_server.connect()
    client.headers(1, request_fields(), done=False)
    client.send(raw(CONTINUATION, 0, 1))
    connection = echo_server.connection()
    echo_server.until(lambda: connection._reader._block_frames == 1)
    echo_server.server.sweep(11)
    client.expect_goaway(ErrorCode.ENHANCE_YOUR_CALM)
    echo_server.server.sweep(100)
    echo_server.until(lambda: not echo_server.server.site.connections)


# Slow bodies.


@pytest.mark.parametrize("path", ["/echo", "/upload"])
@pytest.mark.parametrize("length", [True, False])
def test_a_stalled_body(path: str, length: bool) -> None:
    """`body_idle_seconds` of silence inside a request end it: 408, as HTTP/1.1 does, and no more of the body."""
    unplugged = Http2Harness()
    more = [("content-length", "100")] if length else []
    unplugged.feed(raw(HEADERS, END_HEADERS, 1, post(path, *more)) + raw(DATA, 0, 1, b"x"))
    for second in range(60):
        unplugged.sweep(float(second))
    assert unplugged.frames() == []
    unplugged.sweep(62.0)
    kinds = [type(frame) for frame in unplugged.frames()]
    assert kinds[0] == HeadersFrame
    assert RstStreamFrame in kinds
    assert unplugged.connection.streams == {}


def test_a_moving_body_is_not_cut() -> None:
    unplugged = Http2Harness()
    unplugged.feed(raw(HEADERS, END_HEADERS, 1, post("/echo")))
    for minute in range(30):
        unplugged.feed(raw(DATA, 0, 1, b"x"))
        unplugged.sweep(minute * 50.0)
        unplugged.sweep(minute * 50.0 + 25.0)
    assert unplugged.frames() == []
    unplugged.feed(raw(DATA, END_STREAM, 1, b""))
    assert b"".join(frame.data for frame in unplugged.frames() if isinstance(frame, DataFrame)) == bytes(b"x" * 30)


def test_a_body_that_we_paused_is_not_cut() -> None:
    """A paused handler is no fault of the client's."""
    unplugged = Http2Harness()
    unplugged.feed(raw(HEADERS, END_HEADERS, 1, post("/upload")) + raw(DATA, 0, 1, b"x"))
    unplugged.connection.streams[1].pause()
    for minute in range(10):
        unplugged.sweep(minute * 60.0)
    assert len(unplugged.connection.streams) == 1
    assert not unplugged.closing


def test_a_handler_may_take_its_time() -> None:
    """A whole request waits for nothing of the client's."""
    unplugged = Http2Harness()
    unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 1, post("/hold")))
    for minute in range(100):
        unplugged.sweep(minute * 60.0)
    unplugged.handlers.held[0].respond(OK_PLAIN, b"at last")
    assert [type(frame) for frame in unplugged.frames()] == [HeadersFrame, DataFrame]


def test_a_streaming_call_may_be_silent() -> None:
    """gRPC: an open stream of messages is not a body that must move."""
    import asyncio

    async def main() -> None:
        unplugged = Http2Harness()
        block = post("/test.Echo/Chat", ("content-type", "application/grpc"), ("te", "trailers"))
        unplugged.feed(raw(HEADERS, END_HEADERS, 1, block))
        await asyncio.sleep(0)
        for minute in range(100):
            unplugged.sweep(minute * 60.0)
        assert len(unplugged.connection.streams) == 1
        unplugged.connection.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(main())


# Slow readers.


def _blocked(path: str, window: int = 0) -> Http2Harness:
    unplugged = Http2Harness(Limits(idle_seconds=1e9))
    unplugged.feed(raw(SETTINGS, 0, 0, b"\0\4" + window.to_bytes(4, "big")))
    unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 1, literal(request_fields(path=path))))
    unplugged.frames()
    return unplugged


def test_an_unread_answer() -> None:
    """`write_idle_seconds` without window for an answer: it is dropped, and with the last one the connection."""
    unplugged = _blocked("/big/1000")
    for second in range(60):
        unplugged.sweep(float(second))
    assert unplugged.frames() == []
    unplugged.sweep(62.0)
    kinds = [type(frame) for frame in unplugged.frames()]
    assert kinds == [RstStreamFrame, GoAwayFrame]
    assert unplugged.connection.streams == {}
    assert unplugged.closing


def test_only_the_unread_answer_is_dropped() -> None:
    """Other streams of the connection go on: a browser may leave one download alone."""
    unplugged = _blocked("/big/1000")
    unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 3, post("/hold")))
    unplugged.sweep(0.0)
    unplugged.sweep(62.0)
    assert [frame.stream_id for frame in unplugged.frames() if isinstance(frame, RstStreamFrame)] == [1]
    assert list(unplugged.connection.streams) == [3]
    assert not unplugged.closing


def test_a_slowly_read_answer_is_not_cut() -> None:
    """A byte now and then is movement."""
    unplugged = _blocked("/big/1000")
    for minute in range(30):
        unplugged.feed(raw(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"))
        unplugged.sweep(minute * 50.0)
        unplugged.sweep(minute * 50.0 + 25.0)
    assert sum(len(frame.data) for frame in unplugged.frames() if isinstance(frame, DataFrame)) == 30
    assert not unplugged.closing


def test_a_steady_download_is_unchanged_at_every_sweep_and_not_cut() -> None:
    """What is left to send and the window may be equal each time we look, with much sent in between."""
    unplugged = _blocked("/stream/1", window=0)
    exchange: Any = unplugged.connection.streams[1]
    exchange._end_after = False
    for second in range(100):
        exchange.send_data([bytes(1000)])
        unplugged.feed(raw(WINDOW_UPDATE, 0, 1, (1000).to_bytes(4, "big")) + raw(WINDOW_UPDATE, 0, 0, b"\0\0\3\xe8"))
        unplugged.sweep(float(second))
    assert not unplugged.closing
    assert 1 in unplugged.connection.streams


def _unread(unplugged: Http2Harness) -> None:
    unplugged.transport.stuck = True
    unplugged.transport.unread = 100_000
    unplugged.connection.pause_writing()


def test_a_socket_that_is_not_read() -> None:
    unplugged = Http2Harness()
    _unread(unplugged)
    for second in range(60):
        unplugged.sweep(float(second))
    assert not unplugged.transport.closed
    unplugged.sweep(62.0)
    assert unplugged.transport.closed


def test_a_socket_that_is_not_read_but_written_to() -> None:
    """What we add to the unread bytes is no sign that the client reads."""
    unplugged = Http2Harness()
    _unread(unplugged)
    for second in range(62):
        unplugged.feed(raw(PING, 0, 0, bytes(8)))
        unplugged.sweep(float(second))
    assert unplugged.transport.closed


def test_a_slowly_read_socket_is_not_cut() -> None:
    unplugged = Http2Harness()
    _unread(unplugged)
    for minute in range(30):
        unplugged.transport.unread -= 1
        unplugged.sweep(minute * 50.0)
    assert not unplugged.transport.closed


REQUESTS = {
    "HEAD": literal(request_fields("HEAD")),
    "not found": literal(request_fields("HEAD", "/nothing/here")),
    "gRPC errors": post("/test.Echo/Nothing", ("content-type", "application/grpc")),
    "with bodies": GET,
}


@pytest.mark.parametrize("block", REQUESTS.values(), ids=REQUESTS.keys())
def test_requests_with_unread_answers_do_not_fill_the_memory(block: bytes) -> None:
    """CVE-2019-9517: a client that asks and asks and reads nothing. Answers without a body need no window, either."""
    unplugged = Http2Harness(Limits(concurrent_streams=100))
    _unread(unplugged)
    for stream_id in range(1, 100_001, 2):
        unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, stream_id, block))
        if unplugged.closing:
            break
    assert unplugged.closing
    assert unplugged.transport.unread < 2_000_000


@pytest.mark.parametrize("frame", [raw(PING, 0, 0, bytes(8)), raw(SETTINGS, 0, 0)], ids=["PING", "SETTINGS"])
def test_answers_to_control_frames_that_are_not_read_do_not_fill_the_memory(frame: bytes) -> None:
    """CVE-2019-9512, -9515 with patience: slow enough for the guards of frames, for ever."""
    unplugged = Http2Harness(Limits(concurrent_streams=100, write_idle_seconds=1e9))
    _unread(unplugged)
    for second in range(100_000):
        unplugged.site.now = float(second)
        unplugged.feed(frame)
        if unplugged.closing:
            break
    assert unplugged.closing
    assert unplugged.transport.unread < 2_000_000


# Idle connections.


def test_an_idle_connection_gets_goaway_and_is_closed() -> None:
    unplugged = Http2Harness()
    unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 1, GET))
    unplugged.frames()
    unplugged.sweep(100.0)
    assert not unplugged.closing
    unplugged.sweep(121.0)
    assert goaways(unplugged) == [ErrorCode.NO_ERROR]
    assert unplugged.closing


def test_a_connection_with_a_stream_is_not_idle() -> None:
    unplugged = Http2Harness()
    unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 1, post("/hold")))
    unplugged.sweep(10_000.0)
    assert not unplugged.closing
    unplugged.handlers.held[0].respond(OK_PLAIN, b"x")
    unplugged.sweep(10_100.0)
    assert not unplugged.closing
