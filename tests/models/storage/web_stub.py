# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on loopback whose every path is a function of the test's. Used by the tests of storage and media."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Handler = BaseHTTPRequestHandler
Route = Callable[[Handler], None]


class WebStub:
    """`routes` answer; `seen` has the path and headers of every request that came."""

    def __init__(self, routes: dict[str, Route] | None = None, default: Route | None = None) -> None:
        self.routes: dict[str, Route] = dict(routes or {})
        self.default = default or (lambda handler: reply(handler, b"", status=404))
        self.seen: list[tuple[str, dict[str, str]]] = []
        stub = self

        class Answers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stub.seen.append((self.path, dict(self.headers)))
                self.close_connection = True
                try:
                    stub.routes.get(self.path.partition("?")[0], stub.default)(self)
                except OSError:
                    pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *args: Any) -> None:
                pass  # clients of these tests hang up on purpose

        self.server = Server(("127.0.0.1", 0), Answers)
        self.port = self.server.server_address[1]
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)

    def url(self, path: str, host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def with_tls(self, context: ssl.SSLContext) -> WebStub:
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        return self

    def __enter__(self) -> WebStub:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


def reply(handler: Handler, body: bytes, status: int = 200, **headers: str) -> None:
    """An ordinary answer. `content_type="x"` is the header Content-Type."""
    handler.send_response(status)
    named = {name.replace("_", "-").title(): value for name, value in headers.items()}
    # It closes after each answer, and clients that keep connections have to know.
    for name, value in {"Content-Length": str(len(body)), "Connection": "close", **named}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def serve(body: bytes, **headers: str) -> Route:
    return lambda handler: reply(handler, body, **headers)


def redirect(to: str, status: int = 302) -> Route:
    return lambda handler: reply(handler, b"", status=status, location=to)


def endless(piece: bytes = b"x" * 65536, head: bytes = b"") -> Route:
    """Sends, in chunks without an announced length, until the other side hangs up."""

    def send(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        body = head
        while True:
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(body or piece), body or piece))
            body = b""

    return send


def dripping(stop: threading.Event, seconds: float = 0.02) -> Route:
    """A slow loris: announces a body and sends it byte by byte."""

    def send(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not stop.wait(seconds):
            handler.wfile.write(b"x")

    return send


def mute(stop: threading.Event) -> Route:
    """Takes the request and says nothing."""
    return lambda handler: stop.wait(240) and None
