# SPDX-License-Identifier: Apache-2.0
"""One client, many threads or tasks: each gets its own answers."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import uvloop
from client_servers import RealServer

from headrace.client import AsyncClient, Client

WORKERS, EACH = 8, 40


def row(number: int) -> dict[str, object]:
    return {"INPUT0": np.full((1, 4), number, np.float32)}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_threads_share_a_client(real: RealServer, protocol: str) -> None:
    with Client(getattr(real, protocol)) as client, ThreadPoolExecutor(WORKERS) as pool:

        def work(worker: int) -> list[float]:
            return [float(client.infer("echo", row(worker * EACH + turn))["OUTPUT0"][0, 3]) for turn in range(EACH)]

        for worker, seen in enumerate(pool.map(work, range(WORKERS))):
            assert seen == [float(worker * EACH + turn) for turn in range(EACH)]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tasks_share_a_client(real: RealServer, protocol: str) -> None:
    async def main() -> None:
        async with AsyncClient(getattr(real, protocol)) as client:
            for _ in range(2):
                results = await asyncio.gather(*(client.infer("echo", row(number)) for number in range(100)))
                assert [float(result["OUTPUT0"][0, 0]) for result in results] == [
                    float(number) for number in range(100)
                ]

    asyncio.run(main())


def test_connections_are_kept_and_bounded(real: RealServer) -> None:
    with Client(real.http) as client:
        for number in range(5):
            client.infer("echo", row(number))
        connections = client._requests._transport._connections  # type: ignore[attr-defined]
        assert len(connections._idle) == 1
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda number: client.infer("echo", row(number)), range(64)))
        assert 1 <= len(connections._idle) <= WORKERS
    assert connections._idle == []


def test_a_blocking_client_works_inside_a_loop(real: RealServer) -> None:
    """As in a notebook, whose cells run in one."""

    async def main() -> float:
        with Client(real.http) as client:
            return float(client.infer("echo", row(6))["OUTPUT0"][0, 0])

    assert asyncio.run(main()) == 6.0


# Python tells of the connection that the first loop left behind; whoever wants no such warning closes the client there.
@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_async_client_lives_on_in_another_loop(real: RealServer, protocol: str) -> None:
    client = AsyncClient(getattr(real, protocol))

    async def ask(number: int, last: bool = False) -> float:
        result = await client.infer("echo", row(number))
        if last:
            await client.close()
        return float(result["OUTPUT0"][0, 0])

    assert asyncio.run(ask(1)) == 1.0
    assert asyncio.run(ask(2, last=True)) == 2.0
    gc.collect()


def test_an_async_client_on_uvloop(real: RealServer) -> None:
    async def main() -> list[float]:
        async with AsyncClient(real.http) as client:
            big = np.ones((500, 500), np.float32)
            requests = (client.infer("same_FP32", {"x": big * number}) for number in range(8))
            return [float(result["y"][-1, -1]) for result in await asyncio.gather(*requests)]

    assert uvloop.run(main()) == [float(number) for number in range(8)]


def test_a_forked_child_does_not_use_its_parents_connections(real: RealServer) -> None:
    with Client(real.http) as client:
        client.infer("echo", row(1))
        connections = client._requests._transport._connections  # type: ignore[attr-defined]
        ((line, _),) = connections._idle
        connections._process -= 1  # as if this were the child; a real fork beside threads is not for tests
        client.infer("echo", row(2))
        ((other, _),) = connections._idle
        assert other is not line
