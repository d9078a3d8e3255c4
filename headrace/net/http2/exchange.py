# SPDX-License-Identifier: Apache-2.0
"""One HTTP/2 request and its response: the `Exchange` that handlers use, on a stream."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.buffers import uninitialised
from headrace.core.errors import TooLarge, Unavailable
from headrace.net.http.coding import body_too_large, inflate
from headrace.net.http.exchange import Body, Exchange, buffer_list, compress_body
from headrace.net.http.heads import CONTENT_TYPE, JSON, Buffer, Field, Fields, RequestHead, ResponseHead
from headrace.net.http2.frames import ErrorCode, StreamError
from headrace.net.http2.headers import encode_fields, response_block
from headrace.net.http2.stream import Stream, StreamConnection
from headrace.net.site import HOLD_STEP_BYTES, TOO_MANY_UNFINISHED


class Http2Exchange(Stream, Exchange):
    """An `Exchange` on an HTTP/2 `Stream`."""

    def __init__(self, connection: StreamConnection, stream_id: int, head: RequestHead) -> None:
        super().__init__(connection, stream_id, head)
        self._route, self.params = connection.site.routes.find(head.method, head.path)
        self._unsized_body: bytearray | None = None
        self._sized_body: memoryview | None = None
        self._filled = 0
        self._started = False
        self._status = 0
        self.body: Buffer = b""
        self.on_body: Callable[[bytes], None] | None = None
        self.on_body_end: Callable[[], None] | None = None
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    # Called by the connection.

    def on_open(self, ends: bool) -> None:
        """Call the handler if the route streams its body; otherwise wait for the body."""
        route, length = self._route, self.head.content_length
        if route.longer is not None and not ends and (length is None or length > route.whole_bytes):
            self._route = route.longer
        if self._route.streams_body:
            self._dispatch()
            self._continue(ends)
            return
        limit = self.connection.site.limits.body_bytes
        if (self.head.content_length or 0) > limit:
            self.fail(_too_large(limit))
        else:
            self._continue(ends)

    def on_data(self, data: memoryview) -> None:
        """Pass a piece of the body to the handler, or keep it until the body is complete."""
        length = self.head.content_length
        if length is not None and self.received > length:
            fault = StreamError(ErrorCode.PROTOCOL_ERROR, "the body is longer than its content-length")
            self.connection.fail_stream(self, fault)
            return
        if self._route.streams_body:
            if self.on_body is not None:
                self._guarded(self.on_body, bytes(data))
            return
        if length is None:
            limit = self.connection.site.limits.body_bytes
            if self.received > limit:
                self.fail(_too_large(limit))
            elif self._unsized_body is None:
                self._unsized_body = bytearray(data)
            else:
                # Not a list of pieces: one byte per frame would cost fifty bytes each.
                self._unsized_body += data
                if len(self._unsized_body) - self.held_bytes >= HOLD_STEP_BYTES:
                    self.hold(len(self._unsized_body))
        elif len(data) == length:
            self.body = bytes(data)
        else:
            if self._sized_body is None:
                # Not at the head: a large content-length must cost nothing until bytes arrive.
                self._sized_body = uninitialised(length)
            end = self._filled + len(data)
            self._sized_body[self._filled : end] = data
            self._filled = end
            if end - self.held_bytes >= HOLD_STEP_BYTES:
                self.hold(end)

    def on_end(self) -> None:
        """Call the handler with the complete body, or notify a streaming handler that the body has ended."""
        if self._route.streams_body:
            if self.on_body_end is not None:
                self._guarded(self.on_body_end)
            return
        if self._started:
            return
        if self.held_bytes:
            self.hold(0)
        if self._sized_body is not None:
            self.body, self._sized_body = self._sized_body, None
        elif self._unsized_body is not None:
            self.body, self._unsized_body = self._unsized_body, None
        self._dispatch()

    def on_reset(self, code: int) -> None:
        """Tell the handler that the client has disconnected."""
        if self.on_over is not None:
            self._notify_over()
        if self.on_disconnect is not None:
            callback, self.on_disconnect = self.on_disconnect, None
            self._guarded(callback)

    def stall_timeout(self) -> float | None:
        """Return the timeout for the request body while it is incomplete, else the one for reading the response."""
        if self.pending_bytes or self.remote_closed or self.paused:
            return super().stall_timeout()
        return self.connection.site.limits.body_idle_seconds

    def on_stall(self) -> None:
        """Answer 408 if no response has started; reset the stream otherwise."""
        if self._started:
            super().on_stall()
        else:
            seconds = self.connection.site.limits.body_idle_seconds
            self.respond(_TIMEOUT_HEAD, b'{"error":"the body made no progress for %g seconds"}' % seconds)
            self.on_reset(ErrorCode.CANCEL)

    def drop_body(self) -> None:
        """Answer 503: too many bodies are unfinished."""
        if self._started:
            super().drop_body()
        else:
            self.fail(Unavailable(TOO_MANY_UNFINISHED))
            self.on_reset(ErrorCode.ENHANCE_YOUR_CALM)

    def on_expire(self) -> None:
        """Answer 503 if no response has started; reset the stream otherwise."""
        if self._started:
            super().on_expire()
        else:
            self.fail(Unavailable("the server is shutting down"))
            self.on_reset(ErrorCode.CANCEL)

    def on_send_ready(self) -> None:
        """Tell the handler that it may send again."""
        if self.on_writable is not None:
            self._guarded(self.on_writable)

    # Called by handlers.

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        return self.connection.peer

    @property
    def started(self) -> bool:
        """Whether a response head has been sent."""
        return self._started

    @property
    def closed(self) -> bool:
        """Whether the response is complete or the client has disconnected."""
        return self.local_closed

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        """Send a complete response."""
        if self._started or self.local_closed:
            return
        self._started = True
        buffers = buffer_list(body)
        accept = self.head.get(b"accept-encoding")
        if accept is not None:
            buffers, extra = compress_body(accept, head, buffers, extra)
        size = sum(map(len, buffers))
        status = head.status
        block = response_block(head) + self.connection.site.date_block
        if self.more_lines:
            extra = (*extra, *_fields_of(self.more_lines))
        if status not in _BODILESS:
            extra = (*extra, (b"content-length", b"%d" % size))
        block += encode_fields(extra)
        self._log(status)
        if not size or self.head.method == b"HEAD" or status in _BODILESS:
            self.send_headers(block, end=True)
        else:
            self.send_whole(block, buffers, size, None)
        if self.on_over is not None:
            self._notify_over()

    def start(self, head: ResponseHead, extra: Fields = ()) -> None:
        """Send a response head; the body follows by `send`."""
        if not self._started:
            self._started = True
            self._log(head.status)
            block = response_block(head) + self.connection.site.date_block
            block += encode_fields((*extra, *_fields_of(self.more_lines)))
            self.send_headers(block)

    def send(self, data: Buffer) -> bool:
        """Send a piece of a streamed body."""
        if self.head.method == b"HEAD":
            return True
        return self.send_data([data])

    def finish(self) -> None:
        """End a streamed body."""
        self.send_data([], end=True)
        if self.on_over is not None:
            self._notify_over()

    def abort(self) -> None:
        """Reset the stream, so that the client sees an incomplete response."""
        self.reset(ErrorCode.INTERNAL_ERROR)
        if self.on_over is not None:
            self._notify_over()

    def pause_body(self) -> None:
        """Stop opening the client's window."""
        self.pause()

    def resume_body(self) -> None:
        """Open the client's window again."""
        self.resume()

    # Internal.

    def _continue(self, ends: bool) -> None:
        """Send 100 Continue to a client that waits for it, unless the response has started."""
        if not ends and not self._started and (self.head.get(b"expect") or b"").lower() == b"100-continue":
            self.send_headers(_CONTINUE_BLOCK)

    def _guarded(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call a handler's callback; an exception fails this exchange, not the connection."""
        try:
            callback(*arguments)
        except Exception as error:
            self.fail(error)

    def _dispatch(self) -> None:
        try:
            encoding = self.head.get(b"content-encoding")
            if encoding is not None and not self._route.streams_body and not self._route.raw:
                self.body = inflate(encoding, self.body, self.connection.site.limits.body_bytes)
            self._route.handler(self)
        except Exception as error:
            self.fail(error)

    def _notify_over(self) -> None:
        # Once: a stream that was answered may still be reset while its client does not read.
        callback, self.on_over = self.on_over, None
        if callback is not None:
            callback()

    def _log(self, status: int) -> None:
        access_log = self.connection.site.access_log
        if access_log is not None:
            access_log(self.connection.peer, self.head, status)


def _fields_of(lines: bytes) -> list[Field]:
    parts = [line.partition(b": ") for line in lines.split(b"\r\n")[:-1]]
    return [(name, value) for name, _, value in parts]


def _too_large(limit: int) -> TooLarge:
    return TooLarge(body_too_large(limit))


_TIMEOUT_HEAD = ResponseHead(408, [(CONTENT_TYPE, JSON)])
_BODILESS = (204, 304)
_CONTINUE_BLOCK = b"\x08\x03100"
"""`:status: 100`, with the name from the static table."""
