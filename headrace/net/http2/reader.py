# SPDX-License-Identifier: Apache-2.0
"""Reads HTTP/2 frames: DATA for streams, header blocks for the connection, and control frames.

Owned by `connection.Http2Connection`. The fast path is a small request: one HEADERS and one DATA frame in one read;
padded or split frames, and frames for closed streams, take the slow paths below it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from headrace.net.http2 import frames
from headrace.net.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADER_BYTES,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PRIORITISED,
    SETTINGS_ACK,
    STREAM_MASK,
    ErrorCode,
    Http2ConnectionError,
    Setting,
    StreamError,
    frame,
)
from headrace.net.http2.stream import Stream, StreamConnection, stream_window_update

OWN_FRAME_BYTES = 128 * 1024
"""The largest frame we accept. DATA is handled piece by piece, so this costs no memory and saves frame headers."""

_CONTROL_BYTES = 16_384
_CONTINUATIONS = 64
_SETTING = struct.Struct(">HI")
_STARVED_PER_TOKEN = 200
"""Streams waiting for their window that make a SETTINGS frame count as one more."""
_unpack = HEADER.unpack_from


class FrameReader:
    """Reads the frames of one connection."""

    __slots__ = (
        "_block",
        "_block_ends_stream",
        "_block_frames",
        "_block_stream",
        "_connection",
        "_control",
        "_data_ends",
        "_data_left",
        "_data_stream",
        "_limit",
        "_preface_read",
        "_short",
        "_skip_left",
        "_streams",
    )

    def __init__(self, connection: StreamConnection) -> None:
        self._connection = connection
        self._streams = connection.streams
        self._limit = connection.site.limits.header_bytes
        self._short = min(self._limit, _CONTROL_BYTES)
        self._control = ControlFrames(connection)
        self._preface_read = False
        self._skip_left = 0
        # A DATA frame whose payload is still arriving.
        self._data_left = 0
        self._data_ends = False
        self._data_stream: Stream | None = None
        # A header block whose CONTINUATION frames are still arriving.
        self._block: bytearray | None = None
        self._block_stream = 0
        self._block_ends_stream = False
        self._block_frames = 0

    @property
    def in_head(self) -> bool:
        """Whether the preface, the first SETTINGS or a header block is still incomplete."""
        return self._block is not None or not self._control.settings_seen

    def read(self, buffer: memoryview, end: int) -> int:
        """Handle every complete frame and every piece of a DATA frame; return where the unfinished rest begins."""
        position = 0
        if not self._preface_read:
            position = self._read_preface(buffer, end)
        streams = self._streams
        while self._preface_read:
            if self._data_left:
                position = self._read_data_piece(buffer, position, end)
            if self._skip_left:
                skipped = min(self._skip_left, end - position)
                self._skip_left -= skipped
                position += skipped
            start = position + HEADER_BYTES
            if start > end:
                break
            high, low, kind, flags, stream_id = _unpack(buffer, position)
            length = high << 8 | low
            stop = start + length
            if kind == DATA:
                stream = streams.get(stream_id)
                if (
                    stop <= end
                    and stream is not None
                    and 0 < length <= OWN_FRAME_BYTES
                    and not flags & PADDED
                    and self._block is None
                ):
                    self._receive_data(stream, buffer[start:stop], length, flags & END_STREAM)
                    position = stop
                elif flags & PADDED and length and start == end:
                    break
                else:
                    position = self._start_data(buffer, start, length, flags, stream_id & STREAM_MASK)
            elif (
                kind == HEADERS
                and flags | END_STREAM == END_HEADERS | END_STREAM
                and 0 < length <= self._short
                and stop <= end
                and self._block is None
                and self._control.settings_seen
                and 0 < stream_id <= STREAM_MASK
            ):
                self._connection.headers(stream_id, bytes(buffer[start:stop]), flags & END_STREAM)
                position = stop
            elif length > self._short and self._may_skip(kind, stream_id & STREAM_MASK, length):
                self._skip_left = length
                position = start
            else:
                if stop > end:
                    break
                self._read_other(kind, flags, stream_id & STREAM_MASK, buffer[start:stop])
                position = stop
        return position

    # DATA.

    def _receive_data(self, stream: Stream, data: memoryview, length: int, ends: int) -> None:
        """Handle the payload of a complete DATA frame for an open stream."""
        connection = self._connection
        connection.receive_window -= length
        if connection.receive_window < 0:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        if length > stream.receive_window or stream.remote_closed:
            connection.consume_connection(length)
            connection.fail_stream(stream, _data_error(stream))
            return
        if not ends:
            self._deliver(stream, data, length)
            return
        # The last frame of a request: its bytes count for the connection only.
        stream.received += length
        connection.consumed += length
        if connection.consumed >= connection.update_threshold:
            connection.send_window_update()
        stream.on_data(data)
        try:
            connection.end_of_stream(stream)
        except StreamError as fault:
            connection.fail_stream(stream, fault)

    def _deliver(self, stream: Stream, data: memoryview, length: int) -> None:
        """Give a piece to its stream, whose window allows it; `length` includes padding, as in flow control."""
        stream.receive_window -= length
        stream.received += len(data)
        if len(data):
            stream.on_data(data)
        if stream.paused and not stream.remote_closed:
            stream.unconsumed += length
            return
        connection = self._connection
        connection.consumed += length
        if connection.consumed >= connection.update_threshold:
            connection.send_window_update()
        stream.consumed += length
        if stream.consumed >= connection.stream_update_threshold and not stream.remote_closed:
            connection.write(stream_window_update(stream))

    def _start_data(self, buffer: memoryview, start: int, length: int, flags: int, stream_id: int) -> int:
        """Start a DATA frame on the slow path: padded, in pieces, empty, or for a stream that does not accept it."""
        connection = self._connection
        self._check_order(stream_id)
        if length > OWN_FRAME_BYTES:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "frame larger than SETTINGS_MAX_FRAME_SIZE")
        padding = 0
        if flags & PADDED:
            if not length:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "padded frame without its length")
            padding = buffer[start] + 1
            if padding > length:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
            start += 1
        connection.receive_window -= length
        if connection.receive_window < 0:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        ends = bool(flags & END_STREAM)
        if length == padding and not ends:
            connection.flood_limits.empty_frames.take(connection.site.now)
        stream = self._streams.get(stream_id)
        if stream is not None and (length > stream.receive_window or stream.remote_closed):
            connection.fail_stream(stream, _data_error(stream))
            stream = None
        if stream is None:
            if connection.is_idle(stream_id):
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "DATA on an idle stream")
            if not connection.was_reset_by_us(stream_id):
                raise Http2ConnectionError(ErrorCode.STREAM_CLOSED, "DATA on a closed stream")
            connection.consume_connection(length)
            self._skip_left = length - (1 if padding else 0)
            return start
        self._data_left = length - padding
        self._data_stream = stream
        self._data_ends = ends
        # Padding that follows the data is skipped like an ignored frame; it is consumed here.
        self._skip_left = padding - 1 if padding else 0
        if padding:
            self._deliver(stream, buffer[start:start], padding)
        if not self._data_left:
            self._finish_data()
        return start

    def _read_data_piece(self, buffer: memoryview, position: int, end: int) -> int:
        """Read the next piece of a DATA frame that did not arrive at once."""
        size = min(self._data_left, end - position)
        if size:
            self._data_left -= size
            stream = self._data_stream
            if stream is not None and self._streams.get(stream.id) is stream:
                self._deliver(stream, buffer[position : position + size], size)
            else:
                self._connection.consume_connection(size)
            if not self._data_left:
                self._finish_data()
        return position + size

    def _finish_data(self) -> None:
        stream, self._data_stream = self._data_stream, None
        if self._data_ends and stream is not None and self._streams.get(stream.id) is stream:
            connection = self._connection
            connection.guarded(stream, connection.end_of_stream, stream)

    # Other frames.

    def _read_preface(self, buffer: memoryview, end: int) -> int:
        size = min(end, len(frames.PREFACE))
        if buffer[:size] != frames.PREFACE[:size]:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "the connection preface is wrong")
        if size < len(frames.PREFACE):
            return 0
        self._preface_read = True
        return size

    def _may_skip(self, kind: int, stream_id: int, length: int) -> bool:
        """Return whether a long frame's payload can be ignored; raise if the frame is too long.

        Called before the payload has arrived, so that the result does not depend on the pieces a frame arrives in.
        """
        if length > OWN_FRAME_BYTES:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "frame larger than SETTINGS_MAX_FRAME_SIZE")
        if kind in (HEADERS, CONTINUATION):
            if length > self._limit:
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"header block over {self._limit} bytes")
            return False
        if length <= _CONTROL_BYTES:
            return False
        if kind == frames.SETTINGS:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"SETTINGS over {_CONTROL_BYTES} bytes")
        self._check_order(None)
        self._control.handle_long(kind, stream_id)
        return True

    def _read_other(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        if kind == HEADERS and self._block is None and self._control.settings_seen:
            self._read_headers(flags, stream_id, payload)
        elif kind == CONTINUATION:
            self._read_continuation(flags, stream_id, payload)
        else:
            if kind != frames.SETTINGS or self._control.settings_seen:
                self._check_order(None)
            self._control.handle(kind, flags, stream_id, payload)

    def _check_order(self, stream_id: int | None) -> None:
        """Reject a frame inside a header block, before the first SETTINGS, or on stream 0 if it belongs to a stream."""
        if self._block is not None:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if not self._control.settings_seen:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if stream_id == 0:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a frame of a stream on stream 0")

    def _read_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        start, stop = 0, len(payload)
        if stream_id == 0:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "HEADERS on stream 0")
        if flags & PADDED:
            start = 1
            if not stop:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "padded frame without its length")
            stop -= payload[0]
        if flags & PRIORITISED:
            start += 5
            if len(payload) < start:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            if int.from_bytes(payload[start - 5 : start - 1], "big") & STREAM_MASK == stream_id:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a stream cannot depend on itself")
        if stop < start:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
        block = bytes(payload[start:stop])
        if flags & END_HEADERS:
            self._connection.headers(stream_id, block, bool(flags & END_STREAM))
            return
        self._block = bytearray(block)
        self._block_stream = stream_id
        self._block_ends_stream = bool(flags & END_STREAM)
        self._block_frames = 0
        self._connection.header_block_started()

    def _read_continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        block = self._block
        if block is None or stream_id != self._block_stream:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without its HEADERS")
        block += payload
        self._block_frames += 1
        if len(block) > self._limit or self._block_frames > _CONTINUATIONS:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"header block over {self._limit} bytes")
        if flags & END_HEADERS:
            self._block = None
            self._connection.headers(stream_id, bytes(block), self._block_ends_stream)


def _data_error(stream: Stream) -> StreamError:
    """Return why a stream does not accept a DATA frame."""
    if stream.remote_closed:
        return StreamError(ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
    return StreamError(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the stream's window")


class ControlFrames:
    """Handles the frames of one connection that carry no request.

    SETTINGS, PING, WINDOW_UPDATE, RST_STREAM, PRIORITY, GOAWAY and PUSH_PROMISE.
    """

    __slots__ = ("_connection", "_handlers", "settings_seen")

    def __init__(self, connection: StreamConnection) -> None:
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
        """Handle a frame; one of an unknown type is ignored (RFC 9113 section 4.1)."""
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(flags, stream_id, payload)
        else:
            self._connection.flood_limits.empty_frames.take(self._connection.site.now)

    def handle_long(self, kind: int, stream_id: int) -> None:
        """Handle a frame whose payload is too long to keep: only GOAWAY and unknown types may be so long."""
        if kind == frames.GOAWAY:
            self._check_goaway(stream_id)
        elif kind == frames.PUSH_PROMISE:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a client must not push")
        elif kind in self._handlers:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "control frame too long")
        else:
            self._connection.flood_limits.empty_frames.take(self._connection.site.now)

    def _settings(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & ACK:
            if payload:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledgement with a payload")
            if not self.settings_seen:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            return
        if len(payload) % _SETTING.size:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
        connection = self._connection
        # Each stream that waits for its window may send a frame after this one.
        connection.flood_limits.settings.take(connection.site.now, 1 + len(connection.starved) / _STARVED_PER_TOKEN)
        self.settings_seen = True
        for position in range(0, len(payload), _SETTING.size):
            key, value = _SETTING.unpack_from(payload, position)
            self._apply(key, value)
        connection.acknowledge(SETTINGS_ACK)
        # Only now: a client counts DATA before the acknowledgement against the old window.
        connection.settings_changed()

    def _apply(self, key: int, value: int) -> None:
        connection = self._connection
        if key == Setting.INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "initial window over 2^31-1")
            connection.peer_window_changed(value)
        elif key == Setting.MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "max frame size out of range")
            connection.peer_frame_bytes = value
        elif key == Setting.HEADER_TABLE_SIZE:
            connection.peer_table_changed(value)
        elif key == Setting.ENABLE_PUSH and value > 1:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "enable push is 0 or 1")

    def _ping(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "PING has eight bytes")
        connection = self._connection
        if flags & ACK:
            connection.ping_answered(bytes(payload))
            return
        connection.flood_limits.pings.take(connection.site.now)
        connection.acknowledge(frame(frames.PING, ACK, 0, bytes(payload)))

    def _window_update(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has four bytes")
        increment = int.from_bytes(payload, "big") & STREAM_MASK
        connection = self._connection
        if stream_id == 0:
            if not increment:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "window increment of 0")
            connection.send_window += increment
            if connection.send_window > MAX_WINDOW:
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window overflows")
            connection.pump_blocked()
            return
        stream = connection.streams.get(stream_id)
        if stream is None:
            if connection.is_idle(stream_id):
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
            return
        if not increment:
            connection.fail_stream(stream, StreamError(ErrorCode.PROTOCOL_ERROR, "window increment of 0"))
            return
        connection.peer_opened_window(stream, increment)

    def _reset(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has four bytes")
        connection = self._connection
        if stream_id == 0 or connection.is_idle(stream_id):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        stream = connection.streams.get(stream_id)
        if stream is not None:
            connection.reset_by_peer(stream, int.from_bytes(payload, "big"))

    def _priority(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if stream_id == 0:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        connection = self._connection
        connection.flood_limits.priorities.take(connection.site.now)
        if len(payload) != 5:
            # A stream error by 6.3; on an idle stream there is nothing to reset.
            stream = connection.streams.get(stream_id)
            fault = StreamError(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has five bytes")
            if stream is not None:
                connection.fail_stream(stream, fault)
            elif connection.is_idle(stream_id):
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, fault.text)

    def _goaway(self, flags: int, stream_id: int, payload: memoryview) -> None:
        self._check_goaway(stream_id)
        if len(payload) < 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has at least eight bytes")
        # The client is going away: its open streams are still answered, and it closes when it has the answers.

    def _check_goaway(self, stream_id: int) -> None:
        if stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")

    def _push(self, flags: int, stream_id: int, payload: memoryview) -> None:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a client must not push")
