# SPDX-License-Identifier: Apache-2.0
"""One gRPC call, as a handler sees it: messages in, messages out, a status at the end.

Opened by `services.Services` on an HTTP/2 stream. A unary method's handler gets the call and its one message and
answers, now or later, by `reply` or `fail`; a streaming method's handler sets the callbacks. `streaming` turns these
into coroutines. Everything happens in the event loop's thread; after the call is over every method does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.core.errors import INTERNAL_TEXT, DeadlineExceeded, HeadraceError, Internal, Unavailable
from headrace.core.ids import REQUEST_ID_FIELD, request_id
from headrace.net.grpc.messages import PREFIX_BYTES, MessageAssembler, prefixed, prefixed_gzip
from headrace.net.grpc.metadata import custom_metadata, encode_metadata
from headrace.net.grpc.status import GRPC_STATUS, OK_BLOCK, Status, status_block
from headrace.net.http.exchange import Buffer, listed
from headrace.net.http.heads import RequestHead
from headrace.net.http2.headers import encode_field, encode_fields, encode_status
from headrace.net.http2.stream import Stream

if TYPE_CHECKING:
    from headrace.net.grpc.services import CallPlan
    from headrace.net.http2.connection import Http2Connection

log = logging.getLogger("headrace.wire")

_GZIP_BYTES = 1024
"""Smaller messages are not worth compressing."""

HEAD_BLOCK = encode_status(200) + encode_field(b"content-type", b"application/grpc")
_HEAD_BLOCK_GZIP = HEAD_BLOCK + encode_field(b"grpc-encoding", b"gzip")
_ACCEPT_BLOCK = encode_field(b"grpc-accept-encoding", b"identity,deflate,gzip")

# How far a call is, seen from its handler: what it sent may still wait for the client's window.
_NEW, _STARTED, _OVER = range(3)

Metadata = list[tuple[str, str | bytes]]


class GrpcCall(Stream):
    """See the module."""

    # Defaults on the class, as in `Stream`.
    details = b""
    """Serialized google.rpc.Status for `grpc-status-details-bin`; set before failing."""
    on_message: Callable[[Buffer], None] | None = None
    """For streaming methods: called with each message. `pause` and `resume` hold the client back."""
    on_half_close: Callable[[], None] | None = None
    """For streaming methods: called when the client has sent its last message."""
    on_cancel: Callable[[], object] | None = None
    """Called once if the call ends otherwise than by its handler: the client cancels, goes away or breaks a rule, its
    deadline passes, or a callback raises. Set it to stop work."""
    on_writable: Callable[[], None] | None = None
    """Called when `send` may be called again after it returned False."""
    on_over: Callable[[], None] | None = None
    """Called once when the call is over, however it came to that. For who counts calls, not for handlers; must not
    raise."""
    _message: Buffer | None = None
    _assembler: MessageAssembler | None = None
    _timer: asyncio.TimerHandle | None = None
    _phase = _NEW
    _initial = b""
    _trailing = b""

    def __init__(self, connection: Http2Connection, stream_id: int, head: RequestHead, plan: CallPlan) -> None:
        self.connection = connection
        self.id = stream_id
        self.head = head
        self.send_window = connection.peer_stream_window
        self.receive_window = connection.own_stream_window
        self._plan = plan

    # For handlers.

    @property
    def metadata(self) -> Metadata:
        """The caller's own metadata."""
        return custom_metadata(self.head)

    @property
    def timeout_seconds(self) -> float | None:
        """What the caller gave as its time, counted from the call's arrival."""
        return self._plan.timeout_seconds

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        return self.connection.peer

    @property
    def over(self) -> bool:
        """Whether the call has its status or the client has gone."""
        return self._phase == _OVER

    def set_initial_metadata(self, pairs: Metadata) -> None:
        """Metadata to send before the first message."""
        self._initial = encode_fields(encode_metadata(pairs))

    def set_trailing_metadata(self, pairs: Metadata) -> None:
        """Metadata to send with the status."""
        self._trailing = encode_fields(encode_metadata(pairs))

    def reply(self, message: Buffer | list[Buffer]) -> None:
        """Answer a unary call: one message, and status OK. Buffers of a list are written without being joined."""
        if self._phase:
            self.send(message)
            self.finish()
            return
        buffers = listed(message)
        size = 0
        for buffer in buffers:
            size += len(buffer)
        if self._timer is not None:
            self._stop_timer()
        self._phase = _OVER
        if self.on_over is not None:
            self.on_over()
        if self.connection.site.access_log is not None:
            self._log(Status.OK)
        trailers = OK_BLOCK + self._trailing if self._trailing else OK_BLOCK
        if self._plan.gzip and size >= _GZIP_BYTES:
            packed = prefixed_gzip(buffers)
            head = _HEAD_BLOCK_GZIP + self._initial
            self.send_whole(head, packed, sum(map(len, packed)), trailers)
            return
        head = HEAD_BLOCK + self._initial if self._initial else HEAD_BLOCK
        self.send_whole(head, prefixed(buffers, size), size + PREFIX_BYTES, trailers)

    def send(self, message: Buffer | list[Buffer]) -> bool:
        """Send one message of a stream of them. False asks the caller to wait for `on_writable`."""
        if self._phase == _OVER:
            return True
        self.start()
        buffers = listed(message)
        size = sum(map(len, buffers))
        if self._plan.gzip and size >= _GZIP_BYTES:
            return self.send_data(prefixed_gzip(buffers))
        return self.send_data(prefixed(buffers, size))

    def start(self) -> None:
        """Send the head with the initial metadata, if it has not gone out yet."""
        if self._phase == _NEW:
            self._phase = _STARTED
            self.send_headers((_HEAD_BLOCK_GZIP if self._plan.gzip else HEAD_BLOCK) + self._initial)

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """End the call with a status."""
        phase, self._phase = self._phase, _OVER
        if phase == _OVER:
            return
        if self.on_over is not None:
            self.on_over()
        self._stop_timer()
        self._log(status)
        block = status_block(status, message) + self._trailing
        if self.details and status != Status.OK:
            block += encode_fields(encode_metadata([("grpc-status-details-bin", self.details)]))
        if phase == _STARTED:
            self.send_data([], trailers=block)
        else:
            self.send_headers(HEAD_BLOCK + self._initial + _ACCEPT_BLOCK + block, end=True)

    def fail(self, error: BaseException) -> None:
        """End the call with an error's status; an exception that is not ours is told as INTERNAL, without its text."""
        if isinstance(error, HeadraceError):
            if error.retry_after_seconds is not None:
                seconds = str(math.ceil(error.retry_after_seconds))
                self._trailing += encode_fields(encode_metadata([("retry-after", seconds)]))
            self.finish(GRPC_STATUS[error.code], error.message)
            return
        found_by = request_id(self.head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": found_by, "method": self.head.path.decode("latin-1"), "peer": self.peer}
        log.error("a call failed", exc_info=error, extra=details)
        self._trailing += encode_fields(encode_metadata([(REQUEST_ID_FIELD, found_by)]))
        self.finish(Status.INTERNAL, INTERNAL_TEXT)

    # Called by the connection.

    def on_open(self, ends: bool) -> None:
        """See `Stream.on_open`."""
        plan = self._plan
        if plan.plain:
            return
        if plan.error is not None:
            self.fail(plan.error)
            return
        if plan.timeout_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(plan.timeout_seconds, self._deadline_passed)
        if plan.streams:
            self._guarded(plan.open_stream, self)

    def on_data(self, data: memoryview) -> None:
        """See `Stream.on_data`."""
        assembler = self._assembler
        if assembler is not None:
            if assembler.take(data):
                return
        elif self._message is None:
            # The straight road: a unary call whose whole message came in one frame.
            size = len(data) - PREFIX_BYTES
            if 0 <= size <= self._plan.short_bytes and data[:PREFIX_BYTES] == b"\0" + size.to_bytes(4, "big"):
                self._message = bytes(data[PREFIX_BYTES:])
                return
        self._guarded(self._assemble, data)

    def on_end(self) -> None:
        """See `Stream.on_end`."""
        if self._phase == _OVER:
            return
        if self._assembler is not None and self._assembler.incomplete:
            self._break_off(Internal("the call ended inside a message"))
        elif self._plan.streams:
            if self.on_half_close is not None:
                self._guarded(self.on_half_close)
        elif self._message is None:
            self.finish(Status.UNIMPLEMENTED, "a unary call has one message, not none")
        else:
            try:
                self._plan.answer(self, self._message)
            except Exception as error:
                self._break_off(error)

    def on_reset(self, code: int) -> None:
        """See `Stream.on_reset`."""
        phase, self._phase = self._phase, _OVER
        if phase != _OVER:
            if self.on_over is not None:
                self.on_over()
            self._stop_timer()
            self._log(Status.CANCELLED)
            self._cancelled()

    def on_expire(self) -> None:
        """See `Stream.on_expire`."""
        self._break_off(Unavailable("the server is shutting down"))

    def on_room(self) -> None:
        """See `Stream.on_room`."""
        if self.on_writable is not None:
            self.on_writable()

    # Inside.

    def _assemble(self, data: memoryview) -> None:
        if self._phase == _OVER:
            return
        assembler = self._assembler
        if assembler is None:
            limit = self.connection.site.limits.message_bytes
            assembler = self._assembler = MessageAssembler(limit, self._plan.encoding)
        for message in assembler.feed(data):
            if self._plan.streams:
                if self.on_message is not None and self._phase != _OVER:
                    self.on_message(message)
            elif self._message is None:
                self._message = message
            else:
                self.finish(Status.UNIMPLEMENTED, "a unary call has one message, not more")
                return

    def _guarded(self, deed: Callable[..., None], *arguments: object) -> None:
        try:
            deed(*arguments)
        except Exception as error:
            self._break_off(error)

    def _break_off(self, error: BaseException) -> None:
        """End the call with an error that its handler did not give it, and tell the handler."""
        was_over = self._phase == _OVER
        self.fail(error)
        if not was_over:
            self._cancelled()

    def _deadline_passed(self) -> None:
        self._timer = None
        self._break_off(DeadlineExceeded("the caller's deadline has passed"))

    def _cancelled(self) -> None:
        callback, self.on_cancel = self.on_cancel, None
        if callback is not None:
            callback()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _log(self, status: Status) -> None:
        access_log = self.connection.site.access_log
        if access_log is not None:
            access_log(self.connection.peer, self.head, status)
