# SPDX-License-Identifier: Apache-2.0
"""Products with experts in plain PyTorch, to compare the kernel with and to use in its place."""

from __future__ import annotations

from typing import Any

import torch


def plain_products(
    rows: Any, weights: Any, bias: Any, order: Any, tiles: Any, each: int, transposed: bool
) -> torch.Tensor:
    """Return what the operator `headrace::multiply_experts` does, computed in PyTorch on any device."""
    from headrace.backends.llm.model_runner.fused_experts import tile_count

    out = rows.new_full((len(order), weights.shape[2 if transposed else 1]), float("nan"))
    for expert, first, count in tiles[: tile_count(len(order), len(weights))].tolist():
        pairs = order[first : first + count].long()
        weight = weights[expert] if transposed else weights[expert].T
        out[pairs] = rows[pairs // each] @ weight + (0 if bias is None else bias[expert])
    return out
