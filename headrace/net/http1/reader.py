# SPDX-License-Identifier: Apache-2.0
"""Turns the bytes of an HTTP/1.1 connection into exchanges with a head and a body.

Owned by `protocol.Http1Protocol`, which feeds it and is told of each request. httptools (llhttp in its strict mode)
does the parsing and refuses smuggling shapes; this module adds the limits, assembles bodies, and lets the kernel write
a large body straight into its own memory. It never writes to the socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httptools

from headrace.core.buffers import uninitialised
from headrace.net.http.heads import Field, RequestHead
from headrace.net.http1.exchange import Http1Exchange, made_exchange
from headrace.net.http1.recognising import Recogniser

if TYPE_CHECKING:
    from headrace.net.http1.protocol import Http1Protocol

_DIRECT_BODY_BYTES = 64 * 1024
"""A body with a longer Content-Length is read by the kernel into its own memory; a shorter one is cheaper to copy."""


class Phase:
    """Where in a request the reader stands."""

    BETWEEN = 0
    HEAD = 1
    BODY = 2


class Refusal(Exception):
    """The request cannot be served and the connection cannot go on: an HTTP status and a text for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class RequestReader:
    """One per connection. Methods named `on_*` are called by httptools."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_digested",
        "_fields",
        "_filled",
        "_head_bytes",
        "_limits",
        "_parser",
        "_pieces",
        "_received",
        "_routes",
        "_scheme",
        "_site",
        "_streams",
        "_target",
        "_undigested",
        "_upgrading",
        "_want",
        "direct",
        "exchange",
        "phase",
        "recogniser",
        "since",
    )

    def __init__(self, connection: Http1Protocol, scheme: bytes) -> None:
        self._connection = connection
        self._site = connection.site
        self._limits = connection.site.limits
        self._routes = connection.site.routes
        self._scheme = scheme
        self.recogniser = Recogniser(connection, self, scheme)
        self._parser: Any = httptools.HttpRequestParser(self)
        self.phase = Phase.BETWEEN
        self.since = 0.0
        """When the present phase began, by the site's coarse clock."""
        self._target = b""
        self._fields: list[Field] = []
        self._head_bytes = 0
        self._digested = False
        self._undigested = 0
        self.exchange: Http1Exchange | None = None
        """The request whose body is being read."""
        self._streams = False
        self._upgrading = False
        self._want = 0
        self._received = 0
        self._chunks = 0
        self._pieces: list[bytes] = []
        self.direct: memoryview | None = None
        """A large body on its way: the kernel writes into it."""
        self._filled = 0

    # Fed by the connection.

    def feed(self, received: bytes) -> None:
        """Parse received bytes, at least one; raises `Refusal` when the connection cannot go on."""
        data = memoryview(received)
        while data:
            self._digested = False
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = self._after_upgrade(data[stopped.args[0] :])
                continue
            except httptools.HttpParserCallbackError as failure:
                cause = failure.__context__
                if isinstance(cause, Refusal):
                    raise cause from None
                raise
            except httptools.HttpParserError as failure:
                raise Refusal(400, f"the request is not HTTP/1.1: {failure}") from None
            if not self._digested:
                # llhttp keeps an unfinished field, a chunk extension or empty lines to itself: count what it swallows.
                self._undigested += len(data)
                if self._undigested > self._limits.header_bytes:
                    raise self._head_too_large() if self.phase != Phase.BODY else self._chunks_too_large()
            return

    def give_up(self) -> None:
        """Nothing more will be read: let go of what was half read, and of the parser, which refers back to this."""
        self.exchange = None
        self.phase = Phase.BETWEEN
        self.direct = None
        self._pieces = []
        self._fields = []
        self._parser = None

    def direct_rest(self, direct: memoryview) -> memoryview:
        """Where the kernel should write the rest of a large body, and nothing after it."""
        return direct[self._filled :]

    def direct_filled(self, size: int) -> bool:
        """`size` bytes were written into `direct_rest`; whether that is all of the body."""
        self._filled += size
        self.since = self._site.now
        return self._filled == self._want

    def direct_complete(self) -> None:
        """Hand the large body over."""
        # llhttp still waits for a body it will never see: the next request gets a new parser.
        self._parser = httptools.HttpRequestParser(self)
        self._complete_direct()

    def await_body(self, exchange: Http1Exchange, size: int, begun: bytes) -> None:
        """The head of a request is known, and its body has begun: read the rest of it."""
        self.exchange = exchange
        self._streams = False
        self.phase = Phase.BODY
        self.since = self._site.now
        self._want = size
        self._filled = len(begun)
        self.direct = uninitialised(size)
        self.direct[: self._filled] = begun

    # Called by httptools.

    def on_message_begin(self) -> None:
        """A request line begins."""
        if not self._connection.open:
            # The answer before was the last one of the connection: what follows in the same packet is not read.
            raise Refusal(400, "nothing may follow a request that closes the connection")
        self.phase = Phase.HEAD
        self.since = self._site.now
        self._target = b""
        self._fields = []
        self._head_bytes = 0
        self._digest()

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        self._target += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field (or trailer field, which nobody here reads)."""
        if self.phase == Phase.HEAD:
            self._head_bytes += len(name) + len(value)
            self._fields.append((name.lower(), value.rstrip()))
        else:
            self._count_trailer(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """The head is whole: find its route and prepare for its body."""
        fields = self._fields
        limits = self._limits
        if len(fields) > limits.header_count or self._head_bytes > limits.header_bytes:
            raise self._head_too_large()
        if self._parser.should_upgrade():
            self._upgrading = True  # and llhttp stops: `_after_upgrade` goes on
            return
        exchange = self._new_exchange(self._parser.should_keep_alive())
        self._prepare_body(exchange)
        self.recogniser.read(exchange, self._want)

    def on_body(self, data: bytes) -> None:
        """A piece of the body, de-chunked."""
        self.since = self._site.now
        self._digested = True
        if self._streams:
            if self.exchange is not None:
                self.exchange.body_arrived(data)
        elif self.direct is not None:
            end = self._filled + len(data)
            self.direct[self._filled : end] = data
            self._filled = end
        else:
            self._received += len(data)
            if self._received > self._limits.body_bytes:
                raise self._body_too_large()
            self._pieces.append(data)

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._chunks += 1
        self._digest()
        if self._chunks > self._limits.chunk_count:
            raise Refusal(413, f"more than {self._limits.chunk_count} chunks in one body: send larger chunks")

    def on_message_complete(self) -> None:
        """The request is whole."""
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

    # Inside.

    def _digest(self) -> None:
        self._digested = True
        self._undigested = 0

    def _new_exchange(self, keep_alive: bool) -> Http1Exchange:
        """The request whose head llhttp has just read."""
        parser = self._parser
        target = self._target
        if target[:1] != b"/":
            target = _origin_form(target)
        version = parser.get_http_version()
        head = RequestHead(parser.get_method(), target, self._fields, version=version, scheme=self._scheme)
        if version == "1.1":
            self._check_host(head)
        elif version != "1.0":
            raise Refusal(505, f"HTTP/{version} is not spoken here: use HTTP/1.1")
        route, params = self._routes.find(head.method, head.path)
        self.exchange = exchange = made_exchange(self._connection, head, route, params)
        exchange.keep_alive = keep_alive
        return exchange

    def _prepare_body(self, exchange: Http1Exchange) -> None:
        get = exchange.head.by_name.get
        length = get(b"content-length")
        self._want = want = int(length) if length else 0
        self._received = self._chunks = self._head_bytes = 0
        self._streams = False
        self._digest()
        coding = get(b"transfer-encoding")
        if coding is not None:
            self._check_coding(exchange.head)
        elif want == 0:
            exchange.ends_early = True
            return
        route = exchange.route
        if route.longer is not None and (coding is not None or want > route.whole_bytes):
            exchange.route = route.longer
        self.phase = Phase.BODY
        self.since = self._site.now
        expect = get(b"expect") if exchange.head.version == "1.1" else None
        if expect is not None and expect.lower() != b"100-continue":
            raise Refusal(417, "only 'Expect: 100-continue' is understood")
        if exchange.route.streams_body:
            self._streams = True
            exchange.wants_leave = expect is not None
            exchange.body_begins()
            self._connection.request_begun(exchange)
            return
        if want > self._limits.body_bytes:
            raise self._body_too_large()
        if want > _DIRECT_BODY_BYTES:
            self.direct = uninitialised(want)
            self._filled = 0
        if expect is not None:
            self._connection.leave_wanted(exchange)

    def _complete_direct(self) -> None:
        body = self.direct
        self.direct = None
        self._complete(b"" if body is None else body)

    def _complete(self, body: bytes | memoryview) -> None:
        exchange = self.exchange
        self.exchange = None
        self.phase = Phase.BETWEEN
        self.since = self._site.now
        self._digest()
        if exchange is None:
            return
        if self._streams:
            self._streams = False
            exchange.body_ended()
        else:
            exchange.body = body
            self._connection.request_complete(exchange)

    def _after_upgrade(self, rest: memoryview) -> memoryview:
        """The parser stopped after a head that asks for an upgrade; go on as the request deserves."""
        self._upgrading = False
        self.recogniser.forget()
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise Refusal(501, "CONNECT is not served: this is not a proxy")
        fields = dict(self._fields)
        bodiless = fields.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in fields
        if bodiless and fields.get(b"upgrade", b"").lower() == b"websocket":
            exchange = self._new_exchange(False)
            exchange.ends_early = True
            # What follows may be frames already: nothing is read as HTTP, whether the handler takes over or answers.
            exchange.leftover = bytes(rest)
            self._complete(b"")
            self._connection.stop_reading()
            return rest[:0]
        if b"transfer-encoding" in fields:
            raise Refusal(400, "a request that asks for an upgrade must not have a chunked body")
        # Nobody here offers another upgrade (h2c, mostly): read the same head again as if it had not asked.
        lines = [b"%b %b HTTP/%b\r\n" % (method, self._target, self._parser.get_http_version().encode())]
        lines += [b"%b: %b\r\n" % field for field in self._fields if field[0] != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        return memoryview(b"".join((*lines, b"\r\n", rest)))

    def _check_host(self, head: RequestHead) -> None:
        count = 0
        for name, _ in head.fields:
            if name == b"host":
                count += 1
        if count != 1:
            raise Refusal(400, "an HTTP/1.1 request needs exactly one Host header")

    def _check_coding(self, head: RequestHead) -> None:
        # llhttp lets through codings that it does not undo ("gzip, chunked"), and HTTP/1.0, which has no chunks.
        codings = [value.lower() for name, value in head.fields if name == b"transfer-encoding"]
        if codings != [b"chunked"] or head.version != "1.1":
            raise Refusal(501, "only 'Transfer-Encoding: chunked' is understood, and only in HTTP/1.1")

    def _count_trailer(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.header_bytes:
            raise self._chunks_too_large()

    def _head_too_large(self) -> Refusal:
        limits = self._limits
        return Refusal(431, f"the header is over {limits.header_bytes} bytes or {limits.header_count} fields")

    def _chunks_too_large(self) -> Refusal:
        return Refusal(431, f"the extensions of a chunk, or the trailers, are over {self._limits.header_bytes} bytes")

    def _body_too_large(self) -> Refusal:
        return Refusal(413, f"the body is over the limit of {self._limits.body_bytes} bytes")


def _origin_form(target: bytes) -> bytes:
    """Path and query of an absolute-form target; `*` stays as it is."""
    scheme, separator, rest = target.partition(b"://")
    if separator and scheme.lower() in (b"http", b"https"):
        authority, mark, query = rest.partition(b"?")
        slash = authority.find(b"/")
        return (authority[slash:] if slash >= 0 else b"/") + mark + query
    return target
