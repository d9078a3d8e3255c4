# SPDX-License-Identifier: Apache-2.0
"""gRPC probes against gRPC's own server with its own health service, and against who is none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.fleet.local.probes import check_grpc, probe_check
from headrace.platforms.kubernetes_client.objects import Document
from support.ports import free_port

_SECONDS = 30.0


@pytest.fixture
def server() -> Iterator[tuple[int, health.HealthServicer]]:
    created = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, created)
    port = created.add_insecure_port("127.0.0.1:0")
    created.start()
    yield port, servicer
    created.stop(None).wait()


def test_it_returns_the_status_of_the_server(server: tuple[int, health.HealthServicer]) -> None:
    port, servicer = server
    status = health_pb2.HealthCheckResponse

    async def run() -> None:
        assert await check_grpc(port, "", _SECONDS), "the server as a whole serves by itself"
        assert not await check_grpc(port, "a.Service", _SECONDS), "NOT_FOUND"
        servicer.set("a.Service", status.SERVING)
        assert await check_grpc(port, "a.Service", _SECONDS)
        for other in (status.NOT_SERVING, status.SERVICE_UNKNOWN, status.UNKNOWN):
            servicer.set("a.Service", other)
            assert not await check_grpc(port, "a.Service", _SECONDS)
        servicer.enter_graceful_shutdown()
        assert not await check_grpc(port, "", _SECONDS)

    asyncio.run(run())


def test_a_probe_uses_its_service_name_and_the_local_port_of_the_container(
    server: tuple[int, health.HealthServicer],
) -> None:
    port, servicer = server
    servicer.set("a.Service", health_pb2.HealthCheckResponse.SERVING)

    async def none(*_: Any) -> bool:
        return False

    def probe(**action: Any) -> bool:
        claims: Document = {"grpc": {"port": 9000, **action}, "timeoutSeconds": 30}
        look = probe_check(claims, {9000: port}, {}, none)
        assert look is not None
        return asyncio.run(_awaited(look))

    async def _awaited(look: Any) -> bool:
        result: bool = await look()
        return result

    assert probe() and probe(service="a.Service") and not probe(service="another.Service")


def test_a_server_of_something_else_does_not_serve() -> None:
    outputs = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
        b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\1\x01\0\0\0\1\x88",  # an answer of headers alone
        b"\0\0\4\3\0\0\0\0\1\0\0\0\2",  # RST_STREAM
        b"\0\0\1\0\x09\0\0\0\1\xff",  # padding that is longer than its frame
        b"\xff\xff\xff\0\0\0\0\0\1",
    ]

    async def run() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(outputs[0])
            await writer.drain()
            writer.close()

        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        while outputs:
            assert not await check_grpc(port, "", _SECONDS), outputs[0]
            outputs.pop(0)
        listening.close()
        assert not await check_grpc(free_port(), "", _SECONDS), "nobody listens"

    asyncio.run(run())


def test_who_does_not_answer_in_time_does_not_serve() -> None:
    async def run() -> None:
        gone = asyncio.Event()

        async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()  # until the probe has hung up
            writer.close()
            gone.set()

        listening = await asyncio.start_server(wait, "127.0.0.1", 0)
        assert not await check_grpc(listening.sockets[0].getsockname()[1], "", 0.05)
        async with asyncio.timeout(_SECONDS):
            await gone.wait()
        listening.close()

    asyncio.run(run())
