# SPDX-License-Identifier: Apache-2.0
"""Packed quantised weights: FP8 or integers of 4 or 8 bits, their scales, and products that dequantise a part at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_CPU_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 26
"""Weights that are dequantised at once: what the caches of a CPU hold; on a GPU, what one large product needs."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Quantised weights `[outputs, inputs]` as `QuantizedLinear` computes with them."""

    values: torch.Tensor
    """FP8 or, for integers, bytes. Of 4-bit integers, the lower half of a byte is the earlier input."""
    scales: torch.Tensor
    """float32 `[outputs / rows, inputs / columns]`, each for `block` weights."""
    block: tuple[int, int]
    """Rows and columns that share a scale. Integers have one row."""
    bits: int = 8
    """Bits of a weight."""
    zeros: torch.Tensor | None = None
    """Of integers: what stands for 0, of the shape of `scales`; bytes."""
    order: torch.Tensor | None = None
    """The inputs in the order of the columns, if it is another than theirs."""

    def dequantize(self, first: int, end: int) -> torch.Tensor:
        """Return rows of the weights in float32, their columns in the order that they are stored in."""
        values = _to_float(self.values[first:end], self.bits)
        rows, columns = self.block
        scales = self.scales[first // rows : (end - 1) // rows + 1]
        if rows > 1:
            offset = first % rows
            scales = scales.repeat_interleave(rows, dim=0)[offset : offset + end - first]
        if values.shape[1] % columns:  # the last block is not whole
            return values.mul_(scales.repeat_interleave(columns, dim=1)[:, : values.shape[1]])
        groups = values.unflatten(1, (-1, columns))
        if self.zeros is not None:
            groups.sub_(self.zeros[first:end, :, None])
        return groups.mul_(scales[:, :, None]).flatten(1)


def multiply_in_chunks(rows: torch.Tensor, weights: PackedWeights) -> torch.Tensor:
    """Return `rows @ weights.T`; dequantises a few outputs at a time."""
    outputs, parts = len(weights.values), []
    count = max(1, (_GPU_CHUNK if rows.is_cuda else _CPU_CHUNK) // rows.shape[1])
    for first in range(0, outputs, count):
        part = weights.dequantize(first, min(first + count, outputs))
        parts.append(nn.functional.linear(rows, part.to(rows.dtype)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _to_float(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return packed values as float32, without their scales."""
    if bits == 4:
        halves = values.to(torch.int16)
        values = (halves << 4).bitwise_or_(halves).bitwise_and_(0x0F0F).view(torch.uint8)
    if values.dtype != FP8 or values.is_cuda:
        return values.float()
    # On a CPU, PyTorch converts FP8 slowly. The bits of a number are those of a float16 that is 2**8 times smaller.
    widened = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return widened.view(torch.float16).float().mul_(256.0)


def to_fp8(weight: torch.Tensor) -> PackedWeights:
    """Quantise a weight `[outputs, inputs]` to FP8, with a scale for each output."""
    scales = weight.detach().float().abs().amax(dim=1, keepdim=True) / FP8_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    values = (weight.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return PackedWeights(values, scales, (1, weight.shape[1]))
