# SPDX-License-Identifier: Apache-2.0
"""WebSockets over real loopback sockets: the real `websockets` client, and raw bytes for what it refuses to send."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import logging
import os
import queue
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import trustme
import uvloop
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headrace.core.errors import Code, ResourceExhausted
from headrace.core.limits import Limits
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN, RequestHead
from headrace.net.http.routes import Routes
from headrace.net.http1.connection import Http1Connection
from headrace.net.site import Site
from headrace.net.websocket import handshake as accept_module
from headrace.net.websocket.connection import WebSocketConnection
from headrace.net.websocket.contract import CLOSE_CODE, fit_reason, may_be_sent
from headrace.net.websocket.handshake import accept, any_origin, same_origin

WAIT = 60  # seconds until a test that hangs fails; no test's result depends on it
MESSAGE_BYTES = 8 * 1024 * 1024
NOISE = os.urandom(3_000_000)


class Server:
    """An HTTP/1.1 site on a loopback port, in a thread of its own; what its handlers saw is in `seen`."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.seen: queue.Queue[Any] = queue.Queue()
        self.log: list[tuple[bytes, int]] = []
        self.site = Site(
            Routes(),
            limits=Limits(message_bytes=MESSAGE_BYTES),
            access_log=lambda peer, head, status: self.log.append((head.path, status)),
        )
        self._ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()), daemon=True)
        self._thread.start()
        self.port = self._ready.result(WAIT)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.site.tick(self._loop.time())
        server = await self._loop.create_server(lambda: Http1Connection(self.site), "127.0.0.1", 0, ssl=self._tls)
        self._ready.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()
        for connection in list(self.site.connections):
            connection.abort()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the loop's thread and return what it returns."""
        result: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                result.set_result(function(*args))
            except BaseException as error:
                result.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return result.result(WAIT)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT)

    def websocket(self, on_open: Callable[[WebSocketConnection], None], path: str = "/ws", **options: Any) -> None:
        def handler(exchange: Exchange) -> None:
            accept(exchange, on_open, **options)

        self.site.routes.add("GET", path, handler)

    def echo(self, **options: Any) -> None:
        def on_open(connection: WebSocketConnection) -> None:
            connection.on_message = connection.send
            connection.on_close = lambda code, reason: self.seen.put((code, reason))

        self.websocket(on_open, **options)

    def client(self, path: str = "/ws", **options: Any) -> ClientConnection:
        options = {"max_size": None, "proxy": None, "open_timeout": WAIT, "close_timeout": WAIT} | options
        return connect(f"{'ws' if self._tls is None else 'wss'}://127.0.0.1:{self.port}{path}", **options)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


# The real client.


@pytest.mark.parametrize("compression", [None, "deflate"])
@pytest.mark.parametrize(
    "message", ["", "hello", "h\u00e9 \U0001f30a", b"", b"\x00\xff", b"x" * 126, "y" * 65_536, NOISE, "z" * 7_000_000]
)
def test_echo(server: Server, message: str | bytes, compression: str | None) -> None:
    server.echo()
    with server.client(compression=compression) as client:
        for _ in range(2):
            client.send(message)
            assert client.recv(WAIT) == message
        assert [extension.name for extension in client.protocol.extensions] == (
            ["permessage-deflate"] if compression else []
        )


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_fragments_are_joined(server: Server, compression: str | None) -> None:
    server.echo()
    with server.client(compression=compression) as client:
        client.send(["a \u00e9", "", "b" * 100_000, "c"])
        assert client.recv(WAIT) == "a \u00e9" + "b" * 100_000 + "c"
        client.send(iter([b"\x00", b"", b"\x01" * 70_000]))
        assert client.recv(WAIT) == b"\x00" + b"\x01" * 70_000


def test_many_messages_keep_their_order(server: Server) -> None:
    server.echo()
    with server.client() as client:
        for n in range(2000):
            client.send(str(n))
        assert [client.recv(WAIT) for _ in range(2000)] == [str(n) for n in range(2000)]


def test_compression_can_be_declined(server: Server) -> None:
    server.echo(compression=False)
    with server.client(compression="deflate") as client:
        assert client.protocol.extensions == []


def test_ping_is_answered(server: Server) -> None:
    server.echo()
    with server.client() as client:
        assert client.ping(b"payload").wait(WAIT)


@pytest.mark.parametrize(("offered", "agreed"), [(["v1"], "v1"), (["v1", "v2"], "v2"), (["x"], None), (None, None)])
def test_the_first_of_our_subprotocols_that_is_offered_is_used(
    server: Server, offered: Any, agreed: str | None
) -> None:
    def on_open(connection: WebSocketConnection) -> None:
        server.seen.put(connection.subprotocol)

    server.websocket(on_open, subprotocols=("v2", "v1"))
    with server.client(subprotocols=offered) as client:
        assert client.subprotocol == agreed
    assert server.seen.get(timeout=WAIT) == agreed


def test_the_servers_close_code_reaches_the_client(server: Server) -> None:
    def on_open(connection: WebSocketConnection) -> None:
        connection.on_close = lambda code, reason: server.seen.put((code, reason))
        connection.send("last words")
        connection.close(4321, "enough " * 50)
        connection.close(1000)  # only the first counts
        assert connection.send("too late") is False

    server.websocket(on_open)
    with server.client() as client:
        assert client.recv(WAIT) == "last words"
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(WAIT)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4321, fit_reason("enough " * 50))
    assert server.seen.get(timeout=WAIT)[0] == 4321  # the client echoes it


@pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1001, "bye"), (4000, "\u00e9"), (3000, "x" * 123)])
def test_the_clients_close_code_reaches_the_server(server: Server, code: int, reason: str) -> None:
    server.echo()
    with server.client() as client:
        client.close(code, reason)
    assert server.seen.get(timeout=WAIT) == (code, reason)
    assert client.protocol.close_sent == client.protocol.close_rcvd


def test_a_client_that_vanishes_is_reported_as_1006(server: Server) -> None:
    server.echo()
    with server.client() as client:
        client.send("x")
        assert client.recv(WAIT) == "x"
        client.socket.shutdown(socket.SHUT_RDWR)
        assert server.seen.get(timeout=WAIT) == (1006, "")


def test_drain_closes_with_1001_and_waits_for_the_answer(server: Server) -> None:
    server.echo()
    with server.client() as client:
        client.send("x")
        assert client.recv(WAIT) == "x"
        (connection,) = server.site.connections
        server.call(connection.drain)
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(WAIT)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001
    assert server.seen.get(timeout=WAIT)[0] == 1001


def test_no_websocket_is_opened_while_draining(server: Server) -> None:
    server.echo()
    server.site.draining = True
    with pytest.raises(InvalidStatus) as refused, server.client():
        pass
    assert refused.value.response.status_code == 503


def test_an_exception_closes_with_1011_and_is_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def fails(message: str | bytes) -> None:
        server.seen.put(message)
        raise KeyError("secret")

    def on_open(connection: WebSocketConnection) -> None:
        connection.on_message = fails

    server.websocket(on_open)
    with caplog.at_level(logging.INFO), server.client(additional_headers={"x-request-id": "find-me"}) as client:
        client.socket.sendall(frame(0x81, b"one") + frame(0x81, b"two"))
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(WAIT)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1011
    assert "secret" not in closed.value.rcvd.reason
    assert "find-me" in closed.value.rcvd.reason
    assert server.seen.get(timeout=WAIT) == "one"
    assert server.seen.empty()
    assert [record.message for record in caplog.records if record.exc_info] == ["WebSocket handler failed"]


def test_our_own_error_closes_with_its_code_and_is_not_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def on_open(connection: WebSocketConnection) -> None:
        raise ResourceExhausted("come back later")

    server.websocket(on_open)
    with caplog.at_level(logging.INFO), server.client() as client, pytest.raises(ConnectionClosed) as closed:
        client.recv(WAIT)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "come back later")
    assert not [record for record in caplog.records if record.name.startswith("headrace")]


def exchange_one(client: ClientConnection, message: Any) -> str | bytes:
    client.send(message)
    return client.recv(WAIT)


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_a_message_over_the_limit_closes_with_1009(server: Server, compression: str | None) -> None:
    server.echo()
    with server.client(compression=compression) as client:
        client.send(bytes(MESSAGE_BYTES))
        assert client.recv(WAIT) == bytes(MESSAGE_BYTES)
        with pytest.raises(ConnectionClosed):
            exchange_one(client, bytes(MESSAGE_BYTES + 1))
    assert client.protocol.close_rcvd is not None
    assert client.protocol.close_rcvd.code == 1009
    assert server.seen.get(timeout=WAIT)[0] == 1009


def test_fragments_count_together(server: Server) -> None:
    server.echo()
    with server.client(compression=None) as client, pytest.raises(ConnectionClosed):
        exchange_one(client, iter([bytes(MESSAGE_BYTES), b"x"]))
    assert client.protocol.close_rcvd is not None
    assert client.protocol.close_rcvd.code == 1009


def test_the_connection_is_on_the_site_and_leaves_it(server: Server) -> None:
    class Watched(set[Any]):
        def discard(self, connection: Any) -> None:
            super().discard(connection)
            server.seen.put(type(connection))

    server.site.connections = Watched()
    server.echo()
    with server.client() as client:
        client.send("x")
        assert client.recv(WAIT) == "x"
        kinds = server.call(lambda: [type(connection) for connection in server.site.connections])
        assert kinds == [WebSocketConnection]
        assert server.log == [(b"/ws", 101)]
    assert server.seen.get(timeout=WAIT) is Http1Connection  # when it handed the connection over
    assert server.seen.get(timeout=WAIT) == (1000, "")
    assert server.seen.get(timeout=WAIT) is WebSocketConnection
    assert not server.site.connections


def test_a_client_that_does_not_read_makes_send_ask_to_pause(server: Server) -> None:
    piece = os.urandom(1 << 20)
    count = 0

    def on_open(connection: WebSocketConnection) -> None:
        def fill() -> None:
            nonlocal count
            while True:
                count += 1
                if not connection.send(piece):
                    server.seen.put("full")
                    return

        connection.on_writable = lambda: server.seen.put("writable")
        connection.on_message = lambda message: fill()

    server.websocket(on_open, compression=False)
    with server.client(max_queue=1) as client:
        client.send("go")
        assert server.seen.get(timeout=WAIT) == "full"
        for _ in range(count):
            assert client.recv(WAIT) == piece
        assert server.seen.get(timeout=WAIT) == "writable"


def test_paused_messages_wait_on_the_clients_side(server: Server) -> None:
    opened: queue.Queue[WebSocketConnection] = queue.Queue()

    def on_open(connection: WebSocketConnection) -> None:
        def on_message(message: str | bytes) -> None:
            server.seen.put(message)
            connection.pause_messages()

        connection.on_message = on_message
        opened.put(connection)

    server.websocket(on_open)
    with server.client() as client:
        connection = opened.get(timeout=WAIT)
        client.socket.sendall(frame(0x81, b"1") + frame(0x81, b"2") + frame(0x81, b"3"))
        assert server.seen.get(timeout=WAIT) == "1"
        assert server.seen.empty()
        server.call(connection.resume_messages)
        assert server.seen.get_nowait() == "2"
        assert server.seen.empty()
        server.call(connection.close)
        with pytest.raises(ConnectionClosed):
            client.recv(WAIT)
        assert server.seen.empty()  # nothing is delivered after close


def test_over_tls_which_cannot_be_half_closed() -> None:
    authority = trustme.CA()
    context, trusting = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(trusting)
    server = Server(context)
    try:
        server.echo()
        with server.client(ssl=trusting) as client:
            for message in ("over TLS", NOISE):
                client.send(message)
                assert client.recv(WAIT) == message
            client.close(4001)
        assert server.seen.get(timeout=WAIT) == (4001, "")
        with server.client(ssl=trusting) as client:
            # The client's own thread reads the answer meanwhile, and Python 3.11 may lay its end of file to this write.
            with suppress(ssl.SSLZeroReturnError, ssl.SSLEOFError):
                client.socket.sendall(b"\x83\x80\0\0\0\0")
            with pytest.raises(ConnectionClosed):
                client.recv(WAIT)
        assert client.protocol.close_rcvd is not None
        assert client.protocol.close_rcvd.code == 1002
    finally:
        server.stop()


# Raw bytes.


def frame(first: int, payload: bytes = b"", masked: bool = True) -> bytes:
    length = len(payload)
    if length < 126:
        head = struct.pack("!BB", first, length | 0x80 * masked)
    elif length < 65_536:
        head = struct.pack("!BBH", first, 126 | 0x80 * masked, length)
    else:
        head = struct.pack("!BBQ", first, 127 | 0x80 * masked, length)
    return head + (b"\0\0\0\0" if masked else b"") + payload


KEY = base64.b64encode(b"0123456789abcdef")
GOOD = {
    b"host": b"example.com",
    b"connection": b"Upgrade",
    b"upgrade": b"websocket",
    b"sec-websocket-version": b"13",
    b"sec-websocket-key": KEY,
}


def handshake(
    *extra: tuple[bytes, bytes], method: bytes = b"GET", version: bytes = b"1.1", **changes: bytes | None
) -> bytes:
    fields = GOOD | {name.replace("_", "-").encode(): value for name, value in changes.items()}
    lines = [b"%b: %b" % item for item in (*((n, v) for n, v in fields.items() if v is not None), *extra)]
    return b"\r\n".join((b"%b /ws HTTP/%b" % (method, version), *lines, b"", b""))


class Raw:
    """A plain socket: sends bytes, reads a response head, then everything until the server hangs up."""

    def __init__(self, server: Server, data: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), WAIT)
        self.socket.sendall(data)
        self._rest = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def head(self) -> tuple[int, dict[str, str]]:
        while b"\r\n\r\n" not in self._rest:
            data = self.socket.recv(65_536)
            if not data:
                raise EOFError(self._rest)
            self._rest += data
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        return int(first.split()[1]), {name.lower(): value for name, _, value in (ln.partition(": ") for ln in lines)}

    def until_end(self) -> bytes:
        while data := self.socket.recv(65_536):
            self._rest += data
        return self._rest

    def close_code(self) -> int:
        """The code of a close frame that must be the last thing the server says."""
        data = self.until_end()
        assert data[0] == 0x88
        assert len(data) == 2 + data[1]
        return int.from_bytes(data[2:4], "big")


def test_the_handshake_of_the_rfc(server: Server) -> None:
    server.echo(extra=[(b"x-more", b"yes")])
    with Raw(server, handshake(sec_websocket_key=b"dGhlIHNhbXBsZSBub25jZQ==")) as raw:
        status, fields = raw.head()
    assert status == 101
    assert fields["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert (fields["upgrade"].lower(), fields["connection"].lower()) == ("websocket", "upgrade")
    assert fields["x-more"] == "yes"
    assert "date" in fields
    assert "sec-websocket-extensions" not in fields


def test_frames_in_the_same_packet_as_the_handshake_are_not_lost(server: Server) -> None:
    server.echo()
    with Raw(server, handshake() + frame(0x81, b"early") + frame(0x88, struct.pack("!H", 1000))) as raw:
        assert raw.head()[0] == 101
        assert raw.until_end() == b"\x81\x05early\x88\x02\x03\xe8"
    assert server.seen.get(timeout=WAIT) == (1000, "")


@pytest.mark.parametrize(
    ("data", "status", "fields"),
    [
        (handshake(connection=None, upgrade=None), 426, {"upgrade": "websocket"}),
        (handshake(upgrade=None), 426, {"upgrade": "websocket"}),
        (handshake(connection=b"keep-alive"), 426, {"upgrade": "websocket"}),
        (handshake(sec_websocket_version=b"8"), 426, {"sec-websocket-version": "13"}),
        (handshake(sec_websocket_version=None), 400, {}),
        (handshake(sec_websocket_key=None), 400, {}),
        (handshake(sec_websocket_key=b"c2hvcnQ="), 400, {}),
        (handshake(sec_websocket_key=b"!" * 24), 400, {}),
        (handshake((b"sec-websocket-key", KEY)), 400, {}),
        (handshake((b"sec-websocket-version", b"13")), 400, {}),
        (handshake((b"origin", b"http://example.com"), (b"origin", b"http://example.com")), 400, {}),
        (handshake((b"sec-websocket-extensions", b"=;=")), 400, {}),
        (handshake((b"sec-websocket-protocol", b"a b")), 400, {}),
        (handshake((b"content-length", b"2")) + b"xx", 400, {}),
        (handshake((b"transfer-encoding", b"chunked")) + b"0\r\n\r\n", 400, {}),
        (handshake(method=b"HEAD"), 405, {"allow": "GET"}),
        (handshake(method=b"POST"), 405, {}),
        (handshake((b"origin", b"http://evil.example")), 403, {}),
        (handshake((b"origin", b"null")), 403, {}),
        (handshake(version=b"1.0"), 400, {}),
    ],
)
def test_a_bad_handshake_is_refused(server: Server, data: bytes, status: int, fields: dict[str, str]) -> None:
    server.echo()
    with Raw(server, data) as raw:
        got, got_fields = raw.head()
    assert got == status
    assert fields.items() <= got_fields.items()
    assert server.seen.empty()
    with server.client() as client:  # and the server is none the worse for it
        client.send("x")
        assert client.recv(WAIT) == "x"


def test_a_page_of_the_same_host_and_any_page_where_allowed(server: Server) -> None:
    server.echo()
    server.echo(path="/open", check_origin=any_origin)
    with Raw(server, handshake((b"origin", b"https://EXAMPLE.com"))) as raw:
        assert raw.head()[0] == 101
    evil = handshake((b"origin", b"https://evil.example")).replace(b"/ws", b"/open")
    with Raw(server, evil) as raw:
        assert raw.head()[0] == 101


DEFLATE = (b"sec-websocket-extensions", b"permessage-deflate")


def deflated(payload: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -12)
    return (packer.compress(payload) + packer.flush(zlib.Z_SYNC_FLUSH))[:-4]


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(0x81, b"\xff"), 1007),
        (frame(0x01, b"\xe2") + frame(0x80, b"\x82"), 1007),
        (frame(0x81, b"\xed\xa0\x80"), 1007),
        (frame(0x81, b"x", masked=False), 1002),
        (frame(0x83, b"x"), 1002),
        (frame(0x8B, b"x"), 1002),
        (frame(0xA1, b"x"), 1002),
        (frame(0xC1, b"x"), 1002),
        (frame(0x80, b"x"), 1002),
        (frame(0x01, b"x") + frame(0x81, b"y"), 1002),
        (frame(0x09, b"x"), 1002),
        (frame(0x89, b"x" * 126), 1002),
        (frame(0x88, b"x"), 1002),
        (frame(0x88, struct.pack("!H", 1005)), 1002),
        (frame(0x88, struct.pack("!H", 999)), 1002),
        (frame(0x88, struct.pack("!H", 1000) + b"\xff"), 1007),
        (frame(0x01, b"x") + frame(0x88, struct.pack("!H", 1000)), 1002),
        (struct.pack("!BBQ", 0x82, 0xFF, MESSAGE_BYTES + 1), 1009),
        (struct.pack("!BBQ", 0x82, 0xFF, 2**63), 1009),
    ],
)
def test_a_bad_frame_closes_with_the_right_code(server: Server, frames: bytes, code: int) -> None:
    server.echo()
    # Bytes after the bad frame are neither parsed nor a reason to reset the connection before the code is read.
    with Raw(server, handshake() + frames + frame(0x81, b"after") * 5000) as raw:
        assert raw.head()[0] == 101
        assert raw.close_code() == code
    assert server.seen.get(timeout=WAIT)[0] in (code, 1000)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(0xC2, deflated(bytes(MESSAGE_BYTES + 1))), 1009),
        (frame(0x42, deflated(bytes(MESSAGE_BYTES))) + frame(0x80, b"x" * 2000), 1009),
        (frame(0xC2, b"\xff\xff\xff\xff"), 1002),
        (frame(0xC1, deflated(b"\xff")), 1007),
        (frame(0x41, b"") + frame(0xC0, b""), 1002),
    ],
)
def test_a_bad_deflated_message_closes_with_the_right_code(server: Server, frames: bytes, code: int) -> None:
    server.echo()
    with Raw(server, handshake(DEFLATE) + frames) as raw:
        status, fields = raw.head()
        assert (status, fields["sec-websocket-extensions"].split(";")[0]) == (101, "permessage-deflate")
        assert raw.close_code() == code


def test_pongs_precede_later_messages_and_unsolicited_pongs_are_ignored(server: Server) -> None:
    server.echo()
    data = frame(0x8A, b"unasked") + frame(0x01, b"a") + frame(0x89, b"in between") + frame(0x80, b"b") + frame(0x88)
    with Raw(server, handshake() + data) as raw:
        raw.head()
        assert raw.until_end() == b"\x8a\x0ain between\x81\x02ab\x88\x00"
    assert server.seen.get(timeout=WAIT) == (1005, "")


def test_an_ordinary_request_before_the_handshake_on_the_same_connection(server: Server) -> None:
    server.echo()
    server.site.routes.add("GET", "/hello", lambda exchange: exchange.respond(OK_PLAIN, b"hello"))
    with Raw(server, b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n" + handshake() + frame(0x88)) as raw:
        assert raw.head()[0] == 200
        assert raw.until_end().startswith(b"helloHTTP/1.1 101 ")


# The tables.


def test_every_error_code_has_a_close_code_that_may_be_sent() -> None:
    assert set(CLOSE_CODE) == set(Code)
    assert all(may_be_sent(code) for code in CLOSE_CODE.values())


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000])
def test_codes_that_may_not_be_sent(code: int) -> None:
    assert not may_be_sent(code)


@pytest.mark.parametrize("reason", ["", "x" * 123, "x" * 124, "\u00e9" * 62, "\U0001f30a" * 40, "\ud800" * 200])
def test_a_reason_fits_a_frame_and_stays_text(reason: str) -> None:
    assert len(fit_reason(reason).encode()) <= 123
    assert fit_reason(reason) == reason or len(reason.encode("utf-8", "replace")) > 123


@pytest.mark.parametrize(
    ("origin", "same"),
    [(None, True), (b"http://h:1", True), (b"https://H:1", True), (b"http://h", False), (b"null", False), (b"", False)],
)
def test_same_origin(origin: bytes | None, same: bool) -> None:
    fields = [(b"host", b"h:1")] + ([] if origin is None else [(b"origin", origin)])
    assert same_origin(RequestHead(b"GET", b"/", fields, version="1.1")) is same


class FakeExchange(Exchange):
    """An exchange that is not HTTP/1.1."""

    def __init__(self) -> None:
        self.head = RequestHead(b"GET", b"/ws", [], version="2")
        self.answers: list[int] = []

    def respond(self, head: Any, body: Any = b"", extra: Any = ()) -> None:
        assert not extra  # upgrade and connection fields are not allowed in HTTP/2
        self.answers.append(head.status)


def test_another_protocol_than_http1_is_refused() -> None:
    exchange = FakeExchange()
    assert accept(exchange, lambda connection: None) is None
    assert exchange.answers == [400]
    assert accept_module.any_origin(exchange.head)
