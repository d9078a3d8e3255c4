# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 streams and their connection's flow control: what each may still send and receive, and what waits for a window.

`Stream` is the base of `exchange.Http2Exchange` and `grpc.call.GrpcCall`, so that a request needs one object.
`StreamConnection` is the part of a connection that streams use, and the base of `connection.Http2Connection`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from headrace.net.http.heads import Buffer, Field, RequestHead
from headrace.net.http2 import frames
from headrace.net.http2.frames import (
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADERS,
    ErrorCode,
    FloodLimits,
    Http2ConnectionError,
    StreamError,
    frame,
    frame_header,
    window_update_frame,
)
from headrace.net.site import Site, UnfinishedBodies, WriteStall, peer_name

log = logging.getLogger("headrace.wire")

_pack = HEADER.pack
JOIN_BYTES = 16 * 1024
_UNSENT_HIGH = 256 * 1024
"""A stream with more unsent bytes than this asks its handler to wait."""
_UNREAD_ACKS = 1000
_NO_TABLE = b"\x20"
"""HPACK: the dynamic table has size 0 from here on."""


class Stream:
    """One HTTP/2 stream. The connection calls the `on_*` methods, which subclasses implement."""

    # Defaults on the class: most streams never set most of these, and every request makes a stream.
    received = 0
    consumed = 0
    """Bytes handled for which no WINDOW_UPDATE has been sent yet."""
    paused = False
    unconsumed = 0
    """Bytes received while paused; consumed when the handler resumes."""
    remote_closed = False
    local_closed = False
    send_credit = 0
    """What the client has added to the stream's window by WINDOW_UPDATE, less what was sent; see `send_window`."""
    sent = 0
    """Body bytes sent after waiting for a window. `sweep` looks for progress in `received` and `sent`."""
    held_bytes = 0
    """Bytes of an unfinished body or message, as last counted by `hold`."""
    pending_bytes = 0
    _pending: deque[Buffer] | None = None
    _end_after = False
    _trailers: bytes | None = None
    _waiting_to_send = False
    _progress = -1
    _progress_at = 0.0

    def __init__(self, connection: StreamConnection, stream_id: int, head: RequestHead) -> None:
        self.connection = connection
        self.id = stream_id
        self.head = head
        self.receive_window = connection.own_stream_window

    # Implemented by subclasses, called by the connection.

    def on_open(self, ends: bool) -> None:
        """Handle a new request's head; `ends` says that no body follows."""

    def on_data(self, data: memoryview) -> None:
        """Handle a piece of the body. The view is only valid during the call."""
        raise NotImplementedError

    def on_end(self) -> None:
        """Handle the end of the request."""
        raise NotImplementedError

    def on_trailers(self, fields: list[Field]) -> None:
        """Handle the fields after the body; `on_end` follows."""

    def on_reset(self, code: int) -> None:
        """Handle the end of the stream: the client cancelled it, or the connection is lost."""
        raise NotImplementedError

    def on_expire(self) -> None:
        """End the stream at the drain deadline, with an error for the client if the protocol has one."""
        self.reset(ErrorCode.CANCEL)
        self.on_reset(ErrorCode.CANCEL)

    def on_send_ready(self) -> None:
        """Send more, after `send_data` returned False."""

    def sweep(self, now: float) -> bool:
        """Return whether the client has stalled the stream for too long. Called about once a second."""
        timeout = self.stall_timeout()
        progress = self.received + self.sent
        if timeout is None or progress != self._progress:
            self._progress = progress
            self._progress_at = now
            return False
        return now - self._progress_at > timeout

    def stall_timeout(self) -> float | None:
        """Return how long the client may make no progress; None if it is not the client's turn."""
        return self.connection.site.limits.write_idle_seconds if self.pending_bytes else None

    def on_stall(self) -> None:
        """End a stream whose client made no progress for too long."""
        self.reset(ErrorCode.CANCEL)
        self.on_reset(ErrorCode.CANCEL)

    @property
    def send_window(self) -> int:
        """Bytes that the client lets this stream send.

        The client's SETTINGS_INITIAL_WINDOW_SIZE is added here, so that a change of it costs nothing for each stream.
        """
        return self.connection.peer_stream_window + self.send_credit

    # Receiving.

    def pause(self) -> None:
        """Stop opening the client's window."""
        self.paused = True

    def resume(self) -> None:
        """Open the window for what was received while paused."""
        if self.paused:
            self.paused = False
            size, self.unconsumed = self.unconsumed, 0
            if size:
                self.connection.consume(self, size)

    # Sending.

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """Send a header block as the response's head."""
        if not self.local_closed:
            self.connection.write_headers(self.id, block, end)
            if end:
                self._close_locally()

    def send_whole(self, block: bytes, buffers: list[Buffer], size: int, trailers: bytes | None) -> None:
        """Send head, body and (for gRPC) trailers, in one write if the windows allow it."""
        connection = self.connection
        if self.local_closed:
            return
        fields = len(block) if trailers is None else len(block) + len(trailers)
        if size > JOIN_BYTES or fields > DEFAULT_FRAME_BYTES or not connection.has_room(self, size):
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
        """Send body bytes as the client's windows allow. False asks the caller to wait for `on_send_ready`."""
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
            self._waiting_to_send = True
            return False
        return True

    def flush(self) -> None:
        """Send what the windows allow; queue the stream if something is left."""
        while self.pump():
            pass
        self.connection.queue(self)

    @property
    def can_send(self) -> bool:
        """Whether there is something to send that this stream's own window does not block."""
        if self.local_closed:
            return False
        return self.send_window > 0 if self.pending_bytes else self._end_after

    def pump(self) -> bool:
        """Send one DATA frame if there is data and window for it; return whether to call again."""
        connection = self.connection
        pending = self._pending
        if self.local_closed or pending is None or connection.write_paused:
            return False
        allowed = min(self.send_window, connection.send_window, connection.peer_frame_bytes)
        if self.pending_bytes and allowed <= 0:
            return False
        size = min(allowed, self.pending_bytes) if self.pending_bytes else 0
        buffers = _pop_bytes(pending, size)
        self.pending_bytes -= size
        self.sent += size
        self.send_credit -= size
        connection.send_window -= size
        last = self._end_after and not self.pending_bytes
        ends = last and self._trailers is None
        if size or ends:
            connection.write_many([frame_header(size, DATA, END_STREAM if ends else 0, self.id), *buffers])
        if last:
            if self._trailers is not None:
                connection.write_headers(self.id, self._trailers, end=True)
            self._close_locally()
            return False
        if self._waiting_to_send and self.pending_bytes <= _UNSENT_HIGH // 2:
            self._waiting_to_send = False
            connection.call_soon(self.on_send_ready)
        return self.pending_bytes > 0

    def send_ready(self) -> None:
        """Wake the handler if it waits: the socket takes bytes again."""
        if self._waiting_to_send and self.pending_bytes <= _UNSENT_HIGH // 2:
            self._waiting_to_send = False
            self.on_send_ready()

    def reset(self, code: ErrorCode) -> None:
        """End the stream at once in both directions."""
        self.connection.reset_stream(self, code)

    def release(self) -> None:
        """Mark the stream closed and drop its unsent data."""
        self.local_closed = self.remote_closed = True
        self._pending = None
        self.pending_bytes = 0
        self.connection.starved.pop(self.id, None)
        if self.held_bytes:
            self.hold(0)

    def hold(self, size: int) -> None:
        """Count `size` bytes of a body or message of which the rest has not arrived."""
        self.held_bytes = size
        self.connection.hold(self, size)

    def drop_body(self) -> None:
        """End the request: too many bodies are unfinished."""
        self.reset(ErrorCode.ENHANCE_YOUR_CALM)
        self.on_reset(ErrorCode.ENHANCE_YOUR_CALM)

    def _close_locally(self) -> None:
        self.local_closed = True
        self.connection.closed_locally(self)


class StreamConnection:
    """The part of an HTTP/2 connection that streams and the frame reader use.

    It owns the socket's write side, both directions of flow control, and the queue of blocked streams.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        limits = site.limits
        self.streams: dict[int, Stream] = {}
        self.highest_stream = 0
        self.flood_limits = FloodLimits(limits.concurrent_streams)
        # Sending.
        self.blocked: dict[int, Stream] = {}
        """Streams that only the connection's window or the socket blocks, longest waiting first."""
        self.starved: dict[int, Stream] = {}
        """Streams that their own window blocks."""
        self.peer_stream_window = frames.DEFAULT_WINDOW
        self._window_limit = frames.MAX_WINDOW
        """The largest initial window that overflows no stream's window, or less."""
        self.peer_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self.send_window = frames.DEFAULT_WINDOW
        self.write_paused = False
        self._unobstructed = True
        """Whether a small response may be sent in one write: the socket takes bytes, and no table update is due."""
        self._transport: asyncio.Transport | None = None
        self._out: asyncio.Transport | None = None
        """The transport as long as it may be written to."""
        self._peer: str | None = None
        self._table_bytes = frames.DEFAULT_TABLE_BYTES
        self._table_update = b""
        self._unread_acks = 0
        self._write_stall = WriteStall()
        # Receiving.
        largest = max(limits.body_bytes, limits.message_bytes)
        self._unfinished = UnfinishedBodies(max(limits.connection_unfinished_bytes, 2 * largest))
        self.own_stream_window = _window(limits.stream_window_bytes)
        self.receive_window = _window(limits.connection_window_bytes)
        self.consumed = 0
        """Bytes handled for which no WINDOW_UPDATE has been sent yet."""
        self.update_threshold = self.receive_window // 2
        """A WINDOW_UPDATE is sent after so many consumed bytes."""
        self.stream_update_threshold = self.own_stream_window // 2

    # Implemented by the connection. Called by streams.

    def closed_locally(self, stream: Stream) -> None:
        """Close a stream on which everything has been sent."""
        raise NotImplementedError

    def reset_stream(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once."""
        raise NotImplementedError

    def fail_stream(self, stream: Stream, fault: StreamError) -> None:
        """Reset a stream on which the client broke the protocol."""
        raise NotImplementedError

    # Implemented by the connection. Called by the frame reader.

    def headers(self, stream_id: int, block: bytes, ends_stream: int) -> None:
        """Handle a complete header block: a new request, or the trailers of an open one."""
        raise NotImplementedError

    def header_block_started(self) -> None:
        """Start the timeout of a header block that arrives in several frames."""
        raise NotImplementedError

    def was_reset_by_us(self, stream_id: int) -> bool:
        """Return whether the client may still send on a closed stream because it has not read our reset yet."""
        raise NotImplementedError

    def reset_by_peer(self, stream: Stream, code: int) -> None:
        """Handle RST_STREAM."""
        raise NotImplementedError

    def ping_answered(self, payload: bytes) -> None:
        """Handle the acknowledgement of a PING."""
        raise NotImplementedError

    # Called by the event loop.

    def pause_writing(self) -> None:
        """Stop sending DATA: the socket's buffer is full."""
        self.write_paused = True
        self._unobstructed = False
        self._write_stall.start(self.site.now)

    def resume_writing(self) -> None:
        """Continue to send: the client has read what was buffered."""
        self.write_paused = False
        self._unobstructed = not self._table_update
        self._unread_acks = 0
        for stream in list(self.blocked.values()):
            if not stream.pending_bytes:
                # Only its end is missing, which needs no window.
                stream.pump()
        self.pump_blocked()
        for stream in list(self.streams.values()):
            stream.send_ready()

    # Called by the server.

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def sweep_unread(self, now: float) -> None:
        """Abort if the client has read nothing for too long."""
        transport = self._transport
        if transport is not None and self._write_stall.is_stalled(transport, now, self.site.limits.write_idle_seconds):
            log.info("client stopped reading", extra={"peer": self.peer})
            self.abort()

    # Sending.

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        if self._peer is None:
            self._peer = peer_name(self._transport)
        return self._peer

    def write(self, data: Buffer) -> None:
        """Write bytes to the socket."""
        if self._out is not None:
            self._out.write(data)

    def write_many(self, buffers: list[Buffer]) -> None:
        """Write several buffers to the socket without joining them."""
        if self._out is not None:
            self._out.writelines(buffers)

    def write_headers(self, stream_id: int, block: bytes, end: bool) -> None:
        """Send a header block, in as many frames as the peer's frame size requires."""
        if self._table_update:
            block, self._table_update = self._table_update + block, b""
            self._unobstructed = not self.write_paused
        frame_bytes = self.peer_frame_bytes
        flags = END_STREAM if end else 0
        if len(block) <= frame_bytes:
            self.write(frame(HEADERS, flags | END_HEADERS, stream_id, block))
            return
        pieces = [block[i : i + frame_bytes] for i in range(0, len(block), frame_bytes)]
        kind = HEADERS
        for number, piece in enumerate(pieces, 1):
            last = END_HEADERS if number == len(pieces) else 0
            self.write(frame_header(len(piece), kind, flags | last, stream_id) + piece)
            kind, flags = CONTINUATION, 0

    def has_room(self, stream: Stream, size: int) -> bool:
        """Return whether a body of `size` fits in one frame and in both windows now."""
        return (
            size <= self.peer_stream_window + stream.send_credit
            and size <= self.send_window
            and size <= self.peer_frame_bytes
            and self._unobstructed
        )

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back from the event loop, not from inside this call."""
        asyncio.get_running_loop().call_soon(callback)

    def pump_blocked(self) -> None:
        """Send what the connection's window allows now, one frame per stream in turn.

        Each turn sends something or removes a stream from the queue, so that no WINDOW_UPDATE, however small, costs more
        than it allows to send.
        """
        blocked = self.blocked
        while blocked and self.send_window > 0 and not self.write_paused:
            number = next(iter(blocked))
            stream = blocked.pop(number)
            stream.pump()
            self.queue(stream)

    def queue(self, stream: Stream) -> None:
        """Queue a stream that still has something to send, by what blocks it."""
        if stream.can_send:
            self.blocked[stream.id] = stream
        elif stream.pending_bytes:
            self.starved[stream.id] = stream
            return
        if self.starved:
            self.starved.pop(stream.id, None)

    def acknowledge(self, data: bytes) -> None:
        """Send the acknowledgement of a SETTINGS or PING frame."""
        self.write(data)
        if self.write_paused:
            self.count_unread()

    def count_unread(self) -> None:
        """Count a frame we must answer while the client reads nothing: our answers must not fill the memory."""
        self._unread_acks += 1
        if self._unread_acks > _UNREAD_ACKS + 2 * self.site.limits.concurrent_streams:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")

    def peer_window_changed(self, size: int) -> None:
        """Apply the client's SETTINGS_INITIAL_WINDOW_SIZE, which every stream's window includes (6.9.2)."""
        if size > self._window_limit:
            # The limit never rises while streams close: compute it again from the open ones.
            credit = max((stream.send_credit for stream in self.streams.values()), default=0)
            self._window_limit = frames.MAX_WINDOW - max(credit, 0)
            if size > self._window_limit:
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "initial window overflows a stream's")
        self.peer_stream_window = size

    def peer_opened_window(self, stream: Stream, increment: int) -> None:
        """Apply a WINDOW_UPDATE of a stream."""
        credit = stream.send_credit = stream.send_credit + increment
        if credit > 0:
            if self.peer_stream_window + credit > frames.MAX_WINDOW:
                self.fail_stream(stream, StreamError(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window overflows"))
                return
            self._window_limit = min(self._window_limit, frames.MAX_WINDOW - credit)
        stream.flush()

    def peer_table_changed(self, size: int) -> None:
        """Apply the client's SETTINGS_HEADER_TABLE_SIZE. We use no table, but must announce a reduction (4.3.1)."""
        if size < self._table_bytes:
            self._table_bytes = 0
            self._table_update = _NO_TABLE
            self._unobstructed = False

    def settings_changed(self) -> None:
        """Send what larger windows allow, after the client's SETTINGS were acknowledged."""
        for stream in list(self.starved.values()):
            stream.flush()

    # Receiving.

    def hold(self, stream: Stream, size: int) -> None:
        """Count the bytes of a stream's unfinished body."""
        self._unfinished.count(stream, size)
        self.site.unfinished.count(self, self._unfinished.total)

    def drop_body(self) -> None:
        """End the request with the largest unfinished body."""
        self._unfinished.drop_largest()

    def consume(self, stream: Stream, size: int) -> None:
        """Mark bytes of a stream as handled; opens both windows again, not too often."""
        self.consume_connection(size)
        if not stream.remote_closed:
            stream.consumed += size
            if stream.consumed >= self.own_stream_window // 2:
                self.write(stream_window_update(stream))

    def consume_connection(self, size: int) -> None:
        """Mark bytes as handled for the connection's window only."""
        self.consumed += size
        if self.consumed >= self.update_threshold:
            self.send_window_update()

    def send_window_update(self) -> None:
        """Open the connection's window again for what was consumed."""
        consumed, self.consumed = self.consumed, 0
        self.receive_window += consumed
        self.write(window_update_frame(0, consumed))

    def end_of_stream(self, stream: Stream) -> None:
        """Handle END_STREAM: the client has sent all of a stream."""
        expected = stream.head.content_length
        if expected is not None and expected != stream.received:
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "content-length does not match the body")
        stream.remote_closed = True
        stream.on_end()

    def guarded(self, stream: Stream, action: Callable[..., None], *arguments: object) -> None:
        """Call `action`; a `StreamError` ends the stream, not the connection."""
        try:
            action(*arguments)
        except StreamError as fault:
            self.fail_stream(stream, fault)

    def is_idle(self, stream_id: int) -> bool:
        """Return whether a stream has never been opened."""
        return stream_id > self.highest_stream or not stream_id & 1


def stream_window_update(stream: Stream) -> bytes:
    """Return the WINDOW_UPDATE frame that opens a stream's window again for what was consumed."""
    size, stream.consumed = stream.consumed, 0
    stream.receive_window += size
    return window_update_frame(stream.id, size)


def _pop_bytes(pending: deque[Buffer], size: int) -> list[Buffer]:
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


def _window(size: int) -> int:
    """Return a window that can be announced: a client may use the default before it has read our SETTINGS (6.9.3)."""
    return min(max(size, frames.DEFAULT_WINDOW), frames.MAX_WINDOW)
