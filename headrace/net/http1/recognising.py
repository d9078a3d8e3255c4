# SPDX-License-Identifier: Apache-2.0
"""Requests whose head was seen before, letter for letter: taken without parsing.

Clients repeat themselves, and the same bytes mean the same request: one dictionary look-up replaces the parser. Owned by
`protocol`, which gives it the bytes that come between requests, unless they are the last request again; what it does not
know goes to `reader`, which says what a head turned out to mean. Why this is safe is in docs/decisions/0004.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.net.http.routes import KnownHead
from headrace.net.http1.exchange import Http1Exchange, made_exchange

if TYPE_CHECKING:
    from headrace.net.http1.protocol import Http1Protocol
    from headrace.net.http1.reader import RequestReader

_KNOWN_HEAD_BYTES = 4096
"""Heads up to this size are remembered."""


class Recogniser:
    """One per connection."""

    __slots__ = ("_connection", "_known", "_reader", "_routes", "_scheme", "_text")

    def __init__(self, connection: Http1Protocol, reader: RequestReader, scheme: bytes) -> None:
        self._connection = connection
        self._reader = reader
        self._scheme = scheme
        self._routes = connection.site.routes
        self._known = connection.site.routes.known_heads(scheme)
        self._text: bytes | None = None
        """The head that the reader is given now, and that may be remembered."""

    def feed(self, data: bytes) -> bytes:
        """Take the requests that are known; return what is left for the reader."""
        connection = self._connection
        size = len(data)
        start = 0
        while True:
            end = data.find(b"\r\n\r\n", start, start + _KNOWN_HEAD_BYTES) + 4
            text = data[start:end]
            known = self._known.get(text)
            if known is None:
                # Empty lines before a request are no part of its head, so only what begins with a method is kept.
                self._text = text if end > start + 4 and text[:1].isupper() else None
                return data[start:]
            stop = start + known.size
            exchange = made_exchange(connection, known.head, known.route, known.params)
            if stop > size:
                self._reader.await_body(exchange, stop - end, data[end:])
                return b""
            exchange.body = data[end:stop]
            if known.plain and known.size == size:
                connection.last, connection.last_size = known, size
            connection.request_complete(exchange)
            if stop == size or not connection.open:
                return b""
            start = stop

    def read(self, exchange: Http1Exchange, body_bytes: int) -> None:
        """The reader has understood a head: it is known from now on, if it was one that came by here."""
        text, self._text = self._text, None
        head, route = exchange.head, exchange.route
        plain = exchange.keep_alive and head.version == "1.1" and not route.streams_body
        if text is None or not plain or any(head.get(name) is not None for name in (b"transfer-encoding", b"expect")):
            return
        bare = route.raw or b"content-encoding" not in head.by_name
        known = KnownHead(text, len(text) + body_bytes, head, route, exchange.params, bare)
        self._routes.remember_head(self._scheme, known)

    def forget(self) -> None:
        """What the reader is given now is not to be remembered."""
        self._text = None
