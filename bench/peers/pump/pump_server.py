# SPDX-License-Identifier: Apache-2.0
"""The peer `pump`: the least that a proxy can do in Python on uvloop.

Bytes go to a server and back, unread: no heads, no pool, no health, no metrics. What this costs is the machine's and the
event loop's share of any such proxy. Arguments: the port to listen on, the server's port.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop


class Behind(asyncio.Protocol):
    """The connection to the server, one for each client's."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        """Back to the client."""
        self._client.transport.write(data)


class Client(asyncio.Protocol):
    """A client's connection."""

    transport: asyncio.Transport
    _behind: asyncio.Transport | None = None

    def __init__(self, port: int) -> None:
        self._port = port
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect to the server."""
        self.transport = transport  # type: ignore[assignment]
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._behind, _ = await loop.create_connection(lambda: Behind(self), "127.0.0.1", self._port)
        self._behind.writelines(self._early)

    def data_received(self, data: bytes) -> None:
        """On to the server."""
        if self._behind is None:
            self._early.append(data)
        else:
            self._behind.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        if self._behind is not None:
            self._behind.close()


async def main(port: int, behind: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Client(behind), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
