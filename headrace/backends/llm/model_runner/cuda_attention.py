# SPDX-License-Identifier: Apache-2.0
"""Paged attention for steps that are captured as CUDA graphs. The Triton kernels are in `triton_kernels`.

A step's tokens are packed in one row and divided into tiles: a tile is some consecutive tokens of one sequence, `(row of
the page table, first token, count, position of the first)`. Decoding sequences have tiles of one token, in a list of their
own, and come first. Shapes depend on tensor sizes alone and everything else is read on the device, so that a captured step
serves any mix of lengths. With a split length, kernels are used whose result for a token does not depend on its tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface

from headrace.backends.torch_import import run_once

ATTENTION = "headrace_graphs"
"""The name under which `attention` is registered with transformers."""
NO_TILES = 2
"""The length of a list of prompt tiles without prompts: for 0 or 1 the compiler would compile the layers once more."""


_LEAST_SPLIT, _MOST_SPLITS = 256, 8


def split_tokens(length: int) -> int:
    """Return how many keys a split has in sequences of at most `length` tokens, whatever a step consists of."""
    share = -(-length // _MOST_SPLITS)
    return max(_LEAST_SPLIT, -(-share // 128) * 128)


def tile_tokens(group: int, split: int = 0) -> int:
    """Return the maximum number of tokens in a prompt tile, for `group` query heads per key head."""
    return tile_rows(group, split) // group


def tile_rows(group: int, split: int = 0) -> int:
    """Return the number of query rows in a prompt tile, over all heads of the group; a power of two."""
    rows = 128 if _has_large_shared_memory() and not split else 64
    while rows < group:
        rows *= 2
    return rows


@cache
def _has_large_shared_memory() -> bool:
    """Return whether tiles of 128 rows fit: on data centre GPUs, from the A100 on."""
    if not torch.cuda.is_available():
        return False
    return bool(torch.cuda.get_device_properties(0).shared_memory_per_block_optin >= 160 * 1024)


def _attend(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    row_tiles: torch.Tensor,
    tiles: torch.Tensor,
    page_size: int,
    scale: float,
    window: int,
    cap: float,
    sinks: torch.Tensor | None,
    split: int,
) -> torch.Tensor:
    tiles = tiles if len(tiles) > NO_TILES else tiles[:0]
    rows = tile_rows(query.shape[1] // keys.shape[1], split)
    if split:
        from headrace.backends.llm.model_runner.invariant_attention_kernels import attend as attend_alike

        return attend_alike(
            query, new_keys, new_values, keys, values, slots, table, row_tiles, tiles, page_size, scale, window, rows, cap,
            sinks, split,
        )  # fmt: skip
    from headrace.backends.llm.model_runner.triton_kernels import attend

    return attend(
        query,
        new_keys,
        new_values,
        keys,
        values,
        slots,
        table,
        row_tiles,
        tiles,
        page_size,
        scale,
        window,
        rows,
        cap,
        sinks,
    )


@run_once
def register() -> Any:
    """Register `attention` with transformers, and the kernels as one opaque operator that torch.compile leaves alone.

    The operator claims to mutate nothing, although it writes to the KV cache: nothing else in a compiled layer reads the
    cache, and otherwise the compiler might copy all of it.
    """
    operator = torch.library.custom_op("headrace::attend_pages", _attend, mutates_args=(), device_types="cuda")
    operator.register_fake(_shape_of_result)
    AttentionInterface.register(ATTENTION, attention)
    return operator


def _shape_of_result(query: torch.Tensor, _keys: torch.Tensor, new_values: torch.Tensor, *_others: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], new_values.shape[2])


def attach(module: Any, split: int = 0) -> None:
    """Put the parts of the KV cache that `attention` needs into attributes that torch.compile can trace."""
    cache = module.headrace_cache
    module.headrace_split = split
    module.headrace_keys, module.headrace_values = cache.keys, cache.values
    module.headrace_page_size, module.headrace_window = cache.page_size, cache.window or 0


def detach(module: Any) -> None:
    """Undo `attach`."""
    for name in ("headrace_keys", "headrace_values", "headrace_page_size", "headrace_window", "headrace_split"):
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
    headrace_row_tiles: torch.Tensor,
    headrace_tiles: torch.Tensor,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface, with a cap on scores (Gemma 2) and attention sinks (gpt-oss)."""
    out = torch.ops.headrace.attend_pages(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        module.headrace_keys,
        module.headrace_values,
        headrace_slots,
        headrace_table,
        headrace_row_tiles,
        headrace_tiles,
        module.headrace_page_size,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        module.headrace_window,
        softcap or 0.0,
        s_aux,
        module.headrace_split,
    )
    return out[None], None
