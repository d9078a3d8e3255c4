# SPDX-License-Identifier: Apache-2.0
"""WebSockets through the router: the real `websockets` client against a real server."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from routing import Routing, ScriptedBackend, routing, scripted_backend
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from headrace.fleet.router.settings import TimeoutSettings
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from headrace.net.websocket.handshake import accept
from support.serving import Serving, serving
from support.waiting import eventually


def _echo_site() -> Site:
    def open_socket(exchange: Exchange) -> None:
        def opened(connection: Any) -> None:
            connection.on_message = lambda message: (
                connection.close(4000, "bye") if message == "end" else connection.send(message)
            )

        accept(exchange, opened, subprotocols=("tokens",))

    routes = Routes()
    routes.add("GET", "/socket", open_socket)
    routes.add("GET", "/hello", lambda exchange: exchange.respond(OK_PLAIN, b"hello"))
    return Site(routes)


@pytest.fixture(scope="module")
def server_and_router() -> Iterator[tuple[Serving, Routing]]:
    with serving(_echo_site) as server, routing(server.port) as router:
        yield server, router


def _url(router: Routing, path: str = "/socket") -> str:
    return f"ws://127.0.0.1:{router.port}{path}"


def test_messages_in_both_directions(server_and_router: tuple[Serving, Routing]) -> None:
    _, router = server_and_router
    noise = os.urandom(3_000_000)
    with connect(_url(router), subprotocols=["tokens"], max_size=None) as client:  # type: ignore[list-item]
        assert client.subprotocol == "tokens"
        for message in ("hello", b"\x00\x01", "naïve", noise):
            client.send(message)
            assert client.recv(60) == message
        client.ping().wait(30)


def test_the_close_code_of_the_backend_arrives(server_and_router: tuple[Serving, Routing]) -> None:
    server, router = server_and_router
    with connect(_url(router)) as client:
        client.send("end")
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4000
    eventually(lambda: not router.server.connections())
    assert router.get("/hello").body == b"hello"


def test_both_connections_close_when_the_client_disconnects(server_and_router: tuple[Serving, Routing]) -> None:
    server, router = server_and_router
    with connect(_url(router)) as client:
        client.send("x")
        assert client.recv(60) == "x"
        client.socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: server.connections() <= 1 and not router.server.connections())


def test_a_refusal_passes_as_it_is(server_and_router: tuple[Serving, Routing]) -> None:
    _, router = server_and_router
    with pytest.raises(InvalidStatus) as refused:
        connect(_url(router, "/hello"))
    assert refused.value.response.status_code == 200
    with pytest.raises(InvalidStatus) as refused:
        connect(_url(router), additional_headers={"Origin": "http://elsewhere.example"})
    assert refused.value.response.status_code == 403


def test_frames_sent_with_the_handshake_are_not_lost() -> None:
    # The frames are sent before 101 has come: the backend gets them once it has said so, and not before.
    def patient(sock: socket.socket, backend: ScriptedBackend) -> None:
        backend.seen.append(sock.recv(4096))
        sock.sendall(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-A: b\r\n\r\nfirst"
        )
        sock.sendall(sock.recv(100).upper())

    with scripted_backend(patient) as backend, routing(backend.port) as router:
        with socket.create_connection(("127.0.0.1", router.port), timeout=30) as sock:
            sock.sendall(
                b"GET /w HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
                b"Sec-WebSocket-Key: k\r\n\r\nearly"
            )
            text = b""
            while not text.endswith(b"EARLY"):
                piece = sock.recv(4096)
                assert piece, text
                text += piece
        head, _, rest = text.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101") and b"x-a: b" in head and b"upgrade: websocket" in head
        assert rest == b"firstEARLY"
        assert b"early" not in backend.seen[0]
        assert b"connection: upgrade\r\nupgrade: websocket\r\n" in backend.seen[0]
        assert b"sec-websocket-key: k\r\n" in backend.seen[0]


def test_a_silent_socket_is_closed_in_time() -> None:
    timeouts = TimeoutSettings(idle_seconds=500.0)
    with serving(_echo_site) as server, routing(server.port, timeouts=timeouts) as router:
        with connect(_url(router), ping_interval=None) as client:
            client.send("x")
            assert client.recv(60) == "x"
            router.server.sweep(400.0)
            client.send("y")
            assert client.recv(60) == "y"
            router.server.sweep(400.0)
            client.send("z")
            assert client.recv(60) == "z"
            router.server.sweep(600.0)
            with pytest.raises(ConnectionClosed):
                client.recv(60)


def test_an_end_that_does_not_read_what_is_left_is_cut_in_time() -> None:
    """The backend has sent much and gone; the client never takes it."""

    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        sock.recv(4096)
        sock.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        sock.sendall(bytes(3_000_000))

    with scripted_backend(script) as backend, routing(backend.port) as router:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(30)
            sock.connect(("127.0.0.1", router.port))
            sock.sendall(b"GET /w HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 101"
            assert router.server.connections() == 1
            router.server.sweep(30.0)
            assert router.server.connections() == 1
            eventually(lambda: router.server.sweep(1000.0) or not router.server.connections())
