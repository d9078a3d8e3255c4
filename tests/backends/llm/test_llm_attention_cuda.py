# SPDX-License-Identifier: Apache-2.0
"""The attention kernels on a GPU, compared with plain PyTorch."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.backends.llm.model_runner.cuda_attention import tile_rows, tile_tokens
from support.paged_attention import plain_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

PAGE, PAGES = 16, 300
DECODE = [(length - 1, 1) for length in (1, 2, 15, 16, 17, 64, 100, 513, 1200)]
PROMPTS = [(0, 1), (0, 200), (37, 100), (512, 64), (1000, 333), (0, 17)]
"""Chunks: position of the first token, number of tokens."""


@pytest.mark.parametrize("window", [0, 5, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (4, 4, 64), (6, 2, 80), (16, 1, 32)])
@pytest.mark.parametrize(
    ("chunks", "splits_keys"),
    [(DECODE, True), (DECODE * 60, False), (PROMPTS, False), (DECODE + PROMPTS, True), (DECODE * 60 + PROMPTS, False)],
    ids=["decode", "many", "prompts", "mixed", "many mixed"],
)
def test_kernels_attend_as_pytorch_does(
    chunks: list[tuple[int, int]], splits_keys: bool, heads: int, kv_heads: int, dim: int, window: int
) -> None:
    from headrace.backends.llm.model_runner import triton_kernels

    random.seed(1)
    torch.manual_seed(1)
    group = heads // kv_heads
    decodes = len(chunks) - len(PROMPTS) * (chunks[-1] == PROMPTS[-1])
    rows = min(len(chunks), 18)  # decode rows share the pages of some sequences, and read them only
    longest = max(start + count for start, count in chunks)
    pages = torch.randperm(rows * -(-longest // PAGE)).reshape(rows, -1).int().cuda()
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
    shape = (int(pages.max()) + 1) * PAGE, kv_heads, dim
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    slot = torch.cat(slots).int().cuda()
    fused = torch.randn(first, heads + 2 * kv_heads, dim, dtype=torch.bfloat16, device="cuda")
    query, new_keys, new_values = fused.split([heads, kv_heads, kv_heads], dim=1)  # strided, as fused projections are
    if decodes:  # rows of one sequence would write different keys to one slot
        new_keys, new_values = new_keys.clone(), new_values.clone()
        new_keys[:decodes], new_values[:decodes] = keys[slot[:decodes].long()], values[slot[:decodes].long()]
    lists = [torch.tensor(some, dtype=torch.int32, device="cuda").reshape(-1, 4) for some in (row_tiles, tiles)]
    arguments = (PAGE, dim**-0.5, window)
    found = triton_kernels.attend(
        query, new_keys, new_values, keys.clone(), values.clone(), slot, pages, *lists, *arguments, tile_rows(group)
    )
    expected = plain_attention(
        *(part.float() for part in (query, new_keys, new_values, keys, values)), slot, pages, *lists, *arguments
    )
    assert splits_keys == (decodes > 0 and triton_kernels._splits(len(row_tiles) * kv_heads) > 1)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
