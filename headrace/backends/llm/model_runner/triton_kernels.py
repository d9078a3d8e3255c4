# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `cuda_attention`. Imported only with a GPU: Triton comes with PyTorch for CUDA.

Why our own kernels: PyTorch's kernels that read pages directly need pages of 256 tokens (and a release newer than 2.11),
flex_attention compiles one kernel per size, and gathering pages for the others reads and writes every cached key and value
once more per token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803, PLR0915 - compile-time constants are in capitals, as is usual in Triton; a kernel is one function.

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ENOUGH_PROGRAMS, _MOST_SPLITS = 512, 16
"""Measured on an H200."""
_LOG2_E = 1.4426950408889634
"""Triton's exp2 is faster than exp."""


@triton.jit
def _write(
    keys, values, new_keys, new_values, slots, key_token, key_head, value_token, value_head,
    WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the key and the value of one token to their slot."""
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    head, dim = at // DIM, at % DIM
    key = tl.load(new_keys + token * key_token + head * key_head + dim, mask=inside)
    value = tl.load(new_values + token * value_token + head * value_head + dim, mask=inside)
    tl.store(keys + slot * WIDTH + at, key, mask=inside)
    tl.store(values + slot * WIDTH + at, value, mask=inside)


@triton.jit
def _attend(
    out, parts, weights, query, keys, values, table, tiles, scale, query_token, query_head, table_row, window,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Attend for one tile, the query heads of one key head, and one of SPLITS parts of the keys.

    Keys that all tokens of the tile see come first, without masks; then those that some of them do not see.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tiles + tile * 4)
    first = tl.load(tiles + tile * 4 + 1)
    count = tl.load(tiles + tile * 4 + 2)
    position = tl.load(tiles + tile * 4 + 3)
    rows = tl.arange(0, ROWS)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = (token < count) & (token < TOKENS)
    dims = tl.arange(0, DIM_BLOCK)
    real = dims < DIM
    at_query = (first + token).to(tl.int64)[:, None] * query_token + head[:, None] * query_head + dims[None, :]
    q = tl.load(query + at_query, mask=live[:, None] & real[None, :], other=0.0)

    end = position + count
    begin = tl.maximum(position - window + 1, 0)
    share = tl.cdiv(tl.cdiv(end - begin, COLUMNS), SPLITS) * COLUMNS
    begin += split * share
    end = tl.minimum(end, begin + share)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    masked = begin
    if not WINDOWED:
        masked += tl.maximum(tl.minimum(position + 1, end) - begin, 0) // COLUMNS * COLUMNS
        for start in range(begin, masked, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            page = tl.load(table + row * table_row + column // PAGE)
            slot = (page.to(tl.int64) * PAGE + column % PAGE) * KV_HEADS + kv_head
            key = tl.load(keys + slot[None, :] * DIM + dims[:, None], mask=real[:, None], other=0.0)
            value = tl.load(values + slot[:, None] * DIM + dims[None, :], mask=real[None, :], other=0.0)
            score = tl.dot(q, key, input_precision=PRECISION) * scale
            higher = tl.maximum(best, tl.max(score, 1))
            share_of = tl.exp2(score - higher[:, None])
            fade = tl.exp2(best - higher)
            total = total * fade + tl.sum(share_of, 1)
            sums = sums * fade[:, None] + tl.dot(share_of.to(value.dtype), value, input_precision=PRECISION)
            best = higher
    for start in range(masked, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < end
        page = tl.load(table + row * table_row + column // PAGE, mask=inside, other=0)
        slot = (page.to(tl.int64) * PAGE + column % PAGE) * KV_HEADS + kv_head
        key = tl.load(keys + slot[None, :] * DIM + dims[:, None], mask=inside[None, :] & real[:, None], other=0.0)
        value = tl.load(values + slot[:, None] * DIM + dims[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        score = tl.dot(q, key, input_precision=PRECISION) * scale
        here = (position + token)[:, None]
        seen = inside[None, :] & (column[None, :] <= here) & (column[None, :] > here - window)
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        share_of = tl.exp2(score - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(share_of, 1)
        sums = sums * fade[:, None] + tl.dot(share_of.to(value.dtype), value, input_precision=PRECISION)
        best = higher

    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + head
    if SPLITS == 1:
        tl.store(out + at[:, None] * DIM + dims[None, :], sums, mask=live[:, None] & real[None, :])
    else:
        at = at * SPLITS + split
        tl.store(parts + at[:, None] * DIM + dims[None, :], sums, mask=live[:, None] & real[None, :])
        tl.store(weights + at, tl.where(total == 0.0, -float("inf"), best + tl.log2(total)), mask=live)


@triton.jit
def _join(
    out, parts, weights, tiles, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Combine the partial results of one decode row and one head."""
    at = tl.program_id(0).to(tl.int64)
    count = tl.load(tiles + at // HEADS * 4 + 2)  # 0 or 1
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM_BLOCK)
    real = dims < DIM * count
    weight = tl.load(weights + at * SPLITS + splits, mask=splits < SPLITS * count, other=-float("inf"))
    best = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(best == -float("inf"), 0.0, best))
    some = (weight > 0.0)[:, None] & real[None, :]
    part = tl.load(parts + (at * SPLITS + splits)[:, None] * DIM + dims[None, :], mask=some, other=0.0)
    sums = tl.sum(part * weight[:, None], 0) / tl.maximum(tl.sum(weight, 0), 1e-30)
    tl.store(out + at * DIM + dims, sums, mask=real)


def attend(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    row_tiles: torch.Tensor,
    tiles: torch.Tensor,
    page_size: int,
    scale: float,
    window: int,
    tile_rows: int,
) -> torch.Tensor:
    """Write the new keys and values `[tokens, kv_heads, dim]` to their slots; attend. Returns `[tokens, heads, dim]`.

    `row_tiles` are of decode rows: the tile at index i is token i, or none if its count is 0. `tiles` are of prompts, with
    `tile_rows` query rows each. A window of 0 means full attention.
    """
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    width = kv_heads * dim
    query, new_keys, new_values = (
        part if part.stride(2) == 1 else part.contiguous() for part in (query, new_keys, new_values)
    )
    _write[(tokens,)](
        keys, values, new_keys, new_values, slots, new_keys.stride(0), new_keys.stride(1),
        new_values.stride(0), new_values.stride(1), WIDTH=width, DIM=dim, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    exact = query.dtype == torch.float32
    wide = max(16, triton.next_power_of_2(dim))  # the minimum of tl.dot
    out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
    for own, single in ((row_tiles, True), (tiles, False)):
        if not len(own):
            continue
        rows = max(16, triton.next_power_of_2(group)) if single else tile_rows
        splits = _splits(len(own) * kv_heads) if single else 1
        columns, warps = _block(wide, rows, exact, single and splits == 1, single)
        shape = (len(own), heads, splits, dim) if splits > 1 else (1,)
        parts = torch.empty(shape, dtype=torch.float32, device=query.device)
        weights = torch.empty(shape[:3], dtype=torch.float32, device=query.device)
        _attend[(len(own), kv_heads, splits)](
            out, parts, weights, query, keys, values, table, own, scale * _LOG2_E, query.stride(0), query.stride(1),
            table.stride(0), window or 1 << 30, GROUP=group, KV_HEADS=kv_heads, DIM=dim, DIM_BLOCK=wide, PAGE=page_size,
            ROWS=rows, TOKENS=1 if single else rows // group, COLUMNS=columns, SPLITS=splits,
            PRECISION="ieee" if exact else "tf32", WINDOWED=window > 0, num_warps=warps, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            _join[(len(own) * heads,)](
                out, parts, weights, own, HEADS=heads, DIM=dim, DIM_BLOCK=wide, SPLITS=splits, num_warps=1
            )  # fmt: skip
    return out


def _splits(programs: int) -> int:
    """Return how many parts the keys are split into, so that a few sequences still fill the device."""
    splits = 1
    while splits < _MOST_SPLITS and programs * splits < _ENOUGH_PROGRAMS:
        splits *= 2
    return splits


def _block(wide: int, rows: int, exact: bool, unsplit: bool, single: bool) -> tuple[int, int]:
    """Return how many keys are processed together, and by how many warps. Measured on an H200."""
    if single:
        columns, warps = min(128, (8192 if unsplit else 4096) // wide), 2 if rows == 16 and not exact else 4
    elif rows < 128:
        columns, warps = min(128, 4096 // wide), 4
    else:
        columns, warps = min(64, 8192 // wide), 4 if wide == 128 else 8
    return max(16, columns // (2 if exact else 1)), warps
