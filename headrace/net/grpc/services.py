# SPDX-License-Identifier: Apache-2.0
"""The table of gRPC methods a server has, and the opening of calls to them.

Filled by composition roots; asked by `http2.connection` for every request whose content type is gRPC's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError, InvalidArgument, Unimplemented
from headrace.core.limits import Limits
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.metadata import parse_timeout
from headrace.net.http.exchange import Buffer
from headrace.net.http.heads import RequestHead

if TYPE_CHECKING:
    from headrace.net.http2.connection import Http2Connection
    from headrace.net.http2.stream import Stream

UnaryHandler = Callable[[GrpcCall, Buffer], None]
"""Answers a unary call: gets the call and its message."""

StreamHandler = Callable[[GrpcCall], None]
"""Begins any call with a stream of messages on either side: sets the call's callbacks."""

Methods = dict[bytes, tuple[UnaryHandler | None, StreamHandler | None]]
"""By path, as in `/service/method`; one of the two is there."""


_SHORT_BYTES = 16 * 1024
"""A message up to this size is copied out of its frame; a larger one is put together in memory of its own."""


class CallPlan:
    """How calls with one and the same head are served. Shared by all of them, never changed."""

    __slots__ = (
        "answer",
        "encoding",
        "error",
        "gzip",
        "open_stream",
        "plain",
        "short_bytes",
        "streams",
        "timeout_seconds",
    )

    def __init__(self, head: RequestHead, methods: Methods, limits: Limits) -> None:
        self.error: HeadraceError | None = None
        self.timeout_seconds: float | None = None
        self.encoding = head.get(b"grpc-encoding")
        # A client that compresses its messages gets compressed ones; others asked for nothing.
        self.gzip = self.encoding == b"gzip"
        unary, stream = methods.get(head.path, (None, None))
        self.answer: UnaryHandler = unary or _unanswered
        self.open_stream: StreamHandler = stream or _unopened
        self.streams = stream is not None
        self.short_bytes = -1 if self.streams else min(_SHORT_BYTES, limits.message_bytes)
        """The largest message of a unary call that is taken as it comes, without an assembler."""
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
        """Nothing to do before the message has come."""


class Services:
    """All methods of a server."""

    def __init__(self) -> None:
        self._methods: Methods = {}
        self.names: list[str] = []
        """Full names of the services, for reflection."""

    def add_service(self, name: str) -> None:
        """Announce a service by its full name."""
        if name not in self.names:
            self.names.append(name)

    def unary(self, service: str, method: str, handler: UnaryHandler) -> None:
        """Serve a method with one message each way."""
        self.add_service(service)
        self._methods[f"/{service}/{method}".encode()] = (handler, None)

    def streaming(self, service: str, method: str, handler: StreamHandler) -> None:
        """Serve a method with a stream of messages on one side or both."""
        self.add_service(service)
        self._methods[f"/{service}/{method}".encode()] = (None, handler)

    def methods(self) -> Iterable[str]:
        """Every method as `/service/method`."""
        return (path.decode() for path in self._methods)

    def open(self, connection: Http2Connection, stream_id: int, head: RequestHead) -> Stream | None:
        """Begin a call on a new stream; None if the request is not gRPC's. The head remembers how it is served.

        A room that takes calls whatever their method (the router) overrides this and opens streams of its own.
        """
        plan = head.memo
        if plan is None:
            grpc = is_grpc(head.get(b"content-type") or b"")
            plan = head.memo = CallPlan(head, self._methods, connection.site.limits) if grpc else False
        if plan is False:
            return None
        return GrpcCall(connection, stream_id, head, plan)  # type: ignore[arg-type]


def is_grpc(content_type: bytes) -> bool:
    """Whether a request with this content type is a gRPC call."""
    return content_type == b"application/grpc" or content_type.startswith((b"application/grpc+", b"application/grpc;"))


def _unanswered(_call: GrpcCall, _message: Buffer) -> None:
    raise Unimplemented("this method streams")


def _unopened(_call: GrpcCall) -> None:
    raise Unimplemented("this method does not stream")
