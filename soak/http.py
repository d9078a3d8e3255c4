# SPDX-License-Identifier: Apache-2.0
"""Just enough of HTTP/1.1 to ask our own server: one connection, one request after the other. Used by `traffic`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self


class Connection:
    """To a server of this machine; opened by `async with`."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    async def ask(self, path: str, body: bytes, *fields: str, method: str = "POST") -> tuple[int, bytes]:
        """Status and body of an answer that has a length."""
        status, length = await self.begin(path, body, *fields, method=method)
        return status, await self.reader.readexactly(length or 0)

    async def begin(self, path: str, body: bytes, *fields: str, method: str = "POST") -> tuple[int, int | None]:
        """Ask, and read the answer's head: its status, and its length unless it comes in chunks."""
        lines = (f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *fields)
        self.writer.write("\r\n".join((*lines, "", "")).encode() + body)
        await self.writer.drain()
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        _, found, rest = head.partition(b"\r\ncontent-length:")
        return int(head.split(b" ", 2)[1]), int(rest.split(b"\r\n", 1)[0]) if found else None

    async def chunks(self) -> AsyncIterator[bytes]:
        """The pieces of an answer without a length."""
        while size := int((await self.reader.readline()).strip(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    def vanish(self) -> None:
        """Go without a word, as a process that was killed."""
        self.writer.transport.abort()
