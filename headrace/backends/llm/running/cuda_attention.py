# SPDX-License-Identifier: Apache-2.0
"""Attention over pages for steps that are captured as CUDA graphs.

Used by `cuda_graphs`; the kernels are in `cuda_kernels`. A step's tokens lie packed in one row and are cut into tiles: a
tile is some successive tokens of one sequence, `(row of the page table, first token, count, position of the first)`. A
decoding sequence is a tile of one token. Shapes depend on the sizes of the tensors alone and all else is read on the
device, so that a captured step serves any mixture of lengths.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface

ATTENTION = "headrace_graphs"
"""The name of `attention` with transformers."""


def tokens_of_tile(group: int) -> int:
    """How many tokens a tile of a prompt holds at most, with so many query heads to a key head."""
    return rows_of_tile(group) // group


def rows_of_tile(group: int) -> int:
    """How many queries such a tile has, those of all heads of the group; a power of two."""
    rows = 64
    while rows < group:
        rows *= 2
    return rows


def _attend(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    tiles: torch.Tensor,
    page_size: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    from headrace.backends.llm.running.cuda_kernels import attend

    return attend(query, new_keys, new_values, keys, values, slots, table, tiles, page_size, scale, window)


@cache
def register() -> Any:
    """Make `attention` known to transformers, and the kernels one opaque operator that torch.compile leaves alone.

    The operator says that it changes nothing, though it writes to the cache: nothing else in a compiled layer reads the
    cache, and told the truth the compiler may copy the whole of it.
    """
    operator = torch.library.custom_op("headrace::attend_pages", _attend, mutates_args=(), device_types="cuda")
    operator.register_fake(_shape_of_result)
    AttentionInterface.register(ATTENTION, attention)
    return operator


def _shape_of_result(query: torch.Tensor, *_others: Any) -> torch.Tensor:
    return query.new_empty(query.shape)


def attach(module: Any) -> None:
    """Give an attention module what `attention` needs of its cache, as attributes that torch.compile can follow."""
    cache = module.headrace_cache
    if cache.keys.shape != cache.values.shape:
        raise NotImplementedError("keys and values of different sizes")
    module.headrace_keys, module.headrace_values = cache.keys, cache.values
    module.headrace_page_size, module.headrace_window = cache.page_size, cache.window or 0


def detach(module: Any) -> None:
    """Undo `attach`."""
    for name in ("headrace_keys", "headrace_values", "headrace_page_size", "headrace_window"):
        if hasattr(module, name):
            delattr(module, name)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    headrace_slots: torch.Tensor,
    headrace_table: torch.Tensor,
    headrace_tiles: torch.Tensor,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' modules call, see its attention interface."""
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("a cap on scores, or sinks")
    out = torch.ops.headrace.attend_pages(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        module.headrace_keys,
        module.headrace_values,
        headrace_slots,
        headrace_table,
        headrace_tiles,
        module.headrace_page_size,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        module.headrace_window,
    )
    return out[None], None
