# SPDX-License-Identifier: Apache-2.0
"""Keeps web pages from changing a server that needs no API key: whoever merely visits a page must not load a model by it.

A browser sends what a page asks for to any address that its machine reaches, loopback too, and says from which page in
`Origin`. `OwnPagesRoutes` stands in for `Routes` below the guards of `guarded` and looks at that before whatever can change
something. Programs send no `Origin` and are not asked. A page that had its own name resolved to this machine (DNS rebinding)
is of the same host, so the host must be one that nobody elsewhere can have: an address, `localhost`, a name without a dot,
or this machine's own. With TLS any name will do, since the browser has seen our certificate for it.
"""

from __future__ import annotations

import ipaddress
import socket

from headrace.core.errors import PermissionDenied
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import RequestHead
from headrace.net.http.routes import Routes
from headrace.net.websocket.accept import same_origin
from headrace.programs.serve.guarded_scopes import http_scope

_OTHER_PAGE = "pages of this Origin may not change this server: use its own page, a program, or --api-keys-file"
_READING = ("GET", "HEAD", "OPTIONS")


def may_change(head: RequestHead) -> bool:
    """Whether a request that needs no key may change something: it is of a program, or of a page of this very server."""
    if head.get(b"origin") is None:
        return True
    return same_origin(head) and (head.scheme == b"https" or _is_ours(head.get(b"host") or b""))


def _is_ours(host: bytes) -> bool:
    """Whether a Host can be nobody's but this machine's, or its network's."""
    text = host.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0].rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return ("." not in name and name != "") or name.endswith(".localhost") or name == socket.gethostname().lower()
    return True


class OwnPagesRoutes(Routes):
    """Routes of which those that change something are closed to pages of others, unless they need a key anyway."""

    def add(self, method: str, path: str, handler: Handler, *, streams_body: bool = False) -> None:
        """See `Routes.add`."""
        if method not in _READING and http_scope(method, path) == "admin" and not self.needs_keys():
            handler = _closed(handler)
        super().add(method, path, handler, streams_body=streams_body)

    def needs_keys(self) -> bool:
        """Whether every such request needs an API key, which a page of others does not have."""
        return False


def _closed(handler: Handler) -> Handler:
    def checked(exchange: Exchange) -> None:
        if not may_change(exchange.head):
            raise PermissionDenied(_OTHER_PAGE)
        handler(exchange)

    return checked
