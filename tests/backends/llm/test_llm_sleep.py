# SPDX-License-Identifier: Apache-2.0
"""Language models that sleep: their memory is given back, and their answers are the same when they wake."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from llm_instances import ON_CUDA, Caller, Served, Services, served
from safetensors.torch import load_file, save_file

from headrace.backends.contract import ModelFiles, SleepLevel
from headrace.backends.llm import backend
from headrace.backends.llm.backend import LlmBackend
from headrace.backends.llm.model_runner.runner import model_weights
from headrace.backends.sleeping_weights import place_of
from headrace.core.errors import FailedPrecondition, ResourceExhausted
from headrace.core.generation import Generation, Sampling
from headrace.core.kv_transfer import KvTransferSettings
from headrace.models.config.types import ModelConfig, OutputSpec
from support.fake_cuda_memory import FakeCudaDriver
from support.llm_models import tiny_llama, tiny_mixtral, tiny_qwen2

PROMPTS = ("the quick brown fox jumps over", "a headrace is the channel that", "json looks like")
GREEDY = Sampling(temperature=0.0, max_tokens=16)


def generation(prompt: str, **more: Any) -> Generation:
    return Generation(prompt=prompt, sampling=GREEDY, **more)


async def answers(tiny: Served) -> list[str]:
    return [caller.text for caller in await asyncio.gather(*(tiny.ask(generation(prompt)) for prompt in PROMPTS))]


async def sleep(tiny: Served, level: SleepLevel) -> dict[str, int]:
    return dict(await asyncio.to_thread(tiny.model.sleep, level))


async def wake(tiny: Served) -> None:
    await asyncio.to_thread(tiny.model.wake)


def stored(tensors: Any) -> int:
    """Bytes of the storages behind tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "plain": (tiny_llama, {}, {}),
    "tied": (tiny_qwen2, {"tie_word_embeddings": True}, {}),
    "experts": (tiny_mixtral, {}, {}),
    "fp8": (tiny_llama, {}, {"quantization": "fp8"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_after_each_level(tmp_path: Path, kind: str) -> None:
    make, shape, parameters = KINDS[kind]
    folder = make(tmp_path / "model" / "1", **shape)

    async def main() -> None:
        async with served(folder, **parameters) as tiny:
            before = await answers(tiny)
            assert len(set(before)) == len(PROMPTS)
            assert all(before)
            runner, pool = tiny.engine.runner, tiny.engine.scheduler.pool
            addresses = [id(weight) for weight in model_weights(runner.model)]
            size, cached = stored(model_weights(runner.model)), runner.cache.bytes
            assert size
            assert cached
            place = place_of(runner.device)
            if runner.placed is not None:
                size = runner.placed.bytes[place]
            for level in (1, 2, 2, 1):
                freed = await sleep(tiny, level)  # type: ignore[arg-type]
                assert runner.cache.bytes == 0
                assert pool.evictable == 0
                if runner.placed is None:
                    assert stored(model_weights(runner.model)) == (0 if level == 2 else size)
                else:
                    assert runner.placed.bytes.get(place, 0) == 0
                assert freed[place] == cached + (size if level == 2 or ON_CUDA else 0)
                await wake(tiny)
                assert runner.cache.bytes == cached
                assert [id(weight) for weight in model_weights(runner.model)] == addresses
                assert {weight.device for weight in model_weights(runner.model)} == {runner.device}
                assert await answers(tiny) == before

    asyncio.run(main())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCudaDriver:
    """Weights and KV caches keep their addresses, as on a GPU."""
    fake = FakeCudaDriver()
    monkeypatch.setattr(backend, "open_driver", lambda _device: fake)
    return fake


def addresses_of(runner: Any) -> list[int]:
    caches = [tensor.data_ptr() for layer in runner.cache.layers for tensor in (layer.keys, layer.values)]
    return caches + [weight.data_ptr() for weight in model_weights(runner.model)]


@pytest.mark.skipif(ON_CUDA, reason="has a fake of CUDA's memory, in the memory of the process")
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_given_back_and_addresses_stay(tmp_path: Path, kind: str, driver: FakeCudaDriver) -> None:
    make, shape, parameters = KINDS[kind]
    folder = make(tmp_path / "model" / "1", **shape)

    async def main() -> None:
        async with served(folder, kv_cache_bytes=str(4 << 20), **parameters) as tiny:
            before, used = await answers(tiny), driver.used
            assert used
            runner = tiny.engine.runner
            addresses = addresses_of(runner)
            assert all(any(at <= address < at + size for at, size in driver.reserved.items()) for address in addresses)
            for level in (1, 2, 2, 1):
                freed = await sleep(tiny, level)  # type: ignore[arg-type]
                assert driver.used == 0
                if level == 2:
                    assert freed["host"] == used
                await wake(tiny)
                assert driver.used == used
                assert addresses_of(runner) == addresses
                assert await answers(tiny) == before
            await sleep(tiny, 1)
            await sleep(tiny, 2)
            await wake(tiny)
            assert await answers(tiny) == before
            await sleep(tiny, 2)
        assert driver.used == 0
        assert not driver.reserved

    asyncio.run(main())


@pytest.mark.skipif(ON_CUDA, reason="has a fake of CUDA's memory, in the memory of the process")
@pytest.mark.parametrize("level", [1, 2])
def test_a_model_that_finds_no_memory_sleeps_on(tmp_path: Path, level: SleepLevel, driver: FakeCudaDriver) -> None:
    folder = tiny_llama(tmp_path / "model" / "1")

    async def main() -> None:
        async with served(folder, kv_cache_bytes=str(4 << 20)) as tiny:
            before, used = await answers(tiny), driver.used
            await sleep(tiny, level)
            assert driver.used == 0
            for capacity in (0, used // 2, used - 1):
                driver.capacity = capacity
                with pytest.raises(ResourceExhausted, match="'tiny' cannot wake: host has not enough free memory"):
                    await wake(tiny)
            driver.capacity = used
            await wake(tiny)
            assert driver.used == used
            assert await answers(tiny) == before
        assert driver.used == 0
        assert not driver.reserved

    asyncio.run(main())


def test_it_may_sleep_deeper_and_end_asleep(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model" / "1")

    async def main() -> None:
        async with served(folder) as tiny:
            before = await answers(tiny)
            await sleep(tiny, 1)
            freed = await sleep(tiny, 2)
            assert sum(freed.values()) >= 200_000
            await wake(tiny)
            assert await answers(tiny) == before
            await sleep(tiny, 2)
            await sleep(tiny, 2)

    asyncio.run(main())


@pytest.mark.skipif(ON_CUDA, reason="measures the memory of the process, and the weights are on the GPU")
def test_memory_is_given_back_at_level_2(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model" / "1", hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    megabyte = 1 << 20

    def resident() -> int:
        gc.collect()
        return int(psutil.Process(os.getpid()).memory_info().rss)

    async def main() -> None:
        async with served(folder, kv_cache_bytes=str(64 * megabyte)) as tiny:
            before = await answers(tiny)
            weights = stored(model_weights(tiny.engine.runner.model))
            assert weights > 60 * megabyte
            awake = resident()
            freed = await sleep(tiny, 2)
            asleep = resident()
            assert freed["host"] > weights + 60 * megabyte
            assert awake - asleep > 0.8 * weights
            await wake(tiny)
            assert await answers(tiny) == before
            assert resident() < awake + 0.3 * weights

    asyncio.run(main())


def test_a_draft_model_sleeps_too(tmp_path: Path) -> None:
    folder, draft = tiny_llama(tmp_path / "model" / "1"), tiny_llama(tmp_path / "draft", num_hidden_layers=1)

    async def main() -> None:
        async with served(folder, speculation="draft", draft_model=str(draft)) as tiny:
            before = await answers(tiny)
            components = tiny.engine._components
            assert components.draft_model is not None
            drafting = components.draft_model.runner
            size = stored(model_weights(drafting.model))
            for level in (1, 2):
                freed = await sleep(tiny, level)  # type: ignore[arg-type]
                assert drafting.cache.bytes == 0
                assert stored(model_weights(drafting.model)) == (0 if level == 2 else size)
                await wake(tiny)
                assert await answers(tiny) == before
            assert sum(freed.values()) > size
            assert tiny.value("headrace_llm_speculation_drafts_total") > 0

    asyncio.run(main())


def test_a_running_request_ends_before_it_sleeps(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model" / "1")

    async def main() -> None:
        async with served(folder) as tiny:
            generation = Generation(prompt=PROMPTS[0], sampling=Sampling(temperature=0.0, max_tokens=200), stream=True)
            alone = (await tiny.ask(generation)).text
            caller = tiny.begin(generation)
            await asyncio.wait_for(caller.came.wait(), 60)
            assert not caller.ended.is_set()
            await sleep(tiny, 2)
            await asyncio.wait_for(caller.ended.wait(), 5)
            assert caller.text == alone
            await wake(tiny)

    asyncio.run(main())


def test_a_cancelled_request_does_not_reach_a_sleeping_model(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model" / "1")

    async def main() -> None:
        async with served(folder) as tiny:
            before = await answers(tiny)
            await sleep(tiny, 2)
            callers: list[Caller] = []
            for prompt in PROMPTS:
                caller = tiny.begin(generation(prompt))
                caller.cancelled = True
                callers.append(caller)
            for caller in callers:
                await asyncio.wait_for(caller.ended.wait(), 10)
                assert caller.error is None
            await wake(tiny)
            assert await answers(tiny) == before

    asyncio.run(main())


def test_files_that_changed_are_not_taken_for_the_model(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model" / "1")

    async def main() -> None:
        async with served(folder) as tiny:
            before = await answers(tiny)
            await sleep(tiny, 1)
            file = folder / "model.safetensors"
            kept, moved = file.read_bytes(), tmp_path / "kept"
            file.rename(moved)
            await wake(tiny)  # its weights are in memory
            assert await answers(tiny) == before
            await sleep(tiny, 2)
            with pytest.raises(FailedPrecondition, match="has changed since it was loaded: load the model again"):
                await wake(tiny)
            tensors = {name: tensor * 2 for name, tensor in load_file(moved).items()}
            save_file(tensors, file, metadata={"format": "pt"})
            with pytest.raises(FailedPrecondition, match=r"'model\.safetensors' of model 'tiny' has changed"):
                await wake(tiny)
            assert tiny.engine.runner.cache.bytes == 0
            file.unlink()
            moved.rename(file)
            assert file.read_bytes() == kept
            await wake(tiny)
            assert await answers(tiny) == before

    asyncio.run(main())


def test_what_cannot_sleep_says_why(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model" / "1")

    async def main() -> None:
        def loaded(services: Any, **parameters: str) -> Any:
            outputs = (OutputSpec("text_output", None, None),)
            config = ModelConfig("tiny", "llm", outputs=outputs, decoupled=True, parameters=parameters)
            return LlmBackend().load(config, ModelFiles(folder.parent, 1, folder), services)

        model = loaded(Services(KvTransferSettings("decode")))
        with pytest.raises(FailedPrecondition, match="'tiny' cannot sleep: other servers read its KV cache"):
            model.sleep(1)
        model.close()
        model = loaded(Services(), tensor_parallel="2")
        with pytest.raises(FailedPrecondition, match="'tiny' cannot sleep: its weights are in several processes"):
            model.sleep(2)
        model.close()

    asyncio.run(main())
