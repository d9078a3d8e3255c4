# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `cuda_attention` whose result for a token is the same in every tile and in every step.

Imported only with a GPU, as `triton_kernels`, which are faster. What decides a token's bits is the same for decode rows and
prompts: the size of a tile and of a block of keys, blocks and splits that begin at multiples of their length in the
sequence, and the order in which they are added. Keys that a token does not see have weight 0 and change nothing. Splits are
added one after the other, by the program of a prompt's tile or by a kernel of its own for decode rows. Multiplications and
additions are not fused, because the compiler fuses them differently in different places.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803, PLR0915 - compile-time constants are in capitals, as is usual in Triton; a kernel is one function.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.backends.llm.model_runner.triton_kernels import _LOG2_E, _cap_scores, write_new


@triton.jit
def _attend(
    out, parts, weights, query, keys, values, table, tiles, sinks, scale, cap, query_token, query_head, table_row, window,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Attend for one tile and the query heads of one key head: to all splits, or with PARTS to one, for `_add_parts`."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
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
    here = (position + token)[:, None]

    end = position + count
    begin = tl.maximum(position - window + 1, 0)
    split = begin // SPLIT
    after = tl.where(count > 0, tl.cdiv(end, SPLIT), split)
    if PARTS > 0:
        split = tl.maximum(split, tl.program_id(2))
        after = tl.minimum(after, tl.program_id(2) + 1)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634  # log2(e)
        mass = tl.full([ROWS], 1.0, tl.float32)
    for number in range(split, after):
        best = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
        low = tl.maximum(begin // COLUMNS * COLUMNS, number * SPLIT)
        high = tl.minimum(end, number * SPLIT + SPLIT)
        for start in range(low, high, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < end
            page = tl.load(table + row * table_row + column // PAGE, mask=inside, other=0)
            slot = (page.to(tl.int64) * PAGE + column % PAGE) * KV_HEADS + kv_head
            key = tl.load(
                keys + slot[None, :] * DIM + dims[:, None], mask=inside[None, :] & real[:, None], other=0.0
            ).to(q.dtype)
            value = tl.load(
                values + slot[:, None] * VALUE_DIM + value_dims[None, :],
                mask=inside[:, None] & real_value[None, :],
                other=0.0,
            ).to(q.dtype)
            score = tl.dot(q, key, input_precision=PRECISION) * scale
            if CAPPED:
                score = _cap_scores(score, cap)
            seen = inside[None, :] & (column[None, :] <= here) & (column[None, :] > here - window)
            score = tl.where(seen, score, -float("inf"))
            higher = tl.maximum(best, tl.max(score, 1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            share = tl.exp2(score - base[:, None])
            fade = tl.exp2(best - base)
            total = total * fade + tl.sum(share, 1)
            sums = sums * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
            best = higher
        part = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        weight = tl.where(total == 0.0, -float("inf"), best + tl.log2(total))
        if PARTS > 0:
            at = (tile.to(tl.int64) * (KV_HEADS * GROUP) + head) * PARTS + number
            wanted = live[:, None] & real_value[None, :]
            tl.store(parts + at[:, None] * VALUE_DIM + value_dims[None, :], part, mask=wanted)
            tl.store(weights + at, weight, mask=live)
        else:
            higher = tl.maximum(top, weight)
            base = tl.where(higher == -float("inf"), 0.0, higher)
            fade = tl.exp2(top - base)
            share_of_part = tl.exp2(weight - base)
            result = result * fade[:, None] + part * share_of_part[:, None]
            mass = mass * fade + share_of_part
            top = higher
    if PARTS == 0:
        at = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + head
        result = result / tl.where(mass == 0.0, 1.0, mass)[:, None]
        tl.store(out + at[:, None] * VALUE_DIM + value_dims[None, :], result, mask=live[:, None] & real_value[None, :])


@triton.jit
def _add_parts(
    out, parts, weights, tiles, sinks, window,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Add the splits of one decode row and one head, as `_attend` does for prompts."""
    at = tl.program_id(0).to(tl.int64)
    count = tl.load(tiles + at // HEADS * 4 + 2)  # 0 or 1
    position = tl.load(tiles + at // HEADS * 4 + 3)
    dims = tl.arange(0, DIM_BLOCK)
    real = dims < DIM * count
    split = tl.maximum(position - window + 1, 0) // SPLIT
    after = tl.where(count > 0, tl.cdiv(position + 1, SPLIT), split)
    top = tl.full([DIM_BLOCK], -float("inf"), tl.float32)
    mass = tl.zeros([DIM_BLOCK], tl.float32)
    result = tl.zeros([DIM_BLOCK], tl.float32)
    if HAS_SINKS:
        top = tl.zeros([DIM_BLOCK], tl.float32) + tl.load(sinks + at % HEADS).to(tl.float32) * 1.4426950408889634
        mass = tl.full([DIM_BLOCK], 1.0, tl.float32)
    for number in range(split, after):
        weight = tl.zeros([DIM_BLOCK], tl.float32) + tl.load(weights + at * PARTS + number)
        part = tl.load(parts + (at * PARTS + number) * DIM + dims, mask=real, other=0.0)
        higher = tl.maximum(top, weight)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        fade = tl.exp2(top - base)
        share_of_part = tl.exp2(weight - base)
        result = result * fade + part * share_of_part
        mass = mass * fade + share_of_part
        top = higher
    tl.store(out + at * DIM + dims, result / tl.where(mass == 0.0, 1.0, mass), mask=real)


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
    cap: float,
    sinks: torch.Tensor | None,
    split: int,
) -> torch.Tensor:
    """Do what `triton_kernels.attend` does, in splits of `split` keys, which is a multiple of 128."""
    tokens, heads, dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    group = heads // kv_heads
    query, new_keys, new_values = (
        part if part.stride(2) == 1 else part.contiguous() for part in (query, new_keys, new_values)
    )
    write_new(keys, values, new_keys, new_values, slots)
    exact = query.dtype == torch.float32
    wide, value_wide = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))  # the minimum of tl.dot
    widest = max(wide, value_wide)
    columns = max(16, min(64, 8192 // widest) // (2 if exact else 1))
    log2_scale = 2.0 * scale / cap * _LOG2_E if cap else scale * _LOG2_E
    out = torch.empty((tokens, heads, value_dim), dtype=query.dtype, device=query.device)
    for own, single in ((row_tiles, True), (tiles, False)):
        if not len(own):
            continue
        count = triton.cdiv(table.shape[1] * page_size, split) if single else 0
        shape = (len(own), heads, count, value_dim) if single else (1,)
        parts = torch.empty(shape, dtype=torch.float32, device=query.device)
        weights = torch.empty(shape[:3], dtype=torch.float32, device=query.device)
        _attend[(len(own), kv_heads, max(1, count))](
            out, parts, weights, query, keys, values, table, own, out if sinks is None else sinks, log2_scale,
            cap * _LOG2_E, query.stride(0), query.stride(1), table.stride(0), window or 1 << 30, GROUP=group,
            KV_HEADS=kv_heads, DIM=dim, DIM_BLOCK=wide, VALUE_DIM=value_dim, VALUE_BLOCK=value_wide, PAGE=page_size,
            ROWS=tile_rows, TOKENS=1 if single else tile_rows // group, COLUMNS=columns, SPLIT=split, PARTS=count,
            PRECISION="ieee" if exact else "tf32", CAPPED=cap > 0, HAS_SINKS=sinks is not None,
            num_warps=4 if widest <= 128 else 8, num_stages=2, enable_fp_fusion=False,
        )  # fmt: skip
        if single:
            _add_parts[(len(own) * heads,)](
                out, parts, weights, own, out if sinks is None else sinks, window or 1 << 30, HEADS=heads, DIM=value_dim,
                DIM_BLOCK=value_wide, SPLIT=split, PARTS=count, HAS_SINKS=sinks is not None, num_warps=1,
                enable_fp_fusion=False,
            )  # fmt: skip
    return out
