# SPDX-License-Identifier: Apache-2.0
"""Measure the router's index of KV events: memory for many blocks of many workers, and the CPU time of a choice.

    .venv/bin/python bench/scenarios/kv_events.py
    .venv/bin/python bench/scenarios/kv_events.py --workers 1000 --blocks 1000000 --prompt-tokens 2048

Each worker stores conversations of a common system prompt and turns of its own, as its events would say. A choice gets a
prompt as tokens, which continues one of the conversations, and is that of the policy `kv_events` among all workers. Ends
with 1 if the memory is over 500 MB, a choice takes over 60 us, or a choice is not the worker that has the conversation.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

from headrace.core.kv_events import BlockStored, decode_events, encode_events
from headrace.fleet.router.backend import Backend, Health
from headrace.fleet.router.kv_events import KVEvents
from headrace.fleet.router.kv_index import KVIndex, pack_tokens
from headrace.fleet.router.policies import RequestView
from headrace.fleet.router.settings import BackendAddress, RouterSettings
from headrace.net.http.heads import RequestHead

MOST_BYTES, MOST_SECONDS = 500e6, 60e-6
BLOCK = 16
SYSTEM_BLOCKS = 32
KEPT = 500
"""Conversations that choices are made for."""


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def fill(
    index: KVIndex[Backend], backends: list[Backend], blocks: int, prompt_tokens: int
) -> tuple[list[tuple[Backend, list[int]]], float]:
    """Store the blocks. Return some conversations, each with the worker that has it, and the seconds for all events."""
    chosen = random.Random(7)
    system = [chosen.randrange(100_000) for _ in range(SYSTEM_BLOCKS * BLOCK)]
    turns = max(1, prompt_tokens // BLOCK - SYSTEM_BLOCKS)
    conversations: list[tuple[Backend, list[int]]] = []
    seconds = 0.0
    for number, backend in enumerate(backends):
        name, end = number << 32, (number << 32) + blocks // len(backends)
        parent = name + SYSTEM_BLOCKS - 1
        batch = [BlockStored(list(range(name, parent + 1)), None, system, BLOCK)]
        for first in range(parent + 1, end, turns):
            hashes = list(range(first, min(first + turns, end)))
            tokens = [chosen.randrange(100_000) for _ in range(len(hashes) * BLOCK)]
            batch.append(BlockStored(hashes, parent, tokens, BLOCK))
            if len(hashes) == turns and len(conversations) < KEPT:
                conversations.append((backend, [*system, *tokens, 1, 2, 3]))
        payload = encode_events(batch, 0.0)
        begun = time.thread_time()
        index.apply(backend, decode_events(payload))
        seconds += time.thread_time() - begun
    return conversations, seconds


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--choices", type=int, default=5000)
    options = parser.parse_args()
    settings = RouterSettings((), policy="kv_events")
    settings = replace(settings, kv_events=replace(settings.kv_events, max_blocks=options.blocks))
    backends = [
        Backend(BackendAddress.parse(f"http://worker-{number}:8000"), Health(settings.health, settings.outliers))
        for number in range(options.workers)
    ]
    before = resident_bytes()
    index: KVIndex[Backend] = KVIndex(options.blocks)
    policy = KVEvents(settings, backends, index)
    conversations, apply_seconds = fill(index, backends, options.blocks, options.prompt_tokens)
    used = resident_bytes() - before
    chosen = random.Random(8)
    head = RequestHead(b"POST", b"/v1/chat/completions", [], version="1.1")
    wrong = 0
    seconds = []
    for _ in range(options.choices):
        backend, tokens = chosen.choice(conversations)
        view = RequestView(head)
        view.tokens = pack_tokens(tokens)
        begun = time.thread_time()
        picked, _ = policy.choose(backends, view)
        seconds.append(time.thread_time() - begun)
        wrong += picked is not backend
    seconds.sort()
    middle = seconds[len(seconds) // 2]
    report = {
        "workers": options.workers,
        "blocks": index.blocks,
        "prompt_tokens": len(conversations[0][1]),
        "memory_mb": round(used / 1e6, 1),
        "choice_us_median": round(middle * 1e6, 1),
        "choice_us_p99": round(seconds[int(len(seconds) * 0.99)] * 1e6, 1),
        "event_us_per_block": round(apply_seconds / index.blocks * 1e6, 2),
        "wrong_choices": wrong,
    }
    print(json.dumps(report, indent=2))
    return int(used > MOST_BYTES or middle > MOST_SECONDS or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
