# SPDX-License-Identifier: Apache-2.0
"""Turns an exchange into a WebSocket. Called by the handler of an ordinary GET route, now or later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import orjson

from headrace.core.errors import PermissionDenied, Unavailable
from headrace.net.http.heads import CONTENT_TYPE, JSON, Fields, RequestHead, ResponseHead, check_field
from headrace.net.http1.exchange import Http1Exchange
from headrace.net.websocket.connection import WebSocketConnection
from headrace.net.websocket.contract import WebSocket
from headrace.net.websocket.handshake import HandshakeRefused, negotiate

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange
    from headrace.net.site import Site

OnOpen = Callable[[WebSocket], None]


@runtime_checkable
class OpensWebSockets(Protocol):
    """An exchange whose connection is another server's: that one speaks the protocol."""

    head: RequestHead

    def fail(self, error: BaseException) -> None:
        """See `Exchange.fail`."""

    def open_websocket(self, on_open: OnOpen, subprotocols: Sequence[str], extra: Fields) -> WebSocket | None:
        """Accept it; None if the client has gone."""


OriginCheck = Callable[[RequestHead], bool]

_REFUSALS = {status: ResponseHead(status, [(CONTENT_TYPE, JSON)]) for status in (400, 405, 426)}


def same_origin(head: RequestHead) -> bool:
    """Whether the request comes from a page of this very host, or from no page: browsers always send an Origin."""
    origin = head.get(b"origin")
    return origin is None or origin.partition(b"://")[2].lower() == (head.get(b"host") or b"").lower()


def any_origin(_head: RequestHead) -> bool:
    """For a WebSocket that pages from anywhere may use, because it does not trust cookies or the network."""
    return True


def accept(
    exchange: Exchange,
    on_open: OnOpen,
    *,
    subprotocols: Sequence[str] = (),
    check_origin: OriginCheck | None = None,
    compression: bool = True,
    extra: Fields = (),
) -> WebSocket | None:
    """Answer 101 and call `on_open`, which sets the connection's callbacks; or answer an error and return None.

    Without `check_origin`, browsers may connect only from pages of the same host (`same_origin`): they ask no one
    before they open a WebSocket anywhere, with the user's cookies.
    """
    if isinstance(exchange, OpensWebSockets):
        if not (check_origin or same_origin)(exchange.head):
            exchange.fail(PermissionDenied("pages of this Origin may not open this WebSocket"))
            return None
        return exchange.open_websocket(on_open, subprotocols, extra)
    if not isinstance(exchange, Http1Exchange):
        refuse(exchange, HandshakeRefused(400, "a WebSocket needs HTTP/1.1 here: connect without HTTP/2"))
        return None
    head = exchange.head
    site = exchange.site
    try:
        frames, fields = negotiate(
            head, subprotocols=subprotocols, compression=compression, message_bytes=site.limits.message_bytes
        )
    except HandshakeRefused as refused:
        refuse(exchange, refused)
        return None
    if not (check_origin or same_origin)(head):
        exchange.fail(PermissionDenied("pages of this Origin may not open this WebSocket"))
        return None
    if site.draining:
        exchange.fail(Unavailable("the server is shutting down: connect to another, or again later"))
        return None
    if exchange.closed:
        return None
    response = _switching(site, (*fields, *extra))
    connection = WebSocketConnection(site, frames, head, exchange.peer)
    transport, rest = exchange.take_over()
    if site.access_log is not None:
        site.access_log(connection.peer, head, 101)
    _begin(connection, transport, response, rest, on_open)
    return connection


def refuse(exchange: Exchange, refused: HandshakeRefused) -> None:
    """Answer a request that is no valid handshake."""
    fields = refused.fields if exchange.head.version.startswith("1") else ()
    exchange.respond(_REFUSALS[refused.status], orjson.dumps({"error": refused.text}), fields)


def _begin(
    connection: WebSocketConnection, transport: asyncio.Transport, response: bytes, rest: bytes, on_open: OnOpen
) -> None:
    transport.set_protocol(connection)
    connection.connection_made(transport)
    transport.write(response)
    connection.guard(on_open, connection)
    if rest:
        connection.data_received(rest)


def _switching(site: Site, fields: Fields) -> bytes:
    lines = [b"HTTP/1.1 101 Switching Protocols\r\n", site.date_line]
    for name, value in fields:
        check_field(name, value)
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join((*lines, b"\r\n"))
