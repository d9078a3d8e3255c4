# SPDX-License-Identifier: Apache-2.0
"""RFC 9113 sections 6.5 (SETTINGS), 6.6 (PUSH_PROMISE), 6.7 (PING) and 6.8 (GOAWAY)."""

from __future__ import annotations

import struct

import pytest
from adversary import Client
from http2_echo_server import Http2EchoServer
from hyperframe.frame import PingFrame, SettingsFrame
from raw_frames import (
    ACK,
    ENABLE_PUSH,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    MAX_FRAME,
    MAX_LIST,
    MAX_STREAMS,
    PING,
    PREFACE,
    PUSH_PROMISE,
    SETTINGS,
    TABLE_SIZE,
    literal,
    raw,
    request_fields,
)

from headrace.net.http2.frames import ErrorCode


def setting(key: int, value: int) -> bytes:
    return struct.pack(">HI", key, value)


# 6.5: SETTINGS.


@pytest.mark.parametrize("flags", [0, ACK])
def test_settings_on_a_stream_are_refused(client: Client, flags: int) -> None:
    """6.5: SETTINGS apply to a connection; on a stream they are a connection error of type PROTOCOL_ERROR."""
    client.request(1, "POST", "/hold", end=False)
    client.send(raw(SETTINGS, flags, 1))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("length", [1, 6])
def test_an_acknowledgement_with_a_payload_is_refused(client: Client, length: int) -> None:
    """6.5: ACK with a length other than 0 is a connection error of type FRAME_SIZE_ERROR."""
    client.send(raw(SETTINGS, ACK, 0, bytes(length)))
    client.expect_goaway(ErrorCode.FRAME_SIZE_ERROR)


@pytest.mark.parametrize("length", [1, 5, 7, 17])
def test_settings_of_a_broken_length_are_refused(client: Client, length: int) -> None:
    """6.5: a length that is no multiple of 6 is a connection error of type FRAME_SIZE_ERROR."""
    client.send(raw(SETTINGS, 0, 0, bytes(length)))
    client.expect_goaway(ErrorCode.FRAME_SIZE_ERROR)


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        (ENABLE_PUSH, 2, ErrorCode.PROTOCOL_ERROR),
        (ENABLE_PUSH, 2**32 - 1, ErrorCode.PROTOCOL_ERROR),
        (INITIAL_WINDOW, 2**31, ErrorCode.FLOW_CONTROL_ERROR),
        (INITIAL_WINDOW, 2**32 - 1, ErrorCode.FLOW_CONTROL_ERROR),
        (MAX_FRAME, 0, ErrorCode.PROTOCOL_ERROR),
        (MAX_FRAME, 16_383, ErrorCode.PROTOCOL_ERROR),
        (MAX_FRAME, 2**24, ErrorCode.PROTOCOL_ERROR),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["first SETTINGS", "later SETTINGS"])
def test_a_value_out_of_range_is_refused(
    echo_server: Http2EchoServer, key: int, value: int, code: ErrorCode, first: bool
) -> None:
    """6.5.2: the ranges of ENABLE_PUSH, INITIAL_WINDOW_SIZE and MAX_FRAME_SIZE, and the code each asks for."""
    client = echo_server.connect(handshake=not first)
    client.send(*([PREFACE] if first else []), raw(SETTINGS, 0, 0, setting(key, value)))
    client.expect_goaway(code)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (TABLE_SIZE, 0),
        (TABLE_SIZE, 2**32 - 1),
        (ENABLE_PUSH, 0),
        (ENABLE_PUSH, 1),
        (MAX_STREAMS, 0),
        (MAX_STREAMS, 2**32 - 1),
        (INITIAL_WINDOW, 2**31 - 1),
        (MAX_FRAME, 16_384),
        (MAX_FRAME, 2**24 - 1),
        (MAX_LIST, 0),
        (MAX_LIST, 2**32 - 1),
    ],
)
def test_a_value_at_the_edge_is_accepted(echo_server: Http2EchoServer, key: int, value: int) -> None:
    """6.5.2: every value in range holds, in the first SETTINGS and in later ones; each is acknowledged."""
    client = echo_server.connect({key: value})
    client.change_settings({key: value})
    client.request(1)
    client.expect_ok(1, b"hello")


@pytest.mark.parametrize("key", [0, 7, 8, 9, 0x0A0A, 0xFFFF])
@pytest.mark.parametrize("value", [0, 2**32 - 1])
def test_unknown_settings_are_ignored(client: Client, key: int, value: int) -> None:
    """6.5.2: a setting with an unknown identifier MUST be ignored. It is acknowledged with the rest."""
    client.change_settings({key: value, INITIAL_WINDOW: 100_000})
    client.request(1)
    client.expect_ok(1, b"hello")


def test_every_settings_frame_is_acknowledged_in_order(client: Client) -> None:
    """6.5.3: each SETTINGS frame gets an ACK, as soon as possible: before what comes after it."""
    frames = [SettingsFrame(0, {INITIAL_WINDOW: 70_000 + number}) for number in range(5)]
    client.send(*frames)
    for _ in frames:
        client.wait(lambda frame: frame.type == SETTINGS and "ACK" in frame.flags)
    client.send(SettingsFrame(0, {}), PingFrame(0, b"then me!"))
    first = client.wait(lambda frame: frame.type in (SETTINGS, PING))
    assert first.type == SETTINGS


def test_the_last_of_repeated_settings_applies(client: Client) -> None:
    """6.5.3: values are processed in the order they appear, with no other frame between."""
    payload = setting(INITIAL_WINDOW, 0) + setting(INITIAL_WINDOW, 10) + setting(INITIAL_WINDOW, 3)
    client.send(raw(SETTINGS, 0, 0, payload))
    client.request(1)
    client.ping()
    assert client.answers[1].body == b"hel"
    client.grant(1, 2)
    client.expect_ok(1, b"hello")


def test_an_acknowledgement_of_nothing_is_harmless(client: Client) -> None:
    """6.5.3 does not make a spare ACK an error."""
    client.send(raw(SETTINGS, ACK, 0), raw(SETTINGS, ACK, 0))
    client.ping()


def test_the_server_works_before_its_settings_are_acknowledged(echo_server: Http2EchoServer) -> None:
    """6.5.3: a client that never acknowledges is served all the same (SETTINGS_TIMEOUT is a MAY)."""
    client = echo_server.connect(handshake=False)
    client.send(PREFACE, SettingsFrame(0, {}))
    client.request(1)
    client.expect_ok(1, b"hello")


# 6.6: PUSH_PROMISE.


@pytest.mark.parametrize("stream_id", [0, 1, 2, 3])
@pytest.mark.parametrize("length", [0, 4, 20_000])
def test_push_promise_is_refused(client: Client, stream_id: int, length: int) -> None:
    """6.6, 8.4: a server MUST treat PUSH_PROMISE as a connection error of type PROTOCOL_ERROR."""
    client.request(1, "POST", "/hold", end=False)
    client.send(raw(PUSH_PROMISE, END_HEADERS, stream_id, bytes(length)))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


# 6.7: PING.


def test_a_ping_is_answered_with_its_own_payload(client: Client) -> None:
    """6.7: PING without ACK MUST be answered with ACK and an identical payload."""
    client.send(PingFrame(0, b"\0\xff\1\xfe\2\xfd\3\xfc"))
    frame = client.wait(lambda frame: frame.type == PING)
    assert isinstance(frame, PingFrame)
    assert frame.opaque_data == b"\0\xff\1\xfe\2\xfd\3\xfc"
    assert "ACK" in frame.flags


def test_the_answer_to_a_ping_is_not_answered(client: Client) -> None:
    """6.7: an endpoint MUST NOT respond to PING frames with ACK, not even to one it never sent."""
    client.send(raw(PING, ACK, 0, b"whatever"), raw(PING, ACK, 0, b"headrace"))
    client.ping()
    assert sum(words.startswith("Ping") for words in client.seen) == 2  # the handshake's barrier, and this one


@pytest.mark.parametrize("flags", [0, ACK])
def test_a_ping_on_a_stream_is_refused(client: Client, flags: int) -> None:
    """6.7: PING with a stream identifier other than 0 is a connection error of type PROTOCOL_ERROR."""
    client.request(1, "POST", "/hold", end=False)
    client.send(raw(PING, flags, 1, bytes(8)))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("flags", [0, ACK])
@pytest.mark.parametrize("length", [0, 7, 9, 16_385])
def test_a_ping_of_a_wrong_length_is_refused(client: Client, flags: int, length: int) -> None:
    """6.7: PING with a length other than 8 is a connection error of type FRAME_SIZE_ERROR."""
    client.send(raw(PING, flags, 0, bytes(length)))
    client.expect_goaway(ErrorCode.FRAME_SIZE_ERROR)


# 6.8: GOAWAY.


@pytest.mark.parametrize("length", [8, 20_000])
def test_goaway_on_a_stream_is_refused(client: Client, length: int) -> None:
    """6.8: GOAWAY with a stream identifier other than 0 is a connection error of type PROTOCOL_ERROR."""
    client.request(1, "POST", "/hold", end=False)
    client.send(raw(GOAWAY, 0, 1, bytes(length)))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("code", [0, 11, 0xFFFFFFFF])
def test_streams_are_answered_after_the_clients_goaway(echo_server: Http2EchoServer, code: int) -> None:
    """6.8: GOAWAY does not end streams that are open; unknown codes (7) MUST NOT be treated specially."""
    client = echo_server.connect()
    client.request(1, "POST", "/echo", end=False)
    client.send(raw(GOAWAY, 0, 0, bytes(4) + code.to_bytes(4, "big") + b"bye"))
    client.data(1, b"last", end=True)
    client.expect_ok(1, b"last")


def test_a_client_may_send_goaway_more_than_once(client: Client) -> None:
    """6.8: an endpoint MAY send several."""
    client.send(raw(GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4)), raw(GOAWAY, 0, 0, bytes(8)))
    client.send(raw(HEADERS, 0x5, 1, literal(request_fields())))
    client.expect_ok(1)
