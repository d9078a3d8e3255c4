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
_MOST_WRITTEN = 4096
"""Numbers of a token's keys that a program writes."""
_LOG2_E = 1.4426950408889634
"""Triton's exp2 is faster than exp."""


@triton.jit
def _write(
    keys, values, new_keys, new_values, slots, key_token, key_head, value_token, value_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK numbers of the key and of the value of one token to their slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < KV_HEADS * DIM
    key = tl.load(new_keys + token * key_token + at // DIM * key_head + at % DIM, mask=inside)
    tl.store(keys + slot * (KV_HEADS * DIM) + at, key.to(keys.dtype.element_ty), mask=inside)  # FP8 if the cache is
    inside = at < KV_HEADS * VALUE_DIM
    value = tl.load(new_values + token * value_token + at // VALUE_DIM * value_head + at % VALUE_DIM, mask=inside)
    tl.store(values + slot * (KV_HEADS * VALUE_DIM) + at, value.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _cap_scores(score, cap):
    """Return `cap * tanh(x / cap)` in units of log2, for scores of `2 * log2(e) * x / cap`."""
    return cap - 2.0 * cap / (tl.exp2(score) + 1.0)


@triton.jit
def _attend(
    out, parts, weights, query, keys, values, table, tiles, sinks, scale, cap, query_token, query_head, table_row, window,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Attend for one tile, the query heads of one key head, and one of SPLITS parts of the keys.

    Keys that all tokens of the tile see come first, without masks; then those that some of them do not see. A sink is a
    score per head that takes weight and adds no value; the first part starts with it.
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
    value_dims = tl.arange(0, VALUE_BLOCK)
    real_value = value_dims < VALUE_DIM
    at_query = (first + token).to(tl.int64)[:, None] * query_token + head[:, None] * query_head + dims[None, :]
    q = tl.load(query + at_query, mask=live[:, None] & real[None, :], other=0.0)

    end = position + count
    begin = tl.maximum(position - window + 1, 0)
    share = tl.cdiv(tl.cdiv(end - begin, COLUMNS), SPLITS) * COLUMNS
    begin += split * share
    end = tl.minimum(end, begin + share)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634  # log2(e)
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, 1.0, total)
    sums = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    masked = begin
    if not WINDOWED:
        masked += tl.maximum(tl.minimum(position + 1, end) - begin, 0) // COLUMNS * COLUMNS
        for start in range(begin, masked, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            page = tl.load(table + row * table_row + column // PAGE)
            slot = (page.to(tl.int64) * PAGE + column % PAGE) * KV_HEADS + kv_head
            key = tl.load(keys + slot[None, :] * DIM + dims[:, None], mask=real[:, None], other=0.0).to(q.dtype)
            value = tl.load(
                values + slot[:, None] * VALUE_DIM + value_dims[None, :], mask=real_value[None, :], other=0.0
            ).to(q.dtype)
            score = tl.dot(q, key, input_precision=PRECISION) * scale
            if CAPPED:
                score = _cap_scores(score, cap)
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
        key = tl.load(keys + slot[None, :] * DIM + dims[:, None], mask=inside[None, :] & real[:, None], other=0.0).to(
            q.dtype
        )
        value = tl.load(
            values + slot[:, None] * VALUE_DIM + value_dims[None, :],
            mask=inside[:, None] & real_value[None, :],
            other=0.0,
        ).to(q.dtype)
        score = tl.dot(q, key, input_precision=PRECISION) * scale
        if CAPPED:
            score = _cap_scores(score, cap)
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
        tl.store(out + at[:, None] * VALUE_DIM + value_dims[None, :], sums, mask=live[:, None] & real_value[None, :])
    else:
        at = at * SPLITS + split
        tl.store(parts + at[:, None] * VALUE_DIM + value_dims[None, :], sums, mask=live[:, None] & real_value[None, :])
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


def write_new(
    keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write new keys and values, whose last dimension is contiguous, to their slots."""
    kv_heads, dim = keys.shape[1:]
    value_dim = values.shape[2]
    width = kv_heads * max(dim, value_dim)
    block = min(_MOST_WRITTEN, triton.next_power_of_2(width))
    _write[(len(slots), triton.cdiv(width, block))](
        keys, values, new_keys, new_values, slots, new_keys.stride(0), new_keys.stride(1),
        new_values.stride(0), new_values.stride(1), KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim, BLOCK=block,
    )  # fmt: skip


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
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the new keys and values `[tokens, kv_heads, dim]` to their slots; attend. Returns `[tokens, heads, value dim]`.

    `row_tiles` are of decode rows: the tile at index i is token i, or none if its count is 0. `tiles` are of prompts, with
    `tile_rows` query rows each. A window of 0 means full attention, a cap of 0 means uncapped scores; `sinks` has a score
    per head.
    """
    tokens, heads, dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    group = heads // kv_heads
    query, new_keys, new_values = (
        part if part.stride(2) == 1 else part.contiguous() for part in (query, new_keys, new_values)
    )
    write_new(keys, values, new_keys, new_values, slots)
    exact = query.dtype == torch.float32
    wide, value_wide = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))  # the minimum of tl.dot
    log2_scale = 2.0 * scale / cap * _LOG2_E if cap else scale * _LOG2_E
    out = torch.empty((tokens, heads, value_dim), dtype=query.dtype, device=query.device)
    for own, single in ((row_tiles, True), (tiles, False)):
        if not len(own):
            continue
        rows = max(16, triton.next_power_of_2(group)) if single else tile_rows
        splits = _splits(len(own) * kv_heads) if single else 1
        columns, warps = _block(max(wide, value_wide), rows, exact, single and splits == 1, single)
        shape = (len(own), heads, splits, value_dim) if splits > 1 else (1,)
        parts = torch.empty(shape, dtype=torch.float32, device=query.device)
        weights = torch.empty(shape[:3], dtype=torch.float32, device=query.device)
        _attend[(len(own), kv_heads, splits)](
            out, parts, weights, query, keys, values, table, own, out if sinks is None else sinks, log2_scale,
            cap * _LOG2_E, query.stride(0), query.stride(1), table.stride(0), window or 1 << 30, GROUP=group,
            KV_HEADS=kv_heads, DIM=dim, DIM_BLOCK=wide, VALUE_DIM=value_dim, VALUE_BLOCK=value_wide, PAGE=page_size,
            ROWS=rows, TOKENS=1 if single else rows // group, COLUMNS=columns, SPLITS=splits,
            PRECISION="ieee" if exact else "tf32", WINDOWED=window > 0, CAPPED=cap > 0, HAS_SINKS=sinks is not None,
            num_warps=warps, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            _join[(len(own) * heads,)](
                out, parts, weights, own, HEADS=heads, DIM=value_dim, DIM_BLOCK=value_wide, SPLITS=splits, num_warps=1
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
