# SPDX-License-Identifier: Apache-2.0
"""One real server for all tests of the client, and each of the four ways to ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from client_servers import RealServer, real_server

from headrace.client import AsyncClient, Client, Result

KINDS = ("http", "grpc", "http-aio", "grpc-aio")


class FromOutside:
    """An `AsyncClient` that is called like a `Client`: each call runs in a loop of its own to its end."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(*arguments, **more)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        if name == "infer_stream":
            return lambda *arguments, **more: iter(self._runner.run(_all(method(*arguments, **more))))
        return lambda *arguments, **more: self._runner.run(method(*arguments, **more))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def __enter__(self) -> FromOutside:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _all(stream: Any) -> list[Result]:
    return [result async for result in stream]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("client")
    with real_server(folder, "--model-control-mode=explicit", "--load-model=*") as server:
        yield server


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, real: RealServer) -> Iterator[Any]:
    """Typed as `Any`: a `Client`, or one that looks like it."""
    url = real.http if request.param.startswith("http") else real.grpc
    make: Any = FromOutside if request.param.endswith("aio") else Client
    with make(url) as made:
        yield made


@pytest.fixture(params=("blocking", "aio"))
def make(request: pytest.FixtureRequest) -> Any:
    """Makes a client, of either kind."""
    return FromOutside if request.param == "aio" else Client
