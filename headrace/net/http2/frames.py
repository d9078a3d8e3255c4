# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 frames: layout, types, flags, settings and error codes (RFC 9113 sections 4, 6 and 7), and flood limits."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

HEADER = struct.Struct(">HBBBI")
"""A frame header: length (upper 16 bits, lower 8), type, flags, stream id."""

HEADER_BYTES = 9
STREAM_MASK = 0x7FFFFFFF
MAX_WINDOW = 0x7FFFFFFF
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
DEFAULT_TABLE_BYTES = 4096
LARGEST_FRAME_BYTES = 16_777_215

DATA = 0
HEADERS = 1
PRIORITY = 2
RST_STREAM = 3
SETTINGS = 4
PUSH_PROMISE = 5
PING = 6
GOAWAY = 7
WINDOW_UPDATE = 8
CONTINUATION = 9

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITISED = 0x20


class Setting(IntEnum):
    """Identifiers of SETTINGS parameters."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Http2ConnectionError(Exception):
    """The peer broke the protocol on the connection: answered by GOAWAY and close."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class StreamError(Exception):
    """The peer broke the protocol on one stream: answered by RST_STREAM; the connection stays open."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the nine bytes before a payload."""
    return HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a complete frame."""
    length = len(payload)
    return HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id) + payload


def settings_frame(values: dict[Setting, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", key, value) for key, value in values.items()))


def window_update_frame(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def reset_frame(stream_id: int, code: ErrorCode) -> bytes:
    """Return an RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway_frame(last_stream_id: int, code: ErrorCode, text: bytes = b"") -> bytes:
    """Return a GOAWAY frame."""
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + text)


SETTINGS_ACK = frame(SETTINGS, ACK, 0)


class TokenBucket:
    """A rate limit for one kind of frame; an empty bucket ends the connection."""

    __slots__ = ("_at", "_burst", "_left", "_per_second", "_what")

    def __init__(self, what: str, burst: float, per_second: float) -> None:
        self._what = what
        self._burst = self._left = burst
        self._per_second = per_second
        self._at = 0.0

    def take(self, now: float, tokens: float = 1) -> None:
        """Take tokens; raise `Http2ConnectionError` if there are none left."""
        if now != self._at:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
            self._at = now
        self._left -= tokens
        if self._left < 0:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._what}")

    def put_back(self) -> None:
        """Return one token: a completed request pays for an occasional cancel."""
        if self._left < self._burst:
            self._left += 1


class FloodLimits:
    """Rate limits of one connection for frames that cost the server work without a request.

    They stop rapid reset (CVE-2023-44487), made-you-reset (CVE-2025-8671), and ping, settings, priority and empty-frame
    floods (CVE-2019-9512, -9513, -9515, -9518). Real clients stay far below: grpcio cancelling a thousand calls at once,
    or probing bandwidth with pings, is allowed.
    """

    __slots__ = ("empty_frames", "pings", "priorities", "resets", "settings")

    def __init__(self, concurrent_streams: int) -> None:
        self.resets = TokenBucket("stream resets", max(100.0, 2.0 * concurrent_streams), 200.0)
        self.pings = TokenBucket("pings", 1000.0, 500.0)
        self.settings = TokenBucket("SETTINGS frames", 100.0, 10.0)
        self.priorities = TokenBucket("PRIORITY frames", 10_000.0, 1000.0)
        self.empty_frames = TokenBucket("empty frames", 1000.0, 100.0)
