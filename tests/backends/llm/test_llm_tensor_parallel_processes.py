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
from support.adapters import save_adapters

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
ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
SMALL = {"max_running": "3", "max_step_tokens": "12", "page_size": "4"}


async def answers(tiny: Served, adapter: str = "") -> list[str]:
    """Streamed, to all prompts at once: in chunks of 12 tokens."""
    callers = [tiny.ask(Generation(prompt=prompt, sampling=GREEDY, stream=True, adapter=adapter)) for prompt in PROMPTS]
    return [caller.text for caller in await asyncio.gather(*callers)]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_processes_answer_as_one_process(kind: str, degree: int, tmp_path: Path) -> None:
    """Streamed, in chunks, with hits in the prefix cache, with an adapter and without."""
    folder = KINDS[kind](tmp_path / "tiny" / "1")
    adapters = save_adapters(folder, tmp_path, {"red": ADAPTER})
    parameters = {**SMALL, "adapters": f"red={adapters / 'red'}"}

    async def compare() -> None:
        async with served(folder, **parameters) as one:
            expected, changed = await answers(one), await answers(one, "red")
        assert changed != expected
        async with served(folder, tensor_parallel=str(degree), **parameters) as several:
            assert await answers(several) == expected
            hits = several.engine.scheduler.prefix_hits
            assert await answers(several) == expected
            assert several.engine.scheduler.prefix_hits > hits
            assert await answers(several, "red") == changed

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


def test_a_rank_has_little_more_than_its_shard_in_memory_while_it_loads() -> None:
    script = [sys.executable, str(ROOT / "bench" / "scenarios" / "tensor_parallel.py"), "memory", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(script, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(told.stdout)
    assert found["shard_bytes"] > 60e6
    assert 0.9 < found["ratio"] < 1.2
