# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture of experts as two grouped products, in a form that CUDA graphs can capture in any dtype.

Registered with transformers' experts interface; used while graphs are captured. transformers' own ways either loop over the
experts that were chosen, which waits for the device, or take bfloat16 only. Here the pairs of a token and an expert are
sorted by expert on the device and cut into tiles, `(expert, first pair, number of pairs)`; their number depends on tensor
sizes alone. The Triton kernel is in `expert_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.backends.torch_import import run_once

EXPERTS = "headrace_experts"
"""The name under which `compute_experts` is registered with transformers."""
_OF_THE_INTERFACE = ("has_gate", "has_bias", "is_transposed", "config", "down_proj")
"""Attributes of modules that use it."""
_UNSORTED_PAIRS = 64
"""Up to so many pairs are a tile each: sorting takes a dozen kernels, and weights that are read twice are cached."""
_SMALL_TILE, _LARGE_TILE = 16, 64
"""Pairs of a tile; the smallest is the minimum of Triton's product."""


def tile_pairs(pairs: int, experts: int) -> int:
    """Return how many pairs a tile has at most."""
    if pairs <= _UNSORTED_PAIRS:
        return 1
    return _SMALL_TILE if pairs <= _SMALL_TILE * experts else _LARGE_TILE


def tile_count(pairs: int, experts: int) -> int:
    """Return how many tiles there are at most: each expert has one that may not be full."""
    if pairs <= _UNSORTED_PAIRS:
        return pairs
    return pairs // tile_pairs(pairs, experts) + min(pairs, experts)


@contextmanager
def using_fused_experts(model: Any) -> Iterator[None]:
    """Compute the experts of a model with `compute_experts`, where they go through transformers' interface."""
    configs = {id(module.config): module.config for module in expert_modules(model)}.values()
    if not configs:
        yield
        return
    register()
    before = [config._experts_implementation for config in configs]
    try:
        for config in configs:
            config._experts_implementation = EXPERTS
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._experts_implementation = implementation


def expert_modules(model: Any) -> Iterable[Any]:
    """Return the modules of a model whose experts go through transformers' interface."""
    return [module for module in model.modules() if all(hasattr(module, name) for name in _OF_THE_INTERFACE)]


@run_once
def register() -> tuple[Any, Any]:
    """Register `compute_experts` with transformers, and its steps as opaque operators that torch.compile leaves alone."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    sort = torch.library.custom_op("headrace::sort_by_expert", sort_by_expert, mutates_args=())
    sort.register_fake(_shape_of_order)
    multiply = torch.library.custom_op(
        "headrace::multiply_experts", _multiply_experts, mutates_args=(), device_types="cuda"
    )
    multiply.register_fake(_shape_of_product)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, compute_experts)
    return sort, multiply


def compute_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Implement transformers' experts interface: `[tokens, size]`, and the experts of each token and their weights."""
    first, first_bias = ("gate_up_proj", "gate_up_proj_bias") if module.has_gate else ("up_proj", "up_proj_bias")
    inputs, outputs = getattr(module, first), module.down_proj
    biases = (getattr(module, first_bias), module.down_proj_bias) if module.has_bias else (None, None)
    tokens, each = top_k_index.shape
    order, tiles = torch.ops.headrace.sort_by_expert(top_k_index, inputs.shape[0])
    product = torch.ops.headrace.multiply_experts
    inner = product(hidden_states.to(inputs.dtype), inputs, biases[0], order, tiles, each, module.is_transposed)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    found = product(inner, outputs, biases[1], order, tiles, 1, module.is_transposed)
    if getattr(module, "has_post_expert_norm", False):
        found = module.post_expert_norm(found)
    weighted = found.view(tokens, each, -1) * top_k_weights.unsqueeze(-1)
    summed: torch.Tensor = weighted.sum(dim=1).to(hidden_states.dtype)
    return summed


def sort_by_expert(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs of a token and an expert, `token * experts of a token + place`, sorted by expert, and their tiles.

    The first `tile_count` of the tiles are used, and those of them that are not needed have no pairs. There are more, so
    that the compiler need not know which of the ways below is taken.
    """
    flat = chosen.reshape(-1).int()
    pairs, device = len(flat), chosen.device
    count = tile_count(pairs, experts)
    tiles = torch.empty(pairs + experts, 3, dtype=torch.int32, device=device)
    if pairs <= _UNSORTED_PAIRS:
        order = torch.arange(pairs, dtype=torch.int32, device=device)
        torch.stack([flat, order, torch.ones_like(flat)], dim=1, out=tiles[:count])
        return order, tiles
    size = tile_pairs(pairs, experts)
    by_expert, order = torch.sort(flat, stable=True)
    bounds = torch.searchsorted(by_expert, torch.arange(experts + 1, dtype=torch.int32, device=device))
    starts, lengths = bounds[:-1], bounds.diff()
    ends = ((lengths + size - 1) // size).cumsum(0)
    number = torch.arange(count, device=device)
    expert = torch.searchsorted(ends, number, right=True)
    real = expert < experts
    expert = expert.clamp(max=experts - 1)
    # The number of a tile among those of its expert.
    place = number - ends[expert] + (lengths[expert] + size - 1) // size
    left = (lengths[expert] - place * size).clamp(max=size)
    tiles[:count] = torch.stack([expert, starts[expert] + place * size, torch.where(real, left, 0)], dim=1)
    return order.int(), tiles


def _multiply_experts(
    rows: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    tiles: torch.Tensor,
    each: int,
    transposed: bool,
) -> torch.Tensor:
    from headrace.backends.llm.model_runner.expert_kernels import multiply_experts

    pairs, experts = len(order), len(weights)
    weights = weights if transposed else weights.transpose(1, 2)
    used = tiles[: tile_count(pairs, experts)]
    return multiply_experts(rows, weights, bias, order, used, each, tile_pairs(pairs, experts))


def _shape_of_order(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = chosen.numel()
    return chosen.new_empty(pairs, dtype=torch.int32), chosen.new_empty(pairs + experts, 3, dtype=torch.int32)


def _shape_of_product(
    rows: torch.Tensor,
    weights: torch.Tensor,
    _bias: Any,
    order: torch.Tensor,
    _tiles: Any,
    _each: int,
    transposed: bool,
) -> torch.Tensor:
    # Not len(order): it would be a constant for the compiler.
    return rows.new_empty(order.shape[0], weights.shape[2 if transposed else 1])
