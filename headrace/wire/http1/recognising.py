# SPDX-License-Identifier: Apache-2.0
"""Requests whose head was seen before, letter for letter: taken without parsing.

Clients repeat themselves, and the same bytes mean the same request: one dictionary look-up replaces the parser. Owned by
`protocol`, which gives it the bytes that come between requests; what it does not know goes to `reader`, which says what a
head turned out to mean. Why this is safe is in docs/decisions/0004.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.wire.http.routes import KnownHead
from headrace.wire.http1.exchange import Http1Exchange

if TYPE_CHECKING:
    from headrace.wire.http1.protocol import Http1Protocol
    from headrace.wire.http1.reader import RequestReader

_KNOWN_HEAD_BYTES = 4096
"""Heads up to this size are remembered."""


class Recogniser:
    """One per connection."""

    __slots__ = ("_connection", "_known", "_last", "_last_size", "_last_text", "_reader", "_routes", "_scheme", "_text")

    def __init__(self, connection: Http1Protocol, reader: RequestReader, scheme: bytes) -> None:
        self._connection = connection
        self._reader = reader
        self._scheme = scheme
        self._routes = connection.site.routes
        self._known = connection.site.routes.known_heads(scheme)
        self._text: bytes | None = None
        """The head that the reader is given now, and that may be remembered."""
        self._last: KnownHead
        self._last_text = b""
        self._last_size = -1
        """The last request that was known: its head as it came, and its length with the body."""

    def feed(self, data: bytes) -> bytes:
        """Take the requests that are known; return what is left for the reader."""
        connection = self._connection
        size = len(data)
        if size == self._last_size and data.startswith(self._last_text):
            # The same again on the same connection: not even looked up.
            last = self._last
            exchange = Http1Exchange(connection, last.head, last.route, True)
            if last.params:
                exchange.params = last.params
            exchange.body = data[len(self._last_text) :]
            if last.plain:
                connection.request_plain(exchange, last.route.handler)
            else:
                connection.request_complete(exchange)
            return b""
        start = 0
        while True:
            end = data.find(b"\r\n\r\n", start, start + _KNOWN_HEAD_BYTES) + 4
            text = data[start:end]
            known = self._known.get(text)
            if known is None:
                # Empty lines before a request are no part of its head, so only what begins with a method is kept.
                self._text = text if end > start + 4 and text[:1].isupper() else None
                return data[start:]
            exchange = Http1Exchange(connection, known.head, known.route, True)
            if known.params:
                exchange.params = known.params
            stop = end + known.body_bytes
            if stop > size:
                self._reader.await_body(exchange, known.body_bytes, data[end:])
                return b""
            exchange.body = data[end:stop]
            if not start:
                self._last, self._last_text, self._last_size = known, text, stop
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
        self._routes.remember_head(self._scheme, text, KnownHead(head, route, exchange.params, body_bytes, bare))

    def forget(self) -> None:
        """What the reader is given now is not to be remembered."""
        self._text = None
