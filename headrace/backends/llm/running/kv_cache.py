# SPDX-License-Identifier: Apache-2.0
"""The memory of keys and values: for each layer two tensors `[slots, heads, head size]`.

Slot `page * page_size + offset` is a token's. One page more than the scheduler knows of lies at the end: rows that are
padding are written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the probe has seen of a layer's attention."""

    heads: int
    """For keys and values."""
    key_size: int
    value_size: int
    window: int | None
    """How many tokens it sees, the newest included; None for all."""

    @property
    def elements(self) -> int:
        """For each token."""
        return self.heads * (self.key_size + self.value_size)


class LayerCache:
    """Of one layer. Its attention module has it as `headrace_cache`."""

    __slots__ = ("keys", "page_size", "values", "window")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: int | None, page_size: int) -> None:
        self.keys = keys
        self.values = values
        self.window = window
        self.page_size = page_size


class KVCache:
    """Of all layers."""

    def __init__(
        self, shapes: Sequence[LayerShape], pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        slots = (pages + 1) * page_size
        # Zeros, because what padding reads is multiplied by a weight of 0, and 0 times NaN would be NaN.
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
        """Free it."""
        self.layers.clear()


def page_bytes(shapes: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
    """What a page takes in all layers."""
    return page_size * int(dtype.itemsize) * sum(shape.elements for shape in shapes)
