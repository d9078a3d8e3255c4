# SPDX-License-Identifier: Apache-2.0
"""Measure how fast the backend `llm` generates on this machine's CPU, with a tiny random Llama.

    python bench/scenarios/llm.py [--streams 16] [--tokens 200] [--threads 1] [--rounds 3]
    python bench/scenarios/llm.py --streaming [--streams 16] [--tokens 500] [--rounds 3]

Prints tokens a second of requests one at a time and of so many at once, through the server's engine (data plane, no
HTTP); the steps from a newcomer's arrival beside long answers to its first token; and the CPU time of a streamed token.

With `--streaming` it serves over HTTP, clients in another process read streams of /v1/chat/completions, and what is
printed is the CPU time of a streamed token without the model's own: that of the loop's thread (HTTP, SSE, JSON) and that
of the engine's thread (planning, detokenising, metrics), from which what the runner took was subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from headrace.api.openai.http import OpenAiHttp
from headrace.backends.llm.model_runner.runner import ModelRunner, Step
from headrace.core.generation import Generation, GenerationRequest, Sampling
from headrace.core.telemetry.metrics import Registry
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import EngineSettings, open_engine
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.llm_models import tiny_llama
from support.serving import Serving, serving

PROMPT = "the quick brown fox jumps over the lazy dog while the river runs to the sea"


class Stream:
    """One streamed request."""

    def __init__(self, plane: DataPlane, tokens: int, number: int = 0) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.first = asyncio.get_running_loop().create_future()
        self.tokens = 0
        sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        generation = Generation(prompt=f"{number} {PROMPT}", sampling=sampling, stream=True)
        self.pending = plane.infer_stream(GenerationRequest("tiny", generation), self._answered)

    def _answered(self, answer: Any, final: bool) -> None:
        if isinstance(answer, BaseException):
            if not self.ended.done():
                self.ended.set_exception(answer)
            return
        if not self.first.done():
            self.first.set_result(None)
        if final:
            self.tokens = answer.parameters["completion_tokens"]
            self.ended.set_result(None)


async def one_at_a_time(plane: DataPlane, requests: int, tokens: int) -> float:
    """Tokens a second."""
    began, count = time.perf_counter(), 0
    for number in range(requests):
        stream = Stream(plane, tokens, number)
        await stream.ended
        count += stream.tokens
    return count / (time.perf_counter() - began)


async def at_once(plane: DataPlane, streams: int, tokens: int) -> tuple[float, float]:
    """Tokens a second, and CPU seconds a token."""
    began, cpu = time.perf_counter(), time.process_time()
    running = [Stream(plane, tokens, number) for number in range(streams)]
    for stream in running:
        await stream.ended
    count = sum(stream.tokens for stream in running)
    return count / (time.perf_counter() - began), (time.process_time() - cpu) / count


async def steps_to_first_token(plane: DataPlane, metrics: Registry, streams: int) -> int:
    """Of a newcomer while others generate: from its arrival, so with the making of its tokens."""
    (family,) = (family for family in metrics.families if family.name == "headrace_llm_steps_total")
    ((_, steps),) = family.collect()
    others = [Stream(plane, 1500, number) for number in range(streams)]
    for stream in others:
        await stream.first
    arrived = steps.value
    newcomer = Stream(plane, 4, streams)
    await newcomer.first
    steps_taken = int(steps.value - arrived)
    for stream in others:
        stream.pending.cancel()
        stream.ended.exception()
    await newcomer.ended
    return steps_taken


def made_repository(folder: Path, threads: int) -> Path:
    """With the one model."""
    tiny_llama(folder / "tiny" / "1")
    (folder / "tiny" / "config.pbtxt").write_text(
        'backend: "llm"\n'
        f'parameters {{ key: "threads" value {{ string_value: "{threads}" }} }}\n'
        'parameters { key: "prefix_cache" value { string_value: "false" } }\n'
    )
    return folder


async def main(arguments: argparse.Namespace) -> None:
    """Measure all of it."""
    with tempfile.TemporaryDirectory() as place:
        repository = made_repository(Path(place), arguments.threads)
        server = open_engine(EngineSettings(repositories=(repository,)))
        await server.start()
        plane = server.plane
        await at_once(plane, arguments.streams, 8)
        for _ in range(arguments.rounds):
            alone = await one_at_a_time(plane, 3, arguments.tokens)
            together, cpu = await at_once(plane, arguments.streams, arguments.tokens)
            print(
                f"one at a time {alone:8.0f} tokens/s; {arguments.streams} at a time {together:8.0f} tokens/s "
                f"({together / alone:.1f} x); CPU {cpu * 1e6:.0f} us a token, the model's included"
            )
        for _ in range(arguments.rounds):
            steps_taken = await steps_to_first_token(plane, server.metrics, arguments.streams - 1)
            print(
                f"a newcomer beside {arguments.streams - 1} streams has its first token {steps_taken} steps after it came"
            )
        await server.close(10)


class ModelTime:
    """What the model takes of the engine's thread: the runner's methods, with a clock around them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.engine = 0.0
        """The thread's own clock, when the runner was last called."""
        self._wrap(ModelRunner, "launch")
        self._wrap(Step, "tokens")

    def _wrap(self, kind: type, name: str) -> None:
        computed = getattr(kind, name)

        def timed(*arguments: Any, **more: Any) -> Any:
            began = time.thread_time()
            try:
                return computed(*arguments, **more)
            finally:
                self.engine = time.thread_time()
                self.seconds += self.engine - began

        setattr(kind, name, timed)


async def read_streams(port: int, streams: int, tokens: int) -> int:
    """The clients: how many events came."""

    async def one(number: int) -> int:
        body = json.dumps(
            {"model": "tiny", "messages": [{"role": "user", "content": f"{number} {PROMPT}"}], "stream": True}
            | {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        events, rest = 0, b""
        while b"data: [DONE]" not in rest:
            piece = await reader.read(65536)
            if not piece:
                raise ConnectionError("a stream was cut")
            events += piece.count(b"data: {")
            rest = rest[-16:] + piece
        writer.close()
        return events

    return sum(await asyncio.gather(*(one(number) for number in range(streams))))


def streaming(arguments: argparse.Namespace) -> None:
    """The CPU time of a token that is streamed over HTTP, without the model's."""
    model = ModelTime()

    async def site() -> Site:
        opened = open_engine(EngineSettings(repositories=(repository,), gpus=0))
        await opened.start()
        engines.append(opened)
        routes = Routes()
        OpenAiHttp(opened.plane).add_to(routes)
        return Site(routes)

    def round_(server: Serving, tokens: int) -> tuple[float, float, float, int]:
        loop, engine, computed = server.call(time.thread_time), model.engine - model.seconds, model.seconds
        command = [sys.executable, __file__, "--reader", str(server.port), "--streams", str(arguments.streams)]
        done = subprocess.run([*command, "--tokens", str(tokens)], capture_output=True, text=True, check=True)
        loop, engine = server.call(time.thread_time) - loop, model.engine - model.seconds - engine
        return loop, engine, model.seconds - computed, int(done.stdout)

    engines: list[Any] = []
    with tempfile.TemporaryDirectory() as place:
        repository = made_repository(Path(place), 1)
        with serving(site) as server:
            round_(server, 8)
            for _ in range(arguments.rounds):
                loop, engine, computed, events = round_(server, arguments.tokens)
                tokens = arguments.streams * arguments.tokens
                print(
                    f"{arguments.streams} streams: CPU {(loop + engine) / tokens * 1e6:.1f} us a token: "
                    f"loop {loop / tokens * 1e6:.1f}, engine without the model {engine / tokens * 1e6:.1f} "
                    f"({events} events for {tokens} tokens; the model itself {computed / tokens * 1e6:.0f})"
                )
            server.call(engines[0].close, 10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streaming", action="store_true")
    parser.add_argument("--reader", type=int, help=argparse.SUPPRESS)
    logging.disable(logging.INFO)
    given = parser.parse_args()
    if given.reader:
        print(asyncio.run(read_streams(given.reader, given.streams, given.tokens)))
    elif given.streaming:
        streaming(given)
    else:
        asyncio.run(main(given))
