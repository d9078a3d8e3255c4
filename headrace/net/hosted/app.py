# SPDX-License-Identifier: Apache-2.0
"""The ASGI application itself: finds the route of a request, calls its handler, and sends what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote_from_bytes

from headrace.core.errors import TooLarge, Unimplemented
from headrace.core.limits import Limits
from headrace.net.hosted.exchange import HostedExchange
from headrace.net.http.coding import inflate
from headrace.net.http.heads import RequestHead
from headrace.net.http.routes import Route, Routes
from headrace.net.websocket import closing

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class HostedRoutes:
    """`await HostedRoutes(routes, limits)(scope, receive, send)` for scopes of HTTP and WebSocket."""

    def __init__(self, routes: Routes, limits: Limits) -> None:
        self._routes = routes
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hold one WebSocket until it is closed."""
        head = _head(scope)
        route, params = self._routes.find(head.method, head.path)
        client = scope.get("client")
        exchange = HostedExchange(head, f"{client[0]}:{client[1]}" if client else "", params)
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
            await self._hold(exchange, route, receive, send)
        else:
            await self._answer(exchange, route, receive, send)

    async def _answer(self, exchange: HostedExchange, route: Route, receive: Receive, send: Send) -> None:
        if not route.streams_body:
            try:
                body = await self._whole(exchange.head, receive)
            except TooLarge as error:
                exchange.fail(error)
                await _flush(exchange, send)
                return
            if body is None:
                return
            exchange.body = body
        exchange.guard(self._handle, exchange, route)
        if exchange.finished:
            # Answered at once: no one need watch for the client.
            await _flush(exchange, send)
            return
        listening = asyncio.ensure_future(_listen(exchange, route, receive))
        try:
            await _send_all(exchange, send)
        finally:
            listening.cancel()

    def _handle(self, exchange: HostedExchange, route: Route) -> None:
        encoding = exchange.head.get(b"content-encoding")
        if encoding is not None and not route.streams_body and not route.raw:
            exchange.body = inflate(encoding, exchange.body, self._limits.body_bytes)
        route.handler(exchange)

    async def _whole(self, head: RequestHead, receive: Receive) -> bytes | None:
        """The body; None if the client has gone before it was there."""
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

    async def _hold(self, exchange: HostedExchange, route: Route, receive: Receive, send: Send) -> None:
        exchange.guard(route.handler, exchange)
        if exchange.websocket is None:
            await _refuse(exchange, send)
            return
        listening = asyncio.ensure_future(_listen_to_socket(exchange, receive, self._limits))
        try:
            await _send_all(exchange, send)
        finally:
            listening.cancel()


async def _send_all(exchange: HostedExchange, send: Send) -> None:
    """Send until the end."""
    while True:
        await exchange.changed.wait()
        exchange.changed.clear()
        await _flush(exchange, send)
        if exchange.closed and not exchange.outgoing:
            return


async def _flush(exchange: HostedExchange, send: Send) -> None:
    while exchange.outgoing:
        message = exchange.outgoing.popleft()
        try:
            await send(message)
        except Exception:  # hosts differ in what they raise when the client has gone
            exchange.outgoing.clear()
            exchange.disconnected()
            if exchange.websocket is not None:
                exchange.websocket.ended(closing.ABNORMAL, "")
            return
        if message["type"] == "websocket.close":
            exchange.outgoing.clear()
            exchange.gone = True
            if exchange.websocket is not None:
                exchange.websocket.ended(message["code"], message["reason"])
    exchange.sent()


async def _listen(exchange: HostedExchange, route: Route, receive: Receive) -> None:
    """Hand a streamed body on, then wait for the client to leave."""
    more = route.streams_body
    while True:
        await exchange.flowing.wait()
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


async def _listen_to_socket(exchange: HostedExchange, receive: Receive, limits: Limits) -> None:
    socket = exchange.websocket
    while socket is not None:
        await exchange.flowing.wait()
        message = await receive()
        if message["type"] == "websocket.disconnect":
            exchange.gone = True
            socket.ended(message.get("code", closing.ABNORMAL), message.get("reason") or "")
            exchange.changed.set()
            return
        data = message.get("text")
        if data is None:
            data = message.get("bytes") or b""
        if len(data) > limits.message_bytes:
            socket.close(closing.TOO_BIG, f"a message may have {limits.message_bytes} bytes")
        else:
            socket.arrived(data)


async def _refuse(exchange: HostedExchange, send: Send) -> None:
    """A handler answered a handshake with an HTTP response: hosts have a word for it, or close with 403."""
    if not exchange.finished:
        exchange.fail(Unimplemented("this path is no WebSocket"))
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
