# SPDX-License-Identifier: Apache-2.0
"""One gRPC call, as a handler sees it: messages in, messages out, a status at the end.

Opened by `services.Services` on an HTTP/2 stream. A unary method's handler gets the call and its one message and
answers, now or later, by `reply` or `fail`; a streaming method's handler sets the callbacks. All methods must be called
in the event loop's thread; after the call has ended they do nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from collections.abc import Callable

from headrace.core.errors import (
    INTERNAL_TEXT,
    DeadlineExceeded,
    HeadraceError,
    Internal,
    InvalidArgument,
    Unavailable,
    Unimplemented,
)
from headrace.core.limits import Limits
from headrace.core.names import REQUEST_ID_FIELD, request_id
from headrace.net.grpc.messages import (
    PREFIX_BYTES,
    MessageAssembler,
    custom_metadata,
    encode_metadata,
    parse_timeout,
    prefixed,
    prefixed_gzip,
)
from headrace.net.grpc.status import GRPC_STATUS, OK_BLOCK, Status, status_block
from headrace.net.http.exchange import buffer_list
from headrace.net.http.heads import Buffer, RequestHead
from headrace.net.http2.connection import Http2Connection
from headrace.net.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame_header
from headrace.net.http2.headers import encode_field, encode_fields, encode_status
from headrace.net.http2.stream import JOIN_BYTES, Stream
from headrace.net.site import HOLD_STEP_BYTES, TOO_MANY_UNFINISHED

log = logging.getLogger("headrace.wire")

_GZIP_BYTES = 1024
"""Smaller messages are not worth compressing."""

HEAD_BLOCK = encode_status(200) + encode_field(b"content-type", b"application/grpc")
_HEAD_BLOCK_GZIP = HEAD_BLOCK + encode_field(b"grpc-encoding", b"gzip")
# Frame headers, up to the stream's number: length, type and flags.
_HEAD_FRAME = frame_header(len(HEAD_BLOCK), HEADERS, END_HEADERS, 0)[:5]
_DATA_FRAME = frame_header(0, DATA, 0, 0)[3:5]
_OK_FRAME = frame_header(len(OK_BLOCK), HEADERS, END_HEADERS | END_STREAM, 0)[:5]
_ACCEPT_BLOCK = encode_field(b"grpc-accept-encoding", b"identity,deflate,gzip")

# State of a call as its handler sees it; what the handler sent may still wait for the client's window.
_NEW, _STARTED, _OVER = range(3)

Metadata = list[tuple[str, str | bytes]]

UnaryHandler = Callable[["GrpcCall", Buffer], None]
"""Answers a unary call, given the call and its message."""

StreamHandler = Callable[["GrpcCall"], None]
"""Starts a call that streams in either direction: sets the call's callbacks."""

Methods = dict[bytes, tuple[UnaryHandler | None, StreamHandler | None]]
"""By path, as in `/service/method`; one of the two handlers is set."""

_unpack_prefix = struct.Struct(">BI").unpack_from
_SHORT_BYTES = 16 * 1024
"""A message up to this size is copied out of its frame; a larger one is assembled in its own memory."""


class CallPlan:
    """How to serve calls with the same request head. Immutable, and shared by all of them."""

    __slots__ = (
        "encoding",
        "error",
        "gzip",
        "plain",
        "short_bytes",
        "stream_handler",
        "streams",
        "timeout_seconds",
        "unary_handler",
    )

    def __init__(self, head: RequestHead, methods: Methods, limits: Limits) -> None:
        self.error: HeadraceError | None = None
        self.timeout_seconds: float | None = None
        self.encoding = head.get(b"grpc-encoding")
        # Only a client that compresses its messages gets compressed ones.
        self.gzip = self.encoding == b"gzip"
        unary, stream = methods.get(head.path, (None, None))
        self.unary_handler: UnaryHandler = unary or _not_unary
        self.stream_handler: StreamHandler = stream or _not_streaming
        self.streams = stream is not None
        self.short_bytes = -1 if self.streams else min(_SHORT_BYTES, limits.message_bytes)
        """The largest message of a unary call that is read without an assembler."""
        try:
            if unary is None and stream is None:
                raise Unimplemented(f"unknown method {head.path.decode('latin-1')[:256]}")
            if head.method != b"POST":
                raise InvalidArgument("gRPC calls are POST requests")
            timeout = head.get(b"grpc-timeout")
            if timeout is not None:
                self.timeout_seconds = parse_timeout(timeout)
        except HeadraceError as error:
            self.error = error
        self.plain = self.error is None and self.timeout_seconds is None and not self.streams
        """Whether there is nothing to do before the message has arrived."""


class GrpcCall(Stream):
    """A gRPC call on an HTTP/2 stream."""

    # Defaults on the class, as in `Stream`.
    details = b""
    """Serialized google.rpc.Status for `grpc-status-details-bin`; set before failing."""
    on_message: Callable[[Buffer], None] | None = None
    """For streaming methods: called with each message. `pause` and `resume` control the client's window."""
    on_half_close: Callable[[], None] | None = None
    """For streaming methods: called when the client has sent its last message."""
    on_cancel: Callable[[], object] | None = None
    """Called once if the call ends other than by its handler: the client cancels, disconnects or breaks the protocol, its
    deadline passes, or a callback raises. Set it to stop work."""
    on_writable: Callable[[], None] | None = None
    """Called when `send` may be called again after it returned False."""
    on_over: Callable[[], None] | None = None
    """Called once when the call ends for any reason. For code that counts calls, not for handlers; must not raise."""
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
        self.receive_window = connection.own_stream_window
        self._plan = plan

    # For handlers.

    @property
    def metadata(self) -> Metadata:
        """The client's metadata."""
        return custom_metadata(self.head)

    @property
    def timeout_seconds(self) -> float | None:
        """The client's timeout, counted from the call's arrival."""
        return self._plan.timeout_seconds

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        return self.connection.peer

    @property
    def over(self) -> bool:
        """Whether the call has its status or the client has disconnected."""
        return self._phase == _OVER

    def set_initial_metadata(self, pairs: Metadata) -> None:
        """Set metadata to send before the first message."""
        self._initial = encode_fields(encode_metadata(pairs))

    def set_trailing_metadata(self, pairs: Metadata) -> None:
        """Set metadata to send with the status."""
        self._trailing = encode_fields(encode_metadata(pairs))

    def reply(self, message: Buffer | list[Buffer]) -> None:
        """Answer a unary call: one message, and status OK. Buffers of a list are written without being joined."""
        if self._phase:
            self.send(message)
            self.finish()
            return
        buffers = message if message.__class__ is list else buffer_list(message)
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
        if not (self._trailing or self._initial or self._plan.gzip) and self._reply_plain(buffers, size):
            return
        trailers = OK_BLOCK + self._trailing if self._trailing else OK_BLOCK
        if self._plan.gzip and size >= _GZIP_BYTES:
            packed = prefixed_gzip(buffers)
            head = _HEAD_BLOCK_GZIP + self._initial
            self.send_whole(head, packed, sum(map(len, packed)), trailers)
            return
        head = HEAD_BLOCK + self._initial if self._initial else HEAD_BLOCK
        self.send_whole(head, prefixed(buffers, size), size + PREFIX_BYTES, trailers)

    def _reply_plain(self, buffers: list[Buffer], size: int) -> bool:
        """Send a message as `send_whole` does, with the head and trailers of nearly all answers, whose frames are prepared.

        Return False if it cannot be sent in one write.
        """
        connection = self.connection
        framed = size + PREFIX_BYTES
        if self.local_closed or framed > JOIN_BYTES or not connection.has_room(self, framed):
            return False
        connection.send_window -= framed
        number = self.id.to_bytes(4, "big")
        before = (_HEAD_FRAME, number, HEAD_BLOCK, framed.to_bytes(3, "big"), _DATA_FRAME, number)
        connection.write(b"".join((*before, b"\0", size.to_bytes(4, "big"), *buffers, _OK_FRAME, number, OK_BLOCK)))
        self.local_closed = True
        connection.closed_locally(self)
        return True

    def send(self, message: Buffer | list[Buffer]) -> bool:
        """Send one message of a response stream. False asks the caller to wait for `on_writable`."""
        if self._phase == _OVER:
            return True
        self.start()
        buffers = buffer_list(message)
        size = sum(map(len, buffers))
        if self._plan.gzip and size >= _GZIP_BYTES:
            return self.send_data(prefixed_gzip(buffers))
        return self.send_data(prefixed(buffers, size))

    def start(self) -> None:
        """Send the head with the initial metadata, if it has not been sent yet."""
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
        """End the call with an error's status; an unexpected exception becomes INTERNAL, without its text."""
        if isinstance(error, HeadraceError):
            if error.retry_after_seconds is not None:
                seconds = str(math.ceil(error.retry_after_seconds))
                self._trailing += encode_fields(encode_metadata([("retry-after", seconds)]))
            self.finish(GRPC_STATUS[error.code], error.message)
            return
        log_id = request_id(self.head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": log_id, "method": self.head.path.decode("latin-1"), "peer": self.peer}
        log.error("gRPC call failed", exc_info=error, extra=details)
        self._trailing += encode_fields(encode_metadata([(REQUEST_ID_FIELD, log_id)]))
        self.finish(Status.INTERNAL, INTERNAL_TEXT)

    # Called by the connection.

    def on_open(self, ends: bool) -> None:
        """Start the deadline timer, and open a streaming method."""
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
            self._guarded(plan.stream_handler, self)

    def on_data(self, data: memoryview) -> None:
        """Assemble messages from received bytes."""
        assembler = self._assembler
        if assembler is not None:
            if assembler.take(data):
                if assembler.filled - self.held_bytes >= HOLD_STEP_BYTES:
                    self.hold(assembler.filled)
                return
        elif self._message is None:
            # The fast path: a unary call whose message is one complete frame.
            size = len(data) - PREFIX_BYTES
            if 0 <= size <= self._plan.short_bytes and _unpack_prefix(data) == (0, size):
                self._message = bytes(data[PREFIX_BYTES:])
                return
        self._guarded(self._assemble, data)

    def on_end(self) -> None:
        """Call the unary handler, or notify a streaming method that the client has sent everything."""
        if self._phase == _OVER:
            return
        if self._assembler is not None and self._assembler.incomplete:
            self._end_with(Internal("the call ended inside a message"))
        elif self._plan.streams:
            if self.on_half_close is not None:
                self._guarded(self.on_half_close)
        elif self._message is None:
            self.finish(Status.UNIMPLEMENTED, "a unary call has one message, not none")
        else:
            try:
                self._plan.unary_handler(self, self._message)
            except Exception as error:
                self._end_with(error)

    def on_reset(self, code: int) -> None:
        """Cancel the call."""
        phase, self._phase = self._phase, _OVER
        if phase != _OVER:
            if self.on_over is not None:
                self.on_over()
            self._stop_timer()
            self._log(Status.CANCELLED)
            self._call_on_cancel()

    def on_expire(self) -> None:
        """End the call with UNAVAILABLE."""
        self._end_with(Unavailable("the server is shutting down"))

    def drop_body(self) -> None:
        """End the call with UNAVAILABLE: too many messages are unfinished."""
        self.hold(0)
        self._end_with(Unavailable(TOO_MANY_UNFINISHED))

    def stall_timeout(self) -> float | None:
        """Return the timeout for a message while it is incomplete, else the one for reading the responses."""
        if self.pending_bytes or self.remote_closed or self.paused:
            return super().stall_timeout()
        assembler = self._assembler
        if (self._message is None and not self._plan.streams) or (assembler is not None and assembler.incomplete):
            return self.connection.site.limits.body_idle_seconds
        return None

    def on_stall(self) -> None:
        """End the call: its message made no progress, or its responses are not read."""
        if self.pending_bytes:
            super().on_stall()
            return
        seconds = self.connection.site.limits.body_idle_seconds
        self._end_with(DeadlineExceeded(f"the message made no progress for {seconds:g} seconds"))

    def on_send_ready(self) -> None:
        """Tell the handler that it may send again."""
        if self.on_writable is not None:
            self.on_writable()

    # Internal.

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
        if self.held_bytes and self._phase != _OVER:
            self.hold(assembler.filled)

    def _guarded(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception as error:
            self._end_with(error)

    def _end_with(self, error: BaseException) -> None:
        """End the call with an error that did not come from its handler, and notify the handler."""
        was_over = self._phase == _OVER
        self.fail(error)
        if not was_over:
            self._call_on_cancel()

    def _deadline_passed(self) -> None:
        self._timer = None
        self._end_with(DeadlineExceeded("the caller's deadline has passed"))

    def _call_on_cancel(self) -> None:
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


def _not_unary(_call: GrpcCall, _message: Buffer) -> None:
    raise Unimplemented("this method streams")


def _not_streaming(_call: GrpcCall) -> None:
    raise Unimplemented("this method does not stream")
