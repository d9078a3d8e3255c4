# SPDX-License-Identifier: Apache-2.0
"""The frames that carry no request: SETTINGS, PING, WINDOW_UPDATE, RST_STREAM, PRIORITY, GOAWAY, PUSH_PROMISE.

Called by `reader` with whole frames; acts on its connection.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from headrace.net.http2 import frames
from headrace.net.http2.frames import (
    ACK,
    MAX_WINDOW,
    SETTINGS_ACK,
    STREAM_MASK,
    ConnectionFault,
    ErrorCode,
    Setting,
    StreamFault,
    frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.net.http2.connection import Http2Connection

_SETTING = struct.Struct(">HI")


class ControlFrames:
    """One per connection."""

    __slots__ = ("_connection", "_handlers", "settings_seen")

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self.settings_seen = False
        self._handlers: dict[int, Callable[[int, int, memoryview], None]] = {
            frames.SETTINGS: self._settings,
            frames.PING: self._ping,
            frames.WINDOW_UPDATE: self._window_update,
            frames.RST_STREAM: self._reset,
            frames.PRIORITY: self._priority,
            frames.GOAWAY: self._goaway,
            frames.PUSH_PROMISE: self._push,
        }

    def handle(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        """Act on a frame. An unknown type means nothing (RFC 9113 section 4.1)."""
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(flags, stream_id, payload)
        else:
            self._connection.guards.empty_frames.spend(self._connection.site.now)

    def handle_long(self, kind: int, stream_id: int) -> None:
        """Act on a frame too long for its payload to be kept: only GOAWAY and frames of unknown type may be so."""
        if kind == frames.GOAWAY:
            self._check_goaway(stream_id)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client must not push")
        elif kind in self._handlers:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "control frame too long")
        else:
            self._connection.guards.empty_frames.spend(self._connection.site.now)

    def _settings(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledgement with a payload")
            if not self.settings_seen:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            return
        if len(payload) % _SETTING.size:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
        connection = self._connection
        connection.guards.settings.spend(connection.site.now)
        self.settings_seen = True
        for position in range(0, len(payload), _SETTING.size):
            key, value = _SETTING.unpack_from(payload, position)
            self._apply(key, value)
        connection.answer(SETTINGS_ACK)
        # Not before: a client counts DATA that comes ahead of the acknowledgement against the old window.
        connection.settings_changed()

    def _apply(self, key: int, value: int) -> None:
        connection = self._connection
        if key == Setting.INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "initial window over 2^31-1")
            connection.peer_window_changed(value)
        elif key == Setting.MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "max frame size out of range")
            connection.peer_frame_bytes = value
        elif key == Setting.HEADER_TABLE_SIZE:
            connection.peer_table_changed(value)
        elif key == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "enable push is 0 or 1")

    def _ping(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING has eight bytes")
        connection = self._connection
        if flags & ACK:
            connection.ping_answered(bytes(payload))
            return
        connection.guards.pings.spend(connection.site.now)
        connection.answer(frame(frames.PING, ACK, 0, bytes(payload)))

    def _window_update(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has four bytes")
        increment = int.from_bytes(payload, "big") & STREAM_MASK
        connection = self._connection
        if stream_id == 0:
            if not increment:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "window increment of 0")
            connection.send_window += increment
            if connection.send_window > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window overflows")
            connection.pump_blocked()
            return
        stream = connection.streams.get(stream_id)
        if stream is None:
            if connection.is_idle(stream_id):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
            return
        if not increment:
            connection.fail_stream(stream, StreamFault(ErrorCode.PROTOCOL_ERROR, "window increment of 0"))
            return
        stream.send_window += increment
        if stream.send_window > MAX_WINDOW:
            connection.fail_stream(stream, StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window overflows"))
            return
        stream.flush()

    def _reset(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has four bytes")
        connection = self._connection
        if stream_id == 0 or connection.is_idle(stream_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        stream = connection.streams.get(stream_id)
        if stream is not None:
            connection.reset_by_peer(stream, int.from_bytes(payload, "big"))

    def _priority(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        connection = self._connection
        connection.guards.priorities.spend(connection.site.now)
        if len(payload) != 5:
            # A stream error by 6.3; on a stream that is not open there is nothing to reset but the number.
            stream = connection.streams.get(stream_id)
            fault = StreamFault(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has five bytes")
            if stream is not None:
                connection.fail_stream(stream, fault)
            elif connection.is_idle(stream_id):
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, fault.text)

    def _goaway(self, flags: int, stream_id: int, payload: memoryview) -> None:
        self._check_goaway(stream_id)
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has at least eight bytes")
        # The client is leaving; its open streams are still answered, and it closes when it has them.

    def _check_goaway(self, stream_id: int) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")

    def _push(self, flags: int, stream_id: int, payload: memoryview) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client must not push")
