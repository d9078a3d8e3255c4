# SPDX-License-Identifier: Apache-2.0
"""A Starlette application mounted on the real wire, over loopback sockets, by HTTP/1.1, HTTP/2 and WebSocket."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gzip
import hashlib
import http.client
import json
import os
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headrace.net.asgi_host import MountedApp
from headrace.net.http.heads import OK_PLAIN
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.site import Site

WAIT = 60  # seconds until a test that hangs fails; no test's result depends on it
UPLOAD = os.urandom(5 * 1024 * 1024)
LARGE = os.urandom(3000).hex()
"""Text that stays long enough when compressed for a second compression to be tried."""


class Server:
    """A Starlette application at /app of a site, in a thread of its own. `seen` is what the application saw."""

    def __init__(self) -> None:
        self.seen: queue.Queue[Any] = queue.Queue()
        self.release = asyncio.Event()
        self.asgi = MountedApp(self._application(), "/app")
        self.site = Site(Routes())
        self.site.routes.mount("/app", self.asgi.handle)
        self.site.routes.add("GET", "/plain", lambda exchange: exchange.respond(OK_PLAIN, b"not the application"))
        self._ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()), daemon=True)
        self._thread.start()
        self.port = self._ready.result(WAIT)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.site.tick(self._loop.time())
        await self.asgi.startup()
        server = await self._loop.create_server(lambda: NegotiatingProtocol(self.site), "127.0.0.1", 0)
        self._ready.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()
        for connection in list(self.site.connections):
            connection.abort()
        self.asgi.abort()
        await self.asgi.shutdown()

    def call(self, function: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.call(self._stop.set)
            self._thread.join(WAIT)

    def client(self, path: str, **options: Any) -> ClientConnection:
        client: ClientConnection = connect(
            f"ws://127.0.0.1:{self.port}/app{path}", proxy=None, max_size=None, **options
        )
        return client

    # The application.

    def _application(self) -> Starlette:
        routes = [
            Route("/json/{name}", self._json),
            Route("/upload", self._upload, methods=["POST"]),
            Route("/stream", self._stream),
            Route("/endless", self._endless),
            Route("/waits", self._waits),
            Route("/background", self._background),
            Route("/fails", self._fails),
            Mount("/packed", routes=[Route("/", self._large)], middleware=[Middleware(GZipMiddleware)]),
            Route("/large", self._large),
            WebSocketRoute("/echo", self._echo),
            WebSocketRoute("/refuse", self._refuse),
            WebSocketRoute("/deny", self._deny),
            WebSocketRoute("/fails", self._fails_open),
            WebSocketRoute("/flood", self._flood),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[dict[str, str]]:
        self.seen.put("started")
        yield {"greeting": "hello"}
        self.seen.put("stopped")

    async def _json(self, request: Request) -> Response:
        return JSONResponse(
            {
                "name": request.path_params["name"],
                "query": dict(request.query_params),
                "url": str(request.url_for("_json", name="x").path),
                "greeting": request.state.greeting,
                "http": request.scope["http_version"],
                "client": request.client is not None and request.client.host,
            },
            headers={"x-custom": "yes"},
        )

    async def _upload(self, request: Request) -> Response:
        digest, size = hashlib.sha256(), 0
        async for piece in request.stream():
            digest.update(piece)
            size += len(piece)
        return JSONResponse({"size": size, "sha256": digest.hexdigest()})

    async def _stream(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            for n in range(100):
                yield b"%d," % n * 1000

        return StreamingResponse(pieces(), media_type="text/plain")

    async def _endless(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield bytes(65_536)

        server = self

        class Watched(StreamingResponse):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                try:
                    await super().__call__(scope, receive, send)
                finally:
                    server.seen.put("stream ended")

        return Watched(pieces())

    async def _waits(self, request: Request) -> Response:
        self.seen.put("waiting")
        await request.body()
        message = await request.receive()
        self.seen.put(message["type"])
        return PlainTextResponse("nobody reads this")

    async def _background(self, request: Request) -> Response:
        async def later() -> None:
            await self.release.wait()
            self.seen.put("background done")

        return PlainTextResponse("answered", background=BackgroundTask(later))

    async def _fails(self, request: Request) -> Response:
        raise KeyError("secret")

    async def _large(self, request: Request) -> Response:
        return PlainTextResponse(LARGE)

    async def _echo(self, websocket: WebSocket) -> None:
        chosen = "chat" if "chat" in websocket.scope["subprotocols"] else None
        await websocket.accept(chosen, headers=[(b"x-custom", b"yes")])
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                self.seen.put((message["code"], message["reason"]))
                return
            if message.get("text") == "close":
                await websocket.close(4000, "as you wish")
                return
            if message.get("text") == "return":
                return
            await websocket.send({"type": "websocket.send", **{k: v for k, v in message.items() if k != "type"}})

    async def _refuse(self, websocket: WebSocket) -> None:
        await websocket.close()

    async def _deny(self, websocket: WebSocket) -> None:
        await websocket.send_denial_response(JSONResponse({"error": "not you"}, status_code=401))

    async def _fails_open(self, websocket: WebSocket) -> None:
        await websocket.accept()
        raise KeyError("secret")

    async def _flood(self, websocket: WebSocket) -> None:
        await websocket.accept()
        sent = 0
        try:
            while True:
                await websocket.send_bytes(bytes(65_536))
                sent += 1
        finally:
            self.seen.put("flood ended")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    assert server.seen.get(timeout=WAIT) == "started"
    yield server
    server.stop()


Answer = tuple[int, dict[str, str], bytes]


def by_http1(server: Server, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    connection.request(method, path, body or None, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    answer = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    connection.close()
    return answer


def by_http2(server: Server, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    """One request, in the plainest way that respects flow control."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    client.initiate_connection()
    fields = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "h")]
    fields += [(name.replace("_", "-"), value) for name, value in headers.items()]
    client.send_headers(1, fields, end_stream=not body)
    got: dict[str, str] = {}
    data = b""
    with socket.create_connection(("127.0.0.1", server.port), WAIT) as sock:
        while True:
            while body and (room := min(client.local_flow_control_window(1), client.max_outbound_frame_size)):
                client.send_data(1, body[:room], end_stream=len(body) <= room)
                body = body[room:]
            sock.sendall(client.data_to_send())
            received = sock.recv(65_536)
            assert received
            for event in client.receive_data(received):
                if isinstance(event, h2.events.ResponseReceived):
                    got = dict(event.headers)  # type: ignore[arg-type]
                elif isinstance(event, h2.events.DataReceived):
                    data += event.data or b""
                    client.acknowledge_received_data(event.flow_controlled_length or 0, 1)
                elif isinstance(event, h2.events.StreamReset):
                    raise ConnectionResetError(event.error_code)
                elif isinstance(event, h2.events.StreamEnded):
                    return int(got.pop(":status")), got, data


ask = pytest.mark.parametrize("ask", [by_http1, by_http2])
Ask = Callable[..., Answer]


@ask
def test_json(server: Server, ask: Ask) -> None:
    status, fields, body = ask(server, "GET", "/app/json/caf%C3%A9?a=1")
    assert (status, fields["x-custom"], fields["content-type"]) == (200, "yes", "application/json")
    assert json.loads(body) == {
        "name": "caf\u00e9",
        "query": {"a": "1"},
        "url": "/app/json/x",
        "greeting": "hello",
        "http": "1.1" if ask is by_http1 else "2",
        "client": "127.0.0.1",
    }


@ask
def test_upload(server: Server, ask: Ask) -> None:
    status, _, body = ask(server, "POST", "/app/upload", UPLOAD)
    assert (status, json.loads(body)) == (200, {"size": len(UPLOAD), "sha256": hashlib.sha256(UPLOAD).hexdigest()})


def test_chunked_upload(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    pieces = (UPLOAD[start : start + 100_000] for start in range(0, len(UPLOAD), 100_000))
    connection.request("POST", "/app/upload", pieces, encode_chunked=True)
    assert json.loads(connection.getresponse().read())["sha256"] == hashlib.sha256(UPLOAD).hexdigest()
    connection.close()


@ask
def test_streamed_response(server: Server, ask: Ask) -> None:
    status, _, body = ask(server, "GET", "/app/stream")
    assert (status, body) == (200, b"".join(b"%d," % n * 1000 for n in range(100)))


@ask
def test_head_has_the_length_of_get(server: Server, ask: Ask) -> None:
    status, fields, body = ask(server, "HEAD", "/app/large")
    assert (status, fields["content-length"], body) == (200, "6000", b"")


@ask
def test_errors(server: Server, ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(server, "GET", "/app/nothing")[0] == 404
    assert ask(server, "POST", "/app/stream")[0] == 405
    assert ask(server, "GET", "/app/json/%ff")[0] == 400
    status, _, body = ask(server, "GET", "/app/fails")
    assert status == 500
    assert b"secret" not in body
    assert ask(server, "GET", "/plain")[2] == b"not the application"
    server.stop()  # the application raises after it has answered
    assert "KeyError" in caplog.text


@ask
@pytest.mark.parametrize("path", ["/app/packed/", "/app/large"])
def test_a_response_is_compressed_exactly_once(server: Server, ask: Ask, path: str) -> None:
    _, fields, body = ask(server, "GET", path, accept_encoding="gzip")
    assert fields["content-encoding"] == "gzip"
    assert gzip.decompress(body) == LARGE.encode()


def test_a_connection_is_kept_between_requests(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    for path, size in (("/app/large", 6000), ("/app/stream", 290_000), ("/plain", 19), ("/app/large", 6000)):
        connection.request("GET", path)
        first = connection.sock.getsockname()
        assert len(connection.getresponse().read()) == size
        assert connection.sock is not None
        assert connection.sock.getsockname() == first
    connection.close()


def test_the_application_sees_that_the_client_disconnected(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), WAIT) as sock:
        sock.sendall(b"GET /app/waits HTTP/1.1\r\nhost: h\r\n\r\n")
        assert server.seen.get(timeout=WAIT) == "waiting"
    assert server.seen.get(timeout=WAIT) == "http.disconnect"


def test_a_stream_stops_when_the_client_disconnects(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), WAIT) as sock:
        sock.sendall(b"GET /app/endless HTTP/1.1\r\nhost: h\r\n\r\n")
        assert sock.recv(12) == b"HTTP/1.1 200"
    assert server.seen.get(timeout=WAIT) == "stream ended"


def test_background_tasks_run_after_the_answer(server: Server) -> None:
    assert by_http1(server, "GET", "/app/background")[2] == b"answered"
    assert server.seen.empty()
    server.call(server.release.set)
    assert server.seen.get(timeout=WAIT) == "background done"


def test_shutdown_waits_for_nothing_more_and_stops_the_application(server: Server) -> None:
    server.stop()
    assert server.seen.get(timeout=WAIT) == "stopped"


# WebSockets.


@pytest.mark.parametrize("message", ["text \u00e9", b"\x00\xff", UPLOAD[:2_000_000], ""])
def test_websocket_echo(server: Server, message: str | bytes) -> None:
    with server.client("/echo", subprotocols=["chat"]) as client:
        assert client.subprotocol == "chat"
        assert client.response is not None
        assert client.response.headers["x-custom"] == "yes"
        # In turn: this client reads nothing while it sends, so several large echoes at once would block each other.
        for _ in range(3):
            client.send(message)
            assert client.recv(WAIT) == message
        client.close(4001, "done")
    assert server.seen.get(timeout=WAIT) == (4001, "done")


def test_many_websocket_messages_wait_for_a_slow_application(server: Server) -> None:
    with server.client("/echo") as client:
        for n in range(1000):
            client.send(str(n))
        assert [client.recv(WAIT) for _ in range(1000)] == [str(n) for n in range(1000)]


@pytest.mark.parametrize(("word", "code"), [("close", 4000), ("return", 1000)])
def test_the_application_closes(server: Server, word: str, code: int) -> None:
    with server.client("/echo") as client:
        client.send(word)
        with pytest.raises(ConnectionClosed):
            client.recv(WAIT)
        assert client.protocol.close_rcvd is not None
        assert client.protocol.close_rcvd.code == code


@pytest.mark.parametrize(("path", "status"), [("/refuse", 403), ("/deny", 401), ("/nothing", 403)])
def test_the_application_refuses(server: Server, path: str, status: int) -> None:
    with pytest.raises(InvalidStatus) as refused, server.client(path):
        pass
    assert refused.value.response.status_code == status
    if path == "/deny":
        assert json.loads(refused.value.response.body or b"") == {"error": "not you"}


def test_a_failing_application_closes_with_1011(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with server.client("/fails") as client:
        with pytest.raises(ConnectionClosed):
            client.recv(WAIT)
        assert client.protocol.close_rcvd is not None
        assert client.protocol.close_rcvd.code == 1011
    server.stop()
    assert "KeyError" in caplog.text


def test_a_flooding_application_is_stopped_when_its_client_disconnects(server: Server) -> None:
    with server.client("/flood", compression=None, max_queue=1) as client:
        assert len(client.recv(WAIT)) == 65_536
        client.socket.shutdown(socket.SHUT_RDWR)
        assert server.seen.get(timeout=WAIT) == "flood ended"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n", b"400"),
        (b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 12\r\n", b"426"),
    ],
)
def test_a_bad_handshake_does_not_reach_the_application(server: Server, head: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), WAIT) as sock:
        sock.sendall(b"GET /app/echo HTTP/1.1\r\nhost: h\r\n" + head + b"\r\n")
        assert sock.recv(12) == b"HTTP/1.1 " + status
    assert server.seen.empty()
