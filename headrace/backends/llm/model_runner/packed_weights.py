# SPDX-License-Identifier: Apache-2.0
"""Packed quantised weights: FP8 or integers of 4 or 8 bits, their scales, and products that dequantise a part at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_CHUNK_ELEMENTS = 1 << 22
"""Weights that are dequantised at once on a CPU: 16 MiB in float32."""


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
        values = self.values[first:end]
        rows, columns = self.block
        if self.bits == 4:
            values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
        scales = self.scales[first // rows : (end - 1) // rows + 1]
        if rows > 1:
            offset = first % rows
            scales = scales.repeat_interleave(rows, dim=0)[offset : offset + end - first]
        if values.shape[1] % columns:  # the last block is not whole
            return values.float() * scales.repeat_interleave(columns, dim=1)[:, : values.shape[1]]
        groups = values.float().unflatten(1, (-1, columns))
        if self.zeros is not None:
            groups = groups - self.zeros[first:end, :, None]
        return (groups * scales[:, :, None]).flatten(1)


def multiply_in_chunks(rows: torch.Tensor, weights: PackedWeights) -> torch.Tensor:
    """Return `rows @ weights.T`; dequantises a few outputs at a time."""
    outputs, parts = len(weights.values), []
    count = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    for first in range(0, outputs, count):
        part = weights.dequantize(first, min(first + count, outputs))
        parts.append(nn.functional.linear(rows, part.to(rows.dtype)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def to_fp8(weight: torch.Tensor) -> PackedWeights:
    """Quantise a weight `[outputs, inputs]` to FP8, with a scale for each output."""
    scales = weight.detach().float().abs().amax(dim=1, keepdim=True) / FP8_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    values = (weight.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return PackedWeights(values, scales, (1, weight.shape[1]))
