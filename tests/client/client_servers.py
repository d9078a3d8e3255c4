# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests of the client: a real `headrace serve` over a folder, and fakes that say what a test wants.

`FakeHttp` and `FakeGrpc` are fakes: they play servers that fail in ways a real one does not on command. `HeldSite` is a
site of the real wire with handlers that answer only when told, to see when a client goes away.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from client_models import make_repository

from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON, Buffer
from headrace.net.http.routes import Routes
from headrace.net.http.sse import EventStream
from headrace.net.site import Site
from support.servers import serve_in_thread


class RealServer:
    """A running `headrace serve`."""

    def __init__(self, http: str, grpc_url: str) -> None:
        self.http = http
        self.grpc = grpc_url


@contextmanager
def real_server(folder: Path, *arguments: str) -> Iterator[RealServer]:
    with serve_in_thread(make_repository(folder / "models"), *arguments) as server:
        yield RealServer(f"http://127.0.0.1:{server.ports[-2]}", server.grpc_url)


Turn = Callable[[socket.socket, bytes], bool]
"""What a fake does with a request: it may send something; True keeps the connection."""


class FakeHttp:
    """A fake: plays one turn for each request, whatever it is. Without turns left it closes connections at once."""

    def __init__(self, *turns: Turn, unread: int = 0) -> None:
        """The first `unread` connections are closed without being read."""
        self._unread = unread
        self._turns = list(turns)
        self.requests: list[bytes] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.connections <= self._unread:
                sock.close()
                continue
            self._open.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while self._turns:
                    request = _read_request(sock)
                    if request is None:
                        return
                    self.requests.append(request)
                    if not self._turns.pop(0)(sock, request):
                        return
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)
        for sock in self._open:
            sock.close()


@contextmanager
def fake_http(*turns: Turn, unread: int = 0) -> Iterator[FakeHttp]:
    server = FakeHttp(*turns, unread=unread)
    try:
        yield server
    finally:
        server.close()


def _read_request(sock: socket.socket) -> bytes | None:
    data = bytearray()
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            return None
        data += piece
    head = data.partition(b"\r\n\r\n")[0]
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    whole = len(head) + 4 + (int(length[1]) if length else 0)
    while len(data) < whole:
        piece = sock.recv(65536)
        if not piece:
            return None
        data += piece
    return bytes(data)


def respond_with(data: bytes, *, keeps: bool = False) -> Turn:
    """Send these bytes."""

    def turn(sock: socket.socket, request: bytes) -> bool:
        sock.sendall(data)
        return keeps

    return turn


def answers(status: int, body: bytes = b"{}", *fields: str, keeps: bool = True) -> Turn:
    """A whole answer."""
    head = "\r\n".join([f"HTTP/1.1 {status} Whatever", f"content-length: {len(body)}", *fields, "", ""])
    return respond_with(head.encode() + body, keeps=keeps)


def hangs_up(sock: socket.socket, request: bytes) -> bool:
    """Close without an answer."""
    return False


ANSWER = b'{"model_name":"m","model_version":"3","outputs":[{"name":"y","datatype":"INT32","shape":[2],"data":[7,8]}]}'


class FakeGrpc:
    """A fake: each call of any unary method plays one turn, a function of the context that gives the answer's bytes."""

    def __init__(self, *turns: Callable[[Any], bytes], port: int = 0) -> None:
        self._turns = list(turns)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((self,))
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.url = f"grpc://127.0.0.1:{bound}"
        self._server.start()

    def service(self, details: Any) -> Any:
        def handle(request: bytes, context: Any) -> bytes:
            self.calls.append((details.method, dict(context.invocation_metadata())))
            return self._turns.pop(0)(context)

        return grpc.unary_unary_rpc_method_handler(handle)

    def close(self) -> None:
        self._server.stop(0).wait(30)


@contextmanager
def fake_grpc(*turns: Callable[[Any], bytes], port: int = 0) -> Iterator[FakeGrpc]:
    server = FakeGrpc(*turns, port=port)
    try:
        yield server
    finally:
        server.close()


class HeldSite:
    """v2 paths and methods whose handlers never answer, and note when their client goes away."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.gone = threading.Semaphore(0)

    def site(self) -> Site:
        routes, services = Routes(), Services()
        routes.add("POST", "/v2/models/{model}/infer", self._hold)
        routes.add("GET", "/v2/models/{model}", self._metadata)
        routes.add("GET", "/v2/health/live", lambda exchange: exchange.respond(OK_JSON, b"{}"))
        routes.add("POST", "/v2/models/{model}/generate_stream", self._events)
        services.unary("inference.GRPCInferenceService", "ModelInfer", self._call)
        services.unary("inference.GRPCInferenceService", "ServerLive", lambda call, _: call.reply(b"\x08\x01"))
        services.streaming("inference.GRPCInferenceService", "ModelStreamInfer", self._stream)
        return Site(routes, services=services)

    def wait(self, what: threading.Semaphore) -> None:
        assert what.acquire(timeout=120)

    def _hold(self, exchange: Exchange) -> None:
        exchange.on_disconnect = self.gone.release
        self.arrived.release()

    def _metadata(self, exchange: Exchange) -> None:
        exchange.respond(OK_JSON, b'{"outputs":[{"name":"y","datatype":"INT32","shape":[1]}]}')

    def _events(self, exchange: Exchange) -> None:
        events = EventStream(exchange)
        events.on_disconnect = self.gone.release
        events.send(b'{"y": 1}')
        self.arrived.release()

    def _call(self, call: GrpcCall, message: Buffer) -> None:
        call.on_cancel = self.gone.release
        self.arrived.release()

    def _stream(self, call: GrpcCall) -> None:
        from headrace.client.grpc_codec import message

        call.on_cancel = self.gone.release

        def answer(_: Buffer) -> None:
            response = message("ModelStreamInferResponse")()
            output = response.infer_response.outputs.add(name="y", datatype="INT32", shape=[1])
            assert output.name == "y"
            response.infer_response.raw_output_contents.append(b"\1\0\0\0")
            call.send(response.SerializeToString())
            self.arrived.release()

        call.on_message = answer


def chunks(pieces: Sequence[bytes]) -> bytes:
    """A chunked body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def internals_of(client: Any) -> Any:
    """The inside of a client, or of one called from outside its loop."""
    return vars(client).get("_client") or client._requests


def seen_as_stale(client: Any, line: Any) -> bool:
    """Whether a client would leave a kept connection alone; asked in its loop, after a turn of it, if it has one."""
    runner = vars(client).get("_runner")
    if runner is None:
        return bool(line.is_stale())

    async def is_stale() -> bool:
        await asyncio.sleep(0.001)
        return bool(line.is_stale())

    return bool(runner.run(is_stale()))
