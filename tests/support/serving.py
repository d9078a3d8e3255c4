# SPDX-License-Identifier: Apache-2.0
"""A real server for tests: a site on loopback sockets, on uvloop, in a thread of its own.

with serving(echo_site()) as server:
    requests to ("127.0.0.1", server.port)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvloop

from headrace.core.errors import InvalidArgument
from headrace.core.limits import Limits
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import CoroutineCalls, MessageStream, Services
from headrace.net.grpc.standard_services import HealthService, ReflectionService
from headrace.net.grpc.status import Status
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN, Buffer
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles


class Serving:
    """A running server. `call` runs something in its loop's thread and gives back what it returned."""

    def __init__(self, site: Site, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.site = site
        self.server = server
        self.loop = loop
        self.port = server.port

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        async def run() -> Any:
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(120)

    def sweep(self, seconds_later: float = 0.0) -> None:
        """Let the site's clock run ahead and sweep every connection, as the server does once a second."""

        def sweep() -> None:
            self.site.tick(self.site.now + seconds_later)
            for connection in list(self.site.connections):
                connection.sweep(self.site.now)

        self.call(sweep)

    def connections(self) -> int:
        return int(self.call(lambda: len(self.site.connections)))


@contextmanager
def serving(site: Site | Callable[[], Site | Awaitable[Site]], *, tls: TlsFiles | None = None) -> Iterator[Serving]:
    """Start a site on a free loopback port. A callable, or a coroutine function, is called in the server's loop."""
    started: threading.Event = threading.Event()
    holder: dict[str, Any] = {}

    async def main() -> None:
        created = site() if callable(site) else site
        real: Site = await created if asyncio.iscoroutine(created) else created  # type: ignore[assignment]
        server = HttpServer(real, Address.parse("127.0.0.1:0"), partial(NegotiatingProtocol, real), tls=tls)
        await server.start()
        holder["serving"] = Serving(real, server, asyncio.get_running_loop())
        holder["stop"] = asyncio.Event()
        started.set()
        await holder["stop"].wait()
        await _stop(server)

    def run() -> None:
        try:
            uvloop.run(main())
        except BaseException as error:
            holder["error"] = error
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not started.wait(240) or "error" in holder:  # a site may load a model first
        raise RuntimeError("the server did not start") from holder.get("error")
    running: Serving = holder["serving"]
    try:
        yield running
    finally:
        running.loop.call_soon_threadsafe(holder["stop"].set)
        thread.join(120)


async def _stop(server: HttpServer) -> None:
    """Close everything without a drain, which would take a quarter of a second and has tests of its own."""
    server.abort()
    for _ in range(1000):  # connections end a few turns of the loop later
        if not server.site.connections:
            return
        await asyncio.sleep(0.001)


class EchoHandlers:
    """Routes that tests drive; `seen` and `events` tell what the handlers saw."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.held: list[Exchange] = []
        """Exchanges of `/hold`, which is answered only when a test says so."""

    def add_to(self, routes: Routes) -> None:
        routes.add("GET", "/hello", self.hello)
        routes.add("POST", "/echo", self.echo)
        routes.add("PUT", "/echo", self.echo)
        routes.add("GET", "/big/{size}", self.big)
        routes.add("GET", "/stream/{count}", self.stream)
        routes.add("POST", "/hold", self.hold)
        routes.add("GET", "/hold", self.hold)
        routes.add("GET", "/raise", self.raises)
        routes.add("GET", "/refuse", self.refuses)
        routes.add("POST", "/upload", self.upload, streams_body=True)

    def hello(self, exchange: Exchange) -> None:
        exchange.respond(OK_PLAIN, b"hello")

    def echo(self, exchange: Exchange) -> None:
        exchange.respond(OK_PLAIN, exchange.body)

    def big(self, exchange: Exchange) -> None:
        exchange.respond(OK_PLAIN, bytes(int(exchange.params[0])))

    def stream(self, exchange: Exchange) -> None:
        exchange.start(OK_PLAIN)
        for number in range(int(exchange.params[0])):
            exchange.send(b"piece %d\n" % number)
        exchange.finish()

    def hold(self, exchange: Exchange) -> None:
        exchange.on_disconnect = lambda: self.events.append("disconnect")
        self.held.append(exchange)

    def raises(self, exchange: Exchange) -> None:
        raise RuntimeError("a secret of the handler")

    def refuses(self, exchange: Exchange) -> None:
        raise InvalidArgument("not like that")

    def upload(self, exchange: Exchange) -> None:
        sizes: list[int] = []
        exchange.on_body = lambda piece: sizes.append(len(piece))
        exchange.on_body_end = lambda: exchange.respond(OK_PLAIN, b"%d" % sum(sizes))


class EchoCalls:
    """The gRPC service `test.Echo`: messages are plain bytes."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.held: list[GrpcCall] = []
        self._calls = CoroutineCalls()

    def add_to(self, services: Services) -> None:
        services.unary("test.Echo", "Unary", lambda call, message: call.reply(message))
        services.unary("test.Echo", "Hold", self.hold)
        services.unary("test.Echo", "Raise", self.raises)
        services.unary("test.Echo", "Refuse", self.refuses)
        services.unary("test.Echo", "Metadata", self.metadata)
        services.unary("test.Echo", "Details", self.details)
        services.streaming("test.Echo", "Collect", self._calls.serve(self.collect))
        services.streaming("test.Echo", "Expand", self._calls.serve(self.expand))
        services.streaming("test.Echo", "Chat", self._calls.serve(self.chat))

    def hold(self, call: GrpcCall, message: Buffer) -> None:
        call.on_cancel = lambda: self.events.append("cancel")
        self.held.append(call)

    def raises(self, call: GrpcCall, message: Buffer) -> None:
        raise RuntimeError("a secret of the handler")

    def refuses(self, call: GrpcCall, message: Buffer) -> None:
        raise InvalidArgument("not like that: 100% wrong, naïve")

    def metadata(self, call: GrpcCall, message: Buffer) -> None:
        own = [(key, value) for key, value in call.metadata if key.startswith("x-")]
        call.set_initial_metadata([*own, ("x-first", "initial")])
        call.set_trailing_metadata([("x-last", "trailing"), ("x-last-bin", b"\x00\xff")])
        call.reply(message)

    def details(self, call: GrpcCall, message: Buffer) -> None:
        call.details = bytes(message)
        call.finish(Status.FAILED_PRECONDITION, "see the details")

    async def collect(self, stream: MessageStream) -> None:
        """Client streaming: the messages joined."""
        pieces = [bytes(message) async for message in stream]
        await stream.send(b",".join(pieces))

    async def expand(self, stream: MessageStream) -> None:
        """Server streaming: `count size` gives `count` messages of `size` bytes."""
        count, size = map(int, bytes(await stream.receive() or b"0 0").split())
        for number in range(count):
            await stream.send(number.to_bytes(4, "big") + bytes(size))

    async def chat(self, stream: MessageStream) -> None:
        """Bidirectional: each message comes back at once."""
        async for message in stream:
            await stream.send(message)


def echo_site(
    limits: Limits | None = None, handlers: EchoHandlers | None = None, calls: EchoCalls | None = None
) -> Callable[[], Site]:
    """A site with the echo routes, the echo service, health and reflection; made in the server's loop."""

    def build() -> Site:
        routes = Routes()
        (handlers or EchoHandlers()).add_to(routes)
        services = Services()
        (calls or EchoCalls()).add_to(services)
        HealthService().add_to(services)
        ReflectionService(services, []).add_to(services)
        return Site(routes, services=services, limits=limits)

    return build
