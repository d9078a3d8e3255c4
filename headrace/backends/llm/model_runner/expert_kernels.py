# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of `fused_experts`. Imported only with a GPU: Triton comes with PyTorch for CUDA."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 - compile-time constants are in capitals, as is usual in Triton.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _multiply(
    out, rows, weights, bias, order, tiles, inputs, outputs, each, row_stride, expert_stride, input_stride, output_stride,
    HAS_BIAS: tl.constexpr, PAIRS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of a tile of pairs with OUTPUTS columns of their expert's weights."""
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    if count > 0:
        place = tl.arange(0, PAIRS)
        live = place < count
        pair = tl.load(order + first + place, mask=live, other=0).to(tl.int64)
        column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        real = column < outputs
        at_row = rows + pair // each * row_stride
        at_weight = weights + expert * expert_stride + column.to(tl.int64) * output_stride
        total = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        for start in range(0, inputs, INPUTS):
            at = start + tl.arange(0, INPUTS)
            inside = at < inputs
            part = tl.load(at_row[:, None] + at[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            weight = tl.load(
                at_weight[None, :] + at.to(tl.int64)[:, None] * input_stride,
                mask=inside[:, None] & real[None, :],
                other=0.0,
            )
            total += tl.dot(part, weight, input_precision=PRECISION)
        if HAS_BIAS:
            total += tl.load(bias + expert * outputs + column, mask=real, other=0.0).to(tl.float32)[None, :]
        tl.store(out + pair[:, None] * outputs + column[None, :], total, mask=live[:, None] & real[None, :])


def multiply_experts(
    rows: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    tiles: torch.Tensor,
    each: int,
    tile_pairs: int,
) -> torch.Tensor:
    """Return for each pair `rows[pair // each]` times the weights of its expert, `[pairs, outputs]`.

    `weights` are `[experts, inputs, outputs]` in any order in memory, `bias` `[experts, outputs]`; `order` and `tiles` are
    those of `fused_experts.sort_by_expert`, with at most `tile_pairs` pairs a tile.
    """
    _, inputs, outputs = weights.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(len(order), outputs, dtype=rows.dtype, device=rows.device)
    exact = rows.dtype == torch.float32
    few = tile_pairs <= 16
    columns, at_once = (64, 128) if few else (128, 64)
    _multiply[(len(tiles), triton.cdiv(outputs, columns))](
        out, rows, weights, out if bias is None else bias, order, tiles, inputs, outputs, each, rows.stride(0),
        *weights.stride(), HAS_BIAS=bias is not None, PAIRS=max(16, tile_pairs), INPUTS=at_once // (2 if exact else 1),
        OUTPUTS=columns, PRECISION="ieee" if exact else "tf32", num_warps=4 if few else 8, num_stages=3,
    )  # fmt: skip
    return out
