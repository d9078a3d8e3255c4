# SPDX-License-Identifier: Apache-2.0
"""Opens WebSockets: `accept` turns the exchange of a GET request into a WebSocket, or rejects the handshake.

Called by the handler of an ordinary GET route, at once or later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import orjson
from websockets.datastructures import Headers
from websockets.extensions.permessage_deflate import ServerPerMessageDeflateFactory
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from headrace.core.errors import PermissionDenied, Unavailable
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, Fields, RequestHead, ResponseHead, check_field
from headrace.net.http1.exchange import Http1Exchange
from headrace.net.site import Site
from headrace.net.websocket.connection import WebSocketConnection
from headrace.net.websocket.contract import WebSocket

OnOpen = Callable[[WebSocket], None]


@runtime_checkable
class WebSocketExchange(Protocol):
    """An exchange whose connection belongs to another server, which handles the WebSocket protocol."""

    head: RequestHead

    def fail(self, error: BaseException) -> None:
        """Answer an error."""

    def open_websocket(self, on_open: OnOpen, subprotocols: Sequence[str], extra: Fields) -> WebSocket | None:
        """Accept the WebSocket; None if the client has disconnected."""


OriginCheck = Callable[[RequestHead], bool]

_REJECTION_HEADS = {status: ResponseHead(status, [(CONTENT_TYPE, JSON)]) for status in (400, 405, 426)}


def same_origin(head: RequestHead) -> bool:
    """Return whether the request comes from a page of this host, or from no browser: browsers always send an Origin."""
    origin = head.get(b"origin")
    return origin is None or origin.partition(b"://")[2].lower() == (head.get(b"host") or b"").lower()


def any_origin(_head: RequestHead) -> bool:
    """Allow pages of any host, for a WebSocket that trusts neither cookies nor the network."""
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

    Without `check_origin`, browsers may connect only from pages of the same host (`same_origin`): a browser lets any
    page open a WebSocket to any host, with the user's cookies.
    """
    if isinstance(exchange, WebSocketExchange):
        if not (check_origin or same_origin)(exchange.head):
            exchange.fail(PermissionDenied("pages of this Origin may not open this WebSocket"))
            return None
        return exchange.open_websocket(on_open, subprotocols, extra)
    if not isinstance(exchange, Http1Exchange):
        reject(exchange, HandshakeRejected(400, "a WebSocket needs HTTP/1.1 here: connect without HTTP/2"))
        return None
    head = exchange.head
    site = exchange.site
    try:
        frames, fields = negotiate(
            head, subprotocols=subprotocols, compression=compression, message_bytes=site.limits.message_bytes
        )
    except HandshakeRejected as rejection:
        reject(exchange, rejection)
        return None
    if not (check_origin or same_origin)(head):
        exchange.fail(PermissionDenied("pages of this Origin may not open this WebSocket"))
        return None
    if site.draining:
        exchange.fail(Unavailable("the server is shutting down: connect to another, or again later"))
        return None
    if exchange.closed:
        return None
    response = _switching_protocols(site, (*fields, *extra))
    connection = WebSocketConnection(site, frames, head, exchange.peer)
    transport, rest = exchange.take_over()
    if site.access_log is not None:
        site.access_log(connection.peer, head, 101)
    _start(connection, transport, response, rest, on_open)
    return connection


def reject(exchange: Exchange, rejection: HandshakeRejected) -> None:
    """Answer a request that is not a valid handshake."""
    fields = rejection.fields if exchange.head.version.startswith("1") else ()
    exchange.respond(_REJECTION_HEADS[rejection.status], orjson.dumps({"error": rejection.text}), fields)


def _start(
    connection: WebSocketConnection, transport: asyncio.Transport, response: bytes, rest: bytes, on_open: OnOpen
) -> None:
    transport.set_protocol(connection)
    connection.connection_made(transport)
    transport.write(response)
    connection.guard(on_open, connection)
    if rest:
        connection.data_received(rest)


def _switching_protocols(site: Site, fields: Fields) -> bytes:
    lines = [b"HTTP/1.1 101 Switching Protocols\r\n", site.date_line]
    for name, value in fields:
        check_field(name, value)
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join((*lines, b"\r\n"))


_HANDSHAKE_FIELDS = frozenset((b"connection", b"upgrade", b"origin"))

_UPGRADE: Fields = ((b"upgrade", b"websocket"), (b"connection", b"upgrade"))
_VERSION: Fields = ((b"sec-websocket-version", b"13"),)

_INVALID = (
    "the WebSocket handshake is not valid: it needs one Sec-WebSocket-Key of 16 bytes in base64, at most one Origin, "
    "and well-formed Sec-WebSocket-Protocol and Sec-WebSocket-Extensions fields"
)


class HandshakeRejected(Exception):
    """The request is not a valid opening handshake: the status, text and fields to answer."""

    def __init__(self, status: int, text: str, fields: Fields = ()) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.fields = fields


def is_websocket_upgrade(head: RequestHead) -> bool:
    """Return whether a request asks for a WebSocket, validly or not."""
    return head.version == "1.1" and (head.get(b"upgrade") or b"").strip().lower() == b"websocket"


def negotiate(
    head: RequestHead, *, subprotocols: Sequence[str] = (), compression: bool = True, message_bytes: int | None = None
) -> tuple[ServerProtocol, Fields]:
    """Return the frame parser and the fields of the 101 response; raise `HandshakeRejected`. Touches no socket."""
    if head.version != "1.1":
        raise HandshakeRejected(400, "a WebSocket needs HTTP/1.1 here: connect without HTTP/2 or HTTP/1.0")
    if head.method != b"GET":
        raise HandshakeRejected(405, "a WebSocket is opened by GET", ((b"allow", b"GET"),))
    version = head.get(b"sec-websocket-version")
    if is_websocket_upgrade(head) and version is not None and version.strip() != b"13":
        raise HandshakeRejected(426, "only version 13 of the WebSocket protocol is supported", (*_UPGRADE, *_VERSION))
    if (head.get(b"content-length") or b"0") != b"0" or head.get(b"transfer-encoding") is not None:
        raise HandshakeRejected(400, "a WebSocket handshake has no body")
    frames = ServerProtocol(
        # httptools has read the request already: the parser starts with frames.
        state=State.OPEN,
        extensions=[_deflate()] if compression else None,
        subprotocols=cast("Sequence[Subprotocol]", subprotocols),
        select_subprotocol=_select_subprotocol,
        max_size=message_bytes,
        logger=_WarningsOnly(logging.getLogger("headrace.wire.websocket"), {}),
    )
    response = frames.accept(_request(head))
    if response.status_code == 426:
        raise HandshakeRejected(426, "this is a WebSocket: connect with a WebSocket client", (*_UPGRADE, *_VERSION))
    if response.status_code != 101:
        raise HandshakeRejected(400, _INVALID)
    fields = [
        (name.lower().encode(), value.encode())
        for name, value in response.headers.raw_items()
        if name.lower() != "date"
    ]
    return frames, fields


def _request(head: RequestHead) -> Request:
    headers = Headers()
    for name, value in head.fields:
        if name in _HANDSHAKE_FIELDS or name.startswith(b"sec-websocket-"):
            headers[name.decode("latin-1")] = value.decode("latin-1")
    return Request(head.path.decode("latin-1"), headers)


def _select_subprotocol(frames: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    # RFC 6455 lets the client decide what to do without a common one; the package would answer 400.
    for subprotocol in frames.available_subprotocols or ():
        if subprotocol in offered:
            return subprotocol
    return None


def _deflate() -> ServerPerMessageDeflateFactory:
    # 4 KiB windows and little state, as the package recommends for servers (about 64 KiB less per connection than
    # zlib's defaults); level 1 because messages are compressed in the event loop's thread.
    return ServerPerMessageDeflateFactory(
        server_max_window_bits=12, client_max_window_bits=12, compress_settings={"level": 1, "memLevel": 5}
    )


class _WarningsOnly(logging.LoggerAdapter[logging.Logger]):
    """Keeps only the package's warnings and errors: it logs openings, and at DEBUG the content of messages."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802, the name is logging's
        return level >= logging.WARNING and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return msg, kwargs
