# SPDX-License-Identifier: Apache-2.0
"""A replica on Ray without Ray: requests reach the server, come back as they are, and are told when the server has ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from headrace.core.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from headrace.fleet.ray_serve.forwarding import Forwarder, ForwardRequest, target_of, without_hop_by_hop
from headrace.fleet.ray_serve.replica import ReplicaServer
from headrace.fleet.ray_serve.replica_spec import ReplicaSpec
from support.async_tests import async_test
from support.virtual_time import LoopClock, run_virtual

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SPEC = ReplicaSpec(
    name="digits",
    namespace="default",
    pod={},
    model=None,
    min_replicas=1,
    max_replicas=1,
    target_requests=1,
    max_requests=1,
    idle_seconds=None,
    cpus=1.0,
    gpus=0,
    memory=0,
    request_seconds=0.0,
    grace_seconds=1.0,
    health_seconds=1.0,
)


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[int]:
    """The port of a server that answers each connection so."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def forwarding(answer: Answer, request_seconds: float = 0.0) -> AsyncIterator[Forwarder]:
    async with listening(answer) as port:
        forwarder = Forwarder(port, request_seconds)
        try:
            yield forwarder
        finally:
            await forwarder.close()


def get(target: str = "/", **headers: str) -> ForwardRequest:
    return ForwardRequest("GET", target, list(headers.items()), None)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with the request itself."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    body = await reader.readexactly(length)
    content = head + body
    writer.write(
        b"HTTP/1.1 201 Created\r\nX-Part: a\r\nX-Part: b\r\nDate: now\r\nConnection: close, X-Gone\r\nX-Gone: 1\r\n"
    )
    writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
    await writer.drain()


@async_test
async def test_a_request_arrives_as_it_was_sent_but_for_the_connection() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    headers = [("Host", "example.com"), ("Content-Length", "7"), ("X-A", "1"), ("X-A", "2"), ("Keep-Alive", "5")]
    async with forwarding(echo) as forwarder:
        response = await forwarder.send(ForwardRequest("POST", "/a%2Fb%7E?x=%20&y", headers, body()))
        content = b"".join([chunk async for chunk in response.body])
    assert response.status == 201
    assert [value for name, value in response.headers if name == "X-Part"] == ["a", "b"]
    assert not {name.lower() for name, _ in response.headers} & {"date", "connection", "x-gone"}
    head, _, received = content.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /a%2Fb%7E?x=%20&y HTTP/1.1\r\n") and received == b"one two"
    assert b"Host: example.com" in head and head.count(b"X-A:") == 2
    assert b"Keep-Alive" not in head and b"User-Agent" not in head and b"Accept-Encoding" not in head


@async_test
async def test_pieces_of_a_stream_arrive_before_its_end() -> None:
    go_on = asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await go_on.wait()
        writer.write(b"4\r\nlast\r\n0\r\n\r\n")
        await writer.drain()

    async with forwarding(stream) as forwarder:
        response = await forwarder.send(get())
        assert await anext(response.body) == b"first"
        go_on.set()
        assert [chunk async for chunk in response.body] == [b"last"]
    assert all(name.lower() != "transfer-encoding" for name, _ in response.headers)


@async_test
async def test_a_client_that_reads_nothing_stops_the_server_from_writing() -> None:
    written = 0
    blocked = asyncio.Event()

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        for _ in range(1000):
            writer.write(bytes(1_000_000))
            written += 1_000_000
            if writer.transport.get_write_buffer_size():
                for _ in range(1000):  # turns of the loop, in which the other side reads what it wants
                    await asyncio.sleep(0)
                if writer.transport.get_write_buffer_size():
                    blocked.set()
                    return

    async with forwarding(pour) as forwarder:
        response = await forwarder.send(get())
        await asyncio.wait_for(blocked.wait(), 60)
        response.body.close()
    assert written < 100_000_000


@async_test
async def test_a_client_that_leaves_closes_the_connection_to_the_server() -> None:
    closed = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await reader.read()
        closed.set()

    async with forwarding(endless) as forwarder:
        response = await forwarder.send(get())
        await anext(response.body)
        response.body.close()
        await asyncio.wait_for(closed.wait(), 60)


async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End in the middle of a body, as a server that is killed."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
    await writer.drain()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End before the head of the response."""
    await reader.readuntil(b"\r\n\r\n")


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@async_test
async def test_a_server_that_ends_before_the_response_is_reported() -> None:
    async with forwarding(silent) as forwarder:
        with pytest.raises(Unavailable, match="has ended"):
            await forwarder.send(get())


@async_test
async def test_a_response_that_is_cut_is_not_taken_for_a_complete_one() -> None:
    async with forwarding(cut) as forwarder:
        response = await forwarder.send(get())
        assert await anext(response.body) == b"first"
        with pytest.raises(Unavailable, match="has ended"):
            await anext(response.body)
        response.body.close()


@async_test
async def test_a_request_may_take_as_long_as_the_service_says() -> None:
    async with forwarding(hang, request_seconds=0.05) as forwarder:
        with pytest.raises(DeadlineExceeded, match=r"0\.05 seconds, the timeoutSeconds"):
            await forwarder.send(get())


@pytest.mark.parametrize(
    ("scope", "target"),
    [
        ({"raw_path": b"/digits/v2/a%2Fb", "path": "/digits/v2/a/b", "root_path": "/digits"}, "/v2/a%2Fb"),
        ({"raw_path": b"/digits", "path": "/digits", "root_path": "/digits", "query_string": b"a=1"}, "/?a=1"),
        ({"raw_path": b"/digits2/v2", "path": "/digits2/v2", "root_path": "/digits"}, "/digits2/v2"),
        ({"path": "/digits/a b", "root_path": "/digits"}, "/a%20b"),
        ({"path": "/v2", "root_path": ""}, "/v2"),
    ],
)
def test_the_prefix_of_the_service_is_not_part_of_the_path(scope: dict[str, Any], target: str) -> None:
    assert target_of(scope) == target


def test_fields_of_the_connection_stay_on_it() -> None:
    fields = [("Connection", "close, X-Own"), ("X-Own", "1"), ("TE", "trailers"), ("Accept", "*/*")]
    assert without_hop_by_hop(fields) == [("Accept", "*/*")]


# The replica


@dataclass
class FakeServer:
    """In place of a `ServerProcess`: a process whose end the test decides."""

    port: int = 1
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: bool = False
    fails: bool = False

    async def wait(self) -> int | None:
        await self.ended.wait()
        return -9

    async def wait_ready(self) -> None:
        if self.fails:
            raise FailedPrecondition("it did not become ready")

    async def check(self) -> None:
        if self.ended.is_set():
            raise Unavailable("it has ended")

    def end_message(self, code: int | None) -> str:
        return f"it has ended: {code}"

    async def stop(self, grace_seconds: float) -> None:
        self.stopped = True


async def start(server: FakeServer, exits: list[int] | None = None, **changes: Any) -> ReplicaServer:
    async def launch(spec: ReplicaSpec) -> Any:
        return server

    content = replace(SPEC, **changes).as_json()
    return await ReplicaServer.start(content, launch, (exits if exits is not None else []).append)


def request(path: str = "/digits/v2", method: str = "GET", **headers: str) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "/digits",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    return Request(scope, receive)


async def received(response: Response) -> tuple[int, bytes]:
    """What the client gets."""
    parts: list[Any] = []

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        parts.append(message)

    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    return parts[0]["status"], b"".join(part.get("body", b"") for part in parts)


@async_test
async def test_a_replica_forwards_to_its_server() -> None:
    async with listening(echo) as port:
        replica = await start(FakeServer(port))
        status, content = await received(await replica.answer(request("/digits/v2/models")))
        await replica.stop()
    assert status == 201 and content.startswith(b"GET /v2/models HTTP/1.1")


@async_test
async def test_a_request_to_a_server_that_has_ended_is_told_so() -> None:
    async with listening(silent) as port:
        replica = await start(FakeServer(port))
        response = await replica.answer(request())
        await replica.stop()
    status, content = await received(response)
    assert status == 503 and "has ended" in json.loads(content)["error"]
    assert response.headers["retry-after"] == "1"


@async_test
async def test_a_request_that_takes_too_long_is_told_so() -> None:
    async with listening(hang) as port:
        replica = await start(FakeServer(port), request_seconds=0.05)
        status, content = await received(await replica.answer(request()))
        await replica.stop()
    assert status == 504 and "timeoutSeconds" in json.loads(content)["error"]


def test_the_replica_ends_with_its_server() -> None:
    async def scenario() -> list[int]:
        server, exits = FakeServer(), list[int]()
        replica = await start(server, exits)
        await replica.check()
        server.ended.set()
        with pytest.raises(Unavailable, match="has ended"):
            await replica.check()
        await replica.watched()
        await replica.stop()
        return exits

    assert run_virtual(scenario(), LoopClock()) == [1]


@async_test
async def test_a_replica_that_is_stopped_stops_its_server_and_lives_on() -> None:
    server, exits = FakeServer(), list[int]()
    replica = await start(server, exits)
    await replica.stop()
    server.ended.set()
    await asyncio.sleep(0)
    assert server.stopped and exits == []


@async_test
async def test_a_server_that_does_not_become_ready_is_stopped() -> None:
    server = FakeServer(fails=True)
    with pytest.raises(FailedPrecondition, match="did not become ready"):
        await start(server)
    assert server.stopped


@async_test
async def test_a_service_of_another_version_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"deployed by Headrace 0\.0\.1.*install the same on all nodes"):
        await start(FakeServer(), version="0.0.1")
