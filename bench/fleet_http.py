# SPDX-License-Identifier: Apache-2.0
"""Put real routers before the simulated engines of `bench.fleet_sim`, over real HTTP.

    .venv/bin/python -m bench.fleet_http
    .venv/bin/python -m bench.fleet_http --smg /tmp/venv/bin/python --router predicted_latency,smg:cache_aware
    .venv/bin/python -m bench.fleet_http --router predicted_latency --max-outstanding 12 --tenants 10 --greedy 10

A router is a process of its own: `headrace router`, or one of another package (`smg:POLICY`, `sglang:POLICY`, in the Python
of --smg and --sglang). The engines are servers: they take requests, answer `/tokenize`, stream tokens, publish KV events
(ZeroMQ) and report their load as SGLang does. Their time is simulated and stands still while bytes are on their way: a
request goes through the router to an engine, or the end of an answer to its client, before anything else happens. So the
machine's speed changes no result, but for what a router does by its own clock: `smg` asks for loads every second, which on a
slow machine is often in the engines' time, and on a fast one seldom. `predicted_latency` reads the engines' clock.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import mmap
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import uvloop

from bench.cpu import server_cpu_seconds
from bench.fleet_sim import (
    BLOCK_TOKENS,
    CHARACTERS,
    Engine,
    EngineTimes,
    PrefixCache,
    Request,
    capacity,
    conversations,
    percentiles,
    text_of,
)
from headrace.core.kv_events import BlockRemoved, BlockStored, encode_events

_TOKENIZE_SECONDS = 1e-6
"""For each token, where a router asks for the tokens of a prompt."""
_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
_LAST = (
    b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
    b'"prompt_tokens_details":{"cached_tokens":%d}}}\n\ndata: [DONE]\n\n'
)
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CONTENT = re.compile(rb'"content":\s*"([^"]*)"')
_NUMBER = re.compile(rb"#r(\d+)~")
_BLOCK_BYTES = BLOCK_TOKENS * CHARACTERS
_ZEROS = [0] * (BLOCK_TOKENS - 1)
_ZEROS_TEXT = b",0" * (BLOCK_TOKENS - 1)
_READY_SECONDS = 60.0
_STALL_SECONDS = 60.0
"""Real time after which a router that passes nothing on is given up."""
_FOR_EVER = 86_400


# Engines.


class Replica:
    """One engine, its port and its KV events."""

    def __init__(self, fleet: Fleet, publish: Any) -> None:
        """publish: sends the message of a ZeroMQ socket."""
        self.fleet, self._publish, self._numbers = fleet, publish, count()
        self.engine = Engine(fleet, PrefixCache(fleet.times.cache_tokens // BLOCK_TOKENS, self._changed))

    def load(self) -> dict[str, Any]:
        """Return what SGLang's `/v1/loads` says."""
        engine, times = self.engine, self.fleet.times
        tokens = sum(request.prompt_tokens for request in engine.running)
        waiting = engine.waiting
        return {
            "dp_rank": 0,
            "num_running_reqs": len(engine.running),
            "num_waiting_reqs": len(waiting),
            "num_waiting_uncached_tokens": sum(request.prompt_tokens for request in waiting),
            "num_total_reqs": len(engine.running) + len(waiting),
            "num_used_tokens": tokens,
            "max_total_num_tokens": times.cache_tokens,
            "token_usage": tokens / times.cache_tokens,
            "gen_throughput": len(engine.running) / times.step_seconds,
            "cache_hit_rate": 0.0,
            "utilization": len(engine.running) / times.max_running,
            "max_running_requests": times.max_running,
        }

    def _changed(self, parent: int | None, stored: Sequence[int], removed: Sequence[int]) -> None:
        events: list[Any] = [BlockRemoved(list(removed))] if removed else []
        if stored:
            tokens = [token for block in stored for token in (block, *_ZEROS)]
            events.append(BlockStored(list(stored), parent, tokens, BLOCK_TOKENS))
        self._publish((b"", next(self._numbers).to_bytes(8, "big"), encode_events(events, 0.0)))


class EngineConnection(asyncio.Protocol):
    """One connection to an engine, with one request at a time."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._data = bytearray()

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end]).lower()
            if b" /" not in head:
                self._transport.close()  # some routers try gRPC first
                return
            found = re.search(rb"content-length: *(\d+)", head)
            if found is None and b"transfer-encoding: chunked" in head:
                if not self._data.endswith(b"\r\n0\r\n\r\n"):
                    return
                body, size = _unchunked(bytes(self._data[end + 4 :])), len(self._data)
            else:
                size = end + 4 + (int(found[1]) if found is not None else 0)
                if len(self._data) < size:
                    return
                body = bytes(self._data[end + 4 : size])
            del self._data[:size]
            self._answer(head.split(b" ", 2)[1].partition(b"?")[0], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        fleet = self._replica.fleet
        if path == b"/v1/chat/completions":
            number = _NUMBER.search(body)
            fleet.received(int(number[1]) if number is not None else -1, self._replica, self)
        elif path == b"/tokenize":
            blocks, rest = _blocks_of(body)
            fleet.tokenized = len(blocks) * BLOCK_TOKENS + rest
            text = b",".join([b"%d%b" % (block, _ZEROS_TEXT) for block in blocks] + [b"0"] * rest)
            self._write(b'{"tokens":[%b]}' % text)
        elif path == b"/v1/loads":
            self._write(orjson.dumps({"timestamp": "", "dp_rank_count": 1, "loads": [self._replica.load()]}))
        elif path == b"/v1/models":
            self._write(b'{"object":"list","data":[{"id":"chat","object":"model","owned_by":"sglang"}]}')
        else:
            self._write(b'{"model_path":"chat","model_id":"chat","served_model_name":"chat","is_generation":true}')

    def begin(self) -> None:
        """Write the first token."""
        self._send(_STREAM + _chunk(_EVENT))

    def end(self, request: Request) -> None:
        """Write the other tokens."""
        prompt, output = request.prompt_tokens, request.output_tokens
        last = _LAST % (prompt, output, prompt + output, request.cached_tokens)
        self._send(_chunk(_EVENT * (output - 1) + last) + b"0\r\n\r\n")

    def _write(self, body: bytes) -> None:
        self._send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )

    def _send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def _unchunked(data: bytes) -> bytes:
    parts, start = [], 0
    while size := int(data[start : (end := data.index(b"\r\n", start))], 16):
        parts.append(data[end + 2 : end + 2 + size])
        start = end + 4 + size
    return b"".join(parts)


def _blocks_of(body: bytes) -> tuple[list[int], int]:
    """Return the ids of a prompt's blocks, and how many tokens are behind them."""
    found = _CONTENT.search(body)
    text = found[1] if found is not None else b""
    starts = range(0, len(text) - _BLOCK_BYTES + 1, _BLOCK_BYTES)
    return [int(text[start : start + 8], 16) for start in starts], len(text) % _BLOCK_BYTES // CHARACTERS


# Clients, and the time of all.


class Client(asyncio.Protocol):
    """One connection to the router, with one request at a time."""

    def __init__(self) -> None:
        self.first: asyncio.Future[None] | None = None
        """The first token, or a response without any."""
        self.done: asyncio.Future[None] | None = None
        self.status = 0
        self.tail = b""
        self.usable = True

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.usable = False
        self._set(self.first)
        self._set(self.done)

    def ask(self, message: bytes) -> None:
        """Send a request."""
        loop = asyncio.get_running_loop()
        self.first, self.done = loop.create_future(), loop.create_future()
        self.status, self.tail = 0, b""
        self.transport.write(message)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.done is None or self.done.done():
            return
        self.tail = (self.tail + data)[-4096:]
        if not self.status:
            self.status = int((self.tail + b"    ")[9:12])
            if self.status != 200:
                self.transport.close()
                return
        if b"data: {" in self.tail:
            self._set(self.first)
        if self.tail.endswith(b"0\r\n\r\n"):
            self._set(self.done)

    @property
    def is_whole(self) -> bool:
        """Whether a stream ended as it should."""
        return self.status == 200 and self.tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    def _set(self, future: asyncio.Future[None] | None) -> None:
        if future is not None and not future.done():
            future.set_result(None)


@dataclass(eq=False, slots=True)
class Sent:
    """A request on its way."""

    request: Request
    tenant: int
    status: int = 0
    client: Client | None = None
    connection: EngineConnection | None = None
    received: asyncio.Future[None] | None = None


class Fleet:
    """Engines and clients in simulated time. Implements `fleet_sim.Machine`."""

    def __init__(self, port: int, clock: Path, queues: bool) -> None:
        """port: of the router. queues: whether it holds requests back."""
        self.times = EngineTimes()
        self.tokenized = 0
        """Tokens that the router has asked for since the last request."""
        self._port, self._queues = port, queues
        self._clock = clock.open("r+b")
        self._shared = mmap.mmap(self._clock.fileno(), 8)
        self._now = 0.0
        self._numbers = count()
        self._heap: list[tuple[float, int, Any]] = []
        self._sent: dict[int, Sent] = {}
        self._by_request: dict[Request, Sent] = {}
        self._held = 0
        """Requests that the router has, and no engine."""
        self._fresh: list[Sent] = []
        self._answered: list[Sent] = []
        self._finished: list[Sent] = []
        self._idle: list[Client] = []
        self.all: list[Sent] = []

    @property
    def now(self) -> float:
        """The simulated time."""
        return self._now

    def at(self, when: float, engine: Engine) -> int:
        """Call `engine.step` at a time; return the event."""
        event = next(self._numbers)
        heapq.heappush(self._heap, (when, event, engine))
        return event

    def answered(self, request: Request) -> None:
        """Note a first token."""
        self._answered.append(self._by_request[request])

    def finished(self, request: Request) -> None:
        """Note a last token."""
        request.done = self._now
        self._finished.append(self._by_request[request])

    def received(self, number: int, replica: Replica, connection: EngineConnection) -> None:
        """Take a request that the router has sent to an engine."""
        sent = self._sent[number]
        sent.connection = connection
        delay, self.tokenized = self.tokenized * _TOKENIZE_SECONDS, 0
        heapq.heappush(self._heap, (self._now + delay, next(self._numbers), (replica.engine, sent.request)))
        if sent.received is not None and not sent.received.done():
            sent.received.set_result(None)

    async def run(self, requests: Sequence[tuple[Request, int]]) -> None:
        """Serve all requests, each with its tenant."""
        for request, tenant in requests:
            heapq.heappush(self._heap, (request.arrived, next(self._numbers), Sent(request, tenant)))
        while self._heap:
            self._now, event, what = heapq.heappop(self._heap)
            struct.pack_into("d", self._shared, 0, self._now)
            if isinstance(what, Sent):
                await self._arrived(event, what)
            elif isinstance(what, tuple):
                engine, request = what
                engine.add(request)
            else:
                what.step(event)
                await self._pass_on()
        for client in self._idle:
            client.transport.close()
        self._shared.close()
        self._clock.close()

    async def _arrived(self, number: int, sent: Sent) -> None:
        self.all.append(sent)
        self._sent[number], self._by_request[sent.request] = sent, sent
        while self._idle and not self._idle[-1].usable:
            self._idle.pop()
        loop = asyncio.get_running_loop()
        if self._idle:
            client = self._idle.pop()
        else:
            _, client = await loop.create_connection(Client, "127.0.0.1", self._port)
        sent.client, sent.received = client, loop.create_future()
        client.ask(self._message(number, sent))
        first = client.first
        if first is None:
            raise RuntimeError("a request was not sent")
        waits = {sent.received, first}
        if self._queues:
            self._held += 1
            # It may stay in the router: that it is there is known when the router says so.
            while not any(wait.done() for wait in waits):
                await asyncio.wait(waits, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
                if not any(wait.done() for wait in waits) and await self._router_holds() >= self._held:
                    self._fresh.append(sent)
                    return
            self._held -= 1
        else:
            await asyncio.wait(waits, timeout=_STALL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not sent.received.done():
            sent.status = client.status or 599

    async def _router_holds(self) -> int:
        """Return how many requests wait in our router."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"GET /router/status HTTP/1.1\r\nhost: router\r\nconnection: close\r\n\r\n")
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        return int(json.loads(body)["queued"])

    async def _pass_on(self) -> None:
        answered, self._answered = self._answered, []
        finished, self._finished = self._finished, []
        for sent in answered:
            if sent.connection is not None and sent.client is not None and sent.client.first is not None:
                sent.connection.begin()
                await asyncio.wait({sent.client.first}, timeout=_STALL_SECONDS)
        for sent in finished:
            client = sent.client
            if sent.connection is None or client is None or client.done is None:
                continue
            sent.connection.end(sent.request)
            await asyncio.wait({client.done}, timeout=_STALL_SECONDS)
            sent.status = client.status if client.is_whole else 598
            if client.usable and client.done.done():
                self._idle.append(client)
            del self._by_request[sent.request]
            await self._next_held()

    async def _next_held(self) -> None:
        """Wait until the router has sent on a request that it held, for it has room now."""
        self._fresh = [sent for sent in self._fresh if self._still_held(sent)]
        if not self._fresh:
            return
        waits = [wait for sent in self._fresh for wait in (sent.received, sent.client and sent.client.first) if wait]
        await asyncio.wait(waits, timeout=_STALL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        self._fresh = [sent for sent in self._fresh if self._still_held(sent)]

    def _still_held(self, sent: Sent) -> bool:
        if sent.received is not None and sent.received.done():
            self._held -= 1
            return False
        client = sent.client
        if client is not None and client.first is not None and client.first.done():
            sent.status = client.status or 599
            self._held -= 1
            return False
        return True

    def _message(self, number: int, sent: Sent) -> bytes:
        request = sent.request
        rest = request.prompt_tokens - len(request.blocks) * BLOCK_TOKENS
        # The number is in the text, since some routers pass on no field that they do not know.
        content = text_of(request.blocks) + f"#r{number}~".ljust(rest * CHARACTERS, "~")
        body = orjson.dumps(
            {
                "model": "chat",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": request.output_tokens,
                "stream": True,
            }
        )
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
            b"x-tenant: t%d\r\ncontent-length: %d\r\n\r\n%b" % (self._port, sent.tenant, len(body), body)
        )


@dataclass(slots=True)
class Outcome:
    """What one router came to."""

    router: str
    load: float
    requests: int = 0
    failed: int = 0
    first_token: dict[str, float] = field(default_factory=dict)
    """Percentiles of the seconds to the first token."""
    per_token: dict[str, float] = field(default_factory=dict)
    hit_rate: float = 0.0
    """Prompt tokens that were cached."""
    router_us: float = 0.0
    """CPU time of the router's process for each request."""
    others: dict[str, float] = field(default_factory=dict)
    """Percentiles of the seconds to the first token of all tenants but the first."""
    others_failed: int = 0


def summarize(outcome: Outcome, all_sent: Sequence[Sent], seconds: float) -> Outcome:
    """Fill in what came of the requests. Caches and models are filled in the first quarter."""
    counted = [sent for sent in all_sent if sent.request.arrived >= seconds / 4]
    good = [sent.request for sent in counted if sent.status == 200]
    outcome.requests, outcome.failed = len(counted), len(counted) - len(good)
    outcome.first_token = percentiles([request.first_token - request.arrived for request in good])
    outcome.per_token = percentiles(
        [
            (request.done - request.first_token) / (request.output_tokens - 1)
            for request in good
            if request.output_tokens > 1
        ]
    )
    outcome.hit_rate = sum(request.cached_tokens for request in good) / sum(request.prompt_tokens for request in good)
    others = [sent for sent in counted if sent.tenant]
    if others:
        served = [sent.request for sent in others if sent.status == 200]
        outcome.others = percentiles([request.first_token - request.arrived for request in served])
        outcome.others_failed = len(others) - len(served)
    return outcome


def traffic(options: argparse.Namespace) -> list[tuple[Request, int]]:
    """Return requests with their tenants; the first tenant sends `greedy` times as much as each of the others."""
    seconds, seed, tenants = options.seconds, options.seed, options.tenants
    rate = options.load * options.replicas * capacity(EngineTimes(), conversations(10.0, 600.0, seed))
    if tenants < 2:
        return [(request, 0) for request in conversations(rate, seconds, seed)]
    requests: list[tuple[Request, int]] = []
    for tenant in range(tenants):
        part = conversations(rate / tenants * (1 if tenant else options.greedy), seconds, seed + tenant)
        for request in part:
            # Blocks of different tenants are different.
            request.blocks = tuple(block + (tenant << 24) for block in request.blocks)
        requests += [(request, tenant) for request in part]
    return sorted(requests, key=lambda sent: sent[0].arrived)


# Routers.


@contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program; kill it at the end."""
    with log.open("ab") as stream:
        started = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def free_ports(number: int) -> list[int]:
    """Return ports that nobody has for now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [made.getsockname()[1] for made in sockets]


def wait_until(url: str, log: Path) -> None:
    """Wait until a URL answers 200."""
    ends = time.monotonic() + _READY_SECONDS
    while time.monotonic() < ends:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{url} does not answer:\n{log.read_text(errors='replace')[-2000:]}")


def router_command(
    name: str, own: tuple[int, int], ports: Sequence[tuple[int, int]], options: argparse.Namespace, folder: Path
) -> tuple[list[str], str]:
    """Return the command of a router at these ports of its own, and the path that says when it is ready."""
    port, metrics_port = own
    package, _, policy = name.rpartition(":")
    if package:
        module = {"smg": ["-m", "smg", "launch"], "sglang": ["-m", "sglang_router.launch_router"]}[package]
        urls = [f"http://127.0.0.1:{engine}" for engine, _ in ports]
        # A worker that says nothing for seconds is not ill here: only the time of the engines counts.
        more = ["--load-monitor-interval", "1", "--worker-wedge-secs", str(_FOR_EVER)] if package == "smg" else []
        words = [*module, "--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--log-level", "warn", *more]
        words += ["--prometheus-port", str(metrics_port), "--worker-urls", *urls]
        return [getattr(options, package) or sys.executable, *words], "/readiness"
    config: dict[str, Any] = {
        "timeouts": {"response_seconds": _FOR_EVER, "idle_seconds": _FOR_EVER},
        "backends": [f"http://127.0.0.1:{engine},events={events}" for engine, events in ports],
        "policy": policy,
        "health": {"path": "/health"},
        # A whole prompt has to be there before a choice by prompt.
        "whole_bytes": 4 << 20,
    }
    if options.max_outstanding:
        config |= {
            "max_outstanding": options.max_outstanding,
            "queue": {"requests": 1000, "wait_seconds": _FOR_EVER},
            "fairness": {"tenant_header": "x-tenant"},
        }
    file = folder / "router.json"
    file.write_text(json.dumps(config), "utf-8")
    words = [sys.executable, "-m", "bench.fleet_http", "--clock", str(folder / "clock"), "--config", str(file)]
    return [*words, "--port", str(port)], "/router/healthz"


def run_router(clock: Path, config: str, port: int) -> None:
    """Run `headrace router`, with the engines' clock for what it learns of their times."""
    from headrace.cli.main import main as run_headrace
    from headrace.fleet.router import predicted_latency

    with clock.open("rb") as stream:
        shared = mmap.mmap(stream.fileno(), 8, prot=mmap.PROT_READ)
    predicted_latency.monotonic = lambda: float(struct.unpack_from("d", shared)[0])
    sys.argv = ["headrace", "router", "--config", config, "--port", str(port)]
    run_headrace()


async def serve(replicas: int, fleet: Fleet) -> list[tuple[int, int]]:
    """Serve engines; return the port of each, and that of its KV events."""
    import zmq

    context, loop = zmq.Context.instance(), asyncio.get_running_loop()
    ports = []
    for _ in range(replicas):
        publisher = context.socket(zmq.PUB)
        publisher.set_hwm(0)
        events = publisher.bind_to_random_port("tcp://127.0.0.1")
        replica = Replica(fleet, publisher.send_multipart)
        server = await loop.create_server(lambda replica=replica: EngineConnection(replica), "127.0.0.1", 0)  # type: ignore[misc]
        ports.append((server.sockets[0].getsockname()[1], events))
    return ports


async def measure(name: str, options: argparse.Namespace) -> Outcome:
    """Measure one router before engines with empty caches."""
    port, metrics_port = free_ports(2)
    requests = traffic(options)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "clock").write_bytes(bytes(8))
        fleet = Fleet(port, folder / "clock", bool(options.max_outstanding))
        ports = await serve(options.replicas, fleet)
        log = folder / "router.log"
        command, ready = router_command(name, (port, metrics_port), ports, options, folder)
        router = stack.enter_context(process(command, log))
        await asyncio.to_thread(wait_until, f"http://127.0.0.1:{port}{ready}", log)
        await asyncio.sleep(3)  # every backend is checked, and its events are followed
        before = server_cpu_seconds(router.pid)
        await fleet.run(requests)
        outcome = Outcome(name, options.load)
        outcome.router_us = 1e6 * (server_cpu_seconds(router.pid) - before) / len(requests)
        if options.log:
            options.log.write_bytes(log.read_bytes())
    return summarize(outcome, fleet.all, options.seconds)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| load | router | requests | failed | first token p50 | p90 | p99 | others' p99 | per token p50 | cached | CPU |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for outcome in outcomes:
        first = " | ".join(f"{outcome.first_token[name]:.2f} s" for name in ("p50", "p90", "p99"))
        others = f"{outcome.others['p99']:.2f} s" if outcome.others else "-"
        lines.append(
            f"| {outcome.load:.0%} | `{outcome.router}` | {outcome.requests} | {outcome.failed} | {first} | {others} | "
            f"{1000 * outcome.per_token['p50']:.0f} ms | {outcome.hit_rate:.1%} | {outcome.router_us:.0f} us |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default="cache_aware,kv_events,predicted_latency", help="routers, with commas")
    parser.add_argument("--smg", default="", help="a Python with the package smg")
    parser.add_argument("--sglang", default="", help="a Python with the package sglang-router")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument(
        "--load", type=float, default=0.8, help="share of what the fleet can serve without prefix caches"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of traffic, in the engines' time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--greedy", type=float, default=1.0, help="the first tenant sends so many times its share")
    parser.add_argument("--max-outstanding", type=int, default=0, help="of our router, which is then fair to tenants")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--log", type=Path, help="write the router's log to this file")
    parser.add_argument("--clock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clock:
        run_router(options.clock, options.config, options.port)
        return 0
    outcomes = []
    for name in options.router.split(","):
        began = time.monotonic()
        outcomes.append(uvloop.run(measure(name, options)))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        print(table(outcomes[-1:]), file=sys.stderr, flush=True)
    if options.json:
        print(
            json.dumps([{name: getattr(outcome, name) for name in Outcome.__slots__} for outcome in outcomes], indent=2)
        )  # type: ignore[attr-defined]
    else:
        print(table(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
