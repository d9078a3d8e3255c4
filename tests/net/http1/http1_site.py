# SPDX-License-Identifier: Apache-2.0
"""Handlers for the tests of HTTP/1.1. Each logs what it was called with, so that a test can tell what was *not* executed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headrace.core import errors
from headrace.core.limits import Limits
from headrace.net.http.exchange import Body, Exchange, Handler
from headrace.net.http.heads import CONTENT_TYPE, OK_PLAIN, PLAIN, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.site import Site

SECRET = "a secret of the handler"
NO_CONTENT = ResponseHead(204)
NOT_MODIFIED = ResponseHead(304, [(b"etag", b'"1"')])


class Handlers:
    """`seen` has method, path and body of every request that reached a handler, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.events: list[str] = []
        self.held: list[Exchange] = []
        self.pieces: list[bytes] = []
        self.on_upload: Callable[[Exchange], None] | None = None
        self.on_hook: Callable[[Exchange], None] | None = None

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.seen]

    def add_to(self, routes: Routes) -> None:
        def add(method: str, path: str, handler: Handler, *, streams_body: bool = False) -> None:
            routes.add(method, path, partial(self._recorded, handler), streams_body=streams_body)

        add("GET", "/hello", self.hello)
        add("POST", "/echo", self.echo)
        add("GET", "/hold", self.hold)
        add("POST", "/hold", self.hold)
        add("GET", "/hold-deaf", self.hold_deaf)
        add("POST", "/hold-deaf", self.hold_deaf)
        add("GET", "/big/{size}", self.big)
        add("GET", "/stream/{count}", self.stream)
        add("GET", "/name/{name}/of/{kind}", self.names)
        add("GET", "/empty", lambda exchange: exchange.respond(NO_CONTENT))
        add("GET", "/not-modified", lambda exchange: exchange.respond(NOT_MODIFIED))
        add("GET", "/raise", self.raises)
        add("GET", "/error/{code}", self.error)
        add("GET", "/hook", self.hook)
        add("POST", "/hook", self.hook)
        add("POST", "/upload", self.upload, streams_body=True)
        add("POST", "/early", self.early, streams_body=True)
        add("GET", "/streamed-get", self.early, streams_body=True)

    def _recorded(self, handler: Handler, exchange: Exchange) -> None:
        head = exchange.head
        self.seen.append((head.method.decode(), head.path.decode("latin-1"), bytes(exchange.body)))
        handler(exchange)

    def hello(self, exchange: Exchange) -> None:
        exchange.respond(OK_PLAIN, b"hello")

    def echo(self, exchange: Exchange) -> None:
        exchange.respond(OK_PLAIN, exchange.body)

    def hold(self, exchange: Exchange) -> None:
        exchange.on_disconnect = lambda: self.events.append("disconnect")
        self.held.append(exchange)

    def hold_deaf(self, exchange: Exchange) -> None:
        """Held by a handler that did not ask to be told when the client goes."""
        self.held.append(exchange)

    def big(self, exchange: Exchange) -> None:
        exchange.respond(OK_PLAIN, bytes(int(exchange.params[0])))

    def stream(self, exchange: Exchange) -> None:
        exchange.start(OK_PLAIN)
        for number in range(int(exchange.params[0])):
            exchange.send(b"piece %d\n" % number)
        exchange.finish()

    def names(self, exchange: Exchange) -> None:
        exchange.respond(OK_PLAIN, "|".join(exchange.params).encode())

    def raises(self, exchange: Exchange) -> None:
        raise RuntimeError(SECRET)

    def error(self, exchange: Exchange) -> None:
        """Raise the error of a code; `retry` as the query gives it a time to come back."""
        after = 7.0 if exchange.head.query == b"retry" else None
        kinds = {kind.code.value: kind for kind in errors.HeadraceError.__subclasses__()}
        raise kinds[exchange.params[0]]('not like that: "quoted" \\ naïve', retry_after_seconds=after)

    def hook(self, exchange: Exchange) -> None:
        if self.on_hook is None:
            raise AssertionError("a test uses /hook without setting it")
        self.on_hook(exchange)

    def upload(self, exchange: Exchange) -> None:
        self.held.append(exchange)
        exchange.on_body = self.pieces.append
        exchange.on_body_end = lambda: exchange.respond(OK_PLAIN, b"%d" % sum(map(len, self.pieces)))
        exchange.on_disconnect = lambda: self.events.append("disconnect")
        if self.on_upload is not None:
            self.on_upload(exchange)

    def early(self, exchange: Exchange) -> None:
        """Answers a streamed request at once, without reading its body."""
        exchange.respond(OK_PLAIN, b"early")


def http1_site(handlers: Handlers, limits: Limits | None = None) -> Site:
    routes = Routes()
    handlers.add_to(routes)
    return Site(routes, limits=limits)


def answer_plain(exchange: Exchange, body: Body = b"done") -> None:
    exchange.respond(ResponseHead(200, [(CONTENT_TYPE, PLAIN)]), body)
