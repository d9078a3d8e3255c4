# SPDX-License-Identifier: Apache-2.0
"""Models that sleep on a real GPU: its memory is free for others meanwhile, and addresses and captured graphs stay.

HEADRACE_TEST_DEVICE=cuda python -m pytest -s tests/backends/llm/test_llm_sleep_cuda.py
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_instances import ON_CUDA, Served, served

from headrace.backends.contract import SleepLevel
from headrace.backends.llm.model_runner.runner import model_weights
from headrace.core.errors import ResourceExhausted
from headrace.core.generation import Generation, Sampling
from support.llm_models import tiny_llama, tiny_mixtral, tiny_qwen2

pytestmark = pytest.mark.skipif(not (ON_CUDA and torch.cuda.is_available()), reason="needs a GPU")

MIB = 1 << 20
PROMPTS = ("the quick brown fox jumps over", "a headrace is the channel that", "json looks like")
FEW = {"max_running": "16", "max_step_tokens": "256", "kv_cache_bytes": str(256 * MIB), "compile": "false"}
"""Few and small graphs, which are captured in a second or two."""
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
"""About 0.5 GB in float32."""


def free_bytes() -> int:
    """What the driver says is free, for all processes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


async def answers(tiny: Served) -> list[str]:
    asked = [Generation(prompt=p, sampling=Sampling(temperature=0.0, max_tokens=16)) for p in PROMPTS]
    return [caller.text for caller in await asyncio.gather(*(tiny.ask(generation) for generation in asked))]


async def sleep(tiny: Served, level: SleepLevel) -> dict[str, int]:
    return dict(await asyncio.to_thread(tiny.model.sleep, level))


async def wake(tiny: Served) -> None:
    await asyncio.to_thread(tiny.model.wake)


def addresses_of(runner: Any) -> list[int]:
    caches = [tensor.data_ptr() for layer in runner.cache.layers for tensor in (layer.keys, layer.values)]
    return caches + [weight.data_ptr() for weight in model_weights(runner.model)]


KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "plain": (tiny_llama, SHAPE, FEW),
    "compiled": (tiny_llama, {}, {**FEW, "compile": "true", "dtype": "bfloat16"}),
    "tied": (tiny_qwen2, {"tie_word_embeddings": True}, FEW),
    "experts": (tiny_mixtral, {}, FEW),
    "fp8": (tiny_llama, {"hidden_size": 256}, {**FEW, "quantization": "fp8", "dtype": "bfloat16"}),
    "no graphs": (tiny_llama, {}, {**FEW, "cuda_graphs": "false"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_free_while_it_sleeps_and_graphs_stay(tmp_path: Path, kind: str) -> None:
    make, shape, parameters = KINDS[kind]
    folder = make(tmp_path / "model" / "1", **shape)

    async def main() -> None:
        async with served(folder, **parameters) as tiny:
            before = await answers(tiny)
            assert len(set(before)) == len(PROMPTS)
            runner = tiny.engine.runner
            assert runner.placed is not None, "the driver has no virtual memory management"
            assert runner.cache.keeps_addresses
            assert runner.async_scheduling == (kind != "no graphs")
            graphs, addresses = getattr(runner, "graphs", None), addresses_of(runner)
            held = runner.placed.bytes["gpu0"] + runner.cache.bytes
            awake = free_bytes()
            for level in (1, 2, 2, 1):
                began = time.perf_counter()
                freed = await sleep(tiny, level)  # type: ignore[arg-type]
                slept = time.perf_counter()
                assert freed["gpu0"] == held
                given = free_bytes() - awake
                assert given >= held - 48 * MIB
                # Others may use the memory meanwhile.
                hog = torch.full((given // 2,), 0x7F, dtype=torch.uint8, device="cuda")
                del hog
                torch.cuda.empty_cache()
                waking = time.perf_counter()
                await wake(tiny)
                woke = time.perf_counter()
                sys.stdout.write(
                    f"\n{kind}, level {level}: {held / 1e6:.0f} MB, asleep in {slept - began:.3f} s, awake in "
                    f"{woke - waking:.3f} s"
                )
                assert abs(free_bytes() - awake) <= 64 * MIB
                assert addresses_of(runner) == addresses
                assert getattr(runner, "graphs", None) is graphs
                assert await answers(tiny) == before

    asyncio.run(main())


@pytest.mark.parametrize("level", [1, 2])
def test_twenty_cycles_take_no_memory(tmp_path: Path, level: SleepLevel) -> None:
    folder = tiny_llama(tmp_path / "model" / "1", **SHAPE)

    async def main() -> None:
        async with served(folder, **FEW) as tiny:
            before = await answers(tiny)
            left: list[int] = []
            for _ in range(20):
                await sleep(tiny, level)
                await wake(tiny)
                assert await answers(tiny) == before
                left.append(free_bytes())
            assert left[-1] >= left[1] - 8 * MIB, left

    asyncio.run(main())


def test_memory_comes_back_when_a_model_closes_awake_or_asleep(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model" / "1", **SHAPE)

    async def once(level: SleepLevel | None) -> int:
        async with served(folder, **FEW) as tiny:
            await answers(tiny)
            if level is not None:
                await sleep(tiny, level)
        return free_bytes()

    asyncio.run(once(None))  # what libraries keep for good
    awake = asyncio.run(once(None))
    for level in (1, 2, None):
        assert asyncio.run(once(level)) >= awake - 96 * MIB  # less than a model takes; cuBLAS has workspaces


def test_a_model_that_finds_no_memory_sleeps_on(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model" / "1", **SHAPE)

    async def main() -> None:
        async with served(folder, **FEW) as tiny:
            before = await answers(tiny)
            for level in (1, 2):
                await sleep(tiny, level)  # type: ignore[arg-type]
                free = free_bytes()
                hog = torch.empty(free - 128 * MIB, dtype=torch.uint8, device="cuda")
                with pytest.raises(ResourceExhausted, match="gpu0 has not enough free memory"):
                    await wake(tiny)
                assert torch.cuda.mem_get_info()[0] >= 64 * MIB  # what was taken is given back
                del hog
                torch.cuda.empty_cache()
                await wake(tiny)
                assert await answers(tiny) == before

    asyncio.run(main())


def test_another_model_computes_while_one_sleeps(tmp_path: Path) -> None:
    folder, other = tiny_llama(tmp_path / "a" / "1", **SHAPE), tiny_llama(tmp_path / "b" / "1", num_hidden_layers=3)

    async def main() -> None:
        async with served(folder, **FEW) as first, served(other, **FEW) as second:
            wanted, others = await answers(first), await answers(second)
            for level in (1, 2, 1):
                going = asyncio.create_task(_ask_on(second, others))
                await sleep(first, level)  # type: ignore[arg-type]
                await wake(first)
                assert await answers(first) == wanted
                assert await going

    async def _ask_on(tiny: Served, expected: list[str]) -> bool:
        return all([await answers(tiny) == expected for _ in range(20)])

    asyncio.run(main())
