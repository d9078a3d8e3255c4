# SPDX-License-Identifier: Apache-2.0
"""Compare the router's policies on a fleet of simulated engines, in simulated time.

    .venv/bin/python -m bench.fleet_sim
    .venv/bin/python -m bench.fleet_sim --replicas 64 --load 0.6,0.8,0.9 --seconds 600 --plot fleet.svg

The policies, the choice by request and the load balancing are the router's own code; connections are not simulated. An
engine batches continuously, prefills in chunks and keeps a prefix cache. Its times are those of an 8B model on an H200
(docs/performance.md). The traffic has the published shape of Mooncake's conversations; it is generated, not replayed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

import orjson

from headrace.core.kv_events import BlockRemoved, BlockStored
from headrace.fleet.router import predicted_latency
from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.chooser import Chooser, make_chooser
from headrace.fleet.router.kv_events import KVEvents
from headrace.fleet.router.kv_index import KVIndex
from headrace.fleet.router.policies import RequestView, make_policy
from headrace.fleet.router.predicted_latency import LatencyTimer, PredictedLatency
from headrace.fleet.router.settings import BackendAddress, RouterSettings
from headrace.net.http.heads import RequestHead

BLOCK_TOKENS = 512
"""Tokens of a block, as in Mooncake's traces."""
CHARACTERS = 4
"""Characters of a token."""
POLICIES = ("round-robin", "p2c", "least", "prefix_hash", "cache_aware", "kv_events", "predicted_latency")
_TICK_SECONDS = 0.25
_EVENT = b"\n\n"


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """How long an engine takes: an 8B model in bfloat16 on an H200."""

    step_seconds: float = 0.00464
    """Of a step, whatever it computes."""
    stream_seconds: float = 0.0000623
    """More for each sequence that generates: 211 tokens/s for one stream, 12,447 for 256."""
    prompt_seconds: float = 0.0000313
    """For each token of a prompt: 64 prompts of 4,096 tokens in 8.2 s."""
    chunk_tokens: int = 2048
    max_running: int = 256
    cache_tokens: int = 700_000
    """KV cache: some 90 GB."""


@dataclass(eq=False, slots=True)
class Request:
    """A request, from its arrival to the last token."""

    arrived: float
    blocks: tuple[int, ...]
    """Ids of the prompt's blocks: prompts with the same beginning have the same first ids."""
    prompt_tokens: int
    output_tokens: int
    backend: Backend | None = None
    timer: LatencyTimer | None = None
    cached_tokens: int = 0
    first_token: float = 0.0
    done: float = 0.0
    left: int = 0
    """Tokens that are still to be prefilled, and then to be generated."""


OnChange = Callable[[int | None, Sequence[int], Sequence[int]], None]
"""Gets the blocks of a prompt that were stored, with the block before them, and the blocks that were removed."""


class PrefixCache:
    """The blocks of an engine's cache, least recently used first."""

    def __init__(self, blocks: int, on_change: OnChange | None) -> None:
        self._limit = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._on_change = on_change

    def use(self, blocks: Sequence[int]) -> int:
        """Return how many of the first blocks are cached, and cache all."""
        known = 0
        for block in blocks:
            if block not in self._blocks:
                break
            known += 1
        for block in reversed(blocks):
            # The first block is the last to be evicted: without it the others could not be found.
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._limit)]
        if self._on_change is not None and (known < len(blocks) or removed):
            self._on_change(blocks[known - 1] if known else None, blocks[known:], removed)
        return known


class Machine(Protocol):
    """What an engine runs on: a clock, and somebody who hears of its tokens."""

    times: EngineTimes

    @property
    def now(self) -> float:
        """The time in seconds."""

    def at(self, when: float, engine: Engine) -> int:
        """Call `engine.step` at a time; return the event."""

    def answered(self, request: Request) -> None:
        """Take the first token of a request."""

    def finished(self, request: Request) -> None:
        """Take the last token of a request."""


class Engine:
    """One replica: continuous batching with chunked prefill."""

    def __init__(self, simulation: Machine, cache: PrefixCache) -> None:
        self._simulation = simulation
        self._times = simulation.times
        self._cache = cache
        self._waiting: deque[Request] = deque()
        self._prefill: Request | None = None
        self.running: list[Request] = []
        """Requests that generate."""
        self._chunk = self._steps = 0
        self._began = self._step = 0.0
        self._event = -1
        """The event that ends the current steps; -1 while the engine is idle."""

    @property
    def waiting(self) -> list[Request]:
        """Requests without a first token."""
        return [*([self._prefill] if self._prefill is not None else ()), *self._waiting]

    def add(self, request: Request) -> None:
        """Take a request."""
        self._waiting.append(request)
        if self._event < 0:
            self._start()
        elif self._steps > 1:
            # It may begin after the step that is being computed.
            now = self._simulation.now
            self._steps = min(self._steps, int((now - self._began) / self._step) + 1)
            self._event = self._simulation.at(self._began + self._steps * self._step, self)

    def step(self, event: int) -> None:
        """End the steps that were computed, and start the next."""
        if event != self._event:
            return
        now, still = self._simulation.now, []
        for request in self.running:
            request.left -= self._steps
            if request.left > 0:
                still.append(request)
            else:
                self._simulation.finished(request)
        self.running = still
        prefill = self._prefill
        if prefill is not None:
            prefill.left -= self._chunk
            if prefill.left <= 0:
                self._prefill = None
                prefill.first_token, prefill.left = now, prefill.output_tokens - 1
                self._simulation.answered(prefill)
                if prefill.left > 0:
                    self.running.append(prefill)
                else:
                    self._simulation.finished(prefill)
        self._start()

    def _start(self) -> None:
        times = self._times
        if self._prefill is None and self._waiting and len(self.running) < times.max_running:
            request = self._prefill = self._waiting.popleft()
            known = self._cache.use(request.blocks) * BLOCK_TOKENS
            # The last token is always computed.
            request.cached_tokens = min(known, request.prompt_tokens - 1)
            request.left = request.prompt_tokens - request.cached_tokens
        self._began = self._simulation.now
        self._chunk, self._steps = 0, 1
        seconds = times.step_seconds + times.stream_seconds * len(self.running)
        if self._prefill is not None:
            self._chunk = min(times.chunk_tokens, self._prefill.left)
            seconds += times.prompt_seconds * self._chunk
        elif self.running:
            self._steps = min(request.left for request in self.running)
        else:
            self._event = -1
            return
        self._step = seconds
        self._event = self._simulation.at(self._began + self._steps * seconds, self)


@dataclass(slots=True)
class Result:
    """What a policy came to."""

    policy: str
    load: float
    requests: int
    first_token: dict[str, float] = field(default_factory=dict)
    """Percentiles of the seconds to the first token."""
    per_token: dict[str, float] = field(default_factory=dict)
    hit_rate: float = 0.0
    """Prompt tokens that were cached."""
    choice_us: float = 0.0
    """CPU time of a choice."""


class Simulation:
    """A fleet before which the router chooses by one policy."""

    def __init__(self, policy: str, replicas: int, times: EngineTimes) -> None:
        self.times = times
        self._now = 0.0
        self._heap: list[tuple[float, int, Engine | Request]] = []
        self._numbers = count()
        addresses = tuple(
            BackendAddress.parse(f"http://10.{number >> 8}.{number & 255}.1:8000") for number in range(replicas)
        )
        settings = RouterSettings(addresses, policy=policy)
        chance = random.Random(policy)
        self._backends = Backends(settings, make_policy(policy, chance))
        self._latency = PredictedLatency(settings, chance) if policy == "predicted_latency" else None
        self._index: KVIndex[Backend] | None = KVIndex(replicas * 20_000) if policy == "kv_events" else None
        kv_events = KVEvents(settings, self._backends.all, self._index) if self._index is not None else None
        self._chooser: Chooser | None = make_chooser(settings, self._backends, kv_events or self._latency)
        blocks = times.cache_tokens // BLOCK_TOKENS
        self._engines = {
            backend: Engine(self, PrefixCache(blocks, self._publisher(backend))) for backend in self._backends.all
        }
        self.done: list[Request] = []
        self.choice_seconds = 0.0
        self._ticked = 0.0

    def run(self, requests: Sequence[Request]) -> None:
        """Serve all requests, which are in order of arrival."""
        clock, predicted_latency.monotonic = predicted_latency.monotonic, lambda: self.now
        try:
            for request in requests:
                heapq.heappush(self._heap, (request.arrived, next(self._numbers), request))
            while self._heap:
                self._now, event, payload = heapq.heappop(self._heap)
                if isinstance(payload, Request):
                    self._arrived(payload)
                else:
                    payload.step(event)
        finally:
            predicted_latency.monotonic = clock

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
        """Take the first token of a request."""
        if request.timer is not None:
            request.timer.piece(_EVENT)

    def finished(self, request: Request) -> None:
        """Take the last token of a request."""
        request.done = self.now
        if request.timer is not None:
            request.timer.piece(_EVENT * (request.output_tokens - 1))
            request.timer.ended()
        if request.backend is not None:
            self._backends.end(request.backend, Outcome.OK, self.now)
        self.done.append(request)

    def _arrived(self, request: Request) -> None:
        chooser = self._chooser
        if chooser is not None and self.now - self._ticked >= _TICK_SECONDS:
            self._ticked = self.now
            chooser.tick(self.now)
        view = _view(request, tokens=self._index is not None)
        _ = view.prompt  # the body is read before
        began = time.thread_time()
        backend = self._backends.pick() if chooser is None else chooser.pick(view)
        self.choice_seconds += time.thread_time() - began
        if backend is None:
            raise RuntimeError("no backend is live")
        request.backend = backend
        self._backends.begin(backend)
        if self._latency is not None:
            request.timer = LatencyTimer(self._latency)
            request.timer.sent(backend, view)
        self._engines[backend].add(request)

    def _publisher(self, backend: Backend) -> OnChange | None:
        index = self._index
        if index is None:
            return None

        def publish(parent: int | None, stored: Sequence[int], removed: Sequence[int]) -> None:
            events: list[Any] = [BlockRemoved(removed)] if removed else []
            if stored:
                tokens = [token for block in stored for token in _tokens(block)]
                events.append(BlockStored(stored, parent, tokens, BLOCK_TOKENS))
            index.apply(backend, events)

        return publish


def _tokens(block: int) -> range:
    return range(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)


def text_of(blocks: Sequence[int]) -> str:
    """Return the text of a prompt: its blocks differ where the ids do."""
    return "".join([f"{block:08x}".ljust(BLOCK_TOKENS * CHARACTERS, ".") for block in blocks])


def _view(request: Request, *, tokens: bool) -> RequestView:
    """Return the request as policies see it."""
    body = orjson.dumps({"model": "chat", "prompt": text_of(request.blocks)})
    view = RequestView(RequestHead(b"POST", b"/v1/completions", [], version="1.1"), body)
    if tokens:
        view.tokens = array("I", [token for block in request.blocks for token in _tokens(block)]).tobytes()
    return view


def conversations(rate: float, seconds: float, seed: int = 1) -> list[Request]:
    """Return requests of conversations, in order of arrival: so many a second, on average.

    Mooncake's conversations have prompts of some 12,000 tokens and answers of some 340, and four tenths of the prompt blocks
    were seen before. Here a conversation begins with a document, and each turn repeats what was said.
    """
    random_ = random.Random(seed)
    numbers = count(1)
    turns_mean = 3.0
    requests: list[Request] = []
    system = [list(islice(numbers, random_.randint(1, 3))) for _ in range(20)]
    start = -120.0  # so that conversations are under way when it begins
    while start < seconds:
        start += random_.expovariate(rate / turns_mean)
        blocks = list(system[min(int(random_.paretovariate(1.0)) - 1, len(system) - 1)])
        blocks += islice(numbers, max(1, round(random_.lognormvariate(2.55, 0.8))))
        when = start
        while True:
            output = max(8, min(2000, round(random_.lognormvariate(5.5, 0.8))))
            tokens = len(blocks) * BLOCK_TOKENS + random_.randrange(BLOCK_TOKENS)
            if 0 <= when < seconds:
                requests.append(Request(when, tuple(blocks), tokens, output))
            if random_.random() < 1 / turns_mean:
                break
            blocks += islice(numbers, max(1, round(random_.lognormvariate(0.9, 0.7))))
            when += 5 + random_.expovariate(1 / 30)
    return sorted(requests, key=lambda request: request.arrived)


def capacity(times: EngineTimes, requests: Sequence[Request]) -> float:
    """Return the requests per second that one replica could serve without a prefix cache."""
    prompts = sum(request.prompt_tokens for request in requests)
    outputs = sum(request.output_tokens for request in requests)
    # While prompts are computed, a step is a chunk of one; a sequence has its part of each.
    chunk = times.step_seconds / times.chunk_tokens + times.prompt_seconds
    return len(requests) / (prompts * chunk + outputs * times.stream_seconds)


def simulate(policy: str, load: float, replicas: int, seconds: float, seed: int = 1) -> Result:
    """Run one policy at one load."""
    times = EngineTimes()
    rate = load * replicas * capacity(times, conversations(10.0, 600.0, seed))
    simulation = Simulation(policy, replicas, times)
    requests = conversations(rate, seconds, seed)
    simulation.run(requests)
    # Caches and models are filled in the first quarter.
    counted = [request for request in simulation.done if request.arrived >= seconds / 4]
    result = Result(policy, load, len(counted))
    result.first_token = percentiles([request.first_token - request.arrived for request in counted])
    result.per_token = percentiles(
        [
            (request.done - request.first_token) / (request.output_tokens - 1)
            for request in counted
            if request.output_tokens > 1
        ]
    )
    prompts = sum(request.prompt_tokens for request in counted)
    result.hit_rate = sum(request.cached_tokens for request in counted) / prompts
    result.choice_us = 1e6 * simulation.choice_seconds / len(requests)
    return result


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentile."""
    ordered = sorted(values)
    return {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)}


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| load | policy | first token p50 | p90 | p99 | per token p50 | p99 | cached | choice |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        first, following = result.first_token, result.per_token
        seconds = " | ".join(f"{first[name]:.2f} s" for name in ("p50", "p90", "p99"))
        tokens = " | ".join(f"{1000 * following[name]:.0f} ms" for name in ("p50", "p99"))
        lines.append(
            f"| {result.load:.0%} | `{result.policy}` | {seconds} | {tokens} | {result.hit_rate:.0%} | "
            f"{result.choice_us:.0f} us |"
        )
    return "\n".join(lines)


def plot(results: Sequence[Result]) -> str:
    """Return a picture of the 99th percentile of the time to the first token, by policy and load."""
    worst = max(result.first_token["p99"] for result in results)
    left, width, row = 190, 520, 20
    lines, top = [], 30
    for load in sorted({result.load for result in results}):
        lines.append(f'<text x="4" y="{top + 4}" font-weight="bold">load {load:.0%}</text>')
        top += row
        for result in (result for result in results if result.load == load):
            seconds = result.first_token["p99"]
            lines.append(f'<text x="{left - 8}" y="{top + 4}" text-anchor="end">{result.policy}</text>')
            bar = max(1.0, width * seconds / worst)
            lines.append(f'<rect x="{left}" y="{top - 8}" width="{bar:.0f}" height="14" fill="#3f6fb5"/>')
            lines.append(f'<text x="{left + bar + 6:.0f}" y="{top + 4}">{seconds:.2f} s</text>')
            top += row
        top += row // 2
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 80} {top}" '
        'font-family="sans-serif" font-size="13" fill="#808080" role="img">'
    )
    title = "<title>Time to the first token, 99th percentile</title>"
    caption = '<text x="4" y="14">Time to the first token, 99th percentile (shorter is better)</text>'
    return "\n".join([head, title, caption, *lines, "</svg>", ""])


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument(
        "--load", default="0.8", help="shares of what the fleet can serve without prefix caches, with commas"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="simulated time")
    parser.add_argument("--policy", default=",".join(POLICIES), help="policies, with commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--plot", type=Path, help="write a picture to this SVG file")
    options = parser.parse_args()
    results = []
    for load in map(float, options.load.split(",")):
        for policy in options.policy.split(","):
            began = time.monotonic()
            results.append(simulate(policy, load, options.replicas, options.seconds, options.seed))
            print(f"{policy} at {load:.0%}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if options.plot is not None:
        options.plot.write_text(plot(results), "utf-8")
    if options.json:
        print(json.dumps([{name: getattr(result, name) for name in Result.__slots__} for result in results], indent=2))  # type: ignore[attr-defined]
    else:
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
