# SPDX-License-Identifier: Apache-2.0
"""Backends that break HTTP/2: their calls end with UNAVAILABLE, the connection is closed, and the router lives."""

from __future__ import annotations

import grpc
import pytest
from grpc_router import SECONDS, channel_to, raised, routing, unary
from hpack import Encoder
from scripted_grpc_backend import Peer, ScriptedGrpcBackend, scripted_grpc_backend

from headrace.net.grpc.call import HEAD_BLOCK
from headrace.net.grpc.status import OK_BLOCK
from headrace.net.http2 import frames
from headrace.net.http2.frames import END_HEADERS, END_STREAM, ErrorCode, frame
from headrace.net.http2.headers import encode_field, encode_status
from support.waiting import eventually

_HEAD = frame(frames.HEADERS, END_HEADERS, 1, HEAD_BLOCK)
_HUGE_FIELD = encode_status(200) + encode_field(b"x", bytes(b"v" * 100_000))


def _bomb() -> bytes:
    """A header block of a few bytes that unpacks to megabytes: one long field in the table, named again and again."""
    first = Encoder().encode([(b":status", b"200"), (b"x-bomb", b"v" * 3500)], huffman=False)
    return first + b"\xbe" * 4000


_CONNECTION_FAULTS = {
    "garbage": b"\xff" * 64,
    "text": b"HTTP/1.1 500 Internal Server Error\r\n\r\n",
    "an oversized frame": frames.frame_header(1_000_000, frames.HEADERS, END_HEADERS, 1),
    "an oversized DATA frame": _HEAD + frames.frame_header(200_000, frames.DATA, 0, 1),
    "a header bomb": frame(frames.HEADERS, END_HEADERS, 1, _bomb()),
    "an endless header block": frame(frames.HEADERS, 0, 1, HEAD_BLOCK)
    + frame(frames.CONTINUATION, 0, 1, b"\0" * 10) * 100,
    "a huge header block": frame(frames.HEADERS, 0, 1, _HUGE_FIELD[:16000])
    + b"".join(frame(frames.CONTINUATION, 0, 1, _HUGE_FIELD[i : i + 16000]) for i in range(16000, 100_000, 16000)),
    "not HPACK": frame(frames.HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff"),
    "an interrupted header block": frame(frames.HEADERS, 0, 1, HEAD_BLOCK) + frame(frames.PING, 0, 0, bytes(8)),
    "a lone CONTINUATION": frame(frames.CONTINUATION, END_HEADERS, 1, b""),
    "a window overflow": frames.window_update_frame(0, 0x7FFFFFFF) * 2,
    "a window increment of 0": frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)),
    "SETTINGS of a wrong length": frame(frames.SETTINGS, 0, 0, b"12345"),
    "SETTINGS with a window over 2^31-1": frame(frames.SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"),
    "SETTINGS that ask for pushes": frame(frames.SETTINGS, 0, 0, b"\0\2\0\0\0\1"),
    "a push": frame(frames.PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2" + HEAD_BLOCK),
    "a stream of the backend's own": frame(frames.HEADERS, END_HEADERS, 2, HEAD_BLOCK),
    "a stream nobody opened": frame(frames.HEADERS, END_HEADERS, 9, HEAD_BLOCK),
    "DATA on stream 0": frame(frames.DATA, 0, 0, b"x"),
    "a reset of nothing": frames.reset_frame(99, ErrorCode.CANCEL),
    "padding longer than its frame": _HEAD + frame(frames.DATA, frames.PADDED, 1, b"\xff12"),
    "a PING of seven bytes": frame(frames.PING, 0, 0, bytes(7)),
    "a short GOAWAY": frame(frames.GOAWAY, 0, 0, b"12"),
}

_STREAM_FAULTS = {
    "no status": frame(frames.HEADERS, END_HEADERS, 1, encode_field(b"content-type", b"application/grpc")),
    "a status of letters": frame(frames.HEADERS, END_HEADERS, 1, encode_field(b":status", b"abc")),
    "a field with a line break": frame(
        frames.HEADERS, END_HEADERS, 1, HEAD_BLOCK + encode_field(b"x", b"a\r\ninjected: b")
    ),
    "a field in capitals": frame(frames.HEADERS, END_HEADERS, 1, HEAD_BLOCK + encode_field(b"X-Loud", b"a")),
    "trailers that do not end": _HEAD + frame(frames.HEADERS, END_HEADERS, 1, OK_BLOCK),
    "a pseudo-header in trailers": _HEAD + frame(frames.HEADERS, END_HEADERS | END_STREAM, 1, HEAD_BLOCK),
    "nothing but DATA": frame(frames.DATA, END_STREAM, 1, b"\0\0\0\0\0"),
    "an end without an answer": frame(frames.HEADERS, END_HEADERS | END_STREAM, 1, encode_field(b":status", b"103")),
    "a stream window overflow": frames.window_update_frame(1, 0x7FFFFFFF),
}


@pytest.mark.parametrize("fault", _CONNECTION_FAULTS)
def test_a_broken_connection_is_closed(fault: str) -> None:
    def script(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.greet()
        stream = peer.request()
        if backend.connections > 1:
            peer.answer(stream)
            peer.rest()
        else:
            peer.send(_CONNECTION_FAULTS[fault])
            backend.said.append(peer.rest())

    with scripted_grpc_backend(script) as backend, routing(backend.port) as router, channel_to(router) as channel:
        error = raised(lambda: unary(channel)(b"x", timeout=SECONDS))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "the backend violated HTTP/2" in error.details()
        assert unary(channel)(b"x", timeout=SECONDS) == b"reply"
        assert backend.connections == 2
        assert router.backend(0).stats.failed == 1
        assert router.backend(0).outstanding == 0
        eventually(lambda: backend.said)
        assert bytes([frames.GOAWAY, 0, 0, 0, 0, 0]) in bytes(backend.said[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", _STREAM_FAULTS)
def test_a_broken_stream_leaves_the_connection(fault: str) -> None:
    def script(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.greet()
        peer.request()
        peer.send(_STREAM_FAULTS[fault])
        peer.wait_for(frames.RST_STREAM)
        peer.answer(peer.request())
        peer.rest()

    with scripted_grpc_backend(script) as backend, routing(backend.port) as router, channel_to(router) as channel:
        error = raised(lambda: unary(channel)(b"x", timeout=SECONDS))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert unary(channel)(b"x", timeout=SECONDS) == b"reply"
        assert backend.connections == 1


def test_data_beyond_the_window_is_refused() -> None:
    """The client does not read, so that the stream's window is not given back; a backend sends on all the same."""

    def script(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.greet()
        stream = peer.request()
        peer.send(frame(frames.HEADERS, END_HEADERS, stream, HEAD_BLOCK))
        size = 64 * 1024 * 1024
        peer.send(frame(frames.DATA, 0, stream, b"\0" + size.to_bytes(4, "big")))
        piece = frame(frames.DATA, 0, stream, bytes(64 * 1024))
        for _ in range(size // (64 * 1024)):
            peer.send(piece)
        backend.said.append(peer.wait_for(frames.RST_STREAM))
        peer.answer(peer.request())
        peer.rest()

    with scripted_grpc_backend(script) as backend, routing(backend.port) as router, channel_to(router) as channel:
        call = channel.unary_stream("/test.Echo/Unary")(b"x", timeout=SECONDS)
        eventually(lambda: backend.said)
        assert backend.said == [(1, ErrorCode.FLOW_CONTROL_ERROR.to_bytes(4, "big"))]
        call.cancel()
        assert unary(channel)(b"x", timeout=SECONDS) == b"reply"
        assert backend.connections == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.CANCEL, grpc.StatusCode.CANCELLED),
        (ErrorCode.INTERNAL_ERROR, grpc.StatusCode.INTERNAL),
        (ErrorCode.ENHANCE_YOUR_CALM, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ErrorCode.INADEQUATE_SECURITY, grpc.StatusCode.PERMISSION_DENIED),
        (ErrorCode.NO_ERROR, grpc.StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_reset_is_reported_as_grpc_specifies(code: ErrorCode, status: grpc.StatusCode, begun: bool) -> None:
    def script(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.greet()
        stream = peer.request()
        if begun:
            peer.send(_HEAD + frame(frames.DATA, 0, stream, b"\0\0\0\0\1x"))
        peer.send(frames.reset_frame(stream, code))
        peer.rest()

    with scripted_grpc_backend(script) as backend, routing(backend.port) as router, channel_to(router) as channel:
        error = raised(lambda: unary(channel)(b"x", timeout=SECONDS))
        assert error.code() is status
        assert code.name in error.details()


def test_what_is_legal_though_odd_passes() -> None:
    """Padding, split header blocks, interim answers, PINGs, unknown frames, empty DATA, late frames for ended streams."""

    def script(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.greet()
        first = peer.request()
        peer.answer(first, b"first")
        stream = peer.request()
        message = b"\0\0\0\0\3odd"
        peer.send(
            frames.window_update_frame(first, 10)
            + frames.reset_frame(first, ErrorCode.NO_ERROR)
            + frame(frames.HEADERS, END_HEADERS, stream, encode_field(b":status", b"103"))
            + frame(frames.HEADERS, frames.PADDED, stream, b"\3" + HEAD_BLOCK[:4] + bytes(3))
            + frame(frames.CONTINUATION, END_HEADERS, stream, HEAD_BLOCK[4:])
            + frame(frames.PING, 0, 0, b"12345678")
            + frame(200, 0, 0, b"what is this")
            + frame(frames.DATA, 0, stream, b"")
            + frame(frames.DATA, frames.PADDED, stream, b"\2" + message + bytes(2))
            + frame(frames.HEADERS, 0, stream, OK_BLOCK[:3])
        )
        backend.said.append(peer.wait_for(frames.PING))
        # The flag of the end is on the first frame of a block.
        peer.rest()

    with scripted_grpc_backend(script) as backend, routing(backend.port) as router, channel_to(router) as channel:
        assert unary(channel)(b"x", timeout=SECONDS) == b"first"
        call = channel.unary_stream("/test.Echo/Unary")(b"x", timeout=SECONDS)
        assert next(call) == b"odd"
        eventually(lambda: backend.said == [(0, b"12345678")])
        call.cancel()


def test_http_errors_reach_the_client_as_they_are() -> None:
    """A gateway in between answers without gRPC: the client makes of it what gRPC says it should."""

    def script(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.greet()
        stream = peer.request()
        block = encode_status(503) + encode_field(b"content-type", b"text/html")
        peer.send(
            frame(frames.HEADERS, END_HEADERS, stream, block)
            + frame(frames.DATA, END_STREAM, stream, b"<h1>sorry</h1>")
        )
        peer.rest()

    with scripted_grpc_backend(script) as backend, routing(backend.port) as router, channel_to(router) as channel:
        assert raised(lambda: unary(channel)(b"x", timeout=SECONDS)).code() is grpc.StatusCode.UNAVAILABLE
        assert router.backend(0).stats.refused == 1


def test_an_answer_before_the_request_has_ended() -> None:
    """The rest of the request is of no use to anyone: the backend is told so."""

    def script(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.greet()
        stream, _ = peer.wait_for(frames.HEADERS)
        peer.answer(stream, b"early")
        backend.said.append(peer.wait_for(frames.RST_STREAM))
        peer.rest()

    def endless() -> object:
        yield b"first"
        eventually(lambda: backend.said)

    with scripted_grpc_backend(script) as backend, routing(backend.port) as router, channel_to(router) as channel:
        assert channel.stream_unary("/test.Echo/Collect")(endless(), timeout=SECONDS) == b"early"
        eventually(lambda: backend.said == [(1, ErrorCode.CANCEL.to_bytes(4, "big"))])
