# SPDX-License-Identifier: Apache-2.0
"""One HTTP request over HTTP/2 and its response: the `Exchange` that handlers know, on a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.core.buffers import uninitialised
from headrace.core.errors import TooLarge, Unavailable
from headrace.net.http.coding import inflate
from headrace.net.http.exchange import Body, Buffer, Exchange, encoded, listed
from headrace.net.http.heads import CONTENT_TYPE, JSON, Field, Fields, RequestHead, ResponseHead
from headrace.net.http2.frames import ErrorCode, StreamFault
from headrace.net.http2.headers import encode_fields, response_block
from headrace.net.http2.stream import Stream

if TYPE_CHECKING:
    from headrace.net.http2.connection import Http2Connection


class Http2Exchange(Stream, Exchange):
    """See `Exchange` and `Stream`."""

    def __init__(self, connection: Http2Connection, stream_id: int, head: RequestHead) -> None:
        super().__init__(connection, stream_id, head)
        self._route, self.params = connection.site.routes.find(head.method, head.path)
        self._gathered: bytearray | None = None
        self._whole: memoryview | None = None
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
        """See `Stream.on_open`."""
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
        """See `Stream.on_data`."""
        length = self.head.content_length
        if length is not None and self.received > length:
            fault = StreamFault(ErrorCode.PROTOCOL_ERROR, "the body is longer than its content-length")
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
            elif self._gathered is None:
                self._gathered = bytearray(data)
            else:
                # Not a list of pieces: a client that sends a byte a frame would make each cost fifty.
                self._gathered += data
        elif len(data) == length:
            self.body = bytes(data)
        else:
            if self._whole is None:
                # Not at the head: a promise of bytes should cost nothing until some of them come.
                self._whole = uninitialised(length)
            end = self._filled + len(data)
            self._whole[self._filled : end] = data
            self._filled = end

    def on_end(self) -> None:
        """See `Stream.on_end`."""
        if self._route.streams_body:
            if self.on_body_end is not None:
                self._guarded(self.on_body_end)
            return
        if self._started:
            return
        if self._whole is not None:
            self.body, self._whole = self._whole, None
        elif self._gathered is not None:
            self.body, self._gathered = self._gathered, None
        self._dispatch()

    def on_reset(self, code: int) -> None:
        """See `Stream.on_reset`."""
        if self.on_over is not None:
            self._tell_over()
        if self.on_disconnect is not None:
            callback, self.on_disconnect = self.on_disconnect, None
            self._guarded(callback)

    def patience(self) -> float | None:
        """See `Stream.patience`."""
        if self.pending_bytes or self.remote_closed or self.paused:
            return super().patience()
        return self.connection.site.limits.body_idle_seconds

    def on_stall(self) -> None:
        """See `Stream.on_stall`."""
        if self._started:
            super().on_stall()
        else:
            seconds = self.connection.site.limits.body_idle_seconds
            self.respond(_TIMEOUT_HEAD, b'{"error":"the body stood still for %g seconds"}' % seconds)
            self.on_reset(ErrorCode.CANCEL)

    def on_expire(self) -> None:
        """See `Stream.on_expire`."""
        if self._started:
            super().on_expire()
        else:
            self.fail(Unavailable("the server is shutting down"))
            self.on_reset(ErrorCode.CANCEL)

    def on_room(self) -> None:
        """See `Stream.on_room`."""
        if self.on_writable is not None:
            self._guarded(self.on_writable)

    # Called by handlers.

    @property
    def peer(self) -> str:
        """See `Exchange.peer`."""
        return self.connection.peer

    @property
    def started(self) -> bool:
        """See `Exchange.started`."""
        return self._started

    @property
    def closed(self) -> bool:
        """See `Exchange.closed`."""
        return self.local_closed

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        """See `Exchange.respond`."""
        if self._started or self.local_closed:
            return
        self._started = True
        buffers = listed(body)
        accept = self.head.get(b"accept-encoding")
        if accept is not None:
            buffers, extra = encoded(accept, head, buffers, extra)
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
            self._tell_over()

    def start(self, head: ResponseHead, extra: Fields = ()) -> None:
        """See `Exchange.start`."""
        if not self._started:
            self._started = True
            self._log(head.status)
            block = response_block(head) + self.connection.site.date_block
            block += encode_fields((*extra, *_fields_of(self.more_lines)))
            self.send_headers(block)

    def send(self, data: Buffer) -> bool:
        """See `Exchange.send`."""
        if self.head.method == b"HEAD":
            return True
        return self.send_data([data])

    def finish(self) -> None:
        """See `Exchange.finish`."""
        self.send_data([], end=True)
        if self.on_over is not None:
            self._tell_over()

    def abort(self) -> None:
        """See `Exchange.abort`."""
        self.reset(ErrorCode.INTERNAL_ERROR)
        if self.on_over is not None:
            self._tell_over()

    def pause_body(self) -> None:
        """See `Exchange.pause_body`."""
        self.pause()

    def resume_body(self) -> None:
        """See `Exchange.resume_body`."""
        self.resume()

    # Inside.

    def _continue(self, ends: bool) -> None:
        """Tell a client that waits for it to send the body, unless it has its answer already."""
        if not ends and not self._started and (self.head.get(b"expect") or b"").lower() == b"100-continue":
            self.send_headers(_CONTINUE_BLOCK)

    def _guarded(self, deed: Callable[..., None], *arguments: object) -> None:
        """Call a handler's callback: its failure is this stream's, not the connection's."""
        try:
            deed(*arguments)
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

    def _tell_over(self) -> None:
        # A stream that was answered may still be reset, while its client does not read.
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
    return TooLarge(f"the body is over the limit of {limit} bytes")


_TIMEOUT_HEAD = ResponseHead(408, [(CONTENT_TYPE, JSON)])
_BODILESS = (204, 304)
_CONTINUE_BLOCK = b"\x08\x03100"
"""`:status: 100`, with the name from the static table."""
