# SPDX-License-Identifier: Apache-2.0
"""Our routes under a real uvicorn."""

import asyncio
import gzip
import http.client
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from headrace.core.errors import InvalidArgument
from headrace.core.limits import Limits
from headrace.net.asgi_app import RoutesApp
from headrace.net.http.heads import OK_PLAIN
from headrace.net.http.routes import Routes
from headrace.net.websocket.handshake import accept
from support.waiting import eventually

LIMITS = Limits(body_bytes=1_000_000, message_bytes=10_000)


class HandlerState:
    def __init__(self):
        self.waiting = threading.Event()
        self.gone = threading.Event()
        self.closed = []
        self.sent = 0


def site(seen):
    routes = Routes()

    def echo(exchange):
        exchange.respond(OK_PLAIN, [exchange.head.path, b"?", exchange.head.query, b" ", exchange.body])

    def named(exchange):
        exchange.respond(OK_PLAIN, exchange.params[0].encode(), ((b"x-more", b"1"),))

    def refuses(exchange):
        raise InvalidArgument("write it otherwise")

    def breaks(exchange):
        raise RuntimeError("a secret")

    def waits(exchange):
        exchange.on_disconnect = seen.gone.set
        seen.waiting.set()

    def streams(exchange):
        exchange.start(OK_PLAIN)
        pieces = iter([b"a" * 100_000] * 50)

        def more():
            for piece in pieces:
                seen.sent += 1
                if not exchange.send(piece):
                    return
            exchange.finish()

        exchange.on_writable = more
        more()

    def counts(exchange):
        sizes = []
        exchange.on_body = lambda piece: sizes.append(len(piece))
        exchange.on_body_end = lambda: exchange.respond(OK_PLAIN, b"%d" % sum(sizes))

    def breaks_off(exchange):
        exchange.start(OK_PLAIN)
        exchange.send(b"half")
        asyncio.get_running_loop().call_later(0.05, exchange.fail, RuntimeError("too late"))

    def talk(exchange):
        def opened(socket):
            def on_message(message):
                if message == "close":
                    socket.close(3000, "as you wish")
                elif message == "break":
                    raise RuntimeError("a secret")
                elif message == "hold":
                    socket.pause_messages()
                    threading.Timer(0.05, lambda: loop_call(socket.resume_messages)).start()
                else:
                    socket.send(message)

            loop_call = asyncio.get_running_loop().call_soon_threadsafe
            socket.on_message = on_message
            socket.on_close = lambda code, reason: seen.closed.append((code, reason))

        accept(exchange, opened, subprotocols=("two",))

    routes.add("POST", "/echo", echo)
    routes.add("GET", "/echo", echo)
    routes.add("GET", "/named/{name}", named)
    routes.add("GET", "/refuses", refuses)
    routes.add("GET", "/breaks", breaks)
    routes.add("GET", "/waits", waits)
    routes.add("GET", "/streams", streams)
    routes.add("GET", "/breaks-off", breaks_off)
    routes.add("POST", "/counts", counts, streams_body=True)
    routes.add("GET", "/talk", talk)
    return routes


@contextmanager
def hosted(app):
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", ws="websockets-sansio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def running():
    seen = HandlerState()
    with hosted(RoutesApp(site(seen), LIMITS)) as port:
        yield port, seen


def ask(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/echo?a=1", None, (200, b"/echo?a=1 ")),
        ("POST", "/echo", b"x" * 300_000, (200, b"/echo? " + b"x" * 300_000)),
        ("HEAD", "/echo", None, (200, b"")),
        ("GET", "/named/a%2Fb%20c", None, (200, b"a/b c")),
        ("GET", "/nowhere", None, (404, b'{"error":"Not Found: this server does not have this path"}')),
        ("DELETE", "/echo", None, (405, b'{"error":"Method Not Allowed"}')),
        ("GET", "/refuses", None, (400, b'{"error":"write it otherwise"}')),
        ("GET", "/streams", None, (200, b"a" * 5_000_000)),
        ("POST", "/counts", b"x" * 900_000, (200, b"900000")),
    ],
)
def test_a_route_answers_under_another_server(running, method, path, body, expected):
    status, content, _ = ask(running[0], method, path, body)
    assert (status, content) == expected


def test_an_exception_stays_in_the_log(running):
    status, content, answer = ask(running[0], "GET", "/breaks")
    assert status == 500 and b"secret" not in content and answer.getheader("x-request-id")


def test_a_body_over_the_limit_is_413(running):
    assert ask(running[0], "POST", "/echo", b"x" * 1_000_001)[0] == 413


def test_bodies_are_inflated_and_answers_deflated(running):
    status, content, _ = ask(running[0], "POST", "/echo", gzip.compress(b"y" * 5000), {"Content-Encoding": "gzip"})
    assert (status, content) == (200, b"/echo? " + b"y" * 5000)
    _, content, answer = ask(running[0], "POST", "/echo", b"y" * 5000, {"Accept-Encoding": "gzip"})
    assert answer.getheader("content-encoding") == "gzip" and gzip.decompress(content).endswith(b"y" * 5000)


def test_a_client_that_leaves_cancels(running):
    port, seen = running
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/waits")
    assert seen.waiting.wait(30)
    assert not seen.gone.is_set()
    connection.close()
    assert seen.gone.wait(30)


def test_an_interrupted_response_is_visibly_cut(running):
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        ask(running[0], "GET", "/breaks-off")


def test_messages_in_both_directions_and_in_order(running):
    with connect(f"ws://127.0.0.1:{running[0]}/talk", subprotocols=["one", "two"]) as socket:
        assert socket.subprotocol == "two"
        socket.send("hold")
        for number in range(100):
            socket.send(f"text {number}")
        socket.send(b"\0\1")
        assert [socket.recv(timeout=30) for _ in range(101)] == [*(f"text {n}" for n in range(100)), b"\0\1"]


@pytest.mark.parametrize(
    ("message", "code"), [("close", 3000), ("break", 1011), ("x" * 10_001, 1009)], ids=["asked", "fault", "too large"]
)
def test_a_socket_is_closed_with_a_code(running, message, code):
    port, seen = running
    seen.closed.clear()
    with connect(f"ws://127.0.0.1:{port}/talk") as socket:
        socket.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=30)
    assert closed.value.rcvd.code == code and "secret" not in closed.value.rcvd.reason
    assert [code for code, _ in eventually(lambda: seen.closed)] == [code]


def test_the_owner_is_notified_when_the_client_closes(running):
    port, seen = running
    seen.closed.clear()
    with connect(f"ws://127.0.0.1:{port}/talk") as socket:
        socket.close(3999, "enough")
    assert eventually(lambda: seen.closed) == [(3999, "enough")]


@pytest.mark.parametrize(("path", "origin", "status"), [("/nowhere", None, 404), ("/talk", "http://evil.example", 403)])
def test_a_handshake_that_is_refused_gets_an_answer(running, path, origin, status):
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{running[0]}{path}", origin=origin)
    assert refused.value.response.status_code == status
