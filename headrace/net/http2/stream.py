# SPDX-License-Identifier: Apache-2.0
"""One HTTP/2 stream: what it may still send and receive, and what waits for the client's window.

The base of `exchange.Http2Exchange` and of `grpc.call.GrpcCall`, so that a request needs one object. `connection` calls
the `on_*` methods, which those classes fill in; they call the rest.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from headrace.net.http.exchange import Buffer
from headrace.net.http.heads import Field, RequestHead
from headrace.net.http2.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADERS,
    ErrorCode,
    frame_header,
    window_update_frame,
)

if TYPE_CHECKING:
    from headrace.net.http2.connection import Http2Connection

_pack = HEADER.pack
_JOIN_BYTES = 16 * 1024
_UNSENT_HIGH = 256 * 1024
"""A stream with more unsent bytes than this asks its handler to wait."""


class Stream:
    """See the module."""

    # Defaults on the class: most streams never set most of these, and making one is on every request's path.
    received = 0
    held = 0
    """Bytes taken but not yet granted to the client again."""
    paused = False
    withheld = 0
    """Bytes that came while paused: granted when the handler goes on."""
    remote_closed = False
    local_closed = False
    sent = 0
    """Body bytes sent after waiting for window; with `received`, what `sweep` sees moving."""
    pending_bytes = 0
    _pending: deque[Buffer] | None = None
    _end_after = False
    _trailers: bytes | None = None
    _waiting_for_room = False
    _moved = -1
    _moved_at = 0.0

    def __init__(self, connection: Http2Connection, stream_id: int, head: RequestHead) -> None:
        self.connection = connection
        self.id = stream_id
        self.head = head
        self.send_window = connection.peer_stream_window
        self.receive_window = connection.own_stream_window

    # Filled in by subclasses, called by the connection.

    def on_open(self, ends: bool) -> None:
        """The request's head is there; `ends` says that no body follows."""

    def on_data(self, data: memoryview) -> None:
        """A piece of the body. The view is only valid during the call."""
        raise NotImplementedError

    def on_end(self) -> None:
        """The client has sent everything."""
        raise NotImplementedError

    def on_trailers(self, fields: list[Field]) -> None:
        """The client sent fields after the body; `on_end` follows."""

    def on_reset(self, code: int) -> None:
        """The stream is over: the client cancelled it, or the connection is gone."""
        raise NotImplementedError

    def on_expire(self) -> None:
        """The server's grace is over: say so to the client if there is a way."""
        self.reset(ErrorCode.CANCEL)
        self.on_reset(ErrorCode.CANCEL)

    def on_room(self) -> None:
        """More may be sent, after `send_data` returned False."""

    def sweep(self, now: float) -> bool:
        """Called about once a second. True if the client has let the stream stand still for too long."""
        patience = self.patience()
        moved = self.received + self.sent
        if patience is None or moved != self._moved:
            self._moved = moved
            self._moved_at = now
            return False
        return now - self._moved_at > patience

    def patience(self) -> float | None:
        """How long the client may leave the stream as it is; None if it is not the client who has to move."""
        return self.connection.site.limits.write_idle_seconds if self.pending_bytes else None

    def on_stall(self) -> None:
        """The client has not moved for too long."""
        self.reset(ErrorCode.CANCEL)
        self.on_reset(ErrorCode.CANCEL)

    # Receiving.

    def pause(self) -> None:
        """Stop granting the client room to send."""
        self.paused = True

    def resume(self) -> None:
        """Grant what was withheld."""
        if self.paused:
            self.paused = False
            size, self.withheld = self.withheld, 0
            if size:
                self.connection.grant(self, size)

    # Sending.

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """Send a header block, as the response's head."""
        if not self.local_closed:
            self.connection.write_headers(self.id, block, end)
            if end:
                self._closed_locally()

    def send_whole(self, block: bytes, buffers: list[Buffer], size: int, trailers: bytes | None) -> None:
        """Send head, body and (for gRPC) trailers: in one write when the windows allow it."""
        connection = self.connection
        if self.local_closed:
            return
        fields = len(block) if trailers is None else len(block) + len(trailers)
        if size > _JOIN_BYTES or fields > DEFAULT_FRAME_BYTES or not connection.has_room(self, size):
            connection.write_headers(self.id, block, end=False)
            self.send_data(buffers, end=trailers is None, trailers=trailers)
            return
        connection.send_window -= size
        number = self.id
        parts: list[Buffer] = [_pack(len(block) >> 8, len(block) & 0xFF, HEADERS, END_HEADERS, number), block]
        if trailers is None:
            parts += (_pack(size >> 8, size & 0xFF, DATA, END_STREAM, number), *buffers)
        else:
            last = _pack(len(trailers) >> 8, len(trailers) & 0xFF, HEADERS, END_HEADERS | END_STREAM, number)
            parts += (_pack(size >> 8, size & 0xFF, DATA, 0, number), *buffers, last, trailers)
        connection.write(b"".join(parts))
        self.local_closed = True
        connection.closed_locally(self)

    def send_data(self, buffers: list[Buffer], *, end: bool = False, trailers: bytes | None = None) -> bool:
        """Send body bytes, as the client's windows allow. False asks the caller to wait for `on_room`."""
        if self.local_closed or self._end_after:
            return True
        pending = self._pending
        if pending is None:
            pending = self._pending = deque()
        for buffer in buffers:
            if len(buffer):
                pending.append(buffer)
                self.pending_bytes += len(buffer)
        if end or trailers is not None:
            self._end_after = True
            self._trailers = trailers
        connection = self.connection
        self.flush()
        if self.pending_bytes > _UNSENT_HIGH or connection.write_paused:
            self._waiting_for_room = True
            return False
        return True

    def flush(self) -> None:
        """Send what the windows allow, and wait in line for the connection if that, and not the stream, is full."""
        while self.pump():
            pass
        if self.can_send:
            self.connection.blocked[self.id] = self

    @property
    def can_send(self) -> bool:
        """Whether there is something to send that this stream's own window does not hold back."""
        if self.local_closed:
            return False
        return self.send_window > 0 if self.pending_bytes else self._end_after

    def pump(self) -> bool:
        """Send one DATA frame if there is something to send and room for it; whether it may be worth calling again."""
        connection = self.connection
        pending = self._pending
        if self.local_closed or pending is None or connection.write_paused:
            return False
        room = min(self.send_window, connection.send_window, connection.peer_frame_bytes)
        if self.pending_bytes and room <= 0:
            return False
        size = min(room, self.pending_bytes) if self.pending_bytes else 0
        buffers = _take(pending, size)
        self.pending_bytes -= size
        self.sent += size
        self.send_window -= size
        connection.send_window -= size
        last = self._end_after and not self.pending_bytes
        ends = last and self._trailers is None
        if size or ends:
            connection.write_many([frame_header(size, DATA, END_STREAM if ends else 0, self.id), *buffers])
        if last:
            if self._trailers is not None:
                connection.write_headers(self.id, self._trailers, end=True)
            self._closed_locally()
            return False
        if self._waiting_for_room and self.pending_bytes <= _UNSENT_HIGH // 2:
            self._waiting_for_room = False
            connection.soon(self.on_room)
        return self.pending_bytes > 0

    def room_again(self) -> None:
        """The socket takes bytes again."""
        if self._waiting_for_room and self.pending_bytes <= _UNSENT_HIGH // 2:
            self._waiting_for_room = False
            self.on_room()

    def reset(self, code: ErrorCode) -> None:
        """End the stream at once, both ways."""
        self.connection.reset_stream(self, code)

    def forget(self) -> None:
        """Drop what waits to be sent: the stream is over."""
        self.local_closed = self.remote_closed = True
        self._pending = None
        self.pending_bytes = 0

    def _closed_locally(self) -> None:
        self.local_closed = True
        self.connection.closed_locally(self)


def grant_frame(stream: Stream) -> bytes:
    """The WINDOW_UPDATE that gives a stream its held bytes back."""
    size, stream.held = stream.held, 0
    stream.receive_window += size
    return window_update_frame(stream.id, size)


def _take(pending: deque[Buffer], size: int) -> list[Buffer]:
    """Remove `size` bytes from the front, splitting the last buffer without a copy."""
    taken: list[Buffer] = []
    while size:
        buffer = pending.popleft()
        length = len(buffer)
        if length > size:
            view = memoryview(buffer)
            taken.append(view[:size])
            pending.appendleft(view[size:])
            break
        taken.append(buffer)
        size -= length
    return taken
