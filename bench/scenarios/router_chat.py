# SPDX-License-Identifier: Apache-2.0
"""Measure the router's CPU for small chat requests, full and streamed, beside sglang-router.

    .venv/bin/python bench/scenarios/router_chat.py
    .venv/bin/python bench/scenarios/router_chat.py --sglang /tmp/venv/bin/python    # one that has sglang-router

Round robin over two backends, 16 connections, health checks, metrics and retries on. The backends answer at once; a streamed
answer is of 200 events, and comes in two ways. Rushing: as fast as a backend writes, so that some arrive together. Paced: a
backend computes a step for all its streams and then writes an event to each, every two milliseconds, as engines do, so that
each is read and written by itself. Beside it stands what the benchmark's pump takes (`bench/peers/pump`, before one
backend), which knows nothing of HTTP: nothing on this loop takes less. The routers take turns, and the median of the rounds
counts. CPU time is that of the router's process.

Ends with 1 if ours takes more than 40 us for a request, 10 us for an event that rushes, or 0.35 of what sglang-router takes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import ClassVar

import orjson
import uvloop
from router_cache import CONNECTIONS, Client, Replica, cpu_seconds, free_port, process, wait_for

_PUMP = Path(__file__).parents[2] / "bench" / "peers" / "pump" / "pump_server.py"
BACKENDS, EVENTS, STEP_SECONDS = 2, 200, 0.002
MOST_REQUEST_US, MOST_EVENT_US, MOST_SHARE = 40.0, 10.0, 0.35

_ANSWER = orjson.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "stub",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Water."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    }
)
_EVENT = b"data: %b\n\n" % orjson.dumps(
    {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " water"}}]}
)
_BEGIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)


class Backend(Replica):
    """One connection to a backend."""

    paced: ClassVar[dict[Backend, int]] = {}
    """The events that each has still to come."""
    rushing: ClassVar[dict[Backend, int]] = {}

    def _answer(self, method: bytes, path: bytes, body: bytes) -> None:
        if path != b"/v1/chat/completions":
            super()._answer(method, path, body)
        elif b'"stream":true' in body:
            self.transport.write(_BEGIN)
            # By a word of the prompt: sglang-router sends on the fields that it knows, and no others.
            (self.paced if b"(paced)" in body else self.rushing)[self] = EVENTS
        else:
            self._write(_ANSWER)

    @staticmethod
    async def step(streams: dict[Backend, int], seconds: float) -> None:
        """An event for each stream, over and over."""
        while True:
            await asyncio.sleep(seconds if streams else STEP_SECONDS)
            for stream, left in tuple(streams.items()):
                stream.transport.write(_CHUNK if left else b"0\r\n\r\n")
                if left:
                    streams[stream] = left - 1
                else:
                    del streams[stream]


async def serve(port: int) -> None:
    """Answer until killed."""
    await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", port)
    await asyncio.gather(Backend.step(Backend.paced, STEP_SECONDS), Backend.step(Backend.rushing, 0))


def request(port: int, kind: str) -> bytes:
    """A small chat request."""
    messages = [{"role": "user", "content": f"What turns the wheel of a mill? ({kind})"}]
    stream = kind != "whole"
    body = orjson.dumps({"model": "stub", "messages": messages, "max_tokens": 16, "stream": stream})
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (port, len(body), body)
    )


async def load(port: int, kind: str, count: int) -> int:
    """Send as many; returns how many went wrong."""
    requests: Iterator[bytes] = iter(repeat(request(port, kind), count))
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(CONNECTIONS):
        done: asyncio.Future[None] = loop.create_future()
        _, client = await loop.create_connection(lambda done=done: Client(requests, done), "127.0.0.1", port)  # type: ignore[misc]
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    return sum(client.bad for client in clients)


def cost(pid: int, port: int, kind: str, count: int) -> float:
    """Microseconds of the router for each."""
    before = cpu_seconds(pid)
    bad = uvloop.run(load(port, kind, count))
    if bad:
        raise SystemExit(f"{bad} of {count} requests failed")
    return (cpu_seconds(pid) - before) / count * 1e6


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="of each round")
    parser.add_argument("--streams", type=int, default=400, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sglang", default="", help="a Python that has the package sglang-router")
    parser.add_argument("--backend", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        uvloop.run(serve(options.backend))
        return 0
    with ExitStack() as stack:
        ports = [free_port() for _ in range(BACKENDS)]
        for each in ports:
            stack.enter_context(process(sys.executable, __file__, "--backend", str(each)))
            wait_for(each, "/stats")
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        routers = {"headrace": _ours(stack, urls)}
        if options.sglang:
            routers["sglang-router"] = _theirs(stack, options.sglang, urls)
        routers["a bare pump"] = _pump(stack, ports[0])
        counts = {"whole": options.requests, "rushing": options.streams, "paced": options.streams}
        found: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in counts} for name in routers}
        for _ in range(options.rounds):
            for name, (pid, port) in routers.items():
                for kind, count in counts.items():
                    cost(pid, port, kind, CONNECTIONS)
                    found[name][kind].append(cost(pid, port, kind, count) / (1 if kind == "whole" else EVENTS))
    middle = {name: {kind: statistics.median(told) for kind, told in each.items()} for name, each in found.items()}
    print(f"{'us of CPU for':15} {'a request':>9} {'an event that rushes':>21} {'an event every 2 ms':>20}")
    for name, each in middle.items():
        print(f"{name:15} {each['whole']:9.1f} {each['rushing']:21.1f} {each['paced']:20.1f}")
    ours = middle["headrace"]
    good = ours["whole"] <= MOST_REQUEST_US and ours["rushing"] <= MOST_EVENT_US
    if "sglang-router" in middle:
        share = ours["whole"] / middle["sglang-router"]["whole"]
        print(f"ours takes {share:.2f} of sglang-router's for a request (wanted: {MOST_SHARE})")
        good = good and share <= MOST_SHARE
    return 0 if good else 1


def _ours(stack: ExitStack, urls: list[str]) -> tuple[int, int]:
    port = free_port()
    program = "from headrace.cli.main import main; main()"
    arguments = [sys.executable, "-c", program, "router", "--port", str(port), "--policy", "round_robin"]
    made = stack.enter_context(process(*arguments, *(f"--backend={url}" for url in urls)))
    wait_for(port, "/router/healthz")
    return made.pid, port


def _pump(stack: ExitStack, backend: int) -> tuple[int, int]:
    port = free_port()
    made = stack.enter_context(process(sys.executable, str(_PUMP), str(port), str(backend)))
    wait_for(port, "/stats")
    return made.pid, port


def _theirs(stack: ExitStack, python: str, urls: list[str]) -> tuple[int, int]:
    port = free_port()
    arguments = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--policy", "round_robin", "--prometheus-port", str(free_port()), "--worker-urls", *urls]
    made = stack.enter_context(process(*arguments))
    wait_for(port, "/readiness")
    return made.pid, port


if __name__ == "__main__":
    sys.exit(main())
