# SPDX-License-Identifier: Apache-2.0
"""Runners of unloaded models are used by the next model of the same shape, whose weights are read into place."""

from __future__ import annotations

import asyncio
import gc
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_instances import ON_CUDA, PLACE, USUAL, Served, Services
from safetensors.torch import load_file, save_file

from headrace.backends.contract import ModelFiles
from headrace.backends.llm import backend
from headrace.backends.llm.backend import LlmBackend, LlmModel
from headrace.backends.llm.instance import LlmInstance
from headrace.backends.llm.model_runner import weight_reader
from headrace.backends.llm.model_runner.fused_projections import fuse_projections, named_weights
from headrace.backends.llm.model_runner.weight_reader import direct_weights
from headrace.core.errors import FailedPrecondition
from headrace.core.generation import Generation, Sampling
from headrace.core.kept_memory import Kept, KeptMemory
from headrace.models.config.types import ModelConfig, OutputSpec
from support.fake_cuda_memory import FakeCudaDriver
from support.llm_models import tiny_llama, tiny_qwen2

PROMPTS = ("the quick brown fox jumps over", "a headrace is the channel that")
SMALL = {"kv_cache_bytes": str(4 << 20), "max_running": "8", "max_step_tokens": "64", "compile": "false"}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCudaDriver:
    fake = FakeCudaDriver()
    if not ON_CUDA:
        monkeypatch.setattr(backend, "open_driver", lambda _device: fake)
        monkeypatch.setattr(weight_reader, "_READ_BYTES", 10_000)  # many parts
    return fake


class Server:
    """Loads and unloads models as a server whose models load on demand."""

    def __init__(self) -> None:
        self.backend = LlmBackend()
        self.services = Services()
        self.services.kept_memory = self.kept = KeptMemory()

    @asynccontextmanager
    async def serving(self, folder: Path, **parameters: str) -> Any:
        outputs = (OutputSpec("text_output", None, None),)
        config = ModelConfig(
            "tiny", "llm", outputs=outputs, decoupled=True, parameters={**USUAL, **SMALL, **parameters}
        )
        model = self.backend.load(config, ModelFiles(folder.parent, 1, folder), self.services)  # type: ignore[arg-type]
        instance = await asyncio.to_thread(model.open, PLACE)
        assert isinstance(model, LlmModel)
        assert isinstance(instance, LlmInstance)
        try:
            yield Served(model, instance, self.services.metrics)
        finally:
            await asyncio.to_thread(instance.close)
            model.close()


async def answers(tiny: Served) -> list[str]:
    asked = [Generation(prompt=prompt, sampling=Sampling(temperature=0.0, max_tokens=12)) for prompt in PROMPTS]
    return [(await tiny.ask(generation)).text for generation in asked]


def other_weights(folder: Path, target: Path) -> Path:
    """A model of the same shape with other weights."""
    shutil.copytree(folder, target)
    torch.manual_seed(7)
    tensors = {
        name: torch.randn_like(weight) * weight.std()
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
def test_the_next_model_of_a_shape_uses_the_runner(tmp_path: Path, driver: FakeCudaDriver, make: Any) -> None:
    one = make(tmp_path / "one" / "1")
    two = other_weights(one, tmp_path / "two" / "1")

    async def main() -> None:
        server = Server()
        async with server.serving(one) as tiny:
            first, runner, used = await answers(tiny), tiny.engine.runner, driver.used
            async with server.serving(two) as other:  # both awake: each has its own
                second = await answers(other)
                assert other.engine.runner is not runner
                assert await answers(tiny) == first
            assert second != first
        if not ON_CUDA:
            assert driver.used == 0
        spare = {id(kept.free.__self__.runner) for kept in server.kept._kept}  # type: ignore[attr-defined]
        assert len(spare) == 2
        for folder, wanted in ((two, second), (one, first), (one, first), (two, second)):
            async with server.serving(folder) as tiny:
                assert id(tiny.engine.runner) in spare
                assert await answers(tiny) == wanted
                if not ON_CUDA:
                    assert driver.used == used
                await asyncio.to_thread(tiny.model.sleep, 2)
                await asyncio.to_thread(tiny.model.wake)
                assert await answers(tiny) == wanted
                if folder is two:
                    await asyncio.to_thread(tiny.model.sleep, 1)  # unloaded asleep
        server.kept.close()
        gc.collect()
        assert not driver.reserved

    asyncio.run(main())


def test_another_shape_or_setting_is_loaded_as_usual(tmp_path: Path, driver: FakeCudaDriver) -> None:
    one = tiny_llama(tmp_path / "one" / "1")
    deeper = tiny_llama(tmp_path / "deeper" / "1", num_hidden_layers=3)

    async def main() -> None:
        server = Server()
        async with server.serving(one) as tiny:
            runner = tiny.engine.runner
        for folder, parameters in ((deeper, {}), (one, {"page_size": "8"}), (one, {"quantization": "fp8"})):
            async with server.serving(folder, **parameters) as tiny:
                assert tiny.engine.runner is not runner
        async with server.serving(one, max_queue="5") as tiny:
            assert tiny.engine.runner is runner
        server.kept.close()
        gc.collect()
        assert not driver.reserved

    asyncio.run(main())


def test_a_damaged_file_fails_the_load_and_not_the_next(tmp_path: Path, driver: FakeCudaDriver) -> None:
    one = tiny_llama(tmp_path / "one" / "1")
    two = other_weights(one, tmp_path / "two" / "1")
    file = two / "model.safetensors"
    whole = file.read_bytes()

    async def main() -> None:
        server = Server()
        async with server.serving(two) as tiny:
            wanted = await answers(tiny)
        file.write_bytes(whole[:-500])
        with pytest.raises(FailedPrecondition, match="ends too early: copy the whole model"):
            async with server.serving(two):
                raise AssertionError("it was loaded")
        gc.collect()
        assert not driver.reserved
        file.write_bytes(whole)
        async with server.serving(two) as tiny:
            assert await answers(tiny) == wanted
        server.kept.close()
        gc.collect()
        assert not driver.reserved

    asyncio.run(main())


@pytest.mark.skipif(ON_CUDA, reason="has a fake of CUDA's memory")
def test_nothing_is_kept_where_no_model_loads_on_demand(tmp_path: Path, driver: FakeCudaDriver) -> None:
    one = tiny_llama(tmp_path / "one" / "1")

    async def main() -> None:
        server = Server()
        server.services.kept_memory = None
        async with server.serving(one) as tiny:
            assert await answers(tiny)
        gc.collect()
        assert not driver.reserved

    asyncio.run(main())


def test_joined_projections_have_the_names_of_the_files(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_qwen2(tmp_path / "q")  # has biases
    plain, fused = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    assert fuse_projections(fused)
    weights = named_weights(fused)
    expected = dict(plain.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert direct_weights(fused, folder) is not None
    with torch.no_grad():
        expected = dict(fused.named_parameters())
        next(iter(expected.values())).view(-1)[0] += 1
    assert direct_weights(fused, folder) is None  # as if transformers had converted it


def test_kept_memory_is_freed_oldest_first() -> None:
    kept, freed = KeptMemory(), []
    entries = [Kept(place, 10, lambda number=number: freed.append(number)) for number, place in enumerate("ababa")]  # type: ignore[misc]
    assert all(kept.put(entry) for entry in entries)
    assert kept.bytes == {"a": 30, "b": 20}
    kept.free({"a": 11})
    assert freed == [0, 2]
    assert not kept.take(entries[0])
    assert kept.take(entries[1])
    assert not kept.has(entries[1])
    kept.close()
    assert freed == [0, 2, 3, 4]
    assert not kept.put(entries[0])
    assert kept.bytes == {}
