# SPDX-License-Identifier: Apache-2.0
"""Turns the bytes of an HTTP/2 connection into data for streams, header blocks and control frames.

Owned by `connection.Http2Connection`. The road of a small request, one HEADERS and one DATA frame in one read, is kept
straight; what is padded, split or for a closed stream takes the side roads below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.net.http2 import frames
from headrace.net.http2.control import ControlFrames
from headrace.net.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADER_BYTES,
    HEADERS,
    PADDED,
    PRIORITISED,
    STREAM_MASK,
    ConnectionFault,
    ErrorCode,
    StreamFault,
)
from headrace.net.http2.stream import Stream, grant_frame

if TYPE_CHECKING:
    from headrace.net.http2.connection import Http2Connection

OWN_FRAME_BYTES = 128 * 1024
"""The largest frame we take. DATA is handled piece by piece, so this costs no memory and saves frame headers."""

_CONTROL_BYTES = 16_384
_CONTINUATIONS = 64
_unpack = HEADER.unpack_from


class FrameReader:
    """One per connection."""

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
        "_prefaced",
        "_short",
        "_skip_left",
        "_streams",
    )

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._streams = connection.streams
        self._limit = connection.site.limits.header_bytes
        self._short = min(self._limit, _CONTROL_BYTES)
        self._control = ControlFrames(connection)
        self._prefaced = False
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
        """Handle every whole frame and every piece of a DATA frame; return where the unfinished rest begins."""
        position = 0
        if not self._prefaced:
            position = self._read_preface(buffer, end)
        streams = self._streams
        while self._prefaced:
            if self._data_left:
                position = self._read_piece(buffer, position, end)
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
                    self._take(stream, buffer[start:stop], length, flags & END_STREAM)
                    position = stop
                elif flags & PADDED and length and start == end:
                    break
                else:
                    position = self._begin_data(buffer, start, length, flags, stream_id & STREAM_MASK)
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

    def _take(self, stream: Stream, data: memoryview, length: int, ends: int) -> None:
        """The payload of a whole frame for an open stream."""
        connection = self._connection
        connection.receive_window -= length
        if connection.receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        if length > stream.receive_window or stream.remote_closed:
            connection.grant_connection(length)
            connection.fail_stream(stream, _fault_of(stream))
            return
        if not ends:
            self._deliver(stream, data, length)
            return
        # The last frame of a request: its bytes count for the connection only.
        stream.received += length
        connection.held += length
        if connection.held >= connection.hold_limit:
            connection.grant_held()
        stream.on_data(data)
        try:
            connection.end_of_stream(stream)
        except StreamFault as fault:
            connection.fail_stream(stream, fault)

    def _deliver(self, stream: Stream, data: memoryview, length: int) -> None:
        """Give a piece to its stream, which has room for it; `length` counts padding too, as flow control does."""
        stream.receive_window -= length
        stream.received += len(data)
        if len(data):
            stream.on_data(data)
        if stream.paused and not stream.remote_closed:
            stream.withheld += length
            return
        connection = self._connection
        connection.held += length
        if connection.held >= connection.hold_limit:
            connection.grant_held()
        stream.held += length
        if stream.held >= connection.stream_hold_limit and not stream.remote_closed:
            connection.write(grant_frame(stream))

    def _begin_data(self, buffer: memoryview, start: int, length: int, flags: int, stream_id: int) -> int:
        """A DATA frame off the straight road: padded, in pieces, empty, or for a stream that does not take it."""
        connection = self._connection
        self._check_order(stream_id)
        if length > OWN_FRAME_BYTES:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "frame larger than SETTINGS_MAX_FRAME_SIZE")
        padding = 0
        if flags & PADDED:
            if not length:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "padded frame without its length")
            padding = buffer[start] + 1
            if padding > length:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
            start += 1
        connection.receive_window -= length
        if connection.receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        ends = bool(flags & END_STREAM)
        if length == padding and not ends:
            connection.guards.empty_frames.spend(connection.site.now)
        stream = self._streams.get(stream_id)
        if stream is not None and (length > stream.receive_window or stream.remote_closed):
            connection.fail_stream(stream, _fault_of(stream))
            stream = None
        if stream is None:
            if connection.is_idle(stream_id):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "DATA on an idle stream")
            if not connection.was_reset_by_us(stream_id):
                raise ConnectionFault(ErrorCode.STREAM_CLOSED, "DATA on a closed stream")
            connection.grant_connection(length)
            self._skip_left = length - (1 if padding else 0)
            return start
        self._data_left = length - padding
        self._data_stream = stream
        self._data_ends = ends
        # Padding that follows the data is skipped like a frame of no interest; its window is given back here.
        self._skip_left = padding - 1 if padding else 0
        if padding:
            self._deliver(stream, buffer[start:start], padding)
        if not self._data_left:
            self._finish_data()
        return start

    def _read_piece(self, buffer: memoryview, position: int, end: int) -> int:
        """The next piece of a DATA frame that did not arrive at once."""
        size = min(self._data_left, end - position)
        if size:
            self._data_left -= size
            stream = self._data_stream
            if stream is not None and self._streams.get(stream.id) is stream:
                self._deliver(stream, buffer[position : position + size], size)
            else:
                self._connection.grant_connection(size)
            if not self._data_left:
                self._finish_data()
        return position + size

    def _finish_data(self) -> None:
        stream, self._data_stream = self._data_stream, None
        if self._data_ends and stream is not None and self._streams.get(stream.id) is stream:
            connection = self._connection
            connection.guarded(stream, connection.end_of_stream, stream)

    # Everything else.

    def _read_preface(self, buffer: memoryview, end: int) -> int:
        size = min(end, len(frames.PREFACE))
        if buffer[:size] != frames.PREFACE[:size]:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the connection preface is wrong")
        if size < len(frames.PREFACE):
            return 0
        self._prefaced = True
        return size

    def _may_skip(self, kind: int, stream_id: int, length: int) -> bool:
        """Whether a long frame means nothing, so that its payload need not be kept. One that is too long is refused.

        Asked before the payload is there, so that it makes no difference in which pieces a frame arrives.
        """
        if length > OWN_FRAME_BYTES:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "frame larger than SETTINGS_MAX_FRAME_SIZE")
        if kind in (HEADERS, CONTINUATION):
            if length > self._limit:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"header block over {self._limit} bytes")
            return False
        if length <= _CONTROL_BYTES:
            return False
        if kind == frames.SETTINGS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"SETTINGS over {_CONTROL_BYTES} bytes")
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
        """Refuse a frame inside a header block, before the first SETTINGS, or on stream 0 where it has no business."""
        if self._block is not None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if not self._control.settings_seen:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame of a stream on stream 0")

    def _read_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        start, stop = 0, len(payload)
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS on stream 0")
        if flags & PADDED:
            start = 1
            if not stop:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "padded frame without its length")
            stop -= payload[0]
        if flags & PRIORITISED:
            start += 5
            if len(payload) < start:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            if int.from_bytes(payload[start - 5 : start - 1], "big") & STREAM_MASK == stream_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream cannot depend on itself")
        if stop < start:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
        block = bytes(payload[start:stop])
        if flags & END_HEADERS:
            self._connection.headers(stream_id, block, bool(flags & END_STREAM))
            return
        self._block = bytearray(block)
        self._block_stream = stream_id
        self._block_ends_stream = bool(flags & END_STREAM)
        self._block_frames = 0
        self._connection.touch()

    def _read_continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        block = self._block
        if block is None or stream_id != self._block_stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without its HEADERS")
        block += payload
        self._block_frames += 1
        if len(block) > self._limit or self._block_frames > _CONTINUATIONS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"header block over {self._limit} bytes")
        if flags & END_HEADERS:
            self._block = None
            self._connection.headers(stream_id, bytes(block), self._block_ends_stream)


def _fault_of(stream: Stream) -> StreamFault:
    """Why a stream does not take a DATA frame."""
    if stream.remote_closed:
        return StreamFault(ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
    return StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the stream's window")
