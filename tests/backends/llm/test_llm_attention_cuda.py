# SPDX-License-Identifier: Apache-2.0
"""The attention kernels on a GPU, or interpreted (`support.triton_kernels`), compared with plain PyTorch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headrace.backends.llm.model_runner.cuda_attention import tile_rows, tile_tokens
from support.paged_attention import plain_attention
from support.triton_kernels import DEVICE, HALF, INTERPRETED, needs_kernels

pytestmark = needs_kernels

PAGE, PAGES = 16, 300
DECODE = [(length - 1, 1) for length in ((1, 17, 70) if INTERPRETED else (1, 2, 15, 16, 17, 64, 100, 513, 1200))]
PROMPTS = [(0, 1), (37, 70), (0, 17)] if INTERPRETED else [(0, 1), (0, 200), (37, 100), (512, 64), (1000, 333), (0, 17)]
"""Chunks: position of the first token, number of tokens."""


MANY = pytest.mark.skipif(INTERPRETED, reason="takes too long without a GPU")
STEPS = [
    pytest.param(DECODE, True, id="decode"),
    pytest.param(DECODE * 60, False, id="many", marks=MANY),
    pytest.param(PROMPTS, False, id="prompts"),
    pytest.param(DECODE + PROMPTS, True, id="mixed"),
    pytest.param(DECODE * 60 + PROMPTS, False, id="many mixed", marks=MANY),
]


@pytest.mark.parametrize("window", [0, 5, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (4, 4, 64), (6, 2, 80), (16, 1, 32)])
@pytest.mark.parametrize(("chunks", "splits_keys"), STEPS)
def test_kernels_attend_as_pytorch_does(
    chunks: list[tuple[int, int]], splits_keys: bool, heads: int, kv_heads: int, dim: int, window: int
) -> None:
    compare(chunks, splits_keys, heads, kv_heads, (dim, dim), window)


@pytest.mark.parametrize(("window", "dtype"), [(0, HALF), (5, torch.float32)])
@pytest.mark.parametrize(
    ("shape", "more"),
    [
        pytest.param((8, 4, 256, 256), {"cap": 5.0}, id="capped as Gemma 2"),
        pytest.param((64, 8, 64, 64), {"has_sinks": True}, id="sinks as gpt-oss"),
        pytest.param((16, 16, 192, 128), {}, id="keys and values as DeepSeek-V3"),
        pytest.param((4, 2, 24, 80), {"cap": 3.0, "has_sinks": True}, id="all, values wider than keys"),
    ],
)
@pytest.mark.parametrize(("chunks", "splits_keys"), STEPS)
def test_capped_scores_sinks_and_values_of_another_size(
    chunks: list[tuple[int, int]],
    splits_keys: bool,
    shape: tuple[int, int, int, int],
    more: dict[str, Any],
    window: int,
    dtype: torch.dtype,
) -> None:
    heads, kv_heads, key_size, value_size = shape
    compare(chunks, splits_keys, heads, kv_heads, (key_size, value_size), window, dtype, **more)


def compare(
    chunks: list[tuple[int, int]],
    splits_keys: bool,
    heads: int,
    kv_heads: int,
    sizes: tuple[int, int],
    window: int,
    dtype: torch.dtype = HALF,
    *,
    cap: float = 0.0,
    has_sinks: bool = False,
) -> None:
    """Compute a step of chunks with the kernels and with PyTorch. `sizes` are those of keys and values."""
    from headrace.backends.llm.model_runner import triton_kernels

    random.seed(1)
    torch.manual_seed(1)
    group = heads // kv_heads
    decodes = len(chunks) - len(PROMPTS) * (chunks[-1] == PROMPTS[-1])
    rows = min(len(chunks), 18)  # decode rows share the pages of some sequences, and read them only
    longest = max(start + count for start, count in chunks)
    pages = torch.randperm(rows * -(-longest // PAGE)).reshape(rows, -1).int().to(DEVICE)
    most = tile_tokens(group)
    row_tiles, tiles, slots, first = [], [], [], 0
    for number, (start, count) in enumerate(chunks):
        # Prompts write to their pages, so they have sequences of their own.
        row = number % (rows - len(PROMPTS)) if number < decodes else rows - 1 - (number - decodes)
        if number < decodes:
            row_tiles.append((row, first, 1, start))
        else:
            for cut in range(0, count, most):
                tiles.append((row, first + cut, min(most, count - cut), start + cut))
        places = torch.arange(start, start + count)
        slots.append(pages[row].cpu()[places // PAGE] * PAGE + places % PAGE)
        first += count
    if tiles:  # padding
        row_tiles += [(0, 0, 0, 0)] * 3
        tiles += [(0, 0, 0, 0)] * 3
    key_size, value_size = sizes
    slot_count = (int(pages.max()) + 1) * PAGE
    keys, values = (torch.randn(slot_count, kv_heads, size, dtype=dtype, device=DEVICE) for size in sizes)
    slot = torch.cat(slots).int().to(DEVICE)
    # Strided, as fused projections are.
    fused = torch.randn(first, heads + kv_heads, key_size, dtype=dtype, device=DEVICE)
    query, new_keys = fused.split([heads, kv_heads], dim=1)
    new_values = torch.randn(first, 2 * kv_heads, value_size, dtype=dtype, device=DEVICE)[:, kv_heads:]
    sinks = torch.randn(heads, dtype=dtype, device=DEVICE) + 2 if has_sinks else None
    if decodes:  # rows of one sequence would write different keys to one slot
        new_keys, new_values = new_keys.clone(), new_values.clone()
        new_keys[:decodes], new_values[:decodes] = keys[slot[:decodes].long()], values[slot[:decodes].long()]
    lists = [torch.tensor(some, dtype=torch.int32, device=DEVICE).reshape(-1, 4) for some in (row_tiles, tiles)]
    arguments = (PAGE, key_size**-0.5, window)
    caches = keys.clone(), values.clone()
    found = triton_kernels.attend(
        query, new_keys, new_values, *caches, slot, pages, *lists, *arguments, tile_rows(group), cap, sinks
    )
    wide = [part.float() for part in (query, new_keys, new_values, keys, values)]
    expected = plain_attention(*wide, slot, pages, *lists, *arguments, cap, None if sinks is None else sinks.float())
    assert splits_keys == (decodes > 0 and triton_kernels._splits(len(row_tiles) * kv_heads) > 1)
    torch.testing.assert_close([part.float() for part in caches], wide[3:], atol=0, rtol=0)
    tolerance = 2e-2 if dtype is HALF else 1e-4
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
