# SPDX-License-Identifier: Apache-2.0
"""How fast the backend `llm` generates on this machine's CPU, with a tiny random Llama made on the spot.

    python scripts/measure_llm.py [--streams 16] [--tokens 200] [--threads 1] [--rounds 3]

Prints tokens a second of requests one at a time and of so many at once, through the server's engine (data plane, no
HTTP); the steps from a newcomer's arrival beside long answers to its first token; and the CPU time of a streamed token.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from llm_models import tiny_llama

from headrace.core.generation import Generation, GenerationRequest, Sampling
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import EngineSettings, open_engine
from headrace.telemetry.registry import Registry

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
    taken = int(steps.value - arrived)
    for stream in others:
        stream.pending.cancel()
        stream.ended.exception()
    await newcomer.ended
    return taken


async def main(arguments: argparse.Namespace) -> None:
    """Measure all of it."""
    with tempfile.TemporaryDirectory() as place:
        repository = Path(place)
        tiny_llama(repository / "tiny" / "1")
        (repository / "tiny" / "config.pbtxt").write_text(
            'backend: "llm"\n'
            f'parameters {{ key: "threads" value {{ string_value: "{arguments.threads}" }} }}\n'
            'parameters { key: "prefix_cache" value { string_value: "false" } }\n'
        )
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
            taken = await steps_to_first_token(plane, server.metrics, arguments.streams - 1)
            print(f"a newcomer beside {arguments.streams - 1} streams has its first token {taken} steps after it came")
        await server.close(10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    logging.disable(logging.INFO)
    asyncio.run(main(parser.parse_args()))
