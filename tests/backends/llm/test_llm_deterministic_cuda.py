# SPDX-License-Identifier: Apache-2.0
"""`deterministic` on a GPU: the same bits in any company, with graphs (compiled and not) and kernel by kernel.

The kernels of `invariant_attention_kernels` also run interpreted (`support.triton_kernels`).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.llm.model_runner.cuda_attention import split_tokens, tile_rows, tile_tokens
from headrace.backends.llm.model_runner.model_loader import check_folder, load_model, open_runner
from headrace.backends.llm.settings import LlmSettings
from support.llm_models import tiny_gemma3, tiny_llama, tiny_mistral, tiny_mixtral
from support.llm_steps import answer_logits, check_company
from support.paged_attention import plain_attention
from support.triton_kernels import DEVICE, HALF, INTERPRETED, needs_kernels

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
PAGE, SPLIT = 16, 128
LENGTH = 200 if INTERPRETED else 1000
SHAPES = [
    pytest.param((8, 2, 64, 64), {}, id="groups of 4"),
    pytest.param((32, 8, 128, 128), {}, id="8B Llama"),
    pytest.param((6, 2, 80, 80), {"cap": 5.0}, id="groups of 3, capped"),
    pytest.param((4, 2, 24, 80), {"window": 100, "has_sinks": True}, id="window and sinks, values wider than keys"),
    pytest.param((8, 4, 256, 256), {"window": 37}, id="wide heads"),
]


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("shape", "more"), SHAPES)
@needs_kernels[0]
@pytest.mark.filterwarnings("ignore")  # of numpy, with which Triton interprets
def test_attention_is_the_same_in_every_tile(
    shape: tuple[int, int, int, int], more: dict[str, Any], dtype: torch.dtype
) -> None:
    from headrace.backends.llm.model_runner import invariant_attention_kernels as kernels

    heads, kv_heads, size, value_size = shape
    if INTERPRETED and heads > 8:
        pytest.skip("takes too long without a GPU")
    window, cap = more.get("window", 0), more.get("cap", 0.0)
    random.seed(2)
    torch.manual_seed(2)
    rows, most = tile_rows(heads // kv_heads, SPLIT), tile_tokens(heads // kv_heads, SPLIT)
    pages = torch.randperm(-(-LENGTH // PAGE) + 5)[None].int()
    places = torch.arange(LENGTH)
    slots = (pages[0][places // PAGE] * PAGE + places % PAGE).int().to(DEVICE)
    pages = pages.to(DEVICE)
    cache = [torch.randn(pages.numel() * PAGE, kv_heads, n, dtype=dtype, device=DEVICE) for n in (size, value_size)]
    query = torch.randn(LENGTH, heads, size, dtype=dtype, device=DEVICE)
    new = [torch.randn(LENGTH, kv_heads, n, dtype=dtype, device=DEVICE) for n in (size, value_size)]
    sinks = torch.randn(heads, dtype=dtype, device=DEVICE) + 2 if more.get("has_sinks") else None
    for part, fresh in zip(cache, new, strict=True):
        part[slots.long()] = fresh

    def attend(start: int, cuts: list[int], *, as_rows: bool = False) -> torch.Tensor:
        """The tokens from `start` on, in tiles of so many tokens."""
        tiles, at = [], 0
        for count in cuts:
            tiles.append((0, at, count, start + at))
            at += count
        listed = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
        padding = torch.zeros(3, 4, dtype=torch.int32, device=DEVICE)
        here = slice(start, start + at)
        return kernels.attend(
            query[here], new[0][here], new[1][here], *cache, slots[here], pages, listed if as_rows else padding,
            padding if as_rows else listed, PAGE, size**-0.5, window, rows, cap, sinks, SPLIT,
        )  # fmt: skip

    # Interpreted, only the last tokens.
    first = LENGTH - (min(most, 12) if INTERPRETED else LENGTH)
    count = LENGTH - first
    whole = attend(first, [most] * (count // most) + [count % most] * bool(count % most))
    cuts = []
    while sum(cuts) < count:
        cuts.append(min(random.randint(1, most), count - sum(cuts)))
    assert torch.equal(attend(first, cuts), whole)
    assert torch.equal(attend(first, [1] * count, as_rows=True), whole)
    wide = [part.float() for part in (query, *new, *cache)]
    empty = torch.zeros(0, 4, dtype=torch.int32)
    expected = plain_attention(
        *wide, slots, pages, empty, torch.tensor([(0, 0, LENGTH, 0)]), PAGE, size**-0.5, window, cap,
        None if sinks is None else sinks.float(),
    )[first:]  # fmt: skip
    tolerance = 2e-2 if dtype is HALF else 1e-4
    torch.testing.assert_close(whole.float(), expected, atol=tolerance, rtol=tolerance)


def test_a_split_has_the_same_length_in_every_step() -> None:
    assert [split_tokens(length) for length in (100, 1100, 4096, 131_072)] == [256, 256, 512, 16_384]


@contextmanager
def runner_of(folder: Path, **more: Any) -> Iterator[Any]:
    settings = LlmSettings(
        folder, page_size=8, kv_cache_bytes=1 << 28, max_running=64, max_step_tokens=600, deterministic=True, **more
    )
    device = torch.device("cuda", 0)
    runner, _ = open_runner(load_model(check_folder(settings), settings, device), settings, device)
    try:
        yield runner
    finally:
        runner.close()
        gc.collect()
        torch.cuda.empty_cache()


WIDE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "head_dim": 64, "num_attention_heads": 16,
    "num_key_value_heads": 4, "initializer_range": 0.05,
}  # fmt: skip
"""So large that products are divided among many programs."""


@needs_gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler, about precision
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="compiled graphs"),
        pytest.param({"compile": False}, id="graphs"),
        pytest.param({"deterministic_rows": 64}, id="compiled graphs of 64 rows"),
        pytest.param({"cuda_graphs": False, "deterministic_rows": 32}, id="kernel by kernel"),
        pytest.param({"dtype": "float32"}, id="float32"),
    ],
)
def test_logits_are_the_same_in_any_company(
    more: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.backends.llm.model_runner.cuda_graphs import CudaGraphRunner

    with runner_of(tiny_llama(tmp_path / "model", **WIDE), **{"dtype": "bfloat16", **more}) as runner:
        assert isinstance(runner, CudaGraphRunner) == more.get("cuda_graphs", True), caplog.text
        assert "not compiled" not in caplog.text
        # Fewer would be right, too, but slow: the products of this GPU depend on a row's place.
        assert runner.block_rows == more.get("deterministic_rows", 128), caplog.text
        check_company(runner, others=50 if more.get("cuda_graphs", True) else 6)


@needs_gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [tiny_mistral, tiny_gemma3, tiny_mixtral])
def test_windows_and_experts_are_the_same_in_any_company(make: Any, tmp_path: Path) -> None:
    with runner_of(make(tmp_path / "model"), dtype="bfloat16", compile=False, deterministic_rows=64) as runner:
        check_company(runner, others=30)


@needs_gpu
@pytest.mark.filterwarnings("ignore")
def test_long_contexts_are_the_same_in_any_company(tmp_path: Path) -> None:
    """Of several splits; beside prompts in chunks that end anywhere."""
    folder = tiny_llama(tmp_path / "model", **WIDE, max_position_embeddings=4096)
    random.seed(9)
    requests = [([random.randrange(8, 500) for _ in range(n)], 20) for n in (3000, 1500, 700, 20, 2999)]
    with runner_of(folder, dtype="bfloat16") as runner:
        alone = [answer_logits(runner, [each], prefix_cache=False, step_tokens=600)[0][0] for each in requests]
        for step_tokens in (100, 333, 600):
            together, _ = answer_logits(runner, requests, step_tokens=step_tokens)
            for one, other in zip(alone, together, strict=True):
                assert torch.equal(one, other)
