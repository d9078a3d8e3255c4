# SPDX-License-Identifier: Apache-2.0
"""Our routes as an ASGI application, to run under uvicorn, gunicorn or another ASGI server.

The opposite of `asgi_host`, which runs an ASGI application as one of our handlers. Slower than our own connections,
because every request becomes a coroutine and several dictionaries. `headrace.asgi` uses it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import quote_from_bytes

from headrace.core.errors import TooLarge, Unimplemented
from headrace.core.limits import Limits
from headrace.net.http.coding import inflate
from headrace.net.http.exchange import Body, Exchange, buffer_list, compress_body
from headrace.net.http.heads import Buffer, Fields, RequestHead, ResponseHead, check_field
from headrace.net.http.routes import Route, Routes
from headrace.net.websocket.contract import CloseCode, WebSocket, fit_reason, may_be_sent
from headrace.net.websocket.handshake import OnOpen

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class RoutesApp:
    """An ASGI application for HTTP and WebSocket scopes: `await RoutesApp(routes, limits)(scope, receive, send)`."""

    def __init__(self, routes: Routes, limits: Limits) -> None:
        self._routes = routes
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or serve one WebSocket until it is closed."""
        head = _head(scope)
        route, params = self._routes.find(head.method, head.path)
        client = scope.get("client")
        exchange = AsgiExchange(head, f"{client[0]}:{client[1]}" if client else "", params)
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
            await self._serve_websocket(exchange, route, receive, send)
        else:
            await self._answer(exchange, route, receive, send)

    async def _answer(self, exchange: AsgiExchange, route: Route, receive: Receive, send: Send) -> None:
        if not route.streams_body:
            try:
                body = await self._read_body(exchange.head, receive)
            except TooLarge as error:
                exchange.fail(error)
                await _flush(exchange, send)
                return
            if body is None:
                return
            exchange.body = body
        exchange.guard(self._handle, exchange, route)
        if exchange.finished:
            # Answered at once: no need to watch for a disconnect.
            await _flush(exchange, send)
            return
        listening = asyncio.ensure_future(_listen(exchange, route, receive))
        try:
            await _send_all(exchange, send)
        finally:
            listening.cancel()

    def _handle(self, exchange: AsgiExchange, route: Route) -> None:
        encoding = exchange.head.get(b"content-encoding")
        if encoding is not None and not route.streams_body and not route.raw:
            exchange.body = inflate(encoding, exchange.body, self._limits.body_bytes)
        route.handler(exchange)

    async def _read_body(self, head: RequestHead, receive: Receive) -> bytes | None:
        """Return the complete body; None if the client disconnected before."""
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if size > self._limits.body_bytes:
                raise TooLarge(
                    f"the request body is larger than {self._limits.body_bytes} bytes: send less, or raise the limit"
                )
            pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _serve_websocket(self, exchange: AsgiExchange, route: Route, receive: Receive, send: Send) -> None:
        exchange.guard(route.handler, exchange)
        if exchange.websocket is None:
            await _refuse(exchange, send)
            return
        listening = asyncio.ensure_future(_listen_to_socket(exchange, receive, self._limits))
        try:
            await _send_all(exchange, send)
        finally:
            listening.cancel()


async def _send_all(exchange: AsgiExchange, send: Send) -> None:
    """Send the exchange's messages until it has ended."""
    while True:
        await exchange.changed.wait()
        exchange.changed.clear()
        await _flush(exchange, send)
        if exchange.closed and not exchange.outgoing:
            return


async def _flush(exchange: AsgiExchange, send: Send) -> None:
    while exchange.outgoing:
        message = exchange.outgoing.popleft()
        try:
            await send(message)
        except Exception:  # servers differ in what they raise after a disconnect
            exchange.outgoing.clear()
            exchange.disconnected()
            if exchange.websocket is not None:
                exchange.websocket.ended(CloseCode.ABNORMAL, "")
            return
        if message["type"] == "websocket.close":
            exchange.outgoing.clear()
            exchange.ended = True
            if exchange.websocket is not None:
                exchange.websocket.ended(message["code"], message["reason"])
    exchange.sent()


async def _listen(exchange: AsgiExchange, route: Route, receive: Receive) -> None:
    """Pass a streamed body to the handler, then wait for a disconnect."""
    more = route.streams_body
    while True:
        await exchange.reading.wait()
        message = await receive()
        if message["type"] == "http.disconnect":
            exchange.disconnected()
            return
        if more and exchange.on_body is not None and message.get("body"):
            exchange.guard(exchange.on_body, message["body"])
        if more and not message.get("more_body", False):
            more = False
            if exchange.on_body_end is not None:
                exchange.guard(exchange.on_body_end)


async def _listen_to_socket(exchange: AsgiExchange, receive: Receive, limits: Limits) -> None:
    socket = exchange.websocket
    while socket is not None:
        await exchange.reading.wait()
        message = await receive()
        if message["type"] == "websocket.disconnect":
            exchange.ended = True
            socket.ended(message.get("code", CloseCode.ABNORMAL), message.get("reason") or "")
            exchange.changed.set()
            return
        data = message.get("text")
        if data is None:
            data = message.get("bytes") or b""
        if len(data) > limits.message_bytes:
            socket.close(CloseCode.TOO_BIG, f"a message may have {limits.message_bytes} bytes")
        else:
            socket.arrived(data)


async def _refuse(exchange: AsgiExchange, send: Send) -> None:
    """Send the HTTP response to a handshake, as `websocket.http.response`; other servers close with 403."""
    if not exchange.finished:
        exchange.fail(Unimplemented("this path is not a WebSocket"))
    for message in exchange.outgoing:
        await send({**message, "type": f"websocket.{message['type']}"})


def _head(scope: Scope) -> RequestHead:
    path = scope.get("raw_path")
    if path is None:
        path = quote_from_bytes(scope["path"].encode(), safe="/:@!$&'()*+,;=~").encode()
    prefix = scope.get("root_path", "").encode()
    if prefix and path.startswith(prefix + b"/"):
        path = path[len(prefix) :]
    query = scope.get("query_string", b"")
    method = scope.get("method", "GET").encode()
    fields = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    target = b"%b?%b" % (path, query) if query else bytes(path)
    version = scope.get("http_version", "1.1")
    return RequestHead(method, target, fields, version=version, scheme=scope.get("scheme", "http").encode())


_WAITING_BYTES = 256 * 1024
"""Bytes that may be queued before a handler must wait."""


class AsgiExchange(Exchange):
    """An `Exchange` on an ASGI server: the response becomes messages in `outgoing`, which `RoutesApp` sends in order."""

    def __init__(self, head: RequestHead, peer: str, params: tuple[str, ...]) -> None:
        self.head = head
        self.body = b""
        self.params = params
        self.on_disconnect = None
        self.on_body = None
        self.on_body_end = None
        self.on_writable = None
        self._peer = peer
        self.outgoing: deque[dict[str, Any]] = deque()
        self.changed = asyncio.Event()
        """Set when there is something to send, or the exchange has ended."""
        self.reading = asyncio.Event()
        """Set while the handler, or the WebSocket's owner, has not paused reading."""
        self.reading.set()
        self.ended = False
        """Whether the client has disconnected or the response was aborted: nothing more will be sent."""
        self._started = False
        self.finished = False
        self._waiting_bytes = 0
        self._full = False
        self.websocket: AsgiWebSocket | None = None

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        return self._peer

    @property
    def started(self) -> bool:
        """Whether a response head has been queued."""
        return self._started

    @property
    def closed(self) -> bool:
        """Whether the response is complete or the client has disconnected."""
        return self.finished or self.ended

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        """Send a complete response."""
        if self._started or self.closed:
            return
        buffers = buffer_list(body)
        accept = self.head.get(b"accept-encoding")
        if accept is not None:
            buffers, extra = compress_body(accept, head, buffers, extra)
        data = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        length = (b"content-length", b"%d" % len(data))
        self._start(head, (*extra, length) if head.status >= 200 and head.status not in (204, 304) else extra)
        self._put_body(b"" if self.head.method == b"HEAD" else data, more=False)
        self._end()

    def start(self, head: ResponseHead, extra: Fields = ()) -> None:
        """Send a response head; the body follows by `send`."""
        if not self._started and not self.closed:
            self._start(head, extra)
            self.changed.set()

    def send(self, data: Buffer) -> bool:
        """Send a piece of a streamed body."""
        if self._started and not self.closed and len(data) and self.head.method != b"HEAD":
            self._put_body(data, more=True)
            self.changed.set()
        return not self._full

    def finish(self) -> None:
        """End a streamed body."""
        if self._started and not self.closed:
            self._put_body(b"", more=False)
            self._end()

    def abort(self) -> None:
        """End without a complete response; the ASGI server then closes the connection."""
        if not self.closed:
            self.ended = True
            self.outgoing.clear()
            self._end()

    def pause_body(self) -> None:
        """Stop receiving from the client."""
        self.reading.clear()

    def resume_body(self) -> None:
        """Receive from the client again."""
        self.reading.set()

    def open_websocket(self, on_open: OnOpen, subprotocols: Sequence[str], extra: Fields) -> WebSocket | None:
        """Accept a WebSocket; None if the client has disconnected. Implements `websocket.handshake.WebSocketExchange`."""
        if self._started or self.closed:
            return None
        self._started = True
        offered = [
            text.strip() for text in (self.head.get(b"sec-websocket-protocol") or b"").decode("latin-1").split(",")
        ]
        chosen = next((name for name in subprotocols if name in offered), None)
        self.websocket = AsgiWebSocket(self, chosen)
        fields = _checked((*extra, *_fields(self.more_lines)))
        self.outgoing.append({"type": "websocket.accept", "subprotocol": chosen, "headers": fields})
        self.websocket.guard(on_open, self.websocket)
        self.changed.set()
        return self.websocket

    # Called by `RoutesApp` and `AsgiWebSocket`.

    def put(self, message: dict[str, Any], size: int) -> bool:
        """Queue a message; return False when the queue is full."""
        self.outgoing.append(message)
        self._waiting_bytes += size
        if self._waiting_bytes > _WAITING_BYTES:
            self._full = True
        self.changed.set()
        return not self._full

    def sent(self) -> None:
        """Note that the queue is empty; wake a waiting handler."""
        self._waiting_bytes = 0
        if self._full:
            self._full = False
            callback = self.websocket.on_writable if self.websocket is not None else self.on_writable
            if callback is not None and not self.closed:
                self.guard(callback)

    def disconnected(self) -> None:
        """End the exchange and notify the handler that the client has disconnected."""
        if not self.closed:
            self.ended = True
            self._end()
            if self.on_disconnect is not None:
                self.guard(self.on_disconnect)

    def guard(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call a handler; an exception becomes the response, or ends it."""
        try:
            callback(*arguments)
        except Exception as error:
            self.fail(error)

    def _start(self, head: ResponseHead, extra: Fields) -> None:
        fields = [*head.fields, *_checked((*extra, *_fields(self.more_lines)))]
        self._started = True
        self.outgoing.append({"type": "http.response.start", "status": head.status, "headers": fields})

    def _put_body(self, data: Buffer, *, more: bool) -> None:
        self.put({"type": "http.response.body", "body": bytes(data), "more_body": more}, len(data))

    def _end(self) -> None:
        self.finished = True
        self.changed.set()
        if self.on_over is not None:
            self.on_over()


def _fields(lines: bytes) -> list[tuple[bytes, bytes]]:
    """Return `Exchange.more_lines` as fields."""
    pairs = (line.partition(b": ") for line in lines.split(b"\r\n") if line)
    return [(name, value) for name, _, value in pairs]


def _checked(fields: Fields) -> list[tuple[bytes, bytes]]:
    for name, value in fields:
        check_field(name, value)
    return list(fields)


class AsgiWebSocket(WebSocket):
    """A `WebSocket` on an ASGI server, which handles pings and silent clients."""

    def __init__(self, exchange: AsgiExchange, subprotocol: str | None) -> None:
        self.head = exchange.head
        self.peer = exchange.peer
        self.subprotocol = subprotocol
        self._exchange = exchange
        self._closed = False
        self._received: deque[str | bytes] = deque()

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._closed or self._exchange.ended

    def send(self, message: str | Buffer) -> bool:
        """Send a message."""
        if self.closed:
            return False
        if isinstance(message, str):
            return self._exchange.put({"type": "websocket.send", "text": message}, len(message))
        return self._exchange.put({"type": "websocket.send", "bytes": bytes(message)}, len(message))

    def close(self, code: int = CloseCode.NORMAL, reason: str = "") -> None:
        """Start to close."""
        if not may_be_sent(code):
            raise ValueError(f"{code} may not be sent in a close frame: use 1000 to 1014 or 3000 to 4999")
        if not self.closed:
            self._closed = True
            self._exchange.reading.set()
            message = {"type": "websocket.close", "code": code, "reason": fit_reason(reason)}
            self._exchange.put(message, 0)

    def pause_messages(self) -> None:
        """Stop receiving messages."""
        if not self._closed:
            self._exchange.reading.clear()

    def resume_messages(self) -> None:
        """Receive messages again; deliver those that were queued."""
        self._exchange.reading.set()
        self._deliver()

    # Called by `RoutesApp`.

    def arrived(self, message: str | bytes) -> None:
        """Queue a received message and deliver it unless paused."""
        self._received.append(message)
        self._deliver()

    def ended(self, code: int, reason: str) -> None:
        """Tell the owner that the connection has ended."""
        self._closed = True
        self.notify_closed(code, reason)

    def _deliver(self) -> None:
        while self._received and self._exchange.reading.is_set() and not self._closed:
            message = self._received.popleft()
            if self.on_message is not None:
                self.guard(self.on_message, message)
