# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain PyTorch, to compare kernels with."""

from __future__ import annotations

from typing import Any

import torch


def plain_attention(
    query: Any, new_keys: Any, new_values: Any, keys: Any, values: Any, slots: Any, table: Any, row_tiles: Any, tiles: Any,
    page_size: int, scale: float, window: int, cap: float = 0.0, sinks: Any = None,
    split: int = 0,
) -> Any:  # fmt: skip
    """Return what `cuda_attention` returns, computed in PyTorch on any device; write the new keys and values.

    With a `split`, each token is computed by itself.
    """
    keys[slots.long()], values[slots.long()] = new_keys, new_values
    every = [*row_tiles.tolist(), *tiles.tolist()]
    if split:
        every = [(row, first + n, 1, at + n) for row, first, count, at in every for n in range(count)]
    out = query.new_full((*query.shape[:2], values.shape[2]), float("nan"))
    group = query.shape[1] // keys.shape[1]
    for row, first, count, position in every:
        places = torch.arange(position + count, device=query.device)
        slot = table[row].long()[places // page_size] * page_size + places % page_size
        key, value = (part[slot].repeat_interleave(group, 1) for part in (keys, values))
        here = position + torch.arange(count, device=query.device)[:, None]
        seen = (places <= here) & (places > here - (window or 1 << 30))
        score = torch.einsum("qhd,khd->hqk", query[first : first + count], key) * scale
        if cap:
            score = torch.tanh(score / cap) * cap
        score = score.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            score = torch.cat([score, sinks.to(score.dtype)[:, None, None].expand(-1, count, 1)], 2)
        weight = score.softmax(-1)[:, :, : len(places)]
        out[first : first + count] = torch.einsum("hqk,khd->qhd", weight, value)
    return out
