# SPDX-License-Identifier: Apache-2.0
"""Redis for tests: a real one, for those marked `platform`, and a fake one that says what a test wants.

with redis_process(tmp_path) as redis:
    redis.url
async with FakeRedis(lambda words: b"+OK\\r\\n") as fake:
    fake.url
"""

from __future__ import annotations

import asyncio
import functools
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from headrace.api.access.redis_rate_limits import RedisAddress
from support.ports import free_port

PASSWORD = "for-this-test"
Answer = Callable[[list[bytes]], bytes | None]


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


class FakeRedis:
    """Reads commands and answers what it is told to, in pieces of a size; None for no answer, b"" to hang up."""

    def __init__(self, answer: Answer, piece_bytes: int = 1 << 30) -> None:
        self.answer = answer
        self._piece_bytes = piece_bytes
        self.commands: list[list[bytes]] = []
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> FakeRedis:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        while line := await reader.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            self.commands.append(words)
            answer = b"+PONG\r\n" if words[0] == b"PING" else self.answer(words)
            if answer == b"":
                break
            for start in range(0, len(answer or b""), self._piece_bytes):
                writer.write((answer or b"")[start : start + self._piece_bytes])
                await asyncio.sleep(0)
        writer.close()


class RedisProcess:
    """A redis-server of the test's own, with nothing on disk."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/2"
        self._command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--appendonly", "no", "--dir", str(folder), "--requirepass", PASSWORD]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it listens: whoever looks for it once must find it."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        limit = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < limit
                time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def connect(self) -> Redis:
        """A client, as soon as Redis answers."""
        client = RedisAddress.parse(self.url).client()
        async with asyncio.timeout(120):
            while True:
                try:
                    await client.ping()
                except RedisConnectionError:
                    await asyncio.sleep(0.02)
                else:
                    return client


@contextmanager
def redis_process(folder: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(folder)
    process.start()
    try:
        yield process
    finally:
        process.stop()
