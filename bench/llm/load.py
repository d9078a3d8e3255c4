# SPDX-License-Identifier: Apache-2.0
"""A load generator for `/v1/completions`: raw sockets in several processes, with little work for each token.

`run(port, model, workload, vocabulary)` returns the figures of one workload.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import Any

from bench.llm.workloads import Workload

HOST = "127.0.0.1"
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens": ?(\d+)')
_CACHED = re.compile(rb'"cached_tokens": ?(\d+)')
_TAIL_BYTES = 6000
"""The usage of a stream is in its last bytes."""
_STREAMS_PER_PROCESS, _MOST_PROCESSES = 16, 8
_LIMIT_SECONDS = 240.0


@dataclass
class Answer:
    """What came of a request. Times are of `perf_counter`, which processes of one machine share."""

    begin: float = 0.0
    end: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)
    """When events came, and how many."""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class Stream(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._done: asyncio.Future[None] | None = None
        self._answer = Answer()
        self._streamed = True
        self._head, self._tail = b"", b""
        self._status, self._length, self._received = 0, -1, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the server closed the connection: {exc or self._tail[-200:]!r}"))

    async def ask(self, body: bytes, streamed: bool) -> Answer:
        """Send a request and wait for all of its answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._answer, self._streamed = Answer(time.perf_counter()), streamed
        self._head, self._tail, self._status, self._length, self._received = b"", b"", 0, -1, 0
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        self._transport.write(head % (HOST.encode(), len(body)) + body)
        await self._done
        answer, tail = self._answer, self._tail
        if self._status != 200:
            answer.error = f"{self._status} {tail[:300]!r}"
        answer.tokens, answer.prompt_tokens, answer.cached_tokens = (
            int(found[-1]) if (found := pattern.findall(tail)) else 0 for pattern in (_TOKENS, _PROMPT, _CACHED)
        )
        return answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._status:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._status = int(head[9:12])
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            self._length = int(length[1]) if length else -1
        self._received += len(data)
        if self._streamed and (count := data.count(b"data: ")):
            self._answer.events.append((now, count))
        self._tail = (self._tail + data)[-_TAIL_BYTES:] if self._streamed else self._tail + data
        whole = self._received >= self._length if self._length >= 0 else self._tail.endswith(b"0\r\n\r\n")
        if whole and self._done is not None and not self._done.done():
            self._answer.end = now
            if not self._streamed:
                self._answer.events.append((now, 1))
            self._done.set_result(None)


async def _ask_all(port: int, bodies: Sequence[bytes], streams: int, streamed: bool, barrier: Barrier) -> list[Answer]:
    loop = asyncio.get_running_loop()
    connections = [(await loop.create_connection(Stream, HOST, port))[1] for _ in range(streams)]
    await loop.run_in_executor(None, barrier.wait)
    left, answers = iter(bodies), []

    async def work(connection: Stream) -> None:
        for body in left:
            try:
                answers.append(await connection.ask(body, streamed))
            except ConnectionError as error:
                answers.append(Answer(error=str(error)))
                connection = (await loop.create_connection(Stream, HOST, port))[1]

    await asyncio.gather(*map(work, connections))
    return answers


def _process(port: int, bodies: list[bytes], streams: int, streamed: bool, barrier: Barrier, pipe: Connection) -> None:
    try:
        pipe.send(asyncio.run(_ask_all(port, bodies, streams, streamed, barrier)))
    except Exception as error:
        pipe.send([Answer(error=f"the load generator failed: {error!r}")])
        barrier.abort()


def run(
    port: int, model: str, workload: Workload, vocabulary: int, started: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Run a workload; `started` is called when all connections are open."""
    streams = workload.streams
    bodies = [workload.body(model, prompt, answer) for prompt, answer in workload.prompts(vocabulary)]
    count = max(1, min(_MOST_PROCESSES, streams // _STREAMS_PER_PROCESS))
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count + 1)
    processes = []
    for index in range(count):
        ours, theirs = context.Pipe(duplex=False)
        share = streams // count + (index < streams % count)
        arguments = (port, bodies[index::count], share, workload.streamed, barrier, theirs)
        process = context.Process(target=_process, args=arguments, daemon=True)
        process.start()
        processes.append((process, ours))
    started()
    with suppress(BrokenBarrierError):  # the answers say why
        barrier.wait(60)
    answers: list[Answer] = []
    until = time.monotonic() + _LIMIT_SECONDS
    for process, pipe in processes:
        if pipe.poll(max(0.1, until - time.monotonic())):
            answers += pipe.recv()
        else:
            answers.append(Answer(error=f"no answer within {_LIMIT_SECONDS:g} s"))
            process.kill()
        process.join(5)
    return _figures(answers)


def _figures(answers: Sequence[Answer]) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.error and answer.events]
    errors = [answer.error for answer in answers if answer.error]
    if not good:
        return {"errors": len(errors), "error": errors[:2]}
    seconds = max(answer.end for answer in good) - min(answer.begin for answer in good)
    tokens = sum(answer.tokens for answer in good)
    return {
        "requests": len(good),
        "errors": len(errors),
        "error": errors[:2],
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_ms": _quantiles([answer.events[0][0] - answer.begin for answer in good]),
        "between_tokens_ms": _quantiles([gap for answer in good for gap in _gaps(answer)]),
        "request_ms": _quantiles([answer.end - answer.begin for answer in good]),
    }


def _gaps(answer: Answer) -> Iterator[float]:
    """Yield the seconds between tokens; events that came together have none between them."""
    left, before = answer.tokens, 0.0
    for now, events in answer.events:
        count = min(events, left)  # the last events are the usage and the end
        left -= count
        if count:
            if before:
                yield now - before
            yield from [0.0] * (count - 1)
            before = now


def _quantiles(seconds: Sequence[float]) -> list[float]:
    """Return the median and the 99th percentile in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    return [round(1e3 * ordered[min(int(len(ordered) * share), len(ordered) - 1)], 3) for share in (0.5, 0.99)]
