# SPDX-License-Identifier: Apache-2.0
"""What an application is told about a request: the ASGI scope, made from an exchange. Pure.

https://asgi.readthedocs.io/en/latest/specs/www.html
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from headrace.core.errors import InvalidArgument

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.heads import Field, RequestHead

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

SPEC_VERSION = "2.4"
"""The first version in which `send` raises OSError once the client has gone, instead of saying nothing."""


class ClientGone(OSError):
    """Raised by `send` when nobody is left to read."""


def lifespan_scope(state: dict[str, Any]) -> Scope:
    """The scope of the one call that starts and stops an application."""
    return {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": state}


def http_scope(exchange: Exchange, root_path: str, state: dict[str, Any] | None) -> Scope:
    """The scope of an ordinary request."""
    scope = _shared_scope(exchange, root_path, state)
    scope["type"] = "http"
    scope["method"] = exchange.head.method.decode("ascii", "replace").upper()
    scope["extensions"] = {}
    return scope


def websocket_scope(exchange: Exchange, root_path: str, state: dict[str, Any] | None) -> Scope:
    """The scope of a request that becomes a WebSocket."""
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
        # HTTP/2 names the host in a pseudo-header; applications look for it where HTTP/1.1 has it.
        fields.insert(0, (b"host", head.authority))
    return fields


def address_of(peer: str) -> tuple[str, int] | None:
    """Host and port of `Exchange.peer`; None where it is not an address (a UNIX socket)."""
    host, separator, port = peer.rpartition(":")
    if not separator or not port.isdecimal():
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)
