# SPDX-License-Identifier: Apache-2.0
"""RFC 9113 section 6.9: flow control. `Client` checks every DATA frame against both windows in every test."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from adversary import Client
from fake_transport import Http2Harness
from http2_echo_server import Http2EchoServer
from hyperframe.frame import SettingsFrame
from raw_frames import (
    DATA,
    END_HEADERS,
    HEADERS,
    INITIAL_WINDOW,
    MAX_FRAME,
    SETTINGS,
    TOO_LARGE,
    WINDOW_UPDATE,
    literal,
    raw,
    request_fields,
)

from headrace.net.http.heads import OK_PLAIN
from headrace.net.http2.frames import ErrorCode

MAX_WINDOW = 2**31 - 1

# 6.9: WINDOW_UPDATE.


def test_an_increment_of_0_on_the_connection_is_refused(client: Client) -> None:
    """6.9: a connection error of type PROTOCOL_ERROR (the reserved bit does not count)."""
    client.send(raw(WINDOW_UPDATE, 0, 0, b"\x80\0\0\0"))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("end", [True, False])
def test_an_increment_of_0_on_a_stream_is_refused(client: Client, end: bool) -> None:
    """6.9: a stream error of type PROTOCOL_ERROR."""
    client.request(1, "POST", "/hold", end=end)
    client.send(raw(WINDOW_UPDATE, 0, 1, bytes(4)))
    client.expect_error(1, ErrorCode.PROTOCOL_ERROR)


def test_the_connections_window_does_not_overflow(client: Client) -> None:
    """6.9.1: a window over 2^31-1 is a connection error of type FLOW_CONTROL_ERROR; exactly that is allowed."""
    client.grant(0, MAX_WINDOW - 65_535)
    client.ping()
    client.grant(0, 1)
    client.expect_goaway(ErrorCode.FLOW_CONTROL_ERROR)


def test_a_streams_window_does_not_overflow(client: Client) -> None:
    """6.9.1: a window over 2^31-1 is a stream error of type FLOW_CONTROL_ERROR; exactly that is allowed."""
    client.request(1, "POST", "/hold")
    client.grant(1, MAX_WINDOW - 65_535)
    client.ping()
    client.grant(1, 1)
    client.expect_error(1, ErrorCode.FLOW_CONTROL_ERROR)


def test_new_initial_windows_do_not_overflow_a_stream(client: Client) -> None:
    """6.9.2: a change of SETTINGS_INITIAL_WINDOW_SIZE that overflows any window is a FLOW_CONTROL_ERROR."""
    client.request(1, "POST", "/hold")
    client.grant(1, 2**30)
    client.send(SettingsFrame(0, {INITIAL_WINDOW: 2**30 + 65_536}))
    client.expect_goaway(ErrorCode.FLOW_CONTROL_ERROR)


# 6.9.1: what the server sends.


def test_300_kb_through_tiny_windows(echo_server: Http2EchoServer) -> None:
    """6.9.1: DATA exceeds neither window, however small and in whatever order they are opened."""
    chance = random.Random(9113)
    client = echo_server.connect({INITIAL_WINDOW: 0})
    size = 300_000
    for stream_id in (1, 3):
        client.request(stream_id, path=f"/big/{size}")
    client.ping()
    # What the connection has at the start is used up first, so that both windows matter.
    while not all(client.answers[stream_id].ended for stream_id in (1, 3)):
        where = chance.choice((0, 0, 1, 3))
        client.grant(where, chance.choice((1, 2, 700, 5_000, 20_000, 70_000)))
        client.ping()
    assert client.answers[1].body == client.answers[3].body == bytes(size)


@pytest.mark.parametrize("blocked_by", ["stream", "connection"])
def test_one_byte_at_a_time(echo_server: Http2EchoServer, blocked_by: str) -> None:
    """6.9.1: a window of one byte carries one byte, and the end comes with the last one."""
    client = echo_server.connect({INITIAL_WINDOW: 0 if blocked_by == "stream" else 1_000_000})
    stream_id = 1
    if blocked_by == "connection":
        client.request(1, path="/big/65535")
        client.expect_ok(1)
        stream_id = 3
    client.request(stream_id)
    for count in range(6):
        client.ping()
        assert len(client.answers[stream_id].body) == count
        assert client.answers[stream_id].ended == (count == 5)
        if count < 5:
            client.grant(stream_id if blocked_by == "stream" else 0, 1)


def test_the_end_needs_no_window(echo_server: Http2EchoServer) -> None:
    """6.9.1: frames with length zero and END_STREAM MAY be sent without window: a streamed answer ends when it ends."""
    client = echo_server.connect({INITIAL_WINDOW: 8})
    client.request(1, path="/stream/1")
    client.expect_ok(1, b"piece 0\n")


@pytest.mark.parametrize("trailers", [None, b"\x00\x01a\x01b"])
def test_the_end_needs_no_window_after_the_socket_was_full_either(trailers: bytes | None) -> None:
    """6.9.1: the body has used the window up, and its end waited for the socket only."""
    unplugged = Http2Harness()
    unplugged.feed(raw(HEADERS, END_HEADERS | 1, 1, literal(request_fields("POST", "/hold"))))
    exchange: Any = unplugged.handlers.held[0]
    exchange.start(OK_PLAIN)
    exchange.send(bytes(65_535))
    unplugged.connection.pause_writing()
    unplugged.frames()
    exchange.send_data([], end=trailers is None, trailers=trailers)
    assert unplugged.frames() == []
    unplugged.connection.resume_writing()
    (end,) = unplugged.frames()
    assert end.type == (DATA if trailers is None else HEADERS)
    assert "END_STREAM" in end.flags
    assert unplugged.connection.streams == {}


def test_headers_need_no_window(echo_server: Http2EchoServer) -> None:
    """6.9: only DATA is subject to flow control: heads, trailers and empty answers pass closed windows."""
    client = echo_server.connect({INITIAL_WINDOW: 0})
    client.request(1, "HEAD")
    assert client.expect_ok(1).get(b"content-length") == b"5"
    client.request(3, path="/big/0")
    client.expect_ok(3, b"")
    client.request(5, "POST", "/test.Echo/Nothing", more=[("content-type", "application/grpc")])
    assert client.answer(5).ended


def test_a_closed_stream_window_does_not_stop_the_others(echo_server: Http2EchoServer) -> None:
    """6.9: each stream has its own window; one the client does not read holds back none of the others."""
    client = echo_server.connect()
    client.grant(0, 10_000_000)
    client.request(1, path="/big/1000000")
    for stream_id in range(3, 43, 2):
        client.request(stream_id, path="/big/60000")
        client.expect_ok(stream_id, bytes(60_000))
    client.grant(1, 10_000_000)
    client.expect_ok(1, bytes(1_000_000))


def test_streams_share_the_connections_window(echo_server: Http2EchoServer) -> None:
    """6.9 and fairness: as the connection's window opens, every waiting stream gets some of it in turn."""
    client = echo_server.connect({INITIAL_WINDOW: 1_000_000, MAX_FRAME: 16_384})
    for stream_id in (1, 3, 5, 7):
        client.request(stream_id, path="/big/300000")
    client.ping()
    for _ in range(8):
        client.grant(0, 16_384)
        client.ping()
    later = [len(client.answers[stream_id].body) for stream_id in (3, 5, 7)]
    assert all(size >= 16_384 for size in later), later
    client.grant(0, 2_000_000)
    for stream_id in (1, 3, 5, 7):
        client.expect_ok(stream_id, bytes(300_000))


# 6.9.2: initial windows.


def test_a_smaller_initial_window_makes_windows_negative(echo_server: Http2EchoServer) -> None:
    """6.9.2: a window may become negative; nothing is sent until it is positive again."""
    client = echo_server.connect()
    client.grant(0, 1_000_000)
    client.request(1, path="/big/100000")
    client.ping()
    assert len(client.answers[1].body) == 65_535
    client.change_settings({INITIAL_WINDOW: 16_384})  # the stream's window is now 16384 - 65535 = -49151
    assert client.receiving.of(1) == -49_151
    client.grant(1, 49_151)
    client.ping()
    assert len(client.answers[1].body) == 65_535
    client.grant(1, 1)
    client.ping()
    assert len(client.answers[1].body) == 65_536
    client.change_settings({INITIAL_WINDOW: 20_000})
    client.ping()
    assert len(client.answers[1].body) == 65_536 + 20_000 - 16_384
    client.grant(1, 100_000)
    client.expect_ok(1, bytes(100_000))


def test_a_new_initial_window_applies_to_new_streams(client: Client) -> None:
    """6.9.2: new streams begin with the new value; the connection's window is not changed by SETTINGS."""
    client.change_settings({INITIAL_WINDOW: 200_000})
    client.request(1, path="/big/100000")
    client.ping()
    assert len(client.answers[1].body) == 65_535  # the connection's
    client.grant(0, 100_000)
    client.expect_ok(1, bytes(100_000))


def test_a_larger_initial_window_sets_waiting_streams_free_after_the_acknowledgement(client: Client) -> None:
    """6.5.3, 6.9.2: SETTINGS are acknowledged at once; what they allow follows."""
    client.grant(0, 1_000_000)
    client.change_settings({INITIAL_WINDOW: 10})
    client.request(1, path="/big/100000")
    client.ping()
    client.send(SettingsFrame(0, {INITIAL_WINDOW: 500_000}))
    first = client.wait(lambda frame: frame.type in (DATA, SETTINGS))
    assert first.type == SETTINGS
    client.expect_ok(1, bytes(100_000))


def test_windows_of_one_settings_frame_are_summed_up(client: Client) -> None:
    """6.9.2: going down and up again within SETTINGS leaves the windows as the last value says."""
    client.grant(0, 1_000_000)
    client.request(1, path="/big/100000")
    client.ping()
    for size in (0, 65_535, 1, 70_000, 65_535):
        client.change_settings({INITIAL_WINDOW: size})
    client.ping()
    assert len(client.answers[1].body) == 70_000
    client.grant(1, 100_000)
    client.expect_ok(1, bytes(100_000))


# What the client sends, against the server's windows.


def test_more_data_than_the_streams_window_is_refused(limited: Callable[..., Http2EchoServer]) -> None:
    """6.9.1: a stream or connection error of type FLOW_CONTROL_ERROR. A paused handler has nothing granted."""
    echo_server = limited(stream_window_bytes=100_000, connection_window_bytes=10_000_000)
    client = echo_server.connect()
    client.request(1, "POST", "/upload", end=False)
    client.ping()
    echo_server.server.call(echo_server.connection().streams[1].pause)
    for size in (60_000, 40_000):
        client.data(1, bytes(size))
        client.ping()
    client.data(1, b"x")
    client.expect_error(1, ErrorCode.FLOW_CONTROL_ERROR)


@pytest.mark.parametrize("streams", [1, 4])
def test_more_data_than_the_connections_window_is_refused(
    limited: Callable[..., Http2EchoServer], streams: int
) -> None:
    """6.9.1: a connection error of type FLOW_CONTROL_ERROR; padding and all streams count."""
    echo_server = limited(stream_window_bytes=1_000_000, connection_window_bytes=200_000)
    client = echo_server.connect()
    ids = range(1, 2 * streams, 2)
    for stream_id in ids:
        client.request(stream_id, "POST", "/upload", end=False)
    client.ping()
    connection = echo_server.connection()
    for stream_id in ids:
        echo_server.server.call(connection.streams[stream_id].pause)
    for stream_id in ids:
        client.data(stream_id, bytes(100_000 // streams))
        client.data(stream_id, bytes(100_000 // streams))
    client.ping()
    client.data(1, b"x")
    client.expect_goaway(ErrorCode.FLOW_CONTROL_ERROR)


def test_credit_of_a_paused_stream_is_returned_when_it_ends(limited: Callable[..., Http2EchoServer]) -> None:
    """6.9: bytes that no handler will read go back to the connection: a reset upload must not starve the others."""
    echo_server = limited(stream_window_bytes=100_000, connection_window_bytes=200_000)
    client = echo_server.connect()
    for stream_id in range(1, 41, 2):
        client.request(stream_id, "POST", "/upload", end=False)
        client.ping()
        echo_server.server.call(echo_server.connection().streams[stream_id].pause)
        client.data(stream_id, bytes(90_000))
        client.reset(stream_id)
        client.ping()
        assert client.sending.connection >= 90_000
    client.request(41, "POST", "/upload", end=False)
    client.data(41, bytes(90_000), end=True)
    client.expect_ok(41, b"90000")


@pytest.mark.parametrize("why", ["content-length", "closed", "padding", "too large"])
def test_a_stream_error_neither_costs_nor_gains_window(limited: Callable[..., Http2EchoServer], why: str) -> None:
    """6.9: DATA of a stream that is refused counts once, and is given back once. (The client judges gains.)"""
    echo_server = limited(stream_window_bytes=100_000, connection_window_bytes=200_000, body_bytes=40_000)
    client = echo_server.connect()
    for stream_id in range(1, 81, 2):
        if why == "content-length":
            client.request(stream_id, "POST", "/echo", end=False, more=[("content-length", "7")])
            client.data(stream_id, bytes(30_000), end=True)
        elif why == "closed":
            client.request(stream_id, "POST", "/hold")
            client.data(stream_id, bytes(30_000))
        elif why == "padding":
            client.request(stream_id, "POST", "/hold")
            client.send(raw(DATA, 0x8, stream_id, b"\xff" + bytes(30_000)))
        else:
            client.request(stream_id, "POST", "/echo", end=False)
            client.data(stream_id, bytes(30_000))
            client.data(stream_id, bytes(30_000), end=True)
        client.answer(stream_id)
        client.ping()
        assert client.sending.connection >= 60_000
    connection = echo_server.connection()
    held = echo_server.server.call(lambda: connection.receive_window + connection.consumed)
    assert held == 200_000


def test_a_whole_answer_before_the_request_leaves_the_window_whole(limited: Callable[..., Http2EchoServer]) -> None:
    """6.9: the same where the server answers early and the body is still on its way."""
    client = limited(connection_window_bytes=200_000).connect()
    for stream_id in range(1, 41, 2):
        client.request(stream_id, "POST", "/echo", end=False, more=TOO_LARGE)
        client.data(stream_id, bytes(50_000))
        client.ping()
        assert client.sending.connection >= 50_000


def test_windows_smaller_than_the_default_are_not_announced_too_late(limited: Callable[..., Http2EchoServer]) -> None:
    """6.9.3: a client may use 65535 bytes before it has read our SETTINGS; the server MUST be prepared for that."""
    echo_server = limited(stream_window_bytes=1_000, connection_window_bytes=1_000)
    client = echo_server.connect(handshake=False)
    client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", SettingsFrame(0, {}))
    client.send(raw(HEADERS, END_HEADERS, 1, literal(request_fields("POST", "/upload"))))
    for _ in range(4):
        client.send(raw(DATA, 0, 1, bytes(16_000)))
    client.send(raw(DATA, 1, 1, bytes(1_535)))
    client.expect_ok(1, b"65535")
