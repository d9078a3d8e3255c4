# SPDX-License-Identifier: Apache-2.0
"""The KV cache: the memory of keys and values, two tensors `[slots, heads, head size]` per layer.

A token's slot is `page * page_size + offset`. There is one page more than the scheduler knows of, at the end: padding rows
are written to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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

    def close(self) -> None:
        """Free the memory."""
        self.layers.clear()


def page_bytes(shapes: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page over all layers."""
    return page_size * int(dtype.itemsize) * sum(shape.elements for shape in shapes)
