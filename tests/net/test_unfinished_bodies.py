# SPDX-License-Identifier: Apache-2.0
"""Requests that begin and do not end: what they keep in memory is bounded, by connection and for the whole server."""

from __future__ import annotations

import pytest
from fake_transport import Http2Harness
from http1_fake import FakeWire
from hyperframe.frame import DataFrame, Frame, RstStreamFrame
from raw_frames import DATA, END_HEADERS, END_STREAM, HEADERS, literal, raw, request_fields

from headrace.core.limits import Limits
from headrace.net.http.heads import ResponseHead

KIB = 1024
LIMITS = Limits(
    body_bytes=400 * KIB, message_bytes=400 * KIB, connection_unfinished_bytes=0, unfinished_bytes=0, pipelined_bytes=0
)
"""One connection may hold 800 KiB and the server 1,600 KiB: twice and four times the largest body."""
GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
PIECE = bytes(16 * KIB)


def begin(unplugged: Http2Harness, stream_id: int, kind: str, pieces: int) -> None:
    """Send a request's head and the first pieces of a body that is never complete."""
    if kind == "grpc":
        head = literal(request_fields("POST", "/test.Echo/Unary", GRPC))
        first = b"\0" + (399 * KIB).to_bytes(4, "big")
    else:
        more = [("content-length", str(399 * KIB))] if kind == "sized" else []
        head = literal(request_fields("POST", "/echo", more))
        first = b""
    unplugged.feed(raw(HEADERS, END_HEADERS, stream_id, head) + (raw(DATA, 0, stream_id, first) if first else b""))
    for _ in range(pieces):
        unplugged.feed(raw(DATA, 0, stream_id, PIECE))


def ended(frames: list[Frame]) -> set[int]:
    """The streams that the server has ended."""
    return {frame.stream_id for frame in frames if "END_STREAM" in frame.flags or isinstance(frame, RstStreamFrame)}


@pytest.mark.parametrize("kind", ["grpc", "sized", "unsized"])
def test_one_connection_holds_at_most_its_limit(kind: str) -> None:
    unplugged = Http2Harness(LIMITS)
    begin(unplugged, 1, kind, 10)
    begin(unplugged, 3, kind, 22)
    begin(unplugged, 5, kind, 16)
    assert not ended(unplugged.frames())
    begin(unplugged, 7, kind, 12)
    frames = unplugged.frames()
    assert ended(frames) == {3}, "the largest is dropped"
    if kind != "grpc":
        assert any(b"unfinished" in frame.data for frame in frames if isinstance(frame, DataFrame))
    assert sorted(unplugged.connection.streams) == [1, 5, 7]
    assert unplugged.site.unfinished.total <= 800 * KIB
    assert not unplugged.closing


@pytest.mark.parametrize("kind", ["grpc", "sized"])
def test_a_complete_body_is_not_counted(kind: str) -> None:
    unplugged = Http2Harness(LIMITS)
    for stream_id in range(1, 41, 2):
        begin(unplugged, stream_id, kind, 24)
        assert unplugged.site.unfinished.total > 300 * KIB
        unplugged.feed(raw(DATA, END_STREAM, stream_id, bytes(15 * KIB)))
        assert unplugged.site.unfinished.total == 0
    unplugged.connection.connection_lost(None)


@pytest.mark.parametrize("kind", ["grpc", "sized", "unsized"])
def test_what_a_lost_connection_held_is_not_counted(kind: str) -> None:
    unplugged = Http2Harness(LIMITS)
    begin(unplugged, 1, kind, 20)
    assert unplugged.site.unfinished.total > 0
    unplugged.connection.connection_lost(None)
    assert unplugged.site.unfinished.total == 0


def test_the_whole_server_holds_at_most_its_limit() -> None:
    first = FakeWire(LIMITS)
    wires = [first, *(FakeWire(site=first.site) for _ in range(6))]
    for number, wire in enumerate(wires):
        wire.feed(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (399 * KIB))
        for _ in range(20 + number % 2):
            wire.feed(PIECE)
    dropped = [wire for wire in wires if wire.statuses() == [503]]
    assert len(dropped) == 2 and first.site.unfinished.total <= 1600 * KIB
    assert all(b"unfinished" in wire.answers()[0].body and wire.ended() for wire in dropped)
    for wire in wires:
        wire.protocol.connection_lost(None)
    assert first.site.unfinished.total == 0


def test_bodies_behind_a_slow_request_are_not_read() -> None:
    wire = FakeWire(LIMITS)
    wire.feed(b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n")
    body = bytes(100 * KIB)
    for _ in range(3):
        if wire.reading():
            wire.feed(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert not wire.reading()
    assert len(wire.protocol._queue) == 1
    wire.handlers.held.pop().respond(ResponseHead(200))
    assert wire.reading() and wire.statuses() == [200, 200]


@pytest.mark.parametrize("pieces", [0, 5])
def test_a_message_that_makes_no_progress_ends_its_call(pieces: int) -> None:
    unplugged = Http2Harness()
    begin(unplugged, 1, "grpc", pieces)
    for second in range(60):
        unplugged.sweep(float(second))
    assert unplugged.frames() == []
    unplugged.sweep(62.0)
    assert ended(unplugged.frames()) == {1}
    assert unplugged.connection.streams == {}
