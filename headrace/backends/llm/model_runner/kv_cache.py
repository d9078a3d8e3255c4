# SPDX-License-Identifier: Apache-2.0
"""The KV cache: the memory of keys and values, two tensors `[slots, heads, head size]` per layer.

A token's slot is `page * page_size + offset`. There is one page more than the scheduler knows of, at the end: padding rows
are written to it. The cache may be FP8 (e4m3, without scales): half the bytes of bfloat16, with three bits of mantissa.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a layer's keys and values, as the probe recorded it."""

    heads: int
    """Number of key-value heads."""
    key_size: int
    value_size: int
    window: int | None
    """Sliding window in tokens, the newest included; None for full attention."""

    @property
    def elements(self) -> int:
        """Number of values per token."""
        return self.heads * (self.key_size + self.value_size)


class LayerCache:
    """The keys and values of one layer. Its attention module has it as `headrace_cache`."""

    __slots__ = ("keys", "page_size", "values", "window")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: int | None, page_size: int) -> None:
        self.keys = keys
        self.values = values
        self.window = window
        self.page_size = page_size


class KVCache:
    """The keys and values of all layers."""

    def __init__(
        self, shapes: Sequence[LayerShape], pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        slots = (pages + 1) * page_size
        # Zeros: padding reads uninitialized slots with weight 0, and 0 times NaN would be NaN.
        self.layers = [
            LayerCache(
                torch.zeros(slots, shape.heads, shape.key_size, dtype=dtype, device=device),
                torch.zeros(slots, shape.heads, shape.value_size, dtype=dtype, device=device),
                shape.window,
                page_size,
            )
            for shape in shapes
        ]

    @property
    def bytes(self) -> int:
        """The memory that it takes now."""
        return sum(tensor.nbytes for layer in self.layers for tensor in (layer.keys, layer.values))

    def release(self) -> None:
        """Free the memory while the model sleeps; what was cached is gone."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[:0].clone(), layer.values[:0].clone()

    def restore(self) -> None:
        """Allocate the memory again."""
        slots = (self.pages + 1) * self.page_size
        tensors = [
            torch.zeros(slots, *tensor.shape[1:], dtype=self.dtype, device=self.device)
            for layer in self.layers
            for tensor in (layer.keys, layer.values)
        ]
        for number, layer in enumerate(self.layers):
            layer.keys, layer.values = tensors[2 * number : 2 * number + 2]

    def close(self) -> None:
        """Free the memory."""
        self.layers.clear()


def write_slots(tensor: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Write keys or values `[tokens, heads, head size]` to slots."""
    if tensor.dtype == FP8:  # PyTorch copies bytes
        new = new.clamp(-_FP8_MAX, _FP8_MAX).to(FP8).view(torch.uint8)
        tensor = tensor.view(torch.uint8)
    tensor.index_copy_(0, slots, new)


def page_bytes(shapes: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page over all layers."""
    return page_size * int(dtype.itemsize) * sum(shape.elements for shape in shapes)
