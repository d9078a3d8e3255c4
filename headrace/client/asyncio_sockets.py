# SPDX-License-Identifier: Apache-2.0
"""Connections on asyncio streams, for `aio`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Sequence

from headrace.client.retries import Deadline
from headrace.client.sockets import CONNECT_SECONDS, Address
from headrace.core.tensors import Buffer

_RECEIVE_BYTES = 256 * 1024
_JOIN_BYTES = 64 * 1024


class AsyncConnection:
    """A `Connection` on an asyncio stream. Close it after a cancelled call."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()

    async def send(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        """Send all buffers."""
        if sum(map(len, buffers)) <= _JOIN_BYTES:
            buffers = [b"".join(buffers)]
        async with _within(deadline):
            for buffer in buffers:
                self._writer.write(buffer)
                await self._writer.drain()

    async def receive(self, deadline: Deadline) -> bytes:
        """Return received bytes; b"" at the end of the connection."""
        async with _within(deadline):
            return await self._reader.read(_RECEIVE_BYTES)

    async def fill(self, view: memoryview, deadline: Deadline) -> int:
        """Receive until a buffer is full or the connection ends; return the number of bytes."""
        position = 0
        async with _within(deadline):
            while position < len(view):
                data = await self._reader.read(min(_RECEIVE_BYTES, len(view) - position))
                if not data:
                    break
                view[position : position + len(data)] = data
                position += len(data)
        return position

    def is_stale(self) -> bool:
        """Return whether an idle connection is unusable: closed, or with unexpected data."""
        if self._loop is not asyncio.get_running_loop():
            return True  # The event loop of an earlier `asyncio.run`.
        return self._reader.at_eof() or self._writer.is_closing() or self._reader.exception() is not None

    def close(self) -> None:
        """Close the connection at once."""
        # Not `close`, which waits until the peer has received everything.
        with contextlib.suppress(RuntimeError):  # The event loop is closed, and the connection with it.
            self._writer.transport.abort()


class AsyncNetwork:
    """A `Network` on asyncio."""

    async def connect(self, address: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> AsyncConnection:
        """Connect, with TLS if a context is given."""
        left = deadline.left()
        server_name = address.host if tls is not None else None
        try:
            async with asyncio.timeout(CONNECT_SECONDS if left is None else min(CONNECT_SECONDS, left)):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=tls, server_hostname=server_name, limit=_RECEIVE_BYTES
                )
        except TimeoutError:
            deadline.left()
            raise
        sock = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return AsyncConnection(reader, writer)

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)


@contextlib.asynccontextmanager
async def _within(deadline: Deadline) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(deadline.left()):
            yield
    except TimeoutError as error:
        raise deadline.error_for(error) from None
