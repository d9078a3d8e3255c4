# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of `quantized_cuda`. Imported only with a GPU: Triton comes with PyTorch for CUDA.

A generating sequence multiplies one row with each weight, so that reading the weights takes all the time: the kernel reads
them packed, and dequantises in registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 - compile-time constants are in capitals, as is usual in Triton.

from __future__ import annotations

import torch
import triton
import triton.language as tl

_OUTPUTS, _MOST_INPUTS = 32, 128
"""Outputs of a program, and inputs that it reads at once."""


@triton.jit
def _multiply(
    out, rows, values, scales, zeros, count, outputs, inputs, groups,
    INTEGERS: tl.constexpr, BITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows with OUTPUTS rows of the weights; INPUTS columns at a time have one scale for each output."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    live, real = row < count, output < outputs
    at_scale = (output // BLOCK_ROWS).to(tl.int64) * groups
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        column = start + tl.arange(0, INPUTS)
        inside = column < inputs
        part = tl.load(
            rows + row.to(tl.int64)[:, None] * inputs + column[None, :], mask=live[:, None] & inside[None, :], other=0.0
        )
        wanted = real[:, None] & inside[None, :]
        group = start // BLOCK_COLUMNS
        scale = tl.load(scales + at_scale + group, mask=real, other=0.0)
        width = inputs * BITS // 8
        packed = tl.load(
            values + output.to(tl.int64)[:, None] * width + (column * BITS // 8)[None, :], mask=wanted, other=0.0
        )
        if INTEGERS:
            if BITS == 4:
                packed = (packed >> ((column % 2) * 4)[None, :].to(tl.uint8)) & 15
            zero = tl.load(zeros + at_scale + group, mask=real, other=0).to(tl.float32)
            weight = (packed.to(tl.float32) - zero[:, None]) * scale[:, None]
        else:
            weight = packed.to(tl.float32) * scale[:, None]
        weight = tl.where(wanted, weight, 0.0).to(part.dtype)
        total += tl.dot(part, tl.trans(weight), input_precision=PRECISION)
    tl.store(out + row.to(tl.int64)[:, None] * outputs + output[None, :], total, mask=live[:, None] & real[None, :])


def multiply_packed(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    """Return `rows @ weights.T` for weights as in `PackedWeights`; `block_columns` is a multiple of 16."""
    count, inputs = rows.shape
    outputs = len(values)
    at_once = _MOST_INPUTS
    while block_columns % at_once:
        at_once //= 2
    tile = max(16, triton.next_power_of_2(count))  # the minimum of tl.dot
    out = torch.empty(count, outputs, dtype=rows.dtype, device=rows.device)
    _multiply[(triton.cdiv(outputs, _OUTPUTS), triton.cdiv(count, tile))](
        out, rows.contiguous(), values, scales, scales if zeros is None else zeros, count, outputs, inputs,
        scales.shape[1], INTEGERS=zeros is not None, BITS=bits, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns,
        ROWS=tile, OUTPUTS=_OUTPUTS, INPUTS=at_once,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
