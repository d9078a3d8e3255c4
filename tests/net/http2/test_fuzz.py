# SPDX-License-Identifier: Apache-2.0
"""Any bytes at all, in any pieces: the connection answers as if they had come at once, keeps little, and never raises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_transport import Http2Harness
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame, WindowUpdateFrame
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from raw_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    literal,
    raw,
    request_fields,
    settings,
)

from headrace.core.limits import Limits
from headrace.net.http2.frames import ErrorCode
from headrace.net.http2.reader import OWN_FRAME_BYTES
from support.properties import examples

LIMITS = Limits(
    concurrent_streams=5,
    header_bytes=4096,
    body_bytes=3000,
    stream_window_bytes=70_000,
    connection_window_bytes=100_000,
)
CARRY_BYTES = 64 * 1024 + 16 * 1024

fuzz = hypothesis_settings(
    max_examples=examples(300),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""Derandomized: a run on one machine is a run on another. To look for more, raise `max_examples` and drop it."""

BLOCKS = [
    literal(request_fields()),
    literal(request_fields("POST", "/echo")),
    literal(request_fields("POST", "/echo", [("content-length", "7")])),
    literal(request_fields("POST", "/upload")),
    literal(request_fields("POST", "/hold")),
    literal(request_fields(path="/big/5000")),
    literal(request_fields(path="/stream/3")),
    literal(request_fields("POST", "/test.Echo/Unary", [("content-type", "application/grpc"), ("te", "trailers")])),
    literal(request_fields("HEAD", "/big/100")),
    literal([("x-trailer", "1")]),
    literal([("X-Bad", "1")]),
    b"\x82\x86\x44\x06/hello\x01\x04test",
    b"\x82\x86\xbe\x01\x04test",
    b"\x20\x3f\xe1\x1f" + literal(request_fields()),
    b"\x80",
    b"",
]

stream_ids = st.sampled_from([0, 1, 1, 3, 3, 5, 5, 7, 9, 2, 2**31 - 1, 2**31 + 1])
flags = st.sampled_from([0, END_STREAM, END_HEADERS, END_HEADERS | END_STREAM, PADDED, PADDED | END_STREAM, 0x20, 0xFF])
blocks = st.sampled_from(BLOCKS)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A HEADERS frame that is right more often than not, whole or followed by CONTINUATION."""
    stream_id, block, end = draw(stream_ids), draw(blocks), draw(st.sampled_from([0, END_STREAM]))
    if draw(st.booleans()):
        return raw(HEADERS, END_HEADERS | end, stream_id, block)
    split = draw(st.integers(0, len(block)))
    return raw(HEADERS, end, stream_id, block[:split]) + raw(CONTINUATION, END_HEADERS, stream_id, block[split:])


@st.composite
def data(draw: st.DrawFn) -> bytes:
    """A DATA frame, perhaps padded."""
    stream_id, end = draw(stream_ids), draw(st.sampled_from([0, END_STREAM]))
    body = draw(st.one_of(st.binary(max_size=12), st.integers(0, 3500).map(bytes)))
    if draw(st.booleans()):
        return raw(DATA, end, stream_id, body)
    padding = draw(st.integers(0, 255))
    return raw(DATA, PADDED | end, stream_id, bytes([padding]) + body + bytes(padding))


windows = st.sampled_from([0, 1, 10, 65_535, 2**31 - 1]).map(lambda size: size.to_bytes(4, "big"))
controls = st.one_of(
    st.builds(raw, st.just(PING), st.sampled_from([0, 1]), st.just(0), st.just(b"headrace")),
    st.builds(raw, st.just(SETTINGS), st.just(0), st.just(0), windows.map(lambda window: b"\0\4" + window)),
    st.builds(raw, st.just(SETTINGS), st.just(0), st.just(0), windows.map(lambda window: b"\0\1" + window)),
    st.builds(raw, st.just(SETTINGS), st.just(1), st.just(0)),
    st.builds(raw, st.just(WINDOW_UPDATE), st.just(0), stream_ids, windows),
    st.builds(raw, st.just(RST_STREAM), st.just(0), stream_ids, windows),
    st.builds(raw, st.just(PRIORITY), st.just(0), stream_ids, st.just(bytes(5))),
    st.builds(raw, st.just(GOAWAY), st.just(0), st.just(0), st.binary(min_size=8, max_size=20)),
    st.builds(raw, st.just(0xBE), flags, stream_ids, st.sampled_from([b"", bytes(10), bytes(20_000)])),
)
wild = st.builds(
    raw,
    st.integers(0, 12),
    flags,
    stream_ids,
    st.one_of(st.binary(max_size=20), blocks, st.sampled_from([4097, 16_385, OWN_FRAME_BYTES + 1]).map(bytes)),
    length=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 30), st.sampled_from([16_384, 16_385, 2**24 - 1])),
)
good_frames = st.lists(st.one_of(headers(), headers(), data(), data(), controls), max_size=15)
any_frames = st.lists(st.one_of(headers(), data(), controls, wild), max_size=15)


@contextmanager
def running() -> Iterator[None]:
    """A loop to be in: calls with deadlines want one. Nothing is ever run in it."""
    loop = asyncio.new_event_loop()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(None)
        loop.close()


def played(pieces: list[bytes]) -> tuple[list[bytes], object]:
    """What the connection says to bytes that come in these pieces, and the state they leave it in."""
    unplugged = Http2Harness(LIMITS, shake_hands=False)
    for piece in pieces:
        unplugged.feed(piece)
        check_bounds(unplugged)
    connection = unplugged.connection
    # Window is given back as pieces are read, so the frames that say so depend on the pieces; their sum does not.
    outputs = [frame.serialize() for frame in unplugged.frames() if not isinstance(frame, WindowUpdateFrame)]
    state = (
        unplugged.closing,
        None if unplugged.closing else connection.receive_window + connection.consumed,
        sorted(connection.streams),
        connection.send_window,
        connection.highest_stream,
        [bytes(exchange.body) for exchange in unplugged.handlers.held],
        unplugged.handlers.events,
        connection._carry,
    )
    return outputs, state


def check_bounds(unplugged: Http2Harness) -> None:
    """However the client behaves, a connection keeps a bounded amount."""
    connection, reader = unplugged.connection, unplugged.connection._reader
    assert len(connection._carry) <= CARRY_BYTES
    assert len(reader._block or b"") <= LIMITS.header_bytes
    assert len(connection.streams) <= LIMITS.concurrent_streams
    assert set(connection.blocked) <= set(connection.streams)
    assert len(connection._reset_by_us) <= 1024
    assert connection.receive_window + connection.consumed <= LIMITS.connection_window_bytes
    for stream in connection.streams.values():
        assert stream.receive_window + stream.consumed + stream.unconsumed <= LIMITS.stream_window_bytes
        assert len(getattr(stream, "_gathered", None) or b"") <= LIMITS.body_bytes


def check_said(frames: list[Frame]) -> None:
    """5.1, 5.4.2, 8.1, of what the server says: heads before bodies, nothing after the end, one reset a stream."""
    begun: set[int] = set()
    ended: set[int] = set()
    reset: set[int] = set()
    for frame in frames:
        number = frame.stream_id
        if isinstance(frame, HeadersFrame | DataFrame):
            assert number % 2 == 1
            assert number not in ended | reset, f"{frame} after the end"
            assert isinstance(frame, HeadersFrame) or number in begun, f"{frame} before a head"
            begun.add(number)
            if "END_STREAM" in frame.flags:
                ended.add(number)
        elif isinstance(frame, RstStreamFrame):
            assert number not in reset, f"{frame} twice"
            assert number not in ended or frame.error_code == ErrorCode.NO_ERROR
            reset.add(number)


def check_end(unplugged: Http2Harness) -> None:
    """Closed with GOAWAY as the last word, or still serving."""
    frames = unplugged.frames()
    check_said(frames)
    if unplugged.closing:
        assert isinstance(frames[-1], GoAwayFrame), frames
        assert frames[-1].error_code != ErrorCode.NO_ERROR
        assert unplugged.connection.streams == {}
    else:
        assert not any(isinstance(frame, GoAwayFrame) for frame in frames)
    unplugged.connection.sweep(1000.0)
    unplugged.connection.connection_lost(None)
    assert unplugged.connection.streams == {}
    assert unplugged.site.connections == set()


def cut(stream: bytes, splits: list[int]) -> list[bytes]:
    places = sorted({split % (len(stream) + 1) for split in splits})
    return [stream[start:stop] for start, stop in zip([0, *places], [*places, len(stream)], strict=True)]


@fuzz
@given(good_frames, st.lists(st.integers(0, 2**20), max_size=20))
def test_pieces_do_not_matter_for_good_frames(frames: list[bytes], splits: list[int]) -> None:
    """4.1: a frame means the same however TCP cuts it."""
    stream = PREFACE + settings({}) + b"".join(frames)
    with running():
        assert played(cut(stream, splits)) == played([stream])


@fuzz
@given(any_frames, st.lists(st.integers(0, 2**20), max_size=20))
def test_pieces_do_not_matter_for_any_frames(frames: list[bytes], splits: list[int]) -> None:
    """The same for frames that break rules: the same complaint, at the same place."""
    stream = PREFACE + settings({}) + b"".join(frames)
    with running():
        assert played(cut(stream, splits)) == played([stream])


@hypothesis_settings(fuzz, max_examples=60)
@given(good_frames)
def test_byte_by_byte(frames: list[bytes]) -> None:
    """Every place is a place to cut."""
    stream = (PREFACE + settings({}) + b"".join(frames))[:3000]
    with running():
        assert played([stream[i : i + 1] for i in range(len(stream))]) == played([stream])


@fuzz
@given(any_frames, st.lists(st.integers(0, 2**20), max_size=4))
def test_any_frames_end_well(frames: list[bytes], splits: list[int]) -> None:
    """No sequence of frames, good or bad, raises, grows without bound, or ends without a word."""
    with running():
        unplugged = Http2Harness(LIMITS)
        for piece in cut(b"".join(frames), splits):
            unplugged.feed(piece)
            check_bounds(unplugged)
        check_end(unplugged)


mutations = st.lists(
    st.tuples(st.sampled_from(["flip", "insert", "delete", "copy"]), st.integers(0, 2**20), st.integers(0, 255)),
    max_size=6,
)


@fuzz
@given(good_frames, mutations, st.booleans())
def test_mutated_frames_end_well(frames: list[bytes], changes: list[tuple[str, int, int]], preface: bool) -> None:
    """Good frames with some bytes changed, added, left out or repeated."""
    stream = bytearray((PREFACE + settings({}) if preface else b"") + b"".join(frames))
    for action, place, value in changes:
        place %= len(stream) + 1
        if action == "insert":
            stream.insert(place, value)
        elif action == "delete":
            del stream[place : place + value % 9 + 1]
        elif action == "copy":
            stream[place:place] = stream[place : place + value]
        elif place < len(stream):
            stream[place] ^= 1 << value % 8
    with running():
        unplugged = Http2Harness(LIMITS, shake_hands=not preface)
        unplugged.feed(bytes(stream))
        check_bounds(unplugged)
        if unplugged.closing:
            check_end(unplugged)


@fuzz
@given(st.binary(max_size=600), st.booleans())
def test_garbage_ends_well(garbage: bytes, shake_hands: bool) -> None:
    """Bytes that mean nothing at all."""
    with running():
        unplugged = Http2Harness(LIMITS, shake_hands=shake_hands)
        unplugged.feed(garbage)
        check_bounds(unplugged)
        if unplugged.closing:
            check_end(unplugged)


@fuzz
@given(st.binary(max_size=200))
def test_any_block_ends_well(block: bytes) -> None:
    """Header blocks of random bytes: refused as a stream, refused as a connection, or a request."""
    with running():
        unplugged = Http2Harness(LIMITS)
        unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 1, block) + raw(PING, 0, 0, bytes(8)))
        frames: list[Frame] = unplugged.frames()
        assert frames
        assert isinstance(frames[-1], GoAwayFrame) == unplugged.closing


@pytest.mark.parametrize("length", [OWN_FRAME_BYTES, OWN_FRAME_BYTES + 1, 200_000])
@pytest.mark.parametrize("kind", [DATA, HEADERS, 0xBE])
def test_the_frame_size_applies_to_frames_received_together(kind: int, length: int) -> None:
    """4.2: a frame over the maximum is refused even if all of it is there already."""
    unplugged = Http2Harness()
    unplugged.feed(raw(HEADERS, END_HEADERS, 1, literal(request_fields("POST", "/upload"))))
    unplugged.feed(raw(kind, END_HEADERS if kind == HEADERS else 0, 3 if kind == HEADERS else 1, bytes(length)))
    codes = [frame.error_code for frame in unplugged.frames() if isinstance(frame, GoAwayFrame)]
    if length > OWN_FRAME_BYTES:
        assert codes == [ErrorCode.FRAME_SIZE_ERROR]
    else:
        assert codes == ([ErrorCode.ENHANCE_YOUR_CALM] if kind == HEADERS else [])
