# SPDX-License-Identifier: Apache-2.0
"""Kill replicas with SIGKILL under open streams, repeatedly: which streams end at the client, and with what.

    .venv/bin/python bench/scenarios/killed_replicas.py
    .venv/bin/python bench/scenarios/killed_replicas.py --streams 200 --seconds 600 --every 10

Starts servers with a tiny random Llama and a router before them. Clients stream greedy and seeded chats, completions,
responses and messages all the time, each one of a few requests whose answer is known from a server that nobody kills. Every
few seconds a replica is killed, and started again. Ends with 1 if a stream failed, had a gap or said something else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from kv_transfer import free_port, wait_for

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.llm_models import tiny_llama

HEADRACE = (sys.executable, "-c", "from headrace.cli.main import main; main()")
PROMPTS = ("the quick brown fox", "a headrace is the channel", "requests join and leave", "json looks like")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def request_of(path: str, prompt: str, tokens: int, *, seeded: bool) -> dict[str, Any]:
    """Return a request for a stream."""
    document: dict[str, Any] = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": tokens}
    if seeded:
        document |= {"temperature": 1.0, "seed": 7}
    if path == "/v1/completions":
        return {**document, "prompt": prompt, "ignore_eos": True}
    if path == "/v1/responses":
        return {**document, "input": prompt, "max_output_tokens": tokens}
    return {**document, "messages": [{"role": "user", "content": prompt}], "ignore_eos": True}


def text_of(body: bytes) -> str:
    """Return what a stream says, with how it ends. Raise ValueError if it has a gap."""
    texts: list[str] = []
    end = ""
    numbers = []
    for line in body.split(b"\n"):
        if line.startswith(b":"):
            raise ValueError("a record reached the client")
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event and event.get("error"):
            raise ValueError(str(event["error"]))
        numbers += [event["sequence_number"]] if "sequence_number" in event else []
        for choice in event.get("choices") or ():
            texts.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
            end += choice.get("finish_reason") or ""
        delta = event.get("delta")
        if isinstance(delta, str):
            texts.append(delta)
        elif isinstance(delta, dict):
            texts.append(delta.get("text") or "")
            end += f"{delta.get('stop_reason') or ''}{event.get('usage', {}).get('output_tokens', '')}"
        if event.get("type", "").startswith("response.") and "usage" in (event.get("response") or {}):
            usage = event["response"]["usage"] or {}
            end += f"{event['response']['status']}{usage.get('output_tokens', '')}"
    if numbers != list(range(len(numbers))):
        raise ValueError("the numbers of the events have a gap")
    return f"{''.join(texts)} | {end}"


class Fleet:
    """Servers and a router."""

    def __init__(self, repository: Path, logs: Path, replicas: int) -> None:
        self._repository, self._logs = repository, logs
        self.ports = [free_port() for _ in range(replicas + 1)]
        """The last one is that of the server that nobody kills."""
        self.router_port = free_port()
        self.servers = [self._serve(port) for port in self.ports]
        for port in self.ports:
            wait_for(f"http://127.0.0.1:{port}/v2/health/ready")
        backends = [argument for port in self.ports[:-1] for argument in ("--backend", f"http://127.0.0.1:{port}")]
        self.router = self._start("router", *backends, "--port", str(self.router_port), name="router")
        wait_for(f"http://127.0.0.1:{self.router_port}/router/healthz")

    def _start(self, *arguments: str, name: str) -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*HEADRACE, *arguments], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def _serve(self, port: int) -> subprocess.Popen[bytes]:
        ports = ("--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0")
        return self._start("serve", str(self._repository), *ports, name=f"server-{port}")

    def kill(self, index: int) -> None:
        """Kill a replica, and start it again."""
        self.servers[index].send_signal(signal.SIGKILL)
        self.servers[index].wait(60)
        self.servers[index] = self._serve(self.ports[index])

    def is_ready(self, index: int) -> bool:
        """Return whether a replica answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[index]}/v2/health/ready", timeout=2):
                return True
        except OSError:
            return False

    def close(self) -> None:
        """Stop everything."""
        for process in (self.router, *self.servers):
            process.terminate()
        for process in (self.router, *self.servers):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


async def ask(port: int, path: str, document: dict[str, Any]) -> bytes:
    """Return the body of a streamed response. Raise ConnectionError if it is cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    body = json.dumps(document).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n", 1)[0]:
            raise ConnectionError(status.split(b"\r\n", 1)[0].decode())
        pieces = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            pieces.append(await reader.readexactly(size))
            await reader.readexactly(2)
        return b"".join(pieces)
    except asyncio.IncompleteReadError:
        raise ConnectionError("the stream was cut") from None
    finally:
        writer.close()


async def run(fleet: Fleet, options: argparse.Namespace) -> Counter[str]:
    """Stream and kill; return what happened."""
    requests = [
        (path, request_of(path, prompt, options.tokens, seeded=seeded and path in PATHS[:3]))
        for path in PATHS
        for prompt in PROMPTS
        for seeded in (False, True)
    ]
    known = [text_of(await ask(fleet.ports[-1], path, document)) for path, document in requests]
    counts: Counter[str] = Counter()
    ends = time.monotonic() + options.seconds

    async def client(number: int) -> None:
        chosen = random.Random(number)
        while time.monotonic() < ends:
            index = chosen.randrange(len(requests))
            try:
                text = text_of(await asyncio.wait_for(ask(fleet.router_port, *requests[index]), 300))
            except (OSError, ValueError, TimeoutError) as error:
                counts["failed"] += 1
                print(f"a stream of {requests[index][0]} failed: {type(error).__name__}: {error}", flush=True)
            else:
                counts["complete" if text == known[index] else "different"] += 1

    async def killer() -> None:
        index = 0
        while time.monotonic() + options.every < ends:
            await asyncio.sleep(options.every)
            # Another one has to be up, or there is nobody to continue.
            others = [other for other in range(options.replicas) if other != index]
            ready = [other for other in others if await asyncio.to_thread(fleet.is_ready, other)]
            if ready:
                counts["killed"] += 1
                await asyncio.to_thread(fleet.kill, index)
            index = (index + 1) % options.replicas

    await asyncio.gather(killer(), *(client(number) for number in range(options.streams)))
    return counts


def continuations(port: int) -> dict[str, float]:
    """Return the router's own counts."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/router/metrics") as response:
        lines = response.read().decode().split("\n")
    metrics = (line.rsplit(" ", 1) for line in lines if line.startswith("headrace_router_continuation"))
    return {name: float(value) for name, value in metrics}


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32, help="open at the same time")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=10, help="seconds between two kills")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models, logs = Path(folder) / "models", Path(folder) / "logs"
        logs.mkdir()
        tiny_llama(models / "tiny" / "1")
        values = {"max_model_len": "1024", "kv_cache_bytes": "67108864", "threads": "1"}
        lines = ['backend: "llm"', "instance_group { kind: KIND_CPU }"]
        lines += [
            f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' for name, value in values.items()
        ]
        (models / "tiny" / "config.pbtxt").write_text("\n".join(lines))
        fleet = Fleet(models, logs, options.replicas)
        try:
            counts = asyncio.run(run(fleet, options))
            print(json.dumps({**counts, **continuations(fleet.router_port)}, indent=2))
        finally:
            fleet.close()
    return int(bool(counts["failed"] or counts["different"] or not counts["complete"]))


if __name__ == "__main__":
    sys.exit(main())
