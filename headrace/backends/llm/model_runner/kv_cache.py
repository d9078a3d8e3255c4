# SPDX-License-Identifier: Apache-2.0
"""The KV cache: the memory of keys and values, two tensors `[slots, heads, head size]` per layer.

A token's slot is `page * page_size + offset`. There is one page more than the scheduler knows of, at the end: padding rows
are written to it. The cache may be FP8 (e4m3, without scales): half the bytes of bfloat16, with three bits of mantissa.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.backends.cuda_memory import Driver, MemoryBlock, place_tensors

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
        self,
        shapes: Sequence[LayerShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        driver: Driver | None = None,
    ) -> None:
        """With a `driver` the tensors keep their addresses when the memory is released and restored."""
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        slots = (pages + 1) * page_size
        sizes = [(slots, shape.heads, size) for shape in shapes for size in (shape.key_size, shape.value_size)]
        self._block: MemoryBlock | None = None
        # Zeros: padding reads uninitialized slots with weight 0, and 0 times NaN would be NaN.
        if driver is None:
            tensors = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
        else:
            tensors = self._place(sizes, driver)
        self.layers = [
            LayerCache(tensors[2 * number], tensors[2 * number + 1], shape.window, page_size)
            for number, shape in enumerate(shapes)
        ]

    def _place(self, sizes: Sequence[tuple[int, int, int]], driver: Driver) -> list[torch.Tensor]:
        counts = [math.prod(size) * self.dtype.itemsize for size in sizes]
        offsets, whole = place_tensors(counts)
        self._block = MemoryBlock(driver, whole)
        self._block.map()
        return [
            self._block.tensor(offset, count).zero_().view(self.dtype).view(size)
            for offset, count, size in zip(offsets, counts, sizes, strict=True)
        ]

    @property
    def keeps_addresses(self) -> bool:
        """Whether the tensors stay where they are when the memory is released and restored."""
        return self._block is not None

    @property
    def bytes(self) -> int:
        """The memory that it takes now."""
        if self._block is not None:
            return self._block.held_bytes
        return sum(tensor.nbytes for tensor in self._tensors())

    def release(self) -> None:
        """Free the memory while the model sleeps; what was cached is gone. The device uses none of it any more."""
        if self._block is not None:
            self._block.unmap()
            return
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[:0].clone(), layer.values[:0].clone()

    def restore(self) -> None:
        """Allocate the memory again."""
        if self._block is not None:
            self._block.map()
            for tensor in self._tensors():
                tensor.zero_()
            return
        slots = (self.pages + 1) * self.page_size
        tensors = [
            torch.zeros(slots, *tensor.shape[1:], dtype=self.dtype, device=self.device) for tensor in self._tensors()
        ]
        for number, layer in enumerate(self.layers):
            layer.keys, layer.values = tensors[2 * number : 2 * number + 2]

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]

    def close(self) -> None:
        """Free the memory."""
        self.layers.clear()
        if self._block is not None:
            self._block.close()


def write_slots(tensor: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Write keys or values `[tokens, heads, head size]` to slots."""
    if tensor.dtype == FP8:  # PyTorch copies bytes
        new = new.clamp(-_FP8_MAX, _FP8_MAX).to(FP8).view(torch.uint8)
        tensor = tensor.view(torch.uint8)
    tensor.index_copy_(0, slots, new)


def page_bytes(shapes: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page over all layers."""
    return page_size * int(dtype.itemsize) * sum(shape.elements for shape in shapes)
