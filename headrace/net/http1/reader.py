# SPDX-License-Identifier: Apache-2.0
"""Reads HTTP/1.1 requests: turns received bytes into exchanges with a head and a body.

Owned by `connection.Http1Connection`. httptools (llhttp in strict mode) parses and rejects request smuggling; this module
adds the limits, assembles bodies, and lets the kernel write a large body straight into its own memory. `HeadCache` skips
the parser for heads it has seen before. Nothing here writes to the socket.
"""

from __future__ import annotations

from typing import Any, Protocol

import httptools

from headrace.core.buffers import uninitialised
from headrace.net.http.coding import body_too_large
from headrace.net.http.heads import Field, RequestHead, is_valid_host
from headrace.net.http.routes import KnownHead
from headrace.net.http1.exchange import ExchangeConnection, Http1Exchange, new_exchange
from headrace.net.site import HOLD_STEP_BYTES

_DIRECT_BODY_BYTES = 64 * 1024
"""A body with a longer Content-Length is read by the kernel into its own memory; a shorter one is cheaper to copy."""


class Phase:
    """Which part of a request is being read."""

    BETWEEN = 0
    HEAD = 1
    BODY = 2


class RequestRejected(Exception):
    """The request cannot be served and the connection must close: an HTTP status and an error text for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


_BAD_HOST = "the Host must be a name or an address, with an optional port: example.com, 10.0.0.1:8000 or [::1]:8000"


class RequestSink(ExchangeConnection, Protocol):
    """The connection as its reader sees it: where complete requests go."""

    open: bool
    """Whether more requests may be read."""
    last: KnownHead
    last_size: int

    def request_begun(self, exchange: Http1Exchange) -> None:
        """Handle a request whose head is complete and whose body is streamed."""

    def request_complete(self, exchange: Http1Exchange) -> None:
        """Handle a complete request."""

    def continue_expected(self, exchange: Http1Exchange) -> None:
        """Send 100 Continue when it is this request's turn."""

    def stop_reading(self) -> None:
        """Read nothing more as HTTP."""

    def hold(self, size: int) -> None:
        """Count `size` bytes of a body of which the rest has not arrived."""


class RequestReader:
    """Reads the requests of one connection. Methods named `on_*` are called by httptools."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_content_length",
        "_fields",
        "_filled",
        "_head_bytes",
        "_held",
        "_limits",
        "_parser",
        "_pieces",
        "_received",
        "_reported",
        "_routes",
        "_scheme",
        "_site",
        "_streams",
        "_target",
        "_unreported_bytes",
        "_upgrading",
        "direct",
        "exchange",
        "head_cache",
        "phase",
        "since",
    )

    def __init__(self, connection: RequestSink, scheme: bytes) -> None:
        self._connection = connection
        self._site = connection.site
        self._limits = connection.site.limits
        self._routes = connection.site.routes
        self._scheme = scheme
        self.head_cache = HeadCache(connection, self, scheme)
        self._parser: Any = httptools.HttpRequestParser(self)
        self.phase = Phase.BETWEEN
        self.since = 0.0
        """When the current phase began, by the site's coarse clock."""
        self._target = b""
        self._fields: list[Field] = []
        self._head_bytes = 0
        self._reported = False
        self._held = 0
        """Bytes of the body that is being read, as last counted by the connection."""
        self._unreported_bytes = 0
        self.exchange: Http1Exchange | None = None
        """The request whose body is being read."""
        self._streams = False
        self._upgrading = False
        self._content_length = 0
        self._received = 0
        self._chunks = 0
        self._pieces: list[bytes] = []
        self.direct: memoryview | None = None
        """Memory of a large body that is being received: the kernel writes into it."""
        self._filled = 0

    # Called by the connection.

    def feed(self, received: bytes) -> None:
        """Parse received bytes, at least one; raise `RequestRejected` if the connection must close."""
        data = memoryview(received)
        while data:
            self._reported = False
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = self._after_upgrade(data[stopped.args[0] :])
                continue
            except httptools.HttpParserCallbackError as failure:
                cause = failure.__context__
                if isinstance(cause, RequestRejected):
                    raise cause from None
                raise
            except httptools.HttpParserError as failure:
                raise RequestRejected(400, f"the request is not HTTP/1.1: {failure}") from None
            if not self._reported:
                # llhttp reports no unfinished field, chunk extension or empty line: count what it swallows.
                self._unreported_bytes += len(data)
                if self._unreported_bytes > self._limits.header_bytes:
                    raise self._head_too_large() if self.phase != Phase.BODY else self._chunks_too_large()
            return

    def stop(self) -> None:
        """Read nothing more: release what was half read, and the parser, which refers back to this object."""
        self.exchange = None
        self.phase = Phase.BETWEEN
        self.direct = None
        self._pieces = []
        self._fields = []
        self._parser = None
        self._hold(0)

    def direct_rest(self, direct: memoryview) -> memoryview:
        """Return the memory for the rest of a large body."""
        return direct[self._filled :]

    def direct_filled(self, size: int) -> bool:
        """Count `size` bytes written into `direct_rest`; return whether the body is complete."""
        self._filled += size
        self.since = self._site.now
        if self._filled == self._content_length:
            return True
        self._hold(self._filled)
        return False

    def direct_complete(self) -> None:
        """Complete a request with a large body."""
        # llhttp still waits for the body, which it never gets: the next request needs a new parser.
        self._parser = httptools.HttpRequestParser(self)
        self._complete_direct()

    def await_body(self, exchange: Http1Exchange, size: int, begun: bytes) -> None:
        """Read the rest of a body whose head came from the cache."""
        self.exchange = exchange
        self._streams = False
        self.phase = Phase.BODY
        self.since = self._site.now
        self._content_length = size
        self._filled = len(begun)
        self.direct = uninitialised(size)
        self.direct[: self._filled] = begun

    # Called by httptools.

    def on_message_begin(self) -> None:
        """Start a request."""
        if not self._connection.open:
            # The connection closes after the previous response: what follows in the same packet is not read.
            raise RequestRejected(400, "nothing may follow a request that closes the connection")
        self.phase = Phase.HEAD
        self.since = self._site.now
        self._target = b""
        self._fields = []
        self._head_bytes = 0
        self._mark_reported()

    def on_url(self, url: bytes) -> None:
        """Collect a piece of the request target."""
        self._target += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header field; count and ignore a trailer field."""
        if self.phase == Phase.HEAD:
            self._head_bytes += len(name) + len(value)
            self._fields.append((name.lower(), value.rstrip()))
        else:
            self._count_trailer(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """Find the route of a complete head and prepare for the body."""
        fields = self._fields
        limits = self._limits
        if len(fields) > limits.header_count or self._head_bytes > limits.header_bytes:
            raise self._head_too_large()
        if self._parser.should_upgrade():
            self._upgrading = True  # and llhttp stops: `_after_upgrade` goes on
            return
        exchange = self._new_exchange(self._parser.should_keep_alive())
        self._prepare_body(exchange)
        self.head_cache.remember(exchange, self._content_length)

    def on_body(self, data: bytes) -> None:
        """Collect a piece of the body, already de-chunked."""
        self.since = self._site.now
        self._reported = True
        if self._streams:
            if self.exchange is not None:
                self.exchange.body_arrived(data)
        elif self.direct is not None:
            end = self._filled + len(data)
            self.direct[self._filled : end] = data
            self._filled = end
            self._hold(end)
        else:
            self._received += len(data)
            if self._received > self._limits.body_bytes:
                raise self._body_too_large()
            self._pieces.append(data)
            self._hold(self._received)

    def on_chunk_header(self) -> None:
        """Count a chunk."""
        self._chunks += 1
        self._mark_reported()
        if self._chunks > self._limits.chunk_count:
            raise RequestRejected(413, f"more than {self._limits.chunk_count} chunks in one body: send larger chunks")

    def on_message_complete(self) -> None:
        """Complete the request."""
        if self._upgrading:
            return
        if self.direct is not None:
            self._complete_direct()
            return
        pieces = self._pieces
        if pieces:
            self._pieces = []
            self._complete(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        else:
            self._complete(b"")

    # Internal.

    def _hold(self, size: int) -> None:
        """Count the bytes of the body that is being read, in steps."""
        if size - self._held >= HOLD_STEP_BYTES or (self._held and not size):
            self._held = size
            self._connection.hold(size)

    def _mark_reported(self) -> None:
        self._reported = True
        self._unreported_bytes = 0

    def _new_exchange(self, keep_alive: bool) -> Http1Exchange:
        """Make the exchange of the head that llhttp has just parsed."""
        parser = self._parser
        target = self._target
        if target[:1] != b"/":
            target = self._origin_form(target)
        version = parser.get_http_version()
        head = RequestHead(parser.get_method(), target, self._fields, version=version, scheme=self._scheme)
        if version == "1.1":
            self._check_host(head)
        elif version != "1.0":
            raise RequestRejected(505, f"HTTP/{version} is not supported: use HTTP/1.1")
        route, params = self._routes.find(head.method, head.path)
        self.exchange = exchange = new_exchange(self._connection, head, route, params)
        exchange.keep_alive = keep_alive
        return exchange

    def _prepare_body(self, exchange: Http1Exchange) -> None:
        get = exchange.head.by_name.get
        field = get(b"content-length")
        self._content_length = length = int(field) if field else 0
        self._received = self._chunks = self._head_bytes = 0
        self._streams = False
        self._mark_reported()
        coding = get(b"transfer-encoding")
        if coding is not None:
            self._check_coding(exchange.head)
        elif length == 0:
            exchange.ends_early = True
            return
        route = exchange.route
        if route.longer is not None and (coding is not None or length > route.whole_bytes):
            exchange.route = route.longer
        self.phase = Phase.BODY
        self.since = self._site.now
        expect = get(b"expect") if exchange.head.version == "1.1" else None
        if expect is not None and expect.lower() != b"100-continue":
            raise RequestRejected(417, "only 'Expect: 100-continue' is supported")
        if exchange.route.streams_body:
            self._streams = True
            exchange.expects_continue = expect is not None
            exchange.body_started()
            self._connection.request_begun(exchange)
            return
        if length > self._limits.body_bytes:
            raise self._body_too_large()
        if length > _DIRECT_BODY_BYTES:
            self.direct = uninitialised(length)
            self._filled = 0
        if expect is not None:
            self._connection.continue_expected(exchange)

    def _complete_direct(self) -> None:
        body = self.direct
        self.direct = None
        self._complete(b"" if body is None else body)

    def _complete(self, body: bytes | memoryview) -> None:
        exchange = self.exchange
        self.exchange = None
        self.phase = Phase.BETWEEN
        self.since = self._site.now
        self._mark_reported()
        if self._held:
            self._hold(0)
        if exchange is None:
            return
        if self._streams:
            self._streams = False
            exchange.body_ended()
        else:
            exchange.body = body
            self._connection.request_complete(exchange)

    def _after_upgrade(self, rest: memoryview) -> memoryview:
        """Handle a head that asks for an upgrade: the parser has stopped after it."""
        self._upgrading = False
        self.head_cache.skip()
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise RequestRejected(501, "CONNECT is not served: this is not a proxy")
        fields = dict(self._fields)
        bodiless = fields.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in fields
        if bodiless and fields.get(b"upgrade", b"").lower() == b"websocket":
            exchange = self._new_exchange(False)
            exchange.ends_early = True
            # What follows may be frames already: nothing more is read as HTTP, even if the handler does not upgrade.
            exchange.leftover = bytes(rest)
            self._complete(b"")
            self._connection.stop_reading()
            return rest[:0]
        if b"transfer-encoding" in fields:
            raise RequestRejected(400, "a request that asks for an upgrade must not have a chunked body")
        # No other upgrade is offered (most ask for h2c): parse the same head again without the Upgrade field.
        lines = [b"%b %b HTTP/%b\r\n" % (method, self._target, self._parser.get_http_version().encode())]
        lines += [b"%b: %b\r\n" % field for field in self._fields if field[0] != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        return memoryview(b"".join((*lines, b"\r\n", rest)))

    def _check_host(self, head: RequestHead) -> None:
        hosts = [value for name, value in head.fields if name == b"host"]
        if len(hosts) != 1:
            raise RequestRejected(400, "an HTTP/1.1 request needs exactly one Host header")
        if not is_valid_host(hosts[0]):
            raise RequestRejected(400, _BAD_HOST)

    def _origin_form(self, target: bytes) -> bytes:
        """Return path and query of an absolute-form target, whose host replaces the Host field (RFC 9112, 3.2.2)."""
        scheme, separator, rest = target.partition(b"://")
        if not separator or scheme.lower() not in (b"http", b"https"):
            return target  # `*`, or a path that no route has
        before, mark, query = rest.partition(b"?")
        authority, slash, path = before.partition(b"/")
        authority = authority.rpartition(b"@")[2]  # without a user's name
        if not authority or not is_valid_host(authority):
            raise RequestRejected(400, _BAD_HOST)
        if self._parser.get_http_version() != "1.0":
            self._fields = [(name, authority if name == b"host" else value) for name, value in self._fields]
        return (b"/" + path if slash else b"/") + mark + query

    def _check_coding(self, head: RequestHead) -> None:
        # llhttp accepts codings that it does not decode ("gzip, chunked"), and HTTP/1.0, which has no chunks.
        codings = [value.lower() for name, value in head.fields if name == b"transfer-encoding"]
        if codings != [b"chunked"] or head.version != "1.1":
            raise RequestRejected(501, "only 'Transfer-Encoding: chunked' is supported, and only in HTTP/1.1")

    def _count_trailer(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.header_bytes:
            raise self._chunks_too_large()

    def _head_too_large(self) -> RequestRejected:
        limits = self._limits
        return RequestRejected(431, f"the header is over {limits.header_bytes} bytes or {limits.header_count} fields")

    def _chunks_too_large(self) -> RequestRejected:
        return RequestRejected(
            431, f"the extensions of a chunk, or the trailers, are over {self._limits.header_bytes} bytes"
        )

    def _body_too_large(self) -> RequestRejected:
        return RequestRejected(413, body_too_large(self._limits.body_bytes))


_KNOWN_HEAD_BYTES = 4096
"""Heads up to this size are remembered."""


class HeadCache:
    """Takes requests whose head was seen before, byte for byte, without parsing. One per connection.

    Clients repeat themselves, and the same bytes mean the same request: one dictionary look-up replaces the parser. The
    connection gives it the bytes between requests; the reader adds the heads it parsed. Why this is safe:
    docs/decisions/0004.
    """

    __slots__ = ("_connection", "_known", "_reader", "_routes", "_scheme", "_text")

    def __init__(self, connection: RequestSink, reader: RequestReader, scheme: bytes) -> None:
        self._connection = connection
        self._reader = reader
        self._scheme = scheme
        self._routes = connection.site.routes
        self._known = connection.site.routes.known_heads(scheme)
        self._text: bytes | None = None
        """The head that the reader parses now, if it may be remembered."""

    def feed(self, data: bytes) -> bytes:
        """Complete the requests whose heads are known; return the remaining bytes for the reader."""
        connection = self._connection
        size = len(data)
        start = 0
        while True:
            end = data.find(b"\r\n\r\n", start, start + _KNOWN_HEAD_BYTES) + 4
            text = data[start:end]
            known = self._known.get(text)
            if known is None:
                # Empty lines before a request are not part of its head: only text that begins with a method is kept.
                self._text = text if end > start + 4 and text[:1].isupper() else None
                return data[start:]
            stop = start + known.size
            exchange = new_exchange(connection, known.head, known.route, known.params)
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

    def remember(self, exchange: Http1Exchange, body_bytes: int) -> None:
        """Remember a head that the reader has parsed, if `feed` passed it on and it is a simple one."""
        text, self._text = self._text, None
        head, route = exchange.head, exchange.route
        plain = exchange.keep_alive and head.version == "1.1" and not route.streams_body
        if text is None or not plain or any(head.get(name) is not None for name in (b"transfer-encoding", b"expect")):
            return
        bare = route.raw or b"content-encoding" not in head.by_name
        known = KnownHead(text, len(text) + body_bytes, head, route, exchange.params, bare)
        self._routes.remember_head(self._scheme, known)

    def skip(self) -> None:
        """Do not remember the head that the reader parses now."""
        self._text = None
