# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of the proxy against servers that answer in every way, some of them wrong."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from headrace.backends.openai_proxy.client import HEAD_BYTES, ConnectionPool, Headers, fetch
from headrace.backends.openai_proxy.settings import Origin

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RecordingHandler:
    """A response handler that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = {}
        self.pieces: list[bytes] = []
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def head_received(self, status: int, headers: Headers) -> None:
        assert not self.status
        self.status, self.headers = status, headers

    def body_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def completed(self) -> None:
        self.end.set_result("")

    def failed(self, reason: str) -> None:
        self.end.set_result(reason)

    async def over(self) -> tuple[int, bytes, str]:
        async with asyncio.timeout(30):
            why = await self.end
        return self.status, b"".join(self.pieces), why


def run(serve: Serve, test: Callable[[ConnectionPool], Awaitable[None]], key: str = "") -> int:
    """A test with a pool to a server; how many connections were made."""
    connections = 0

    async def main() -> None:
        async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            try:
                await serve(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(counted, "127.0.0.1", 0)
        pool = ConnectionPool(
            asyncio.get_running_loop(), Origin("127.0.0.1", server.sockets[0].getsockname()[1], prefix="/p"), key
        )
        try:
            await test(pool)
        finally:
            pool.close()
            server.close()
            await asyncio.sleep(0)

    asyncio.run(main())
    return connections


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
    return head, await reader.readexactly(length)


def answering(*answers: bytes, pause: bool = False) -> Serve:
    """A server that gives these answers one after the other, and then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await read_request(reader)
            pieces = [answer[at : at + 1] for at in range(len(answer))] if pause else [answer]
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if pause:
                    await asyncio.sleep(0)

    return serve


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Y: z\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\ntrailer: x\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nhello"
OLD = b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK


@pytest.mark.parametrize("answer", [OK, CHUNKED, UNTIL_CLOSE, OLD, INTERIM])
@pytest.mark.parametrize("pause", [False, True])
def test_every_way_to_end_an_answer(answer: bytes, pause: bool) -> None:
    async def test(pool: ConnectionPool) -> None:
        received = RecordingHandler()
        pool.post("/x", b"{}", received)
        assert await received.over() == (200, b"hello", "")

    run(answering(answer, pause=pause), test)


def test_what_is_sent() -> None:
    seen: list[tuple[str, bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await read_request(reader))
            writer.write(OK)

    async def test(pool: ConnectionPool) -> None:
        received = RecordingHandler()
        pool.post("/v1/x", b'{"a": "\xc3\xa4"}', received)
        await received.over()
        assert received.headers[b"x-y"] == b"z"
        assert await fetch(pool, "/health", 30) == (200, b"hello")
        assert seen[0][0].split("\r\n")[0] == "POST /p/v1/x HTTP/1.1"
        assert f"host: 127.0.0.1:{pool.origin.port}\r\n" in seen[0][0]
        assert "authorization: Bearer k3y\r\n" in seen[0][0] and "accept-encoding: identity" in seen[0][0]
        assert seen[0][1] == b'{"a": "\xc3\xa4"}'
        assert seen[1][0].startswith("GET /p/health HTTP/1.1\r\n")

    assert run(serve, test, "k3y") == 1


def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    async def test(pool: ConnectionPool) -> None:
        for _ in range(3):
            assert (await fetch(pool, "/x", 30))[0] == 200
        # As if the engine had closed it just now, and we had not heard.
        received = RecordingHandler()
        call = pool.get("/x", received)
        assert call.connection is not None
        call.connection._transport.abort()  # type: ignore[union-attr]
        assert await received.over() == (200, b"hello", "")

    assert run(answering(*[OK] * 9), test) == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed the connection without a response"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "in the middle of its response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello", "in the middle of its response"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nhello", "in the middle of its response"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "invalid HTTP response"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "invalid HTTP response"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nxx", "invalid HTTP response"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 2 * HEAD_BYTES, "response headers of more"),
    ],
)
def test_answers_that_are_none(answer: bytes, why: str) -> None:
    async def test(pool: ConnectionPool) -> None:
        received = RecordingHandler()
        pool.post("/x", b"{}", received)
        assert why in (await received.over())[2]
        assert pool.all == set()

    run(answering(answer), test)


def test_a_longer_answer_than_requested_is_discarded() -> None:
    async def test(pool: ConnectionPool) -> None:
        for _ in range(2):
            assert await fetch(pool, "/x", 30) == (200, b"hello")

    assert run(answering(OK + b"HTTP/1.1 500 No\r\ncontent-length: 3\r\n\r\nbad"), test) == 2


def test_giving_up_closes_the_connection() -> None:
    async def test(pool: ConnectionPool) -> None:
        gone = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda *streams: hold(gone, *streams), "127.0.0.1", 0)
        held = ConnectionPool(pool.loop, Origin("127.0.0.1", server.sockets[0].getsockname()[1]))
        received = RecordingHandler()
        call = held.post("/x", b"{}", received)
        while not received.pieces:
            await asyncio.sleep(0.001)
        call.cancel()
        async with asyncio.timeout(30):
            await gone
        assert not received.end.done()
        early = held.post("/x", b"{}", received)
        early.cancel()  # before there is a connection
        held.close()
        server.close()

    async def hold(gone: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
            await reader.read(1)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        if not gone.done():
            gone.set_result(None)
        writer.close()

    run(answering(OK), test)


def test_server_unreachable() -> None:
    async def test(pool: ConnectionPool) -> None:
        nowhere = ConnectionPool(pool.loop, Origin("127.0.0.1", 1))
        with pytest.raises(ConnectionError, match="cannot be reached"):
            await fetch(nowhere, "/x", 30)
        with pytest.raises(ConnectionError, match="cannot be reached"):
            await fetch(ConnectionPool(pool.loop, Origin("no-such-host.invalid", 80)), "/x", 30)

    run(answering(OK), test)


def test_an_engine_behind_https_must_prove_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    proof = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(proof)

    async def test(pool: ConnectionPool) -> None:
        server = await asyncio.start_server(answering(OK), "127.0.0.1", 0, ssl=proof)
        origin = Origin("localhost", server.sockets[0].getsockname()[1], tls=True)
        stranger = ConnectionPool(pool.loop, origin)
        with pytest.raises(ConnectionError, match="certificate that is not trusted"):
            await fetch(stranger, "/x", 30)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        trusting = ConnectionPool(pool.loop, origin)
        assert await fetch(trusting, "/x", 30) == (200, b"hello")
        trusting.close()
        server.close()
        await asyncio.sleep(0.01)

    run(answering(OK), test)


def test_a_page_that_is_late() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await reader.read(1)

    async def test(pool: ConnectionPool) -> None:
        with pytest.raises(ConnectionError, match=r"did not answer /x within 0.05 seconds"):
            await fetch(pool, "/x", 0.05)

    run(never, test)
