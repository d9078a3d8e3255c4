# SPDX-License-Identifier: Apache-2.0
"""The gRPC methods of a server, and coroutines that serve them.

Programs fill `Services`; `http2.connection` calls its `open` for every request. `CoroutineCalls` serves a streaming
method with a coroutine instead of callbacks: easier to read, and not used on the hot path.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from headrace.core.errors import Cancelled
from headrace.net.grpc.call import CallPlan, GrpcCall, Methods, StreamHandler, UnaryHandler
from headrace.net.grpc.status import Status
from headrace.net.http.heads import Buffer, RequestHead
from headrace.net.http.routes import Policy, Scope, Workers
from headrace.net.http2.connection import Http2Connection
from headrace.net.http2.stream import Stream


class Middleware(Protocol):
    """Adds the checks of a method's policy to its handler."""

    def unary(self, name: str, policy: Policy, handler: UnaryHandler) -> UnaryHandler:
        """Wrap a method with one message each way; `name` is `/service/method`."""

    def streaming(self, policy: Policy, handler: StreamHandler) -> StreamHandler:
        """Wrap a method with a stream of messages."""


class Services:
    """The gRPC methods of a server. Implements `site.StreamOpener`.

    `middleware` wraps each handler once, when it is registered.
    """

    def __init__(self, middleware: Middleware | None = None) -> None:
        self._middleware = middleware
        self._methods: Methods = {}
        self.names: list[str] = []
        """Full names of the services, for reflection."""
        self.policies: dict[str, Policy] = {}
        """The policy of every method, by `/service/method`."""

    def add_service(self, name: str) -> None:
        """Add a service's full name to the list that reflection returns."""
        if name not in self.names:
            self.names.append(name)

    def unary(
        self,
        service: str,
        method: str,
        handler: UnaryHandler,
        *,
        scope: Scope | None = "admin",
        workers: Workers = "one",
    ) -> None:
        """Serve a method with one message each way."""
        name = self._add(service, method, policy := Policy(scope, workers))
        if self._middleware is not None:
            handler = self._middleware.unary(name, policy, handler)
        self._methods[name.encode()] = (handler, None)

    def streaming(self, service: str, method: str, handler: StreamHandler, *, scope: Scope | None = "admin") -> None:
        """Serve a method with a stream of messages on one side or both."""
        name = self._add(service, method, policy := Policy(scope))
        if self._middleware is not None:
            handler = self._middleware.streaming(policy, handler)
        self._methods[name.encode()] = (None, handler)

    def open(self, connection: Http2Connection, stream_id: int, head: RequestHead) -> Stream | None:
        """Start a call on a new stream; None if the request is not gRPC. The plan is cached in the head.

        The router overrides this to accept calls of any method, and opens streams of its own.
        """
        plan = head.memo
        if plan is None:
            grpc = is_grpc(head.get(b"content-type") or b"")
            plan = head.memo = CallPlan(head, self._methods, connection.site.limits) if grpc else False
        if plan is False:
            return None
        return GrpcCall(connection, stream_id, head, plan)  # type: ignore[arg-type]

    def _add(self, service: str, method: str, policy: Policy) -> str:
        self.add_service(service)
        name = f"/{service}/{method}"
        self.policies[name] = policy
        return name


def is_grpc(content_type: bytes) -> bool:
    """Return whether a request with this content type is a gRPC call."""
    return content_type == b"application/grpc" or content_type.startswith((b"application/grpc+", b"application/grpc;"))


_WAITING_BYTES = 1024 * 1024
"""Bytes of received messages that may wait for the coroutine before flow control stops the client."""

_MESSAGE_COST = _WAITING_BYTES // 16
"""Counted for each message beside its bytes, so that many small ones stop the client too."""


class MessageStream:
    """A call as a coroutine sees it: `async for` over received messages, `await send` to answer."""

    def __init__(self, call: GrpcCall) -> None:
        self.call = call
        self._messages: deque[Buffer] = deque()
        self._waiting = 0
        self._ended = False
        self._arrival = asyncio.Event()
        self._room = asyncio.Event()
        call.on_message = self._on_message
        call.on_half_close = self._on_half_close
        call.on_writable = self._room.set

    async def receive(self) -> Buffer | None:
        """Return the next message, or None after the last."""
        while not self._messages:
            if self._ended:
                return None
            self._arrival.clear()
            await self._arrival.wait()
        message = self._messages.popleft()
        self._waiting -= len(message) + _MESSAGE_COST
        if self._waiting <= _WAITING_BYTES // 2:
            self.call.resume()
        return message

    async def __aiter__(self) -> AsyncIterator[Buffer]:
        """Iterate over the client's messages."""
        while (message := await self.receive()) is not None:
            yield message

    async def send(self, message: Buffer | list[Buffer]) -> None:
        """Send a message, and wait while the client does not read."""
        if self.call.over:
            raise Cancelled("the call is over")
        self._room.clear()
        if not self.call.send(message):
            await self._room.wait()

    def _on_message(self, message: Buffer) -> None:
        self._messages.append(message)
        self._waiting += len(message) + _MESSAGE_COST
        if self._waiting >= _WAITING_BYTES:
            self.call.pause()
        self._arrival.set()

    def _on_half_close(self) -> None:
        self._ended = True
        self._arrival.set()


class CoroutineCalls:
    """Runs a coroutine per call and references its task: an unreferenced task may be garbage-collected."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def serve(self, coroutine: Callable[[MessageStream], Awaitable[None]]) -> StreamHandler:
        """Return a handler for `Services.streaming`. The call ends with the coroutine: OK, or its error's status."""

        def open_call(call: GrpcCall) -> None:
            stream = MessageStream(call)
            task = asyncio.ensure_future(self._run(coroutine, stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            call.on_cancel = task.cancel

        return open_call

    async def _run(self, coroutine: Callable[[MessageStream], Awaitable[None]], stream: MessageStream) -> None:
        call = stream.call
        try:
            await coroutine(stream)
        except asyncio.CancelledError:
            # Usually because the call is over; if not, something the coroutine awaited was cancelled.
            call.finish(Status.CANCELLED, "the call was cancelled by the server")
            raise
        except BaseException as error:
            call.fail(error)
        else:
            call.finish()
