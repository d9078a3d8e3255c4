# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of `quantized_cuda`. Imported only with a GPU: Triton comes with PyTorch for CUDA.

Steps that generate multiply few rows with each weight, so that reading the weights takes most of the time: the kernels read
them packed and dequantise in registers. Integers become floats by their bits: 4-bit values in the lowest bits of the
mantissa of 1024 are the float16 1024 + value. Block sizes were measured on an H200.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803, N806 - compile-time constants are in capitals, as is usual in Triton.

from __future__ import annotations

import torch
import triton
import triton.language as tl

_GROUP = 128
"""Inputs whose products are summed before they are scaled, at most."""
_MANY_OUTPUTS = 16384
"""So many outputs fill the device with larger blocks."""


@triton.jit
def _lower(pair):
    """Return the lower float16 of 32 bits as float32."""
    return (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _upper(pair):
    """Return the upper float16 of 32 bits as float32."""
    return (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _one_row_4bit(
    out, row, words, scales, zeros, outputs, inputs, scale_width,
    BLOCK_COLUMNS: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply one row with OUTPUTS rows of 4-bit weights, eight in each of `words`."""
    WORDS: tl.constexpr = INPUTS // 8
    GROUPS: tl.constexpr = INPUTS // GROUP
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < outputs
    width = inputs // 8
    total = tl.zeros([OUTPUTS, GROUPS], tl.float32)
    for start in range(0, width, WORDS):
        word = start + tl.arange(0, WORDS)
        packed = tl.load(
            words + output.to(tl.int64)[:, None] * width + word[None, :],
            mask=real[:, None] & (word < width)[None, :], other=0,
        )  # fmt: skip
        column = start * 8 + tl.arange(0, INPUTS)
        x = tl.load(row + column, mask=column < inputs, other=0.0).to(tl.float32)
        # By the three bits of their places in a word, the lowest first.
        even, odd = tl.split(tl.reshape(x, [WORDS, 2, 2, 2]))
        x04, x26 = tl.split(even)
        x0, x4 = tl.split(x04)
        x2, x6 = tl.split(x26)
        x15, x37 = tl.split(odd)
        x1, x5 = tl.split(x15)
        x3, x7 = tl.split(x37)
        evens, odds = x0 + x2 + x4 + x6, x1 + x3 + x5 + x7
        sums = tl.sum(tl.reshape(evens + odds, [GROUPS, GROUP // 8]), 1)
        # Values at odd places stay where they are in the mantissa: 16 times as much, and 64 is what was added to them.
        added = tl.sum(tl.reshape(1024.0 * evens + 64.0 * odds, [GROUPS, GROUP // 8]), 1)
        x1, x3, x5, x7 = x1 / 16, x3 / 16, x5 / 16, x7 / 16
        later = packed >> 8
        pair = (packed & 0x000F000F) | 0x64006400
        products = _lower(pair) * x0[None, :]
        products += _upper(pair) * x4[None, :]
        pair = (packed & 0x00F000F0) | 0x64006400
        products += _lower(pair) * x1[None, :]
        products += _upper(pair) * x5[None, :]
        pair = (later & 0x000F000F) | 0x64006400
        products += _lower(pair) * x2[None, :]
        products += _upper(pair) * x6[None, :]
        pair = (later & 0x00F000F0) | 0x64006400
        products += _lower(pair) * x3[None, :]
        products += _upper(pair) * x7[None, :]
        products = tl.sum(tl.reshape(products, [OUTPUTS, GROUPS, GROUP // 8]), 2)
        first = start * 8 + tl.arange(0, GROUPS) * GROUP
        at = output.to(tl.int64)[:, None] * scale_width + (first // BLOCK_COLUMNS)[None, :]
        some = real[:, None] & (first < inputs)[None, :]
        scale = tl.load(scales + at, mask=some, other=0.0)
        zero = tl.load(zeros + at, mask=some, other=0).to(tl.float32)
        total += (products - added[None, :] - zero * sums[None, :]) * scale
    tl.store(out + output, tl.sum(total, 1), mask=real)


@triton.jit
def _one_row_8bit(
    out, row, values, scales, zeros, outputs, inputs, scale_width,
    INTEGERS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply one row with OUTPUTS rows of 8-bit weights."""
    GROUPS: tl.constexpr = INPUTS // GROUP
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < outputs
    total = tl.zeros([OUTPUTS, GROUPS], tl.float32)
    for start in range(0, inputs, INPUTS):
        column = start + tl.arange(0, INPUTS)
        inside = column < inputs
        weight = tl.load(
            values + output.to(tl.int64)[:, None] * inputs + column[None, :],
            mask=real[:, None] & inside[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
        products = tl.sum(tl.reshape(weight * x[None, :], [OUTPUTS, GROUPS, GROUP]), 2)
        first = start + tl.arange(0, GROUPS) * GROUP
        at = (output // BLOCK_ROWS).to(tl.int64)[:, None] * scale_width + (first // BLOCK_COLUMNS)[None, :]
        some = real[:, None] & (first < inputs)[None, :]
        if INTEGERS:
            zero = tl.load(zeros + at, mask=some, other=0).to(tl.float32)
            products -= zero * tl.sum(tl.reshape(x, [GROUPS, GROUP]), 1)[None, :]
        total += products * tl.load(scales + at, mask=some, other=0.0)
    tl.store(out + output, tl.sum(total, 1), mask=real)


@triton.jit
def _one_row_fp8(
    out, row, values, scales, outputs, inputs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr
):  # fmt: skip
    """Multiply one row with OUTPUTS rows of FP8 weights that have one scale for each output."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < outputs
    total = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        column = start + tl.arange(0, INPUTS)
        inside = column < inputs
        weight = tl.load(
            values + output.to(tl.int64)[:, None] * inputs + column[None, :],
            mask=real[:, None] & inside[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        total += weight * tl.load(row + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + output, tl.sum(total, 1) * tl.load(scales + output, mask=real, other=0.0), mask=real)


@triton.jit
def _few_rows(
    out, rows, values, scales, zeros, count, outputs, inputs, scale_width,
    INTEGERS: tl.constexpr, BITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply up to ROWS rows with OUTPUTS rows of the weights, GROUP inputs at a time."""
    HALF: tl.constexpr = GROUP // 2
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    live, real = row < count, output < outputs
    at_row = row.to(tl.int64)[None, :] * inputs
    at_scale = (output // BLOCK_ROWS).to(tl.int64) * scale_width
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, inputs, GROUP):
        group = start // BLOCK_COLUMNS
        scale = tl.load(scales + at_scale + group, mask=real, other=0.0)
        if BITS == 4:
            byte = start // 2 + tl.arange(0, HALF)
            inside = byte * 2 < inputs
            packed = tl.load(
                values + output.to(tl.int64)[:, None] * (inputs // 2) + byte[None, :],
                mask=real[:, None] & inside[None, :], other=0,
            )  # fmt: skip
            wanted = live[None, :] & inside[:, None]
            even = tl.load(rows + at_row + (2 * byte)[:, None], mask=wanted, other=0.0)
            odd = tl.load(rows + at_row + (2 * byte + 1)[:, None], mask=wanted, other=0.0)
            zero = tl.load(zeros + at_scale + group, mask=real, other=0).to(tl.float32)
            # 128 + value or 1024 + value: integers that bfloat16, or float16, holds exactly.
            if rows.dtype.element_ty == tl.bfloat16:
                zero = (zero + 128.0).to(tl.bfloat16)[:, None]
                low = ((packed & 15).to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - zero
                high = ((packed >> 4).to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - zero
            else:
                zero = (zero + 1024.0).to(tl.float16)[:, None]
                low = ((packed & 15).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - zero
                high = ((packed >> 4).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - zero
            part = tl.dot(low.to(even.dtype), even, input_precision=PRECISION)
            part = tl.dot(high.to(odd.dtype), odd, part, input_precision=PRECISION)
        else:
            column = start + tl.arange(0, GROUP)
            inside = column < inputs
            weight = tl.load(
                values + output.to(tl.int64)[:, None] * inputs + column[None, :],
                mask=real[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            x = tl.load(rows + at_row + column[:, None], mask=live[None, :] & inside[:, None], other=0.0)
            if INTEGERS:
                zero = tl.load(zeros + at_scale + group, mask=real, other=0).to(tl.float32)
                weight = weight.to(tl.float32) - zero[:, None]
            part = tl.dot(weight.to(x.dtype), x, input_precision=PRECISION)
        total += part * scale[:, None]
    tl.store(out + row[None, :] * outputs + output[:, None], total, mask=real[:, None] & live[None, :])


@triton.jit
def _few_rows_fp8(
    out, rows, row_scales, values, scales, count, outputs, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply up to ROWS rows that are FP8 with OUTPUTS rows of FP8 weights; a scale for each row and each output."""
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    live, real = row < count, output < outputs
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, inputs, INPUTS):
        column = start + tl.arange(0, INPUTS)
        inside = column < inputs
        weight = tl.load(
            values + output.to(tl.int64)[:, None] * inputs + column[None, :],
            mask=real[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        x = tl.load(
            rows + row.to(tl.int64)[None, :] * inputs + column[:, None],
            mask=live[None, :] & inside[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(weight, x, total)
    scale = tl.load(scales + output, mask=real, other=0.0)[:, None] * tl.load(row_scales + row, mask=live)[None, :]
    tl.store(out + row[None, :] * outputs + output[:, None], total * scale, mask=real[:, None] & live[None, :])


@triton.jit
def _dequantize(
    out, values, scales, zeros, outputs, inputs, scale_width,
    INTEGERS: tl.constexpr, BITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Write OUTPUTS x INPUTS weights as floats."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    some = (output < outputs)[:, None] & (column < inputs)[None, :]
    width = inputs * BITS // 8
    packed = tl.load(
        values + output.to(tl.int64)[:, None] * width + (column * BITS // 8)[None, :], mask=some, other=0.0
    )
    at = (output // BLOCK_ROWS).to(tl.int64)[:, None] * scale_width + (column // BLOCK_COLUMNS)[None, :]
    scale = tl.load(scales + at, mask=some, other=0.0)
    if INTEGERS:
        if BITS == 4:
            packed = (packed >> ((column % 2) * 4)[None, :].to(tl.uint8)) & 15
        weight = packed.to(tl.float32) - tl.load(zeros + at, mask=some, other=0).to(tl.float32)
    else:
        weight = packed.to(tl.float32)
    tl.store(out + output.to(tl.int64)[:, None] * inputs + column[None, :], weight * scale, mask=some)


def multiply_packed(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    """Return `rows @ weights.T` for a few rows and weights as in `PackedWeights`; `block_columns` is a multiple of 16."""
    count, inputs = rows.shape
    outputs, scale_width = len(values), scales.shape[1]
    group = _GROUP
    while block_columns % group:
        group //= 2
    rows, integers = rows.contiguous(), zeros is not None
    out = torch.empty(count, outputs, dtype=rows.dtype, device=rows.device)
    zeros = scales if zeros is None else zeros
    many = outputs > _MANY_OUTPUTS
    if count > 1:
        _few_rows[(triton.cdiv(outputs, 64),)](
            out, rows, values, scales, zeros, count, outputs, inputs, scale_width, INTEGERS=integers, BITS=bits,
            BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, GROUP=group,
            ROWS=max(16, triton.next_power_of_2(count)),  # the minimum of tl.dot
            OUTPUTS=64, PRECISION="ieee" if rows.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
        )  # fmt: skip
    elif bits == 4:
        _one_row_4bit[(triton.cdiv(outputs, 16),)](
            out, rows, values.view(torch.uint32), scales, zeros, outputs, inputs, scale_width,
            BLOCK_COLUMNS=block_columns, GROUP=group, OUTPUTS=16, INPUTS=4096, num_warps=8,
        )  # fmt: skip
    elif not integers and (block_rows, block_columns) == (1, inputs):
        _one_row_fp8[(triton.cdiv(outputs, 16 if many else 4),)](
            out, rows, values, scales, outputs, inputs,
            OUTPUTS=16 if many else 4, INPUTS=256 if many else 1024, num_warps=4 if many else 2,
        )  # fmt: skip
    else:
        _one_row_8bit[(triton.cdiv(outputs, 8),)](
            out, rows, values, scales, zeros, outputs, inputs, scale_width, INTEGERS=integers,
            BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, GROUP=group, OUTPUTS=8, INPUTS=1024, num_warps=4,
        )  # fmt: skip
    return out


def multiply_fp8(
    rows: torch.Tensor, row_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product of up to 128 FP8 rows and FP8 weights, with a scale for each row and each output."""
    count, inputs = rows.shape
    outputs = len(values)
    out = torch.empty(count, outputs, dtype=dtype, device=rows.device)
    tile = max(16, triton.next_power_of_2(count))
    _few_rows_fp8[(triton.cdiv(outputs, 64),)](
        out, rows, row_scales, values, scales, count, outputs, inputs,
        ROWS=tile, OUTPUTS=64, INPUTS=256, num_warps=4, num_stages=4 if outputs > _MANY_OUTPUTS or tile > 64 else 6,
    )  # fmt: skip
    return out


def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    block_rows: int,
    block_columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weights `[outputs, inputs]`."""
    outputs, inputs = len(values), values.shape[1] * 8 // bits
    out = torch.empty(outputs, inputs, dtype=dtype, device=values.device)
    _dequantize[(triton.cdiv(outputs, 16), triton.cdiv(inputs, 256))](
        out, values, scales, scales if zeros is None else zeros, outputs, inputs, scales.shape[1],
        INTEGERS=zeros is not None, BITS=bits, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns,
        OUTPUTS=16, INPUTS=256, num_warps=4,
    )  # fmt: skip
    return out
