# SPDX-License-Identifier: Apache-2.0
"""Floods: many small frames that cost the server more than the client. Each ends in ENHANCE_YOUR_CALM (RFC 9113, 10.5).

Over real sockets: the flood is sent whole, the answer is GOAWAY, the server goes on serving others, and the connection
is gone after the next sweep even if the attacker keeps its end open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
from adversary import Client
from fake_transport import Http2Harness
from http2_echo_server import Http2EchoServer
from raw_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    TOO_LARGE,
    WINDOW_UPDATE,
    literal,
    raw,
    request_fields,
)

from headrace.core.limits import Limits
from headrace.net.http2.frames import ErrorCode
from headrace.net.http2.stream import Stream

GET = literal(request_fields())
HOLD = literal(request_fields("POST", "/hold"))
ODD = range(1, 2**31, 2)


def expect_calm(echo_server: Http2EchoServer, client: Client) -> None:
    """The flood was refused; the server lives; the connection is gone after a sweep."""
    client.expect_goaway(ErrorCode.ENHANCE_YOUR_CALM)
    assert client.ended
    echo_server.check_alive()
    echo_server.server.sweep(100)
    echo_server.until(lambda: not echo_server.server.site.connections)


@pytest.fixture
def small(limited: Callable[..., Http2EchoServer]) -> Http2EchoServer:
    return limited(concurrent_streams=50)


# Rapid reset, and resets that the client provokes.


@pytest.mark.parametrize("end", [True, False])
def test_rapid_reset(small: Http2EchoServer, end: bool) -> None:
    """CVE-2023-44487: open and cancel at once, never over the concurrency limit."""
    client = small.connect()
    flags = END_HEADERS | (END_STREAM if end else 0)
    for stream_id in ODD[:3000]:
        client.send(raw(HEADERS, flags, stream_id, HOLD) + raw(RST_STREAM, 0, stream_id, b"\0\0\0\x08"))
    expect_calm(small, client)
    assert len(small.handlers.held) < 2500


def _overflow(stream_id: int) -> bytes:
    return raw(HEADERS, END_HEADERS | END_STREAM, stream_id, HOLD) + raw(
        WINDOW_UPDATE, 0, stream_id, b"\x7f\xff\xff\xff"
    )


def _nothing_granted(stream_id: int) -> bytes:
    return raw(HEADERS, END_HEADERS | END_STREAM, stream_id, HOLD) + raw(WINDOW_UPDATE, 0, stream_id, bytes(4))


def _data_after_the_end(stream_id: int) -> bytes:
    return raw(HEADERS, END_HEADERS | END_STREAM, stream_id, HOLD) + raw(DATA, 0, stream_id, b"x")


def _empty_data_after_the_end(stream_id: int) -> bytes:
    return raw(HEADERS, END_HEADERS | END_STREAM, stream_id, HOLD) + raw(DATA, END_STREAM, stream_id)


def _headers_after_the_end(stream_id: int) -> bytes:
    return 2 * raw(HEADERS, END_HEADERS | END_STREAM, stream_id, HOLD)


def _short_priority(stream_id: int) -> bytes:
    return raw(HEADERS, END_HEADERS | END_STREAM, stream_id, HOLD) + raw(PRIORITY, 0, stream_id, b"x")


def _malformed(stream_id: int) -> bytes:
    return raw(HEADERS, END_HEADERS | END_STREAM, stream_id, literal([("X", "y")]))


def _wrong_length(stream_id: int) -> bytes:
    block = literal(request_fields("POST", "/echo", [("content-length", "3")]))
    return raw(HEADERS, END_HEADERS, stream_id, block) + raw(DATA, END_STREAM, stream_id, b"xy")


PROVOCATIONS = [
    _overflow,
    _nothing_granted,
    _data_after_the_end,
    _empty_data_after_the_end,
    _headers_after_the_end,
    _short_priority,
    _malformed,
    _wrong_length,
]


@pytest.mark.parametrize("provoke", PROVOCATIONS)
def test_made_you_reset(small: Http2EchoServer, provoke: Callable[[int], bytes]) -> None:
    """CVE-2025-8671: the client breaks a rule on each stream, so that the server does the resetting."""
    client = small.connect()
    for stream_id in ODD[:3000]:
        client.send(provoke(stream_id))
    expect_calm(small, client)
    assert len(small.handlers.held) < 2500


def test_streams_over_the_limit(small: Http2EchoServer) -> None:
    """Refused streams are resets, too."""
    client = small.connect()
    for stream_id in ODD[:3000]:
        client.send(raw(HEADERS, END_HEADERS | END_STREAM, stream_id, HOLD))
    expect_calm(small, client)
    assert len(small.handlers.held) == 50


def test_an_honest_client_may_cancel(small: Http2EchoServer) -> None:
    """What real clients do stays far inside: each call that is answered pays for one that is cancelled."""
    client = small.connect()
    numbers = iter(ODD)
    for _ in range(40):
        batch = [next(numbers) for _ in range(40)]
        for stream_id in batch[:20]:
            client.request(stream_id, "POST", "/hold")
        for stream_id in batch[20:]:
            client.request(stream_id)
        for stream_id in batch[:20]:
            client.reset(stream_id)
        for stream_id in batch[20:]:
            client.expect_ok(stream_id)
    client.ping()


def test_a_thousand_calls_cancelled_together_are_not_a_flood(limited: Callable[..., Http2EchoServer]) -> None:
    """Limits: grpcio cancelling a thousand calls stays inside, twice over."""
    client = limited().connect()
    for start in (1, 2001):
        ids = range(start, start + 2000, 2)
        client.send(*(raw(HEADERS, END_HEADERS | END_STREAM, stream_id, HOLD) for stream_id in ids))
        client.send(*(raw(RST_STREAM, 0, stream_id, b"\0\0\0\x08") for stream_id in ids))
        client.ping()


def test_early_answers_are_not_a_flood(small: Http2EchoServer) -> None:
    """RST_STREAM(NO_ERROR) after a whole answer is the server's choice: it is not held against the client."""
    client = small.connect()
    client.grant(0, 1 << 20)
    for stream_id in ODD[:1000]:
        client.request(stream_id, "POST", "/echo", end=False, more=TOO_LARGE)
        assert client.answer(stream_id).status == 413
    client.ping()


# Control frames.


FLOODS: dict[str, tuple[bytes, int]] = {
    "ping": (raw(PING, 0, 0, b"12345678"), 10_000),
    "settings": (raw(SETTINGS, 0, 0), 1_000),
    "settings with values": (raw(SETTINGS, 0, 0, b"\0\4\0\0\xff\xff" * 100), 1_000),
    "priority": (raw(PRIORITY, 0, 1, bytes(5)), 30_000),
    "priority of idle streams": (raw(PRIORITY, 0, 77, bytes(5)), 30_000),
    "empty data": (raw(DATA, 0, 1), 5_000),
    "padding only": (raw(DATA, PADDED, 1, b"\xff" + bytes(255)), 5_000),
    "unknown frames": (raw(0xBE, 0, 0), 5_000),
    "large unknown frames": (raw(0xBE, 0, 0, bytes(16_500)), 2_000),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS.keys())
def test_a_flood_of_frames(limited: Callable[..., Http2EchoServer], flood: tuple[bytes, int]) -> None:
    """CVE-2019-9512, -9513, -9515, -9518: frames that are cheap to send and bring nothing."""
    echo_server = limited()
    client = echo_server.connect()
    client.request(1, "POST", "/upload", end=False)
    client.ping()
    frame, count = flood
    for _ in range(count // 100):
        client.send(frame * 100)
    expect_calm(echo_server, client)


def test_empty_data_on_a_reset_stream(limited: Callable[..., Http2EchoServer]) -> None:
    """CVE-2019-9518: the same where nobody listens."""
    echo_server = limited()
    client = echo_server.connect()
    client.request(1, "POST", "/echo", end=False, more=TOO_LARGE)
    client.expect_reset(1, ErrorCode.NO_ERROR)
    for _ in range(50):
        client.send(raw(DATA, 0, 1) * 100)
    expect_calm(echo_server, client)


def test_headers_on_a_reset_stream(limited: Callable[..., Http2EchoServer]) -> None:
    """A block costs its decoding, wanted or not."""
    echo_server = limited()
    client = echo_server.connect()
    client.request(1, "POST", "/echo", end=False, more=TOO_LARGE)
    client.expect_reset(1, ErrorCode.NO_ERROR)
    for _ in range(50):
        client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, GET) * 100)
    expect_calm(echo_server, client)


def test_harmless_repetition_is_not_a_flood(client: Client) -> None:
    """Acknowledgements, late WINDOW_UPDATE and RST_STREAM cost nothing and are not counted."""
    client.request(1)
    client.expect_ok(1)
    for _ in range(30):
        client.send(raw(PING, ACK, 0, bytes(8)) * 100, raw(SETTINGS, ACK, 0) * 100)
        client.send(raw(WINDOW_UPDATE, 0, 1, b"\0\0\0\1") * 100, raw(RST_STREAM, 0, 1, bytes(4)) * 100)
    client.ping()


# Header blocks.


def test_a_continuation_flood_of_empty_frames(limited: Callable[..., Http2EchoServer]) -> None:
    """CVE-2024-27983 and its kin: a block that never ends, of nothing."""
    echo_server = limited()
    client = echo_server.connect()
    client.send(raw(HEADERS, END_STREAM, 1, GET))
    client.send(raw(CONTINUATION, 0, 1) * 10_000)
    expect_calm(echo_server, client)


def test_a_continuation_flood_of_full_frames(limited: Callable[..., Http2EchoServer]) -> None:
    """The same, of much: no more than the limit of a header is ever kept."""
    echo_server = limited()
    client = echo_server.connect()
    client.send(raw(HEADERS, END_STREAM, 1, GET))
    for _ in range(50):
        client.send(raw(CONTINUATION, 0, 1, bytes(10_000)))
    expect_calm(echo_server, client)


@pytest.mark.parametrize("length", [65_537, 100_000])
def test_a_headers_frame_over_the_limit(limited: Callable[..., Http2EchoServer], length: int) -> None:
    """A block over the limit is refused by its length, before it has arrived."""
    echo_server = limited()
    client = echo_server.connect()
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, b"", length=length))
    expect_calm(echo_server, client)


def test_a_header_bomb(limited: Callable[..., Http2EchoServer]) -> None:
    """HPACK amplification: one large entry of the table, named by a byte thousands of times."""
    echo_server = limited()
    client = echo_server.connect()
    bomb = GET + b"\x40\x01x" + b"\x7f\xa1\x1e" + b"y" * 4000
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, bomb))
    client.expect_ok(1)
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 3, GET + b"\xbe" * 14_000))
    expect_calm(echo_server, client)


def test_a_bomb_of_many_small_fields(limited: Callable[..., Http2EchoServer]) -> None:
    """As many fields as bytes: the 32 bytes each counts for stop it."""
    echo_server = limited()
    client = echo_server.connect()
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, GET + b"\x90" * 16_000))
    expect_calm(echo_server, client)


@pytest.mark.parametrize("size", [10, 1_000, 10_000])
def test_what_is_remembered_of_blocks_is_bounded(size: int) -> None:
    """A client that never repeats itself fills the memory of its connection up to a bound, in bytes."""
    unplugged = Http2Harness()
    for number in range(1000):
        block = literal(request_fields(more=[("x-number", f"{number:05}"), ("x-filling", "f" * size)]))
        unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, block))
    assert not unplugged.closing
    remembered = unplugged.connection._headers._remembered
    assert sum(map(len, remembered)) <= 512 * 1024


# Windows.


def _waiting_for_window(count: int) -> Http2Harness:
    """A connection with `count` streams whose answers wait for the client's window."""
    unplugged = Http2Harness(Limits(concurrent_streams=2 * count))
    unplugged.feed(raw(SETTINGS, 0, 0, b"\0\4\0\0\0\0"))
    big = literal(request_fields(path="/big/1000"))
    unplugged.feed(b"".join(raw(HEADERS, END_HEADERS | END_STREAM, 2 * i + 1, big) for i in range(count)))
    assert len(unplugged.connection.streams) == count
    unplugged.frames()
    return unplugged


@pytest.fixture
def pumped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a stream was asked to send."""
    requests: list[int] = []
    pump = Stream.pump

    def counting(stream: Stream) -> bool:
        requests.append(stream.id)
        return pump(stream)

    monkeypatch.setattr(Stream, "pump", counting)
    return requests


@pytest.mark.parametrize("where", [0, 1])
def test_a_window_update_costs_no_walk_over_all_streams(pumped: list[int], where: int) -> None:
    """CVE-2019-9511, -9517: thirteen bytes must not make the server look at every stream that waits."""
    unplugged = _waiting_for_window(500)
    pumped.clear()
    unplugged.feed(raw(WINDOW_UPDATE, 0, where, b"\0\0\0\1") * 1000)
    assert not unplugged.closing
    assert len(pumped) <= 3000


def test_a_dribbled_connection_window_costs_no_walk_either(pumped: list[int]) -> None:
    """The same with one stream that could send, behind many that could not, and a window of one byte at a time."""
    unplugged = _waiting_for_window(500)
    unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, 2001, literal(request_fields(path="/big/70000"))))
    unplugged.feed(raw(WINDOW_UPDATE, 0, 2001, b"\0\1\x11\x70"))
    assert unplugged.connection.send_window == 0
    unplugged.frames()
    pumped.clear()
    unplugged.feed(raw(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 1000)
    assert sum(len(frame.data) for frame in unplugged.frames() if hasattr(frame, "data")) == 1000
    assert len(pumped) <= 3000


def test_settings_that_change_the_window_often_cost_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of values in few frames must not make the server visit every open stream for each."""

    class Untouched(dict[int, Stream]):
        def values(self) -> NoReturn:  # type: ignore[override]
            raise AssertionError("a walk over all streams")

    unplugged = Http2Harness(Limits(concurrent_streams=2000))
    unplugged.feed(b"".join(raw(HEADERS, END_HEADERS, 2 * i + 1, HOLD) for i in range(1000)))
    connection = unplugged.connection
    assert len(connection.streams) == 1000
    monkeypatch.setattr(connection, "streams", Untouched(connection.streams))
    for _ in range(20):
        unplugged.feed(raw(SETTINGS, 0, 0, b"\0\4\0\0\xff\xff\0\4\0\0\xff\xfe" * 1300))
    assert not unplugged.closing
    assert connection.streams[1].send_window == 0xFFFE


def test_settings_that_open_every_window_a_little_are_counted_by_their_work(pumped: list[int]) -> None:
    unplugged = _waiting_for_window(1000)
    pumped.clear()
    for size in range(1, 60):
        unplugged.feed(raw(SETTINGS, 0, 0, b"\0\4\0\0\0%c" % size))
    assert unplugged.closing
    assert (
        5_000 < len(pumped) < 60_000
    )  # several frames are allowed: clients raise the window as they measure bandwidth


def test_a_client_that_grants_no_window_is_cut(limited: Callable[..., Http2EchoServer]) -> None:
    """Answers nobody fetches are not kept for ever: over a socket, with a client that reads all and grants nothing."""
    echo_server = limited(write_idle_seconds=60.0, idle_seconds=1_000_000.0)
    client = echo_server.connect({INITIAL_WINDOW: 0})
    for stream_id in ODD[:20]:
        client.request(stream_id, path="/big/1000000")
    client.ping()
    connection = echo_server.connection()
    assert sum(stream.pending_bytes for stream in connection.streams.values()) == 20_000_000
    echo_server.server.sweep(0)
    echo_server.server.sweep(61)
    client.expect_end()
    assert connection.streams == {}
    client.socket.close()
    echo_server.until(lambda: not echo_server.server.site.connections)


def test_a_client_that_does_not_read_is_cut(limited: Callable[..., Http2EchoServer]) -> None:
    """The same with a client that grants everything and reads nothing: the socket is what stands still."""
    echo_server = limited(write_idle_seconds=60.0)
    client = echo_server.connect({INITIAL_WINDOW: 2**31 - 1})
    client.grant(0, 2**30)
    for stream_id in ODD[:20]:
        client.request(stream_id, path="/big/5000000")
    echo_server.until(lambda: any(getattr(c, "write_paused", False) for c in echo_server.server.site.connections))
    echo_server.server.sweep(0)
    echo_server.server.sweep(61)
    echo_server.until(lambda: not echo_server.server.site.connections)
