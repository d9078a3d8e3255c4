# SPDX-License-Identifier: Apache-2.0
"""A WebSocketConnection on a fake transport: time-outs, back-pressure, and any split of the bytes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.limits import Limits
from headrace.net.http.heads import RequestHead
from headrace.net.site import Site
from headrace.net.websocket.connection import WebSocketConnection
from headrace.net.websocket.contract import may_be_sent
from headrace.net.websocket.handshake import negotiate
from support.properties import examples

PING, PONG_HEAD = b"\x89\x00", 0x8A
LIMITS = Limits(idle_seconds=100, write_idle_seconds=30, body_idle_seconds=40, message_bytes=1_000_000)


class FakeTransport(asyncio.Transport):
    """Keeps what is written; `unread` is what the client has not read."""

    def __init__(self, half_closes: bool = True) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.unread = 0
        self.events: list[str] = []
        self.half_closes = half_closes

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unread

    def can_write_eof(self) -> bool:
        return self.half_closes

    def write_eof(self) -> None:
        self.events.append("eof")

    def close(self) -> None:
        self.events.append("close")

    def abort(self) -> None:
        self.events.append("abort")

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.events.append("pause")

    def resume_reading(self) -> None:
        self.events.append("resume")


class ConnectionHarness:
    """A connection, its transport, and what its owner was told."""

    def __init__(self, *, deflate: bool = False, half_closes: bool = True) -> None:
        fields = [
            (b"host", b"h"),
            (b"connection", b"upgrade"),
            (b"upgrade", b"websocket"),
            (b"sec-websocket-version", b"13"),
            (b"sec-websocket-key", base64.b64encode(bytes(16))),
        ]
        if deflate:
            fields.append((b"sec-websocket-extensions", b"permessage-deflate"))
        head = RequestHead(b"GET", b"/ws", fields, version="1.1")
        self.site = Site(limits=LIMITS)
        frames, _ = negotiate(head, message_bytes=LIMITS.message_bytes)
        self.transport = FakeTransport(half_closes)
        self.connection = WebSocketConnection(self.site, frames, head, "127.0.0.1:1")
        self.messages: list[str | bytes] = []
        self.closes: list[tuple[int, str]] = []
        self.writable = 0
        self.connection.on_message = self.messages.append
        self.connection.on_close = lambda code, reason: self.closes.append((code, reason))
        self.connection.on_writable = self._on_writable
        self.connection.connection_made(self.transport)

    def _on_writable(self) -> None:
        self.writable += 1

    def sweep(self, now: float) -> None:
        self.site.tick(now)
        self.connection.sweep(now)

    def sent(self) -> list[bytes]:
        written, self.transport.written = self.transport.written, []
        return written


def frame(first: int, payload: bytes = b"") -> bytes:
    length = len(payload)
    if length < 126:
        head = struct.pack("!BB", first, 0x80 | length)
    elif length < 65_536:
        head = struct.pack("!BBH", first, 0x80 | 126, length)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, length)
    return head + bytes(4) + payload


def close_frame(code: int) -> bytes:
    return frame(0x88, struct.pack("!H", code))


def code_of(data: bytes) -> int:
    assert data[0] == 0x88
    return int.from_bytes(data[2:4], "big")


# Time.


def test_a_silent_client_is_pinged_and_then_closed() -> None:
    room = ConnectionHarness()
    room.sweep(25)
    assert room.sent() == []
    room.sweep(26)
    assert room.sent() == [PING]
    room.sweep(27)
    assert room.sent() == []
    room.sweep(51)
    room.sweep(76)
    assert room.sent() == [PING, PING]
    room.sweep(101)
    assert [code_of(data) for data in room.sent()] == [1011]
    room.sweep(110)
    assert room.transport.events == []
    room.sweep(111)
    assert room.transport.events == ["close"]
    room.connection.connection_lost(None)
    assert room.closes == [(1006, "")]


def test_a_pong_counts_as_a_sign_of_life() -> None:
    room = ConnectionHarness()
    for now in range(26, 2000, 26):
        room.sweep(now)
        assert room.sent() == [PING]
        room.connection.data_received(frame(0x8A))
    assert not room.connection.closed


def test_a_paused_client_is_not_blamed_for_its_silence() -> None:
    room = ConnectionHarness()
    room.connection.pause_messages()
    room.sweep(1000)
    assert room.sent() == []
    room.connection.resume_messages()
    room.sweep(1020)
    assert room.sent() == []
    room.sweep(1026)
    assert room.sent() == [PING]


def test_an_unfinished_message_may_not_stall_even_with_pongs() -> None:
    room = ConnectionHarness()
    room.connection.data_received(frame(0x01, b"begun"))
    for now in (20, 40):
        room.sweep(now)
        room.connection.data_received(frame(0x8A))
    assert room.sent() == []
    room.sweep(41)
    assert [code_of(data) for data in room.sent()] == [1008]


def test_every_piece_of_a_message_restarts_its_timer() -> None:
    room = ConnectionHarness()
    room.connection.data_received(frame(0x01, b"begun"))
    for now in (30, 60, 90):
        room.sweep(now)
        room.connection.data_received(frame(0x00, b"more"))
    room.connection.data_received(frame(0x80, b"end"))
    room.sweep(140)
    assert room.messages == ["begunmoremoremoreend"]
    assert not room.connection.closed


def test_a_client_that_does_not_read_is_cut_off() -> None:
    room = ConnectionHarness()
    room.transport.unread = 1000
    room.connection.pause_writing()
    room.sweep(10)
    room.sweep(40)
    assert room.transport.events == []
    room.sweep(41)
    assert room.transport.events == ["abort"]


def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    room = ConnectionHarness()
    room.connection.pause_writing()
    for now in range(10, 200, 10):
        room.transport.unread = 10_000 - now
        room.connection.data_received(frame(0x8A))
        room.sweep(now)
    assert room.transport.events == []


def test_a_closing_client_gets_the_time_it_needs_to_read_what_was_sent() -> None:
    room = ConnectionHarness()
    room.connection.close(1000)
    for now in range(5, 100, 5):
        room.transport.unread = 10_000 - now
        room.sweep(now)
    assert room.transport.events == []
    room.sweep(106)
    assert room.transport.events == ["abort"]


def test_tls_cannot_be_half_closed() -> None:
    room = ConnectionHarness(half_closes=False)
    room.connection.data_received(close_frame(1000))
    assert room.transport.events == ["close"]
    assert room.closes == [(1000, "")]


# Back-pressure.


def test_only_the_last_pong_is_kept_for_a_client_that_does_not_read() -> None:
    room = ConnectionHarness()
    room.connection.pause_writing()
    for n in range(1000):
        room.connection.data_received(frame(0x89, b"%d" % n))
    assert room.sent() == []
    room.connection.resume_writing()
    assert room.sent() == [b"\x8a\x03999"]
    room.connection.data_received(frame(0x89, b"a") + frame(0x89, b"b"))
    assert room.sent() == [b"\x8a\x01a", b"\x8a\x01b"]


def test_nothing_follows_a_close_frame() -> None:
    room = ConnectionHarness()
    room.connection.pause_writing()
    room.connection.data_received(frame(0x89, b"x"))
    room.connection.close(1000)
    room.connection.resume_writing()
    assert [data[0] for data in room.sent()] == [0x88]
    assert room.writable == 0


def test_send_asks_to_pause_while_the_client_is_behind() -> None:
    room = ConnectionHarness()
    assert room.connection.send("a") is True
    room.connection.pause_writing()
    assert room.connection.send(bytearray(b"b")) is False
    room.connection.resume_writing()
    assert room.writable == 1
    assert room.sent() == [b"\x81\x01a", b"\x82\x01b"]
    assert room.connection.send(memoryview(b"c")) is True


def test_what_on_writable_raises_closes_too() -> None:
    room = ConnectionHarness()
    room.connection.on_writable = lambda: 1 // 0  # type: ignore[assignment]
    room.connection.pause_writing()
    room.connection.resume_writing()
    assert [code_of(data) for data in room.sent()] == [1011]


def test_pausing_stops_the_socket_and_the_messages_that_are_here() -> None:
    room = ConnectionHarness()
    connection = room.connection

    def one(message: str | bytes) -> None:
        room.messages.append(message)
        connection.pause_messages()

    connection.on_message = one
    connection.data_received(b"".join(frame(0x81, b"%d" % n) for n in range(3)) + close_frame(4000))
    assert room.messages == ["0"]
    assert room.transport.events == ["pause"]
    connection.data_received(b"")  # a transport may deliver what it had read already
    connection.resume_messages()
    assert room.messages == ["0", "1"]
    connection.on_message = room.messages.append
    connection.resume_messages()
    assert room.messages == ["0", "1", "2"]
    assert room.closes == [(4000, "")]
    assert room.transport.events == ["pause", "resume", "pause", "resume", "eof"]


def test_pause_and_resume_inside_a_message_do_not_nest() -> None:
    room = ConnectionHarness()
    depth = 0

    def nested(message: str | bytes) -> None:
        nonlocal depth
        depth += 1
        assert depth == 1
        room.connection.pause_messages()
        room.connection.resume_messages()
        room.messages.append(message)
        depth -= 1

    room.connection.on_message = nested
    room.connection.data_received(frame(0x81, b"x") * 5000)
    assert room.messages == ["x"] * 5000


def test_messages_before_a_close_can_still_be_answered() -> None:
    room = ConnectionHarness()
    room.connection.on_message = room.connection.send
    room.connection.data_received(frame(0x81, b"question") + close_frame(1000))
    assert room.sent() == [b"\x81\x08question", b"\x88\x02\x03\xe8"]


def test_a_deflated_message_is_not_inflated_before_its_turn() -> None:
    room = ConnectionHarness(deflate=True)
    packer = zlib.compressobj(9, zlib.DEFLATED, -12)
    big = packer.compress(bytes(LIMITS.message_bytes)) + packer.flush(zlib.Z_SYNC_FLUSH)
    inflated: list[int] = []
    decode = room.connection._frames.extensions[0].decode

    def counting(frame: Any, **options: Any) -> Any:
        result = decode(frame, **options)
        inflated.append(len(result.data))
        return result

    room.connection._frames.extensions[0].decode = counting  # type: ignore[method-assign]
    room.connection.on_message = lambda message: room.connection.pause_messages()
    room.connection.data_received(frame(0xC2, big[:-4]) + frame(0xC2, big[:-4]))
    assert inflated == [LIMITS.message_bytes]


def test_empty_fragments_take_no_memory() -> None:
    room = ConnectionHarness()
    room.connection.data_received(frame(0x01, b"a"))
    for _ in range(100):
        room.connection.data_received(frame(0x00) * 1000)
    assert bytes(room.connection._reader._partial or b"") == b"a"
    room.connection.data_received(frame(0x80, b"b"))
    assert room.messages == ["ab"]


# The end.


def test_after_the_end_nothing_does_anything() -> None:
    room = ConnectionHarness()
    room.connection.connection_lost(None)
    assert room.site.connections == set()
    assert room.connection.send("x") is False
    room.connection.close(1000)
    room.connection.drain()
    room.connection.abort()
    room.connection.pause_messages()
    room.connection.resume_messages()
    room.sweep(1e6)
    room.connection.connection_lost(None)
    assert room.closes == [(1006, "")]
    assert (room.sent(), room.transport.events) == ([], [])


def test_a_client_that_disconnects_without_a_close_frame_is_gone_even_with_unread_data() -> None:
    room = ConnectionHarness()
    room.transport.unread = 1000
    assert not room.connection.eof_received()  # the transport closes once its buffer is empty
    assert room.closes == [(1006, "")]
    assert room.connection.send("x") is False
    room.sweep(1)
    room.sweep(10)
    assert room.transport.events == []
    room.sweep(11)
    assert room.transport.events == ["abort"]


def test_bytes_after_the_end_are_not_kept() -> None:
    room = ConnectionHarness()
    room.connection.data_received(close_frame(1000))
    for _ in range(10):
        room.connection.data_received(frame(0x81, b"x" * 1000))
    assert room.connection._reader._received == b""
    assert room.connection._frames.reader.buffer == b""
    assert room.messages == []


@pytest.mark.parametrize("code", [1005, 1006, 1015, 0, 99_999])
def test_a_close_code_that_may_not_be_sent_is_a_mistake_of_the_owner(code: int) -> None:
    room = ConnectionHarness()
    with pytest.raises(ValueError, match=str(code)):
        room.connection.close(code)
    assert not room.connection.closed


def test_the_clients_code_is_kept_for_an_owner_who_had_paused() -> None:
    room = ConnectionHarness()
    room.connection.on_message = lambda message: room.connection.pause_messages()
    room.connection.data_received(frame(0x81, b"x"))
    room.connection.data_received(close_frame(4001))
    room.connection.resume_messages()
    assert room.closes == [(4001, "")]


def test_what_on_close_raises_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    room = ConnectionHarness()
    room.connection.on_close = lambda code, reason: 1 // 0  # type: ignore[assignment]
    room.connection.connection_lost(None)
    assert len(caplog.records) == 1


FRAMES = [
    frame(0x81, b"text"),
    frame(0x82, b"x" * 200),
    frame(0x82, b"y" * 70_000),
    frame(0x01, "\u00e9".encode()[:1]),
    frame(0x89, b"p"),
    frame(0x00),
    frame(0x80, "\u00e9".encode()[1:]),
    close_frame(1000),
]


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, sum(map(len, FRAMES))), max_size=40))
def test_the_bytes_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    room = ConnectionHarness()
    data = b"".join(FRAMES)
    edges = [0, *sorted(cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        if end > start:
            room.connection.data_received(data[start:end])
    assert room.messages == ["text", b"x" * 200, b"y" * 70_000, "\u00e9"]
    assert room.sent() == [b"\x8a\x01p", b"\x88\x02\x03\xe8"]
    assert room.closes == [(1000, "")]


@settings(max_examples=examples(200))
@given(data=st.binary(max_size=200), deflate=st.booleans())
def test_any_bytes_end_in_messages_or_a_proper_close(data: bytes, deflate: bool) -> None:
    room = ConnectionHarness(deflate=deflate)
    room.connection.data_received(data)
    room.connection.connection_lost(None)
    assert len(room.closes) == 1
    for sent in room.sent():
        assert sent[0] == PONG_HEAD or sent == b"\x88\x00" or may_be_sent(code_of(sent))
