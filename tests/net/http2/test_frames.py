# SPDX-License-Identifier: Apache-2.0
"""RFC 9113 sections 3.4 (preface), 4.1 and 4.2 (frames and their size) and 5.5 (extensions)."""

from __future__ import annotations

import pytest
from adversary import Client
from http2_echo_server import Http2EchoServer
from raw_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_FRAME,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    literal,
    raw,
    request_fields,
    settings,
)

from headrace.net.http2.frames import ErrorCode

# 3.4: the connection preface.


def test_the_server_sends_its_settings_first_and_unprompted(echo_server: Http2EchoServer) -> None:
    """3.4: the server preface is a SETTINGS frame, the first it sends. (The client judges the order.)"""
    client = echo_server.connect(handshake=False)
    client.send(PREFACE)
    client.wait(lambda frame: frame.type == SETTINGS and "ACK" not in frame.flags)


def test_settings_and_requests_may_follow_the_preface_immediately(echo_server: Http2EchoServer) -> None:
    """3.4: a client may send frames right after its preface, without waiting for the server's."""
    client = echo_server.connect(handshake=False)
    client.send(PREFACE, settings({}), raw(HEADERS, 0x5, 1, literal(request_fields())))
    client.expect_ok(1, b"hello")


@pytest.mark.parametrize("split", range(1, len(PREFACE)))
def test_the_preface_may_be_split_anywhere(echo_server: Http2EchoServer, split: int) -> None:
    """3.4, prior knowledge: the server knows the preface whatever packets it comes in."""
    client = echo_server.connect(handshake=False)
    client.send(PREFACE[:split])
    # Wait until the first part has been read, so that the second is really a second one.
    echo_server.until(lambda: _received_by_server(echo_server) == split)
    client.send(PREFACE[split:], settings({}), raw(HEADERS, 0x5, 1, literal(request_fields())))
    client.expect_ok(1, b"hello")


def _received_by_server(echo_server: Http2EchoServer) -> int:
    (connection,) = echo_server.server.site.connections
    return len(getattr(connection, "_first", b"") or getattr(connection, "_carry", b""))


def test_a_wrong_preface_is_a_connection_error(echo_server: Http2EchoServer) -> None:
    """3.4: an invalid preface is a connection error of type PROTOCOL_ERROR."""
    client = echo_server.connect(handshake=False)
    client.send(PREFACE[:18] + b"XX\r\n\r\n")
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


FIRST_FRAMES = {
    "DATA": raw(DATA, 0, 1, b"x"),
    "HEADERS": raw(HEADERS, 0x5, 1, literal(request_fields())),
    "PRIORITY": raw(PRIORITY, 0, 1, bytes(5)),
    "RST_STREAM": raw(RST_STREAM, 0, 1, bytes(4)),
    "acknowledgement": raw(SETTINGS, ACK, 0),
    "PUSH_PROMISE": raw(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2" + literal(request_fields())),
    "PING": raw(PING, 0, 0, bytes(8)),
    "GOAWAY": raw(GOAWAY, 0, 0, bytes(8)),
    "WINDOW_UPDATE": raw(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
    "CONTINUATION": raw(CONTINUATION, END_HEADERS, 1, literal(request_fields())),
    "unknown": raw(0xBE, 0, 0, b"x"),
    "large unknown": raw(0xBE, 0, 0, bytes(20_000)),
}


@pytest.mark.parametrize("first", FIRST_FRAMES.values(), ids=FIRST_FRAMES.keys())
def test_the_first_frame_must_be_settings(echo_server: Http2EchoServer, first: bytes) -> None:
    """3.4: the client preface ends with a SETTINGS frame; anything else there is a PROTOCOL_ERROR."""
    client = echo_server.connect(handshake=False)
    client.send(PREFACE, first)
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


# 4.1: the frame header.


def test_the_reserved_bit_of_a_stream_id_is_ignored(client: Client) -> None:
    """4.1: the reserved bit MUST be ignored when receiving, on a frame of any type."""
    bit = 1 << 31
    client.send(raw(HEADERS, END_HEADERS, bit | 1, literal(request_fields("POST", "/echo"))))
    client.send(raw(WINDOW_UPDATE, 0, bit | 1, b"\0\0\0\1"), raw(WINDOW_UPDATE, 0, bit, b"\0\0\0\1"))
    client.send(raw(DATA, END_STREAM, bit | 1, b"abc"))
    client.expect_ok(1, b"abc")


@pytest.mark.parametrize("kind", [DATA, HEADERS, PRIORITY, SETTINGS, PING, WINDOW_UPDATE])
def test_undefined_flags_are_ignored(client: Client, kind: int) -> None:
    """4.1: flags that mean nothing for a frame type MUST be ignored."""
    client.send(
        raw(HEADERS, (0xD2 if kind == HEADERS else 0) | END_HEADERS, 1, literal(request_fields("POST", "/echo")))
    )
    frames = {
        PRIORITY: raw(PRIORITY, 0xFF, 1, bytes(5)),
        SETTINGS: raw(SETTINGS, 0xFE, 0, b""),
        PING: raw(PING, 0xFE, 0, b"12345678"),
        WINDOW_UPDATE: raw(WINDOW_UPDATE, 0xFF, 1, b"\0\0\0\1"),
    }
    client.send(frames.get(kind, b""))
    client.send(raw(DATA, (0xF6 if kind == DATA else 0) | END_STREAM, 1, b"abc"))
    client.expect_ok(1, b"abc")


# 4.2: frame size.


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "header only"])
@pytest.mark.parametrize("kind", [DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, 0xBE])
def test_a_frame_over_the_maximum_is_refused(client: Client, kind: int, whole: bool) -> None:
    """4.2: a frame larger than SETTINGS_MAX_FRAME_SIZE is a FRAME_SIZE_ERROR, however it arrives."""
    length = client.theirs[MAX_FRAME] + 1
    client.request(1, "POST", "/upload", end=False)
    stream_id = 0 if kind in (SETTINGS, PING, GOAWAY) else 3 if kind == HEADERS else 1
    client.send(
        raw(kind, END_HEADERS if kind == HEADERS else 0, stream_id, bytes(length if whole else 1), length=length)
    )
    client.expect_goaway(ErrorCode.FRAME_SIZE_ERROR)


def test_a_data_frame_of_the_maximum_is_accepted(client: Client) -> None:
    """4.2: what was announced in SETTINGS_MAX_FRAME_SIZE is accepted."""
    client.request(1, "POST", "/upload", end=False)
    client.data(1, bytes(client.theirs[MAX_FRAME]), end=True)
    client.expect_ok(1, b"%d" % client.theirs[MAX_FRAME])


@pytest.mark.parametrize(
    ("kind", "stream_id", "length"),
    [
        (PRIORITY, 1, 4),
        (PRIORITY, 1, 6),
        (RST_STREAM, 1, 3),
        (RST_STREAM, 1, 5),
        (SETTINGS, 0, 5),
        (SETTINGS, 0, 7),
        (PING, 0, 7),
        (PING, 0, 9),
        (GOAWAY, 0, 7),
        (WINDOW_UPDATE, 0, 3),
        (WINDOW_UPDATE, 0, 5),
        (WINDOW_UPDATE, 1, 3),
        (WINDOW_UPDATE, 1, 5),
    ],
)
def test_a_frame_of_a_wrong_length_is_refused(client: Client, kind: int, stream_id: int, length: int) -> None:
    """4.2: FRAME_SIZE_ERROR for a frame too small or too large for its type; of the connection where state is shared.

    Only PRIORITY (6.3) may be a stream error; a connection error is allowed for it, too (5.4.1).
    """
    client.request(1, "POST", "/hold", end=False)
    client.send(raw(kind, 0, stream_id, b"\0" * (length - 1) + b"\1"))
    if kind == PRIORITY:
        client.expect_error(1, ErrorCode.FRAME_SIZE_ERROR)
    else:
        client.expect_goaway(ErrorCode.FRAME_SIZE_ERROR)


# 5.5: extensions.


@pytest.mark.parametrize("length", [0, 7, 16_384, 100_000])
@pytest.mark.parametrize("stream_id", [0, 1, 2, 9])
def test_unknown_frames_are_ignored(client: Client, stream_id: int, length: int) -> None:
    """5.5: frames of unknown type MUST be ignored and discarded, on any stream, of any size."""
    client.request(1, "POST", "/echo", end=False)
    client.send(raw(0xBE, 0xFF, stream_id, bytes(length)))
    client.data(1, b"abc", end=True)
    client.expect_ok(1, b"abc")
    client.request(3)
    client.expect_ok(3)


@pytest.mark.parametrize("length", [8, 20_000])
def test_an_unknown_frame_inside_a_header_block_is_refused(client: Client, length: int) -> None:
    """5.5: extension frames in the middle of a field block are a connection error of type PROTOCOL_ERROR."""
    client.headers(1, request_fields(), done=False)
    client.send(raw(0xBE, 0, 0, bytes(length)))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


# A frame in pieces means the same as in one piece; sizes that need no memory need no refusal.


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "split"])
def test_a_large_goaway_is_only_a_goaway(echo_server: Http2EchoServer, whole: bool) -> None:
    """6.8: opaque debug data is of any length; nothing of it is kept."""
    client = echo_server.connect()
    frame = raw(GOAWAY, 0, 0, bytes(8 + 60_000))
    client.send(frame if whole else frame[:100])
    if not whole:
        connection = echo_server.connection()
        echo_server.until(lambda: connection._reader._skip_left)
        assert len(connection._carry) == 0
        client.send(frame[100:])
    client.request(1)
    client.expect_ok(1)
