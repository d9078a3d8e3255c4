# SPDX-License-Identifier: Apache-2.0
"""Hand bytes from clients to backends and back, knowing nothing of HTTP: what a router on this loop cannot go below.

    python scripts/bare_pump.py PORT BACKEND-PORT...

Each connection of a client gets one to the next backend. For `measure_router_chat.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import cast

import uvloop


class Back(asyncio.Protocol):
    """To a backend."""

    def __init__(self, client: Front) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what has come meanwhile."""
        self._client.backend = cast("asyncio.Transport", transport)
        self._client.backend.writelines(self._client.early)

    def data_received(self, data: bytes) -> None:
        """An answer."""
        self._client.transport.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        """The client is told."""
        self._client.transport.close()


class Front(asyncio.Protocol):
    """From a client."""

    def __init__(self, ports: Iterator[int]) -> None:
        self._ports = ports
        self.early: list[bytes] = []
        self.backend: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect."""
        self.transport = cast("asyncio.Transport", transport)
        loop = asyncio.get_running_loop()
        made = loop.create_connection(lambda: Back(self), "127.0.0.1", next(self._ports))
        self._connecting = loop.create_task(made)

    def data_received(self, data: bytes) -> None:
        """A request."""
        if self.backend is None:
            self.early.append(data)
        else:
            self.backend.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        """The backend is told."""
        if self.backend is not None:
            self.backend.close()


async def serve(port: int, backends: list[int]) -> None:
    """Until killed."""
    ports = itertools.cycle(backends)
    server = await asyncio.get_running_loop().create_server(lambda: Front(ports), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), [int(each) for each in sys.argv[2:]]))
