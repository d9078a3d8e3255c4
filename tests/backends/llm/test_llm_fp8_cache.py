# SPDX-License-Identifier: Apache-2.0
"""A KV cache in FP8: twice the tokens of bfloat16 in the same memory, and nearly the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.llm.kv_transfer.page_layout import pack_pages, pages_fingerprint, unpack_pages
from headrace.backends.llm.model_runner.kv_cache import FP8, KVCache, LayerShape, write_slots
from headrace.backends.llm.model_runner.model_loader import check_folder, load_model, open_runner
from headrace.backends.llm.page_pool import PagePool
from headrace.backends.llm.scheduler import Scheduler, Sequence
from headrace.backends.llm.settings import LlmSettings
from support import llm_models

CPU = torch.device("cpu")
PROMPT = [(7 * place + 3 * place * place) % 500 + 8 for place in range(60)]
REST = [(11 * place) % 500 + 8 for place in range(20)]


def logits_of(folder: Path, **settings: Any) -> tuple[torch.Tensor, int]:
    """The logits after a prompt in chunks and after each of REST; and how many pages the cache has."""
    llm_settings = LlmSettings(folder, page_size=8, kv_cache_bytes=1 << 20, **settings)
    runner, sizes = open_runner(load_model(check_folder(llm_settings), llm_settings, CPU), llm_settings, CPU)
    scheduler = Scheduler(PagePool(sizes.pages, 8, prefix_cache=False), max_running=2, max_step_tokens=16)
    sequence = Sequence(list(PROMPT), len(PROMPT) + len(REST))
    scheduler.add(sequence)
    logits: list[torch.Tensor] = []
    for token in REST:
        while not scheduler.idle:
            chunks = scheduler.schedule()
            step = runner.launch(chunks, greedy=False)
            if chunks[0].samples:
                logits.append(step.logits.clone())
                scheduler.commit(chunks, [token])
                break
            scheduler.commit(chunks, [])
    runner.close()
    assert len(logits) == len(REST)
    return torch.cat(logits), sizes.pages


@pytest.mark.parametrize("make", ["tiny_llama", "tiny_qwen2", "tiny_mistral"])
def test_logits_are_near_those_of_the_models_own_dtype(make: str, tmp_path: Path) -> None:
    folder = getattr(llm_models, make)(tmp_path / "model", initializer_range=0.02)
    exact, _ = logits_of(folder)
    near, _ = logits_of(folder, kv_cache_dtype="fp8")
    assert not torch.equal(near, exact)
    assert (near - exact).abs().mean() / exact.abs().mean() < 0.02


def test_the_same_memory_holds_twice_the_tokens_of_bfloat16(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "model")
    _, pages = logits_of(folder, dtype="bfloat16")
    assert logits_of(folder, dtype="bfloat16", kv_cache_dtype="fp8")[1] == 2 * pages


def cache_of(dtype: torch.dtype) -> KVCache:
    return KVCache([LayerShape(2, 4, 6, None)] * 2, 3, 8, dtype, CPU)


def test_values_that_are_too_large_become_the_largest() -> None:
    cache = cache_of(FP8)
    write_slots(cache.layers[0].keys, torch.tensor([5]), torch.full((1, 2, 4), -1e6))
    assert (cache.layers[0].keys[5].float() == -448).all()
    assert (cache.layers[0].keys[4].float() == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_pages_are_sent_and_received(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, target = cache_of(dtype), cache_of(dtype)
    computed = torch.bfloat16 if dtype is FP8 else dtype
    for layer in source.layers:
        for tensor in (layer.keys, layer.values):
            write_slots(tensor, torch.arange(24), torch.randn(24, *tensor.shape[1:], dtype=computed))
    unpack_pages(target, [2, 0], pack_pages(source, [0, 1]))
    for given, received in zip(source.layers, target.layers, strict=True):
        assert torch.equal(received.keys[16:24].float(), given.keys[:8].float())
        assert torch.equal(received.values[:8].float(), given.values[8:16].float())


def test_servers_with_other_caches_do_not_exchange_pages() -> None:
    assert pages_fingerprint(b"weights", cache_of(FP8)) != pages_fingerprint(b"weights", cache_of(torch.bfloat16))
