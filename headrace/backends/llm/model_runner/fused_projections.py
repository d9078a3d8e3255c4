# SPDX-License-Identifier: Apache-2.0
"""Projections of the same input as one matrix product: q, k and v of an attention, gate and up of an MLP.

One large product is faster than several small ones. transformers calls the projections one after the other: the first that
is called computes all of them, and the others return their part. Used on a GPU by `model_loader`, for models without
adapters, which change single projections.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of projections of one module that have the same input."""


def fuse_projections(model: nn.Module) -> int:
    """Replace projections that can be computed together; return how many groups there were."""
    count = 0
    for module in list(model.modules()):
        for names in GROUPS:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if _can_fuse(parts):
                _fuse(module, names, parts)
                count += 1
    return count


class _Projections(nn.Module):
    """The projections of a group."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        self.bias = None
        if parts[0].bias is not None:
            self.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
        self.sizes = [part.out_features for part in parts]
        self.input: torch.Tensor | None = None
        self.results: dict[int, torch.Tensor] = {}
        """Of the projections of `input` that were not asked for yet."""

    def project(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return one projection of `hidden`; compute all of them if it is new."""
        if self.input is not hidden or index not in self.results:
            results = nn.functional.linear(hidden, self.weight, self.bias).split(self.sizes, dim=-1)
            self.input, self.results = hidden, dict(enumerate(results))
        result = self.results.pop(index)
        if not self.results:
            self.input = None
        return result


class _Projection(nn.Module):
    """One projection of a group."""

    def __init__(self, group: _Projections, index: int) -> None:
        super().__init__()
        if not index:
            self.group = group  # a submodule of the first only: its weight is counted once
        self._shared = (group,)
        self._index = index

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the projection of `hidden`."""
        return self._shared[0].project(self._index, hidden)


def _can_fuse(parts: Sequence[Any]) -> bool:
    if not all(type(part) is nn.Linear for part in parts):
        return False
    first = parts[0]
    return all(
        part.in_features == first.in_features
        and (part.bias is None) == (first.bias is None)
        and part.weight.dtype == first.weight.dtype
        and part.weight.device == first.weight.device
        and not part._forward_hooks
        and not part._forward_pre_hooks
        for part in parts
    )


def _fuse(module: nn.Module, names: Sequence[str], parts: Sequence[nn.Linear]) -> None:
    group = _Projections(parts)
    for index, name in enumerate(names):
        setattr(module, name, _Projection(group, index))
