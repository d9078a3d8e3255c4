# SPDX-License-Identifier: Apache-2.0
"""A router in front of backends for tests, and backends that a test scripts.

with serving(echo_site()) as one, routing(one.port) as router:
    requests to ("127.0.0.1", router.port)
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from headrace.core.limits import Limits
from headrace.fleet.router.fairness import FindTenant
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.settings import BackendAddress, HealthSettings, RouterSettings, TimeoutSettings
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.serving import Serving, serving

NO_CHECKS = HealthSettings(path="")
PATIENT = TimeoutSettings(connect_seconds=60.0)
"""Router, backends and models are threads of one process: on a busy machine they may wait for each other for seconds."""


class Routing:
    """A running router."""

    def __init__(self, server: Serving, proxy: RouterProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.port = server.port

    def get(self, path: str = "/hello", method: str = "GET", body: bytes | None = None, **fields: str) -> Answer:
        """One request on a connection of its own."""
        return ask(self.port, method, path, body, fields)

    def stats(self, place: int = 0) -> Any:
        return self.proxy.backends.all[place].stats

    def sweep(self, seconds_later: float) -> None:
        """Keep the time limits of connections and of those who wait in line, as if it were so much later."""

        def sweep() -> None:
            now = self.server.loop.time() + seconds_later
            for pool in self.proxy.pools.values():
                pool.sweep(now)
            if self.proxy.queue is not None:
                self.proxy.queue.sweep(now)

        self.server.call(sweep)


class Answer:
    """A response that was read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.fields = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    def __repr__(self) -> str:
        return f"Answer({self.status}, {self.fields}, {self.body[:200]!r})"


def ask(port: int, method: str, path: str, body: bytes | None = None, fields: dict[str, str] | None = None) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        named = {name.replace("_", "-"): value for name, value in (fields or {}).items()}
        connection.request(method, path, body, named)
        return Answer(connection.getresponse())
    finally:
        connection.close()


@contextmanager
def routing(
    *ports: int | str, limits: Limits | None = None, find_tenant: FindTenant | None = None, **changes: Any
) -> Iterator[Routing]:
    """A router before the servers at these ports (or with these backend texts). No active checks unless asked for."""
    texts = [port if isinstance(port, str) else f"http://127.0.0.1:{port}" for port in ports]
    settings = RouterSettings(tuple(BackendAddress.parse(text) for text in texts), health=NO_CHECKS, timeouts=PATIENT)
    settings = replace(settings, **changes)
    created: list[RouterProxy] = []

    async def build() -> Site:
        proxy = RouterProxy(settings, find_tenant=find_tenant)
        routes = Routes()
        proxy.add_to(routes)
        await proxy.start()
        created.append(proxy)
        return Site(routes, limits=limits)

    with serving(build) as server:  # type: ignore[arg-type]
        try:
            yield Routing(server, created[0])
        finally:
            server.call(created[0].close)


class ScriptedBackend:
    """A backend that calls `script` with each connection. `seen` is what it has read."""

    def __init__(self, script: Callable[[socket.socket, ScriptedBackend], None]) -> None:
        self._behave = script
        self.seen: list[bytes] = []
        self.connections = 0
        self.stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(60)
            self.connections += 1
            self._sockets.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                self._behave(sock, self)
            except OSError:
                pass

    def read_request(self, sock: socket.socket) -> bytes:
        """A request's head and its body, if it has a length; b"" at the end."""
        text = b""
        while b"\r\n\r\n" not in text:
            piece = sock.recv(65536)
            if not piece:
                return b""
            text += piece
        head, _, body = text.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        while len(body) < length:
            piece = sock.recv(65536)
            if not piece:
                return b""
            body += piece
        self.seen.append(head + b"\r\n\r\n" + body)
        return self.seen[-1]

    def rest(self) -> None:
        """Return when all that has come so far was dealt with."""
        for thread in list(self._threads):
            thread.join(30)

    def close(self) -> None:
        self.stopping.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # else `accept` would go on, and take one more
        self._thread.join(30)
        self._listener.close()
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.rest()


@contextmanager
def scripted_backend(script: Callable[[socket.socket, ScriptedBackend], None]) -> Iterator[ScriptedBackend]:
    backend = ScriptedBackend(script)
    try:
        yield backend
    finally:
        backend.close()


def answering(*pieces: bytes, close: bool = True) -> Callable[[socket.socket, ScriptedBackend], None]:
    """Reads each request and answers these bytes; then closes, or waits for the next request."""

    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        while backend.read_request(sock):
            for piece in pieces:
                sock.sendall(piece)
            if close:
                return

    return script


def raw(port: int, data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(data)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        received = b""
        while piece := sock.recv(65536):
            received += piece
        return received
