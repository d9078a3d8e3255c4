# SPDX-License-Identifier: Apache-2.0
"""A gRPC backend that sends exactly the frames of a test's script, valid or not: blocking sockets, a thread each."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.net.grpc.call import HEAD_BLOCK
from headrace.net.grpc.status import OK_BLOCK
from headrace.net.http2 import frames
from headrace.net.http2.frames import END_HEADERS, END_STREAM, PREFACE, frame


class Peer:
    """The router, as the backend sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = b""
        self.bodies: dict[int, bytes] = {}

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def greet(self, *settings: tuple[frames.Setting, int]) -> None:
        self._take(len(PREFACE))
        self.send(frames.settings_frame(dict(settings)) + frames.SETTINGS_ACK)

    def frame(self) -> tuple[int, int, int, bytes]:
        """The next frame: kind, flags, stream, payload."""
        head = self._take(9)
        payload = self._take(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:9], "big"), payload

    def request(self) -> int:
        """The number of the next stream whose request is complete."""
        while True:
            kind, flags, stream, payload = self.frame()
            if kind == frames.DATA:
                self.bodies[stream] = self.bodies.get(stream, b"") + payload
            if kind in (frames.DATA, frames.HEADERS) and flags & END_STREAM:
                return stream

    def wait_for(self, wanted: int) -> tuple[int, bytes]:
        """Stream and payload of the next frame of a kind."""
        while True:
            kind, _, stream, payload = self.frame()
            if kind == wanted:
                return stream, payload

    def answer(self, stream: int, message: bytes = b"reply") -> None:
        self.send(
            frame(frames.HEADERS, END_HEADERS, stream, HEAD_BLOCK)
            + frame(frames.DATA, 0, stream, b"\0" + len(message).to_bytes(4, "big") + message)
            + frame(frames.HEADERS, END_HEADERS | END_STREAM, stream, OK_BLOCK)
        )

    def rest(self) -> bytes:
        """Everything until the router closes."""
        with contextlib.suppress(ConnectionError):
            while piece := self._socket.recv(65536):
                self._received += piece
        return self._received

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            piece = self._socket.recv(65536)
            if not piece:
                raise ConnectionResetError("the router closed")
            self._received += piece
        taken, self._received = self._received[:size], self._received[size:]
        return taken


class ScriptedGrpcBackend:
    """`said` collects what scripts want tests to see; `closed` counts connections that the router ended."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connections = 0
        self.said: list[object] = []


@contextmanager
def scripted_grpc_backend(script: Callable[[Peer, ScriptedGrpcBackend], None]) -> Iterator[ScriptedGrpcBackend]:
    """`script` is called for each connection; the connection is closed when it returns."""
    listener = socket.create_server(("127.0.0.1", 0))
    backend = ScriptedGrpcBackend(listener.getsockname()[1])
    opened: list[socket.socket] = []

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            script(Peer(sock), backend)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                sock.settimeout(60)
                opened.append(sock)
                backend.connections += 1
                threading.Thread(target=serve, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield backend
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for sock in opened:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        thread.join(30)
