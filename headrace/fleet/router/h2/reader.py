# SPDX-License-Identifier: Apache-2.0
"""Frames of a backend: what differs from those of a client, which `wire.http2` reads.

Owned by `connection.UpstreamConnection`. A server sends no preface, says how many streams it takes, and may go away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.net.http2.control import ControlFrames
from headrace.net.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADER,
    HEADER_BYTES,
    HEADERS,
    STREAM_MASK,
    ConnectionFault,
    ErrorCode,
    Setting,
)
from headrace.net.http2.reader import FrameReader

if TYPE_CHECKING:
    from headrace.fleet.router.h2.connection import UpstreamConnection

_LAST = END_HEADERS | END_STREAM
_unpack = HEADER.unpack_from


class UpstreamControl(ControlFrames):
    """One per connection."""

    __slots__ = ("_upstream",)

    def __init__(self, connection: UpstreamConnection) -> None:
        super().__init__(connection)
        self._upstream = connection

    def handle_long(self, kind: int, stream_id: int) -> None:
        """See `ControlFrames.handle_long`. A GOAWAY whose words are too many to be kept still means that it goes."""
        super().handle_long(kind, stream_id)
        if kind == GOAWAY:
            self._upstream.going_away(STREAM_MASK)

    def _apply(self, key: int, value: int) -> None:
        if key == Setting.MAX_CONCURRENT_STREAMS:
            self._upstream.room_announced(value)
        elif key == Setting.ENABLE_PUSH and value:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a server cannot ask for pushes")
        else:
            super()._apply(key, value)

    def _goaway(self, flags: int, stream_id: int, payload: memoryview) -> None:
        super()._goaway(flags, stream_id, payload)
        self._upstream.going_away(int.from_bytes(payload[:4], "big") & STREAM_MASK)

    def _push(self, flags: int, stream_id: int, payload: memoryview) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a push, which we have ruled out")


class UpstreamReader(FrameReader):
    """One per connection."""

    __slots__ = ("_upstream",)

    def __init__(self, connection: UpstreamConnection) -> None:
        super().__init__(connection)
        self._upstream = connection
        self._control = UpstreamControl(connection)
        self._prefaced = True

    def read(self, buffer: memoryview, end: int) -> int:
        """See `FrameReader.read`. Before it, as far as they come: small answers, each whole and of the usual form."""
        position = 0
        if not (self._data_left or self._skip_left or self._block is not None) and self._control.settings_seen:
            position = self._read_answers(buffer, end)
            if position == end:
                return end
        if not position:
            return super().read(buffer, end)
        return position + super().read(buffer[position:end], end - position)

    def _read_answers(self, buffer: memoryview, end: int) -> int:
        """Take answers of three frames: HEADERS, DATA, HEADERS. Nothing is judged here: what is odd stays for others."""
        take = self._upstream.whole_answer
        position = 0
        while position + HEADER_BYTES < end:
            head = position + HEADER_BYTES
            high, low, kind, flags, number = _unpack(buffer, position)
            head_end = head + (high << 8 | low)
            data = head_end + HEADER_BYTES
            if kind != HEADERS or flags != END_HEADERS or data > end:
                break
            high, low, kind, flags, same = _unpack(buffer, head_end)
            data_end = data + (high << 8 | low)
            tail = data_end + HEADER_BYTES
            if kind != DATA or flags or same != number or data == data_end or tail > end:
                break
            high, low, kind, flags, same = _unpack(buffer, data_end)
            stop = tail + (high << 8 | low)
            if kind != HEADERS or flags != _LAST or same != number or stop > end:
                break
            if not take(number, bytes(buffer[head:head_end]), buffer[data:data_end], bytes(buffer[tail:stop])):
                break
            position = stop
        return position
