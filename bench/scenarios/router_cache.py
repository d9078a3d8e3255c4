# SPDX-License-Identifier: Apache-2.0
"""Measure the prefix-cache hit rate of four replicas behind several routers, and the routers' CPU.

    .venv/bin/python bench/scenarios/router_cache.py
    .venv/bin/python bench/scenarios/router_cache.py --sglang /tmp/venv/bin/python    # with the package sglang-router

64 system prompts, a question of its own in each request, 16 connections. The replicas are small servers with a real prefix
cache: blocks of 64 characters, chained, the one used longest ago goes first; room for some 24 of the 64 prompts. All
routers get the same requests in the same order, and replicas with empty caches. Prints one line of JSON for each router.

Ends with 1 if `cache_aware` finds less than 1.8 x what `round_robin` finds, or clearly less than that of `sglang-router`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import orjson
import uvloop

PROMPTS, PROMPT_CHARACTERS, QUESTION_CHARACTERS = 64, 2048, 256
REPLICAS, CONNECTIONS = 4, 16
BLOCK = 64
CACHE_BLOCKS = 24 * (PROMPT_CHARACTERS + QUESTION_CHARACTERS) // BLOCK
SERVICE_SECONDS = 0.002
LEAST_RATIO, NOISE = 1.8, 0.005
WORDS = ("river", "stone", "mill", "water", "turbine", "gate", "flow", "level", "weir", "channel", "intake", "spill")


class Cache:
    """What a replica has computed before."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.requests = self.asked = self.hits = 0

    def use(self, text: str) -> None:
        """A prompt comes."""
        self.requests += 1
        chain, known = 0, True
        chains = []
        for place in range(0, len(text) - BLOCK + 1, BLOCK):
            chain = hash((chain, text[place : place + BLOCK]))
            chains.append(chain)
            known = known and chain in self.blocks
            self.asked += 1
            self.hits += known
        # The beginning last, so that it stays longest.
        for each in reversed(chains):
            self.blocks[each] = None
            self.blocks.move_to_end(each)
        while len(self.blocks) > CACHE_BLOCKS:
            self.blocks.popitem(last=False)


class Replica(asyncio.Protocol):
    """One connection to a replica."""

    cache = Cache()

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self.transport = transport
        self.data = b""

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.data += data
        while b"\r\n\r\n" in self.data:
            head, _, rest = self.data.partition(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(rest) < length:
                return
            body, self.data = rest[:length], rest[length:]
            self._answer(head.split(b" ")[0], head.split(b" ")[1], body)

    def _answer(self, method: bytes, path: bytes, body: bytes) -> None:
        if path == b"/v1/chat/completions" and method == b"POST":
            messages = orjson.loads(body)["messages"]
            Replica.cache.use("".join(f"{message['role']}{message['content']}" for message in messages))
            told: Any = {"id": "1", "object": "chat.completion", "choices": [], "model": "stub"}
            asyncio.get_running_loop().call_later(SERVICE_SECONDS, self._write, orjson.dumps(told))
            return
        if path == b"/reset":
            Replica.cache = Cache()
        cache = Replica.cache
        told = {
            b"/stats": {"requests": cache.requests, "asked": cache.asked, "hits": cache.hits},
            b"/v1/models": {"object": "list", "data": [{"id": "stub", "object": "model"}]},
        }.get(path, {"model_path": "stub", "is_generation": True, "status": "ok"})
        self._write(orjson.dumps(told))

    def _write(self, text: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)
            )


async def replica(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Replica, "127.0.0.1", port)
    await server.serve_forever()


class Client(asyncio.Protocol):
    """One connection of the load: the next request when the last is answered."""

    def __init__(self, requests: Iterator[bytes], done: asyncio.Future[None]) -> None:
        self.requests = requests
        self.done = done
        self.data = b""
        self.bad = 0

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self.transport = transport
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the router closed a connection"))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.data += data
        head, mark, body = self.data.partition(b"\r\n\r\n")
        if not mark:
            return
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            if not body.endswith(b"0\r\n\r\n"):
                return
        else:
            length = int(lower.partition(b"content-length:")[2].split(b"\r\n")[0])
            if len(body) < length:
                return
        self.bad += not head.startswith(b"HTTP/1.1 200")
        self.data = b""
        self._next()

    def _next(self) -> None:
        text = next(self.requests, None)
        if text is not None:
            self.transport.write(text)
        elif not self.done.done():
            self.done.set_result(None)
            self.transport.close()


def workload(count: int, port: int) -> Iterator[bytes]:
    """The same requests for every router."""
    dice = random.Random(11)

    def text(length: int) -> str:
        return " ".join(dice.choice(WORDS) for _ in range(length // 3))[:length]

    systems = [f"{text(16)} {text(PROMPT_CHARACTERS - 17)}" for _ in range(PROMPTS)]
    for _ in range(count):
        messages = [
            {"role": "system", "content": dice.choice(systems)},
            {"role": "user", "content": text(QUESTION_CHARACTERS)},
        ]
        body = orjson.dumps({"model": "stub", "messages": messages})
        yield (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (port, len(body), body)
        )


async def load(port: int, count: int) -> tuple[int, float]:
    """Send them all; returns how many went wrong, and the seconds it took."""
    requests = workload(count, port)
    loop = asyncio.get_running_loop()
    clients = []
    began = time.perf_counter()
    for _ in range(CONNECTIONS):
        done: asyncio.Future[None] = loop.create_future()
        _, client = await loop.create_connection(lambda done=done: Client(requests, done), "127.0.0.1", port)  # type: ignore[misc]
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    return sum(client.bad for client in clients), time.perf_counter() - began


def free_port() -> int:
    """One that nobody has for now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def get(port: int, path: str) -> Any:
    """What a server of ours says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        text = answer.read()
    return json.loads(text) if text.startswith(b"{") else text


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program, until the end."""
    made = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield made
    finally:
        made.send_signal(signal.SIGKILL)
        made.wait()


def wait_for(port: int, path: str) -> None:
    """Until it answers."""
    for _ in range(600):
        try:
            get(port, path)
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"nothing answers at {port}{path}")


def cpu_seconds(pid: int) -> float:
    """Of the process and its threads."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as stream:
        fields = stream.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, command: list[str], port: int, ready: str, replicas: list[int], count: int) -> dict[str, Any]:
    """One router."""
    for replica in replicas:
        get(replica, "/reset")
    with process(*command) as router:
        wait_for(port, ready)
        asyncio.run(load(port, 200))
        time.sleep(0.5)
        for replica in replicas:
            get(replica, "/reset")
        before = cpu_seconds(router.pid)
        bad, seconds = asyncio.run(load(port, count))
        used = cpu_seconds(router.pid) - before
    stats = [get(replica, "/stats") for replica in replicas]
    asked = sum(counts["asked"] for counts in stats)
    return {
        "router": name,
        "hit_rate": round(sum(counts["hits"] for counts in stats) / max(1, asked), 4),
        "cpu_ms_per_1000": round(used / count * 1e6, 1),
        "requests_per_second": round(count / seconds),
        "failed": bad,
        "requests_of_replicas": [counts["requests"] for counts in stats],
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--sglang", default="", help="a Python that has the package sglang-router")
    parser.add_argument("--replica", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        uvloop.run(replica(options.replica))
        return 0
    with ExitStack() as stack:
        replicas = [free_port() for _ in range(REPLICAS)]
        for each in replicas:
            stack.enter_context(process(sys.executable, __file__, "--replica", str(each)))
        for each in replicas:
            wait_for(each, "/stats")
        urls = [f"http://127.0.0.1:{replica}" for replica in replicas]
        found: dict[str, Any] = {}
        for policy in ("round_robin", "least_loaded", "prefix_hash", "cache_aware"):
            port = free_port()
            program = "from headrace.cli.main import main; main()"
            command = [sys.executable, "-c", program, "router", "--port", str(port), "--policy", policy]
            command += [f"--backend={url}" for url in urls]
            told = measure(f"headrace {policy}", command, port, "/router/healthz", replicas, options.requests)
            found[policy] = told
            print(json.dumps(told), flush=True)
        for policy in ("round_robin", "cache_aware") if options.sglang else ():
            port = free_port()
            command = [options.sglang, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--policy", policy, "--prometheus-port", str(free_port()), "--worker-urls", *urls]
            told = measure(f"sglang-router {policy}", command, port, "/readiness", replicas, options.requests)
            found[f"sglang {policy}"] = told
            print(json.dumps(told), flush=True)
        ratio = found["cache_aware"]["hit_rate"] / max(1e-9, found["round_robin"]["hit_rate"])
        print(f"cache_aware finds {ratio:.2f} x what round_robin finds (wanted: {LEAST_RATIO})")
        good = ratio >= LEAST_RATIO
        theirs, ours = found.get("sglang cache_aware"), found["cache_aware"]
        if theirs is not None:
            cpu = ours["cpu_ms_per_1000"] / theirs["cpu_ms_per_1000"]
            print(f"sglang-router's finds {theirs['hit_rate']}, ours {ours['hit_rate']} at {cpu:.2f} x its CPU time")
            good = good and ours["hit_rate"] >= theirs["hit_rate"] - NOISE
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
