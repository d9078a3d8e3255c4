# SPDX-License-Identifier: Apache-2.0
"""Runs ASGI 3 applications (Starlette and the like) on our server.

Use it as `routes.mount("/admin", MountedApp(app, "/admin").handle)`.
For pages where comfort matters more than speed. One task per request, on `Exchange` alone, so it works over HTTP/1.1 and
HTTP/2; WebSockets go through `websocket`. The opposite direction, our routes under another ASGI server, is `asgi_app`.
Specification: https://asgi.readthedocs.io/en/latest/specs/www.html
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

from headrace.core.errors import InvalidArgument, PermissionDenied
from headrace.net.asgi_app import Message, Receive, Scope, Send
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import Field, RequestHead, ResponseHead, check_field
from headrace.net.websocket.contract import CloseCode, WebSocket
from headrace.net.websocket.handshake import (
    HandshakeRejected,
    accept,
    any_origin,
    is_websocket_upgrade,
    negotiate,
    reject,
)

log = logging.getLogger("headrace.wire.asgi")

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

SPEC_VERSION = "2.4"
"""The first version in which `send` raises OSError after the client has disconnected, instead of doing nothing."""

_WAITING_BYTES = 256 * 1024
_WAITING_MESSAGES = 16
"""Bytes, and WebSocket messages, kept for an application that has not received them; then reading pauses."""

_SERVER_FIELDS = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"date"))
"""Response fields that the server sets, not the application."""


class MountedApp:
    """An ASGI application as a handler. Use `handle` between `startup` and `shutdown`."""

    def __init__(self, app: Application, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")
        self._lifespan = Lifespan(app)
        self._state: dict[str, Any] | None = None
        # The loop keeps only weak references to tasks: without this, a waiting task could be garbage-collected.
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self) -> None:
        """Run the application's startup; raise `LifespanFailed` if it reports a failure."""
        await self._lifespan.startup()
        self._state = self._lifespan.state

    async def shutdown(self) -> None:
        """Wait for running requests and their background tasks, then run the application's shutdown."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        await self._lifespan.shutdown()

    def abort(self) -> None:
        """Cancel all running requests, at the end of a shutdown's grace period."""
        for task in self._tasks:
            task.cancel()

    def handle(self, exchange: Exchange) -> None:
        """Answer a request with the application. The route must stream its body, as mounts do."""
        if is_websocket_upgrade(exchange.head):
            try:
                negotiate(exchange.head)
            except HandshakeRejected as rejection:
                reject(exchange, rejection)
                return
            session = WebSocketSession(exchange)
            self._start(session.run(self._app, websocket_scope(exchange, self._root_path, self._state)))
        else:
            cycle = RequestCycle(exchange)
            self._start(cycle.run(self._app, http_scope(exchange, self._root_path, self._state)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RequestCycle:
    """One HTTP request to an application: `receive` and `send` on top of an exchange's callbacks."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0
        self._body_ended = False
        self._end_reported = False
        self._reading_paused = False
        self._disconnected = False
        self._incoming = asyncio.Event()
        self._writable = asyncio.Event()
        self._response: tuple[int, list[Field]] | None = None
        self._streaming = False
        self._complete = False
        self._length: int | None = None
        exchange.on_body = self._on_body
        exchange.on_body_end = self._on_body_end
        exchange.on_disconnect = self._on_disconnect
        exchange.on_writable = self._writable.set

    async def run(self, app: Application, scope: Scope) -> None:
        """Call the application and end the response, whatever the application does."""
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self._complete:
                self._exchange.abort()
            raise
        except Exception as error:
            if self._disconnected:
                report_late(error, scope)
            elif self._complete:
                log.error("application failed after its response", exc_info=error, extra={"path": scope["path"]})
            else:
                self._exchange.fail(error)
        else:
            if not self._complete and not self._disconnected:
                self._exchange.fail(RuntimeError("the application returned without a complete response"))
        finally:
            self._complete = True
            self._resume_body()

    async def receive(self) -> Message:
        """Return the next piece of the body, or `http.disconnect` after the response or the client has ended."""
        while True:
            if self._pieces:
                body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
                self._pieces = []
                self._waiting_bytes = 0
                self._resume_body()
                self._end_reported = self._body_ended
                return {"type": "http.request", "body": body, "more_body": not self._body_ended}
            if self._disconnected or self._complete:
                return {"type": "http.disconnect"}
            if self._body_ended and not self._end_reported:
                self._end_reported = True
                return {"type": "http.request", "body": b"", "more_body": False}
            self._incoming.clear()
            await self._incoming.wait()

    async def send(self, message: Message) -> None:
        """Send a piece of the response; wait while the client does not read."""
        kind = message["type"]
        if kind == "http.response.start":
            if self._response is not None:
                raise RuntimeError("http.response.start was sent twice")
            self._response = message["status"], response_fields(message.get("headers", ()))
        elif kind != "http.response.body":
            raise RuntimeError(f"{kind!r} is not a message for an HTTP response")
        elif self._response is None or self._complete:
            raise RuntimeError("http.response.body belongs between http.response.start and the last body message")
        else:
            await self._send_body(*self._response, message.get("body", b""), message.get("more_body", False))

    async def _send_body(self, status: int, fields: list[Field], body: bytes, more: bool) -> None:
        if self._disconnected:
            # Only a stream must be stopped; after a complete response the application's background tasks run on.
            if more:
                raise ClientDisconnected("the client has disconnected")
            self._complete = True
            return
        exchange = self._exchange
        if not self._streaming:
            if not more and exchange.head.method != b"HEAD" and not _has_field(fields, b"content-encoding"):
                fields = [field for field in fields if field[0] != b"content-length"]
                exchange.respond(_head(status), body, fields)
                self._mark_complete()
                return
            self._streaming = True
            self._length = _length(fields) if exchange.head.method != b"HEAD" else None
            exchange.start(_head(status), fields)
        self._count(len(body), more)
        has_room = exchange.send(body) if body and exchange.head.method != b"HEAD" else True
        if not more:
            exchange.finish()
            self._mark_complete()
        elif not has_room:
            self._writable.clear()
            await self._writable.wait()

    def _mark_complete(self) -> None:
        # Only after the exchange accepted it: a body that is not bytes can still be answered by an error.
        self._complete = True
        self._incoming.set()

    def _count(self, size: int, more: bool) -> None:
        if self._length is None:
            return
        self._length -= size
        if self._length < 0 or (self._length and not more):
            # On a keep-alive connection the client would confuse the body with the next response.
            raise RuntimeError("the body is not as long as the application's content-length says")

    # Called by the exchange.

    def _on_body(self, piece: bytes) -> None:
        if self._complete:
            return
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        if self._waiting_bytes > _WAITING_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._exchange.pause_body()
        self._incoming.set()

    def _on_body_end(self) -> None:
        self._body_ended = True
        self._incoming.set()

    def _on_disconnect(self) -> None:
        self._disconnected = True
        self._incoming.set()
        self._writable.set()

    def _resume_body(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._exchange.resume_body()


def report_late(error: Exception, scope: Scope) -> None:
    """Log an exception raised after the client has disconnected: frameworks raise when they notice that."""
    log.info("application stopped after its client disconnected", exc_info=error, extra={"path": scope["path"]})


def response_fields(headers: Iterable[Iterable[bytes]]) -> list[Field]:
    """Return an application's response fields without those the server sets; reject invalid ones."""
    fields: list[Field] = []
    for name, value in headers:
        field = bytes(name).lower(), bytes(value)
        check_field(*field)
        if field[0] not in _SERVER_FIELDS:
            fields.append(field)
    return fields


def _has_field(fields: list[Field], wanted: bytes) -> bool:
    return any(name == wanted for name, _ in fields)


def _length(fields: list[Field]) -> int | None:
    for name, value in fields:
        if name == b"content-length":
            return int(value)
    return None


@lru_cache(maxsize=64)
def _head(status: int) -> ResponseHead:
    return ResponseHead(status)


class WebSocketSession:
    """One WebSocket to an application: `receive` and `send` on top of a `WebSocket`.

    As ASGI specifies, the application checks the Origin field, which is in its scope.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._connection: WebSocket | None = None
        self._messages: deque[Message] = deque([{"type": "websocket.connect"}])
        self._waiting_bytes = 0
        self._incoming = asyncio.Event()
        self._writable = asyncio.Event()
        self._denial: tuple[int, list[Field]] | None = None
        self._denial_body: list[bytes] = []
        self._closed_by_app = False
        self._disconnected: Message | None = None
        exchange.on_disconnect = lambda: self._on_close(CloseCode.ABNORMAL, "")

    async def run(self, app: Application, scope: Scope) -> None:
        """Call the application and close the WebSocket, whatever the application does."""
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            if self._connection is not None:
                self._connection.close(CloseCode.GOING_AWAY, "the server is shutting down")
            else:
                self._exchange.abort()
            raise
        except Exception as error:
            if self._disconnected is not None:
                report_late(error, scope)
            elif self._connection is not None:
                self._connection.fail(error)
            else:
                self._exchange.fail(error)
        else:
            if self._connection is not None:
                self._connection.close(CloseCode.NORMAL)
            elif not self._exchange.closed:
                self._exchange.fail(RuntimeError("the application neither accepted nor refused the WebSocket"))

    async def receive(self) -> Message:
        """Return the next message, or `websocket.disconnect` after the end."""
        while True:
            if self._messages:
                message = self._messages.popleft()
                self._waiting_bytes -= _size(message)
                if self._connection is not None and not self._is_full():
                    self._connection.resume_messages()
                return message
            if self._disconnected is not None:
                return self._disconnected
            self._incoming.clear()
            await self._incoming.wait()

    async def send(self, message: Message) -> None:
        """Send a message; wait while the client does not read."""
        kind = message["type"]
        if self._closed_by_app:
            raise RuntimeError(f"{kind!r} after the WebSocket was closed or refused")
        if self._disconnected is not None:
            if kind == "websocket.close":
                return
            raise ClientDisconnected("the client has disconnected")
        if self._connection is not None:
            await self._send_open(self._connection, kind, message)
        elif kind == "websocket.accept":
            self._accept(message)
        elif kind == "websocket.close":
            self._closed_by_app = True
            self._exchange.fail(PermissionDenied("the application refused the WebSocket"))
        elif kind == "websocket.http.response.start" and self._denial is None:
            self._denial = message["status"], response_fields(message.get("headers", ()))
        elif kind == "websocket.http.response.body" and self._denial is not None:
            self._deny(message)
        else:
            raise RuntimeError(f"{kind!r} is not expected before websocket.accept")

    async def _send_open(self, connection: WebSocket, kind: str, message: Message) -> None:
        if kind == "websocket.send":
            data = message.get("text")
            if data is None:
                data = message["bytes"]
            if not connection.send(data):
                self._writable.clear()
                if self._disconnected is None:
                    await self._writable.wait()
        elif kind == "websocket.close":
            self._closed_by_app = True
            connection.close(message.get("code", CloseCode.NORMAL), message.get("reason") or "")
        else:
            raise RuntimeError(f"{kind!r} is not expected after websocket.accept")

    def _accept(self, message: Message) -> None:
        chosen = message.get("subprotocol")
        extra = response_fields(message.get("headers", ()))
        connection = accept(
            self._exchange,
            self._opened,
            subprotocols=() if chosen is None else (chosen,),
            check_origin=any_origin,
            extra=extra,
        )
        if connection is None:
            # The server is draining, or the client disconnected before the application accepted.
            self._on_close(CloseCode.ABNORMAL, "")

    def _opened(self, connection: WebSocket) -> None:
        self._connection = connection
        connection.on_message = self._on_message
        connection.on_close = self._on_close
        connection.on_writable = self._writable.set

    def _deny(self, message: Message) -> None:
        self._denial_body.append(message.get("body", b""))
        if self._denial is None or message.get("more_body", False):
            return
        self._closed_by_app = True
        status, fields = self._denial
        fields = [field for field in fields if field[0] != b"content-length"]
        self._exchange.respond(ResponseHead(status), self._denial_body, fields)

    # Called by the connection.

    def _on_message(self, message: str | bytes) -> None:
        key = "text" if isinstance(message, str) else "bytes"
        self._messages.append({"type": "websocket.receive", key: message})
        self._waiting_bytes += len(message)
        if self._connection is not None and self._is_full():
            self._connection.pause_messages()
        self._incoming.set()

    def _on_close(self, code: int, reason: str) -> None:
        if self._disconnected is None:
            self._disconnected = {"type": "websocket.disconnect", "code": code, "reason": reason}
        self._incoming.set()
        self._writable.set()

    def _is_full(self) -> bool:
        return len(self._messages) >= _WAITING_MESSAGES or self._waiting_bytes >= _WAITING_BYTES


def _size(message: Message) -> int:
    return len(message.get("text") or message.get("bytes") or b"")


class LifespanFailed(RuntimeError):
    """The application reports that it could not start; the server should not start either."""


class Lifespan:
    """The ASGI lifespan protocol: one call of the application that lasts as long as the server.

    An application may decline it by raising.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._task: asyncio.Task[None] | None = None
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._answer: asyncio.Future[Message] | None = None
        self.state: dict[str, Any] = {}
        """The application's state for its requests; each gets a copy."""

    async def startup(self) -> None:
        """Start the application; raise `LifespanFailed` if it reports a failure."""
        self._task = asyncio.create_task(self._run(), name="asgi lifespan")
        answer = await self._ask("lifespan.startup")
        if answer is None:
            self._task = None
        elif answer["type"] == "lifespan.startup.failed":
            await self._end()
            raise LifespanFailed(f"the application did not start: {answer.get('message') or 'it gave no reason'}")

    async def shutdown(self) -> None:
        """Stop the application, if it was started, and wait for it."""
        if self._task is None:
            return
        answer = await self._ask("lifespan.shutdown")
        await self._end()
        if answer is not None and answer["type"] == "lifespan.shutdown.failed":
            log.error("application shutdown failed: %s", answer.get("message", ""))

    async def _run(self) -> None:
        try:
            await self._app(lifespan_scope(self.state), self._inbox.get, self._send)
        except Exception:
            # The specification lets servers continue: the application may not support this scope.
            log.info("application does not support the lifespan protocol", exc_info=True)

    async def _ask(self, kind: str) -> Message | None:
        """Send a message and return its answer; None if the application ends without one."""
        if self._task is None:
            return None
        self._answer = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait({"type": kind})
        await asyncio.wait((self._answer, self._task), return_when=asyncio.FIRST_COMPLETED)
        return self._answer.result() if self._answer.done() else None

    async def _send(self, message: Message) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    async def _end(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait((task,))


class ClientDisconnected(OSError):
    """Raised by `send` after the client has disconnected."""


def lifespan_scope(state: dict[str, Any]) -> Scope:
    """Return the scope of the call that starts and stops an application."""
    return {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": state}


def http_scope(exchange: Exchange, root_path: str, state: dict[str, Any] | None) -> Scope:
    """Return the scope of an HTTP request."""
    scope = _shared_scope(exchange, root_path, state)
    scope["type"] = "http"
    scope["method"] = exchange.head.method.decode("ascii", "replace").upper()
    scope["extensions"] = {}
    return scope


def websocket_scope(exchange: Exchange, root_path: str, state: dict[str, Any] | None) -> Scope:
    """Return the scope of a WebSocket request."""
    scope = _shared_scope(exchange, root_path, state)
    scope["type"] = "websocket"
    scope["scheme"] = {"http": "ws", "https": "wss"}.get(scope["scheme"], scope["scheme"])
    offered = (value for name, value in exchange.head.fields if name == b"sec-websocket-protocol")
    items = b",".join(offered).decode("latin-1").split(",")
    scope["subprotocols"] = [item.strip() for item in items if item.strip()]
    scope["extensions"] = {"websocket.http.response": {}}
    return scope


def _shared_scope(exchange: Exchange, root_path: str, state: dict[str, Any] | None) -> Scope:
    head = exchange.head
    try:
        path = unquote_to_bytes(head.path).decode()
    except UnicodeDecodeError:
        raise InvalidArgument("the path is not UTF-8 after percent-decoding") from None
    scope: Scope = {
        "asgi": {"version": "3.0", "spec_version": SPEC_VERSION},
        "http_version": head.version,
        "scheme": head.scheme.decode("latin-1"),
        "path": path,
        "raw_path": head.path,
        "query_string": head.query,
        "root_path": root_path,
        "headers": _fields(head),
        "client": address_of(exchange.peer),
        "server": None,
    }
    if state is not None:
        scope["state"] = state.copy()
    return scope


def _fields(head: RequestHead) -> list[Field]:
    fields = list(head.fields)
    if head.authority and head.get(b"host") is None:
        # HTTP/2 has the host in a pseudo-header; applications read the Host field.
        fields.insert(0, (b"host", head.authority))
    return fields


def address_of(peer: str) -> tuple[str, int] | None:
    """Return host and port of `Exchange.peer`; None if it is not an address (a UNIX socket)."""
    host, separator, port = peer.rpartition(":")
    if not separator or not port.isdecimal():
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)
