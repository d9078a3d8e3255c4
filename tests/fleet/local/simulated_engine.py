# SPDX-License-Identifier: Apache-2.0
"""A language model's server for the simulated machine, with the times of `bench.fleet_sim`'s engine, and clients for it.

Real: the router between them, HTTP, the autoscaler. Fake: the engine, which batches continuously and takes the times of an
8B model on an H200; tokens after the first are sent together when the last is done.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from simulated_programs import SimulatedProcess

from bench.fleet_sim import BLOCK_TOKENS, Engine, EngineTimes, PrefixCache, Request

_BLOCKS = itertools.count(1)


class _Machine:
    """What `bench.fleet_sim.Engine` needs of a simulation: time, and somebody who hears of tokens."""

    def __init__(self) -> None:
        self.times = EngineTimes()
        self._loop = asyncio.get_running_loop()
        self._events = itertools.count()
        self.waiting: dict[Request, tuple[asyncio.Event, asyncio.Event]] = {}

    @property
    def now(self) -> float:
        return self._loop.time()

    def at(self, when: float, engine: Engine) -> int:
        event = next(self._events)
        self._loop.call_at(when, engine.step, event)
        return event

    def answered(self, request: Request) -> None:
        self.waiting[request][0].set()

    def finished(self, request: Request) -> None:
        self.waiting[request][1].set()


async def engine(process: SimulatedProcess) -> int:
    """`engine --port=N [--start=SECONDS]`: streams `max_tokens` tokens for a prompt of `prompt_tokens`."""
    options = dict(word.removeprefix("--").split("=", 1) for word in process.words if word.startswith("--"))
    await asyncio.sleep(float(options.get("start", 0.0)))
    machine: Any = _Machine()
    replica = Engine(machine, PrefixCache(1, None))
    open_streams, idle, stopped = 0, asyncio.Event(), asyncio.Event()
    idle.set()

    async def stream(writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        nonlocal open_streams
        blocks = tuple(next(_BLOCKS) for _ in range(asked["prompt_tokens"] // BLOCK_TOKENS))
        request = Request(machine.now, blocks, asked["prompt_tokens"], asked["max_tokens"])
        first, last = machine.waiting[request] = asyncio.Event(), asyncio.Event()
        open_streams += 1
        idle.clear()
        try:
            replica.add(request)
            await first.wait()
            writer.write(b"HTTP/1.1 200 -\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            _write_chunk(writer, b"data: 1\n\n")
            await last.wait()
            _write_chunk(writer, b"data: 1\n\n" * (asked["max_tokens"] - 1) + b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            del machine.waiting[request]
            open_streams -= 1
            if not open_streams:
                idle.set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET "):
                    writer.write(b"HTTP/1.1 200 -\r\ncontent-length: 0\r\n\r\n")
                    continue
                length = next(
                    int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length:")
                )
                await stream(writer, json.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    loop = process.loop
    server = loop.listen(
        int(options["port"]),
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), serve, loop=loop),
    )
    process.on_terminate = stopped.set
    await stopped.wait()
    server.close()
    await idle.wait()
    return 0


def _write_chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(content), content))


@dataclass
class Stream:
    """One request of a client."""

    asked_at: float
    status: int = 0
    first: float = 0.0
    """Seconds to the first token."""
    per_token: float = 0.0
    tokens: int = 0
    whole: bool = False
    """Whether the stream ended as it should."""


@dataclass
class OpenLoop:
    """Requests that come whether or not earlier ones are answered."""

    url: str
    prompt_tokens: int = 4096
    output_tokens: int = 100
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    streams: list[Stream] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, rate: float, seconds: float) -> None:
        """Send requests at this rate for so long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (when := loop.time() + self.chance.expovariate(rate)) < until:
            await asyncio.sleep(when - loop.time())
            task = asyncio.ensure_future(self._ask())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.sleep(max(0.0, until - loop.time()))

    async def finish(self) -> None:
        """Wait until all streams have ended."""
        while self._tasks:
            await asyncio.gather(*tuple(self._tasks))

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        tokens = max(2, round(self.output_tokens * self.chance.uniform(0.5, 1.5)))
        asked = {"prompt_tokens": self.prompt_tokens, "max_tokens": tokens, "stream": True}
        body, stream = json.dumps(asked).encode(), Stream(loop.time())
        self.streams.append(stream)
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(self.url).port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: fleet\r\nconnection: close\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            stream.status = int(head.split()[1])
            content = b""
            while piece := await reader.read(1 << 16):
                if not stream.first and b"data:" in piece:
                    stream.first = loop.time() - stream.asked_at
                content += piece
            stream.tokens = content.count(b"data: 1")
            stream.whole = stream.tokens == tokens and b"[DONE]" in content and content.endswith(b"0\r\n\r\n")
            stream.per_token = (loop.time() - stream.asked_at - stream.first) / (tokens - 1)
        finally:
            writer.close()


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
