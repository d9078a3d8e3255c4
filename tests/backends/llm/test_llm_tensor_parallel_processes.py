# SPDX-License-Identifier: Apache-2.0
"""A sharded model whose ranks are processes, as in production: answers, kill -9, memory.

Beside test_llm_tensor_parallel.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llm_instances import Served, served

from headrace.backends.llm.tensor_parallel import group
from headrace.core.errors import Unavailable
from headrace.core.generation import Generation, Sampling
from support import llm_models

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
KINDS: dict[str, Callable[..., Path]] = {
    "llama": llm_models.tiny_llama,
    "qwen2": llm_models.tiny_qwen2,
    "qwen3": llm_models.tiny_qwen3,
    "mistral": llm_models.tiny_mistral,
    "gemma3": llm_models.tiny_gemma3,
    "mixtral": llm_models.tiny_mixtral,
    "qwen3_moe": llm_models.tiny_qwen3_moe,
}
PROMPTS = [("the quick brown fox jumps over Grüße " * 4)[number : 3 + 9 * number] for number in range(1, 9)]
GREEDY = Sampling(temperature=0.0, max_tokens=10)
LONG = Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True)
SMALL = {"max_running": "3", "max_step_tokens": "12", "page_size": "4"}


async def answers(tiny: Served) -> list[str]:
    """Streamed, to all prompts at once: in chunks of 12 tokens."""
    callers = [tiny.ask(Generation(prompt=prompt, sampling=GREEDY, stream=True)) for prompt in PROMPTS]
    return [caller.text for caller in await asyncio.gather(*callers)]


@pytest.mark.parametrize(("kind", "degree"), [*((kind, 2) for kind in KINDS), ("llama", 4), ("qwen3_moe", 4)])
def test_processes_answer_as_one_process(kind: str, degree: int, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path / "tiny" / "1")

    async def compare() -> None:
        async with served(folder, **SMALL) as one:
            expected = await answers(one)
        async with served(folder, tensor_parallel=str(degree), **SMALL) as several:
            assert await answers(several) == expected
            assert await answers(several) == expected  # with hits in the prefix cache
            assert several.engine.scheduler.prefix_hits

    asyncio.run(compare())


def test_a_killed_rank_is_replaced_again_and_again(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")

    async def kill() -> list[int]:
        used = []
        async with served(folder, tensor_parallel="2") as tiny:
            ranks: Any = tiny.engine.runner._group  # type: ignore[attr-defined]
            expected = (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text
            for _ in range(5):
                running = tiny.begin(Generation(prompt="the", sampling=LONG, stream=True))
                await asyncio.wait_for(running.came.wait(), 60)
                used.append(ranks._ranks[0].pid)
                os.kill(used[-1], signal.SIGKILL)
                await asyncio.wait_for(running.ended.wait(), 60)
                assert isinstance(running.error, Unavailable)
                assert f"rank 1 (process {used[-1]}) has ended (signal 9: killed)" in str(running.error)
                assert (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text == expected
            used.append(ranks._ranks[0].pid)
            used += [process.pid for process in ranks._source._spares]
        return used

    for pid in asyncio.run(kill()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_stopped_rank_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not end: the group has a bound for a step."""
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    monkeypatch.setattr(group, "STEP_SECONDS", 10.0)

    async def stop() -> None:
        async with served(folder, tensor_parallel="2") as tiny:
            expected = (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text
            os.kill(tiny.engine.runner._group._ranks[0].pid, signal.SIGSTOP)  # type: ignore[attr-defined]
            with pytest.raises(Unavailable, match="send it again"):
                await tiny.ask(Generation(prompt="the", sampling=GREEDY))
            assert (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text == expected

    asyncio.run(stop())


def test_a_rank_has_little_more_than_its_shard_in_memory_while_it_loads(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(
        tmp_path / "model",
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
    )
    script = [sys.executable, str(ROOT / "scripts" / "measure_ranks.py"), "memory", str(folder), "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(script, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(told.stdout)
    assert found["shard_bytes"] > 60e6
    assert 0.9 < found["ratio"] < 1.2
