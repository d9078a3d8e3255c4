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

from headrace.backends.llm.model_runner.packed_weights import PackedWeights
from headrace.backends.llm.model_runner.quantized_linear import QuantizedLinear

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

    def __init__(self, parts: Sequence[Any]) -> None:
        super().__init__()
        self.layer = _join_quantized(parts) if type(parts[0]) is QuantizedLinear else _join(parts)
        self.sizes = [part.out_features for part in parts]
        self.input: torch.Tensor | None = None
        self.results: dict[int, torch.Tensor] = {}
        """Of the projections of `input` that were not asked for yet."""

    def project(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return one projection of `hidden`; compute all of them if it is new."""
        if self.input is not hidden or index not in self.results:
            results = self.layer(hidden).split(self.sizes, dim=-1)
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
        self.index = index

    @property
    def group_of_projections(self) -> _Projections:
        """The group that it belongs to."""
        return self._shared[0]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the projection of `hidden`."""
        return self._shared[0].project(self.index, hidden)


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by the names that they had before `fuse_projections`: parts of the joined ones."""
    weights: dict[str, torch.Tensor] = {}
    joined: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, _Projection):
            group, index = module.group_of_projections, module.index
            first = sum(group.sizes[:index])
            for name, weight in group.layer.named_parameters():
                weights[f"{path}.{name}"] = weight.narrow(0, first, group.sizes[index])
                joined.add(id(weight))
    return weights | {name: weight for name, weight in model.named_parameters() if id(weight) not in joined}


def _join(parts: Sequence[nn.Linear]) -> nn.Linear:
    outputs = sum(part.out_features for part in parts)
    joined = nn.Linear(parts[0].in_features, outputs, bias=False, device="meta")
    joined.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    joined.bias = _join_biases(parts)
    return joined


def _join_quantized(parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
    weights = [part.weights for part in parts]
    joined = PackedWeights(
        torch.cat([part.values for part in weights]),
        torch.cat([part.scales for part in weights]),
        weights[0].block,
        weights[0].bits,
        None if weights[0].zeros is None else torch.cat([part.zeros for part in weights if part.zeros is not None]),
        weights[0].order,
    )
    layer = QuantizedLinear(joined, _join_biases(parts), len(joined.values), parts[0].in_features)
    layer.fp8_product = parts[0].fp8_product
    return layer


def _join_biases(parts: Sequence[Any]) -> nn.Parameter | None:
    if parts[0].bias is None:
        return None
    return nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)


def _can_fuse(parts: Sequence[Any]) -> bool:
    kind = type(parts[0])
    if kind not in (nn.Linear, QuantizedLinear) or not all(type(part) is kind for part in parts):
        return False
    first = parts[0]
    alike = _are_quantized_alike(parts) if kind is QuantizedLinear else _are_alike(parts)
    return alike and all(
        part.in_features == first.in_features
        and (part.bias is None) == (first.bias is None)
        and not part._forward_hooks
        and not part._forward_pre_hooks
        for part in parts
    )


def _are_alike(parts: Sequence[nn.Linear]) -> bool:
    first = parts[0].weight
    return all(part.weight.dtype == first.dtype and part.weight.device == first.device for part in parts)


def _are_quantized_alike(parts: Sequence[QuantizedLinear]) -> bool:
    """Return whether weights have the same form, and their scales can be put one after the other."""
    first = parts[0].weights
    return all(
        (weights.block, weights.bits, weights.values.dtype) == (first.block, first.bits, first.values.dtype)
        and part.out_features % first.block[0] == 0
        and (weights.zeros is None) == (first.zeros is None)
        and part.fp8_product == parts[0].fp8_product
        and _same_order(weights.order, first.order)
        for part in parts
        for weights in (part.weights,)
    )


def _same_order(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(torch.equal(one, other))


def _fuse(module: nn.Module, names: Sequence[str], parts: Sequence[Any]) -> None:
    group = _Projections(parts)
    for index, name in enumerate(names):
        setattr(module, name, _Projection(group, index))
