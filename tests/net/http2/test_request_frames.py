# SPDX-License-Identifier: Apache-2.0
"""RFC 9113 sections 6.1 (DATA), 6.2 (HEADERS), 6.3 (PRIORITY) and 6.4 (RST_STREAM)."""

from __future__ import annotations

import pytest
from adversary import Client
from http2_echo_server import Http2EchoServer
from hyperframe.frame import DataFrame, HeadersFrame
from raw_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PRIORITISED,
    PRIORITY,
    RST_STREAM,
    literal,
    raw,
    request_fields,
)

from headrace.net.http2.frames import ErrorCode

GET = literal(request_fields())

# 6.1: DATA.


@pytest.mark.parametrize("payload", [b"", b"x"])
def test_data_on_stream_0_is_refused(client: Client, payload: bytes) -> None:
    """6.1: DATA with stream identifier 0 is a connection error of type PROTOCOL_ERROR."""
    client.send(raw(DATA, 0, 0, payload))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize(("length", "padding"), [(1, 1), (1, 255), (10, 10), (10, 200)])
def test_padding_as_long_as_the_data_frame_is_refused(client: Client, length: int, padding: int) -> None:
    """6.1: padding of the length of the payload or more is a connection error of type PROTOCOL_ERROR."""
    client.request(1, "POST", "/upload", end=False)
    client.send(raw(DATA, PADDED, 1, bytes([padding]) + bytes(length - 1)))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


def test_a_padded_data_frame_needs_its_pad_length(client: Client) -> None:
    """6.1, 4.2: a PADDED frame too short for its mandatory field is a FRAME_SIZE_ERROR."""
    client.request(1, "POST", "/upload", end=False)
    client.send(raw(DATA, PADDED, 1, b""))
    client.expect_goaway(ErrorCode.FRAME_SIZE_ERROR, ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("padding", [0, 1, 255])
@pytest.mark.parametrize("path", ["/echo", "/upload"])
def test_padding_is_not_data(client: Client, path: str, padding: int) -> None:
    """6.1: padding is stripped; it may fill the frame, and be anything."""
    client.request(1, "POST", path, end=False)
    client.send(raw(DATA, PADDED, 1, bytes([padding]) + b"abc" + b"\xff" * padding))
    client.send(raw(DATA, PADDED | END_STREAM, 1, bytes([padding]) + b"\xff" * padding))
    client.expect_ok(1, b"abc" if path == "/echo" else b"3")


def test_padding_counts_in_flow_control(client: Client) -> None:
    """6.1, 6.9.1: the whole payload, padding and its length included, uses the windows, and all of it is given back.

    17 MiB that are padding almost alone pass through a window of 4 and one of 16: not giving the padding back would
    stop it, and giving back too much is what the client looks out for.
    """
    client.request(1, "POST", "/upload", end=False)
    frame = DataFrame(1, b"x", pad_length=255, flags=["PADDED"])
    rounds = 17 * 1024 * 1024 // 257 // 500
    for _ in range(rounds):
        client.send(*[frame] * 500)
        client.ping()
        assert client.sending.of(1) > 0
        assert client.sending.connection > 0
    client.data(1, b"", end=True)
    client.expect_ok(1, b"%d" % (rounds * 500))


def test_a_body_may_be_split_into_any_frames(client: Client) -> None:
    """6.1: empty frames, padded frames and the empty last frame make one body."""
    client.request(1, "POST", "/echo", end=False)
    client.data(1, b"")
    client.data(1, b"ab")
    client.send(DataFrame(1, b"cd", pad_length=9, flags=["PADDED"]))
    client.data(1, b"ef")
    client.data(1, b"", end=True)
    client.expect_ok(1, b"abcdef")


# 6.2: HEADERS.


def test_headers_on_stream_0_are_refused(client: Client) -> None:
    """6.2: HEADERS with stream identifier 0 is a connection error of type PROTOCOL_ERROR."""
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 0, GET))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("extra", [0, 1, 100])
@pytest.mark.parametrize("flags", [PADDED, PADDED | PRIORITISED])
def test_padding_longer_than_the_headers_frame_is_refused(client: Client, flags: int, extra: int) -> None:
    """6.2: padding over the space left for the block fragment is a connection error of type PROTOCOL_ERROR."""
    fixed = 5 if flags & PRIORITISED else 0
    body = bytes(fixed) + GET[:50]
    client.send(raw(HEADERS, END_HEADERS | flags, 1, bytes([51 + fixed * (not flags & PRIORITISED) + extra]) + body))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize(
    ("flags", "payload"), [(PADDED, b""), (PRIORITISED, bytes(4)), (PADDED | PRIORITISED, bytes(5))]
)
def test_headers_too_short_for_their_fields_are_refused(client: Client, flags: int, payload: bytes) -> None:
    """4.2: a frame too small for its mandatory data is a FRAME_SIZE_ERROR of the connection."""
    client.send(raw(HEADERS, END_HEADERS | flags, 1, payload))
    client.expect_goaway(ErrorCode.FRAME_SIZE_ERROR, ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("padding", [0, 1, 255])
@pytest.mark.parametrize("priority", [False, True])
def test_headers_may_be_padded_and_prioritised(client: Client, padding: int, priority: bool) -> None:
    """6.2: padding and the (deprecated) priority fields are understood and left out of the block."""
    flags = ["END_HEADERS", "END_STREAM", *(["PADDED"] if padding else []), *(["PRIORITY"] if priority else [])]
    client.send(HeadersFrame(1, GET, pad_length=padding, depends_on=3, stream_weight=200, exclusive=True, flags=flags))
    client.expect_ok(1, b"hello")


def test_a_block_fragment_may_be_all_padding(client: Client) -> None:
    """6.2: padding may use all the space there is; the block then follows in CONTINUATION (or is empty: malformed)."""
    client.send(raw(HEADERS, END_HEADERS | END_STREAM | PADDED, 1, b"\x05" + bytes(5)))
    client.expect_reset(1, ErrorCode.PROTOCOL_ERROR)


def test_an_empty_block_is_a_malformed_request(client: Client) -> None:
    """8.3.1: no pseudo-headers at all."""
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, b""))
    client.expect_reset(1, ErrorCode.PROTOCOL_ERROR)


def test_a_stream_that_depends_on_itself(client: Client) -> None:
    """RFC 7540 section 5.3.1 made this a stream error of type PROTOCOL_ERROR; RFC 9113 dropped the rule.

    So an error is right, and so is an answer; a connection error stands for a stream error (5.4.1).
    """
    client.send(raw(HEADERS, END_HEADERS | END_STREAM | PRIORITISED, 1, b"\0\0\0\1\x10" + GET))
    frame = client.wait(lambda frame: frame.type in (HEADERS, RST_STREAM, 7))
    assert frame.type == HEADERS or getattr(frame, "error_code", None) == ErrorCode.PROTOCOL_ERROR


# 6.3: PRIORITY.


def test_priority_on_stream_0_is_refused(client: Client) -> None:
    """6.3: PRIORITY with stream identifier 0 is a connection error of type PROTOCOL_ERROR."""
    client.send(raw(PRIORITY, 0, 0, bytes(5)))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("dependency", [0, 1, 3, 2**31 - 1])
def test_priority_changes_nothing(client: Client, dependency: int) -> None:
    """5.3.2, 6.3: the deprecated signal is parsed and has no other effect."""
    client.request(1, "POST", "/echo", end=False)
    client.send(raw(PRIORITY, 0, 1, dependency.to_bytes(4, "big") + b"\x10"))
    client.data(1, b"x", end=True)
    if dependency == 1:
        # RFC 7540 section 5.3.1 again: an error would be allowed.
        frame = client.wait(lambda frame: frame.type in (HEADERS, RST_STREAM, 7))
        assert frame.type == HEADERS or getattr(frame, "error_code", None) == ErrorCode.PROTOCOL_ERROR
    else:
        client.expect_ok(1, b"x")


@pytest.mark.parametrize("length", [0, 4, 6])
@pytest.mark.parametrize("state", ["idle", "closed"])
def test_priority_of_a_wrong_length_on_no_open_stream(client: Client, state: str, length: int) -> None:
    """6.3: a stream error of type FRAME_SIZE_ERROR. Where there is no stream to reset, ignoring it is what is left."""
    if state == "closed":
        client.request(1)
        client.expect_ok(1)
    client.send(raw(PRIORITY, 0, 1, bytes(length)))
    if state == "idle":
        client.expect_error(1, ErrorCode.FRAME_SIZE_ERROR)
    else:
        client.ping()


# 6.4: RST_STREAM.


def test_reset_of_stream_0_is_refused(client: Client) -> None:
    """6.4: RST_STREAM with stream identifier 0 is a connection error of type PROTOCOL_ERROR."""
    client.send(raw(RST_STREAM, 0, 0, bytes(4)))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("code", [0, 8, 13, 0x1234, 0xFFFFFFFF])
@pytest.mark.parametrize("end", [True, False])
def test_a_reset_ends_the_work(echo_server: Http2EchoServer, code: int, end: bool) -> None:
    """6.4, 7: RST_STREAM ends a stream whatever its code; unknown codes MUST NOT be treated specially."""
    client = echo_server.connect()
    client.request(1, "POST", "/hold" if end else "/echo", end=end)
    client.reset(1, code)
    client.ping()
    assert echo_server.handlers.events == (["disconnect"] if end else [])
    assert echo_server.connection().streams == {}
    for exchange in echo_server.handlers.held:
        # The handler answers late: nobody hears it. (The client would judge HEADERS on a stream that is over.)
        echo_server.server.call(lambda exchange=exchange: exchange.abort())
    client.ping()
    assert not any(words.startswith(("Headers 1", "RstStream 1")) for words in client.seen)
