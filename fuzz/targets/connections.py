# SPDX-License-Identifier: Apache-2.0
"""Target `connections`: the bytes of a whole connection, HTTP/1.1 or HTTP/2.

Whatever comes, the connection answers or ends, nothing is left of it, no answer is a fault of ours; and where TCP cuts the
bytes changes no answer.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections import Counter

from hyperframe.exceptions import HyperframeError
from hyperframe.frame import Frame, GoAwayFrame

from fuzz.in_memory_server import Server
from fuzz.target import Check, Target, require
from headrace.net.grpc.status import Status

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_FRAME_HEAD = 9
_SHORT_HEAD = struct.Struct(">BBBH")
"""Kind, flags, stream, length."""

_UNTIMELY = (Status.DEADLINE_EXCEEDED, Status.CANCELLED)

Answered = list[tuple[bytes, int]]


def _played(server: Server, data: bytes, cuts: list[int]) -> tuple[Answered, bytes]:
    connection = server.connect()
    connection.send(data, cuts)
    connection.hang_up()
    server.check()
    return list(server.answered), connection.written


def _paths(recorded: Answered) -> list[bytes]:
    return sorted(path for path, _ in recorded)


def _cuts(data: bytes) -> list[int]:
    """The same places whenever the same bytes are played."""
    rng = random.Random(zlib.crc32(data))
    return sorted(rng.randint(0, len(data)) for _ in range(rng.randint(1, 6)))


def _open_http1() -> Check:
    server = Server()

    def check(data: bytes) -> None:
        whole, written = _played(server, data, [])
        require(not written or written.startswith((b"HTTP/1.", b"\x00")), f"an answer begins with {written[:20]!r}")
        pieces, _ = _played(server, data, _cuts(data))
        require(whole == pieces, f"in one piece: {whole}; cut: {pieces}")

    return check


def _open_http2() -> Check:
    server = Server()

    def check(data: bytes) -> None:
        data = PREFACE + _SETTINGS + data
        whole, written = _played(server, data, [])
        failed = _check_frames(written)
        pieces, written = _played(server, data, _cuts(data))
        failed = _check_frames(written) and failed
        # Whether an answer is there before its deadline, a reset or the end of its connection is a matter of time.
        timely = not any(status in _UNTIMELY for _, status in (*whole, *pieces))
        same = sorted(whole) == sorted(pieces) if timely else _paths(whole) == _paths(pieces)
        if failed:
            fewer, more = sorted((Counter(_paths(whole)), Counter(_paths(pieces))), key=Counter.total)
            same = fewer <= more
        require(same, f"in one piece: {whole}; cut: {pieces}")

    return check


def _open_frames() -> Check:
    """As HTTP/2, of an input that is cut into frames by shorter heads: every input is frames, which bytes seldom are."""
    check = _open_http2()

    def check_frames(data: bytes) -> None:
        frames, at = b"", 0
        while at + _SHORT_HEAD.size <= len(data):
            kind, flags, stream, length = _SHORT_HEAD.unpack_from(data, at)
            at += _SHORT_HEAD.size
            payload = data[at : at + length % 1024]
            at += len(payload)
            frames += struct.pack(">BHBBI", 0, len(payload), kind % 12, flags, stream) + payload
        check(frames)

    return check_frames


def _check_frames(written: bytes) -> bool:
    """What the server says are whole frames, and those of one stream end when they say so.

    Returns whether the connection ended because of an error: requests before it may be without an answer.
    """
    ended: set[int] = set()
    failed = False
    while written:
        require(len(written) >= _FRAME_HEAD, "a torn frame")
        try:
            frame, length = Frame.parse_frame_header(memoryview(written[:_FRAME_HEAD]))
            require(len(written) >= _FRAME_HEAD + length, "a torn frame")
            frame.parse_body(memoryview(written[_FRAME_HEAD : _FRAME_HEAD + length]))
        except HyperframeError as error:
            require(False, f"a frame that is none: {error}")
        if type(frame).__name__ in ("HeadersFrame", "DataFrame"):
            require(frame.stream_id not in ended, f"{frame} after the end of its stream")
            if "END_STREAM" in frame.flags:
                ended.add(frame.stream_id)
        failed = failed or (isinstance(frame, GoAwayFrame) and frame.error_code != 0)
        written = written[_FRAME_HEAD + length :]
    return failed


HTTP1 = Target(
    "a connection of HTTP/1.1: answers or ends, no 500, the same answers wherever it is cut",
    _open_http1,
    (
        b"GET / HTTP/1.1\r\n",
        b"POST /v2/models/any/infer HTTP/1.1\r\nhost: a\r\n",
        b"\r\n",
        b"\r\n\r\n",
        b"host: a\r\n",
        b"content-length: 5\r\n",
        b"transfer-encoding: chunked\r\n",
        b"expect: 100-continue\r\n",
        b"connection: close\r\n",
        b"upgrade: websocket\r\nconnection: upgrade\r\n",
        b"content-encoding: gzip\r\n",
        b"0\r\n\r\n",
        b"5;a=b\r\nhello\r\n",
        b"HEAD",
        b"OPTIONS *",
        b"%2e%2e/",
        b"//",
        b"?a=b",
        b"HTTP/1.0",
    ),
)
HTTP2 = Target(
    "a connection of HTTP/2: answers or ends by GOAWAY, no 500, whole frames, the same answers wherever it is cut",
    _open_http2,
    (
        b"\x00\x00\x00\x00\x01\x00\x00\x00\x01",
        b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x01",
        b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08",
        b"\x00\x00\x08\x06\x00\x00\x00\x00\x00headrace",
        b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00",
        b"\x00\x00\x00\x04\x01\x00\x00\x00\x00",
        b"\x82\x86\x84\x41\x01a",
        b"\x83\x86\x44\x10/v2/health/ready",
    ),
)
HTTP2_FRAMES = Target("the same, of inputs that are frames", _open_frames, HTTP2.words)
