# SPDX-License-Identifier: Apache-2.0
"""Layers of a sharded model whose results are summed or joined over the ranks.

The other projections have fewer rows than those of the whole model, and are ordinary linear layers; `Columns` notes on each
which rows they are, for LoRA adapters.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from headrace.backends.llm.tensor_parallel.communicator import Peers
from headrace.backends.llm.tensor_parallel.sharding import Sharding, Span
from headrace.backends.torch_import import run_once

VOCABULARY_REFUSAL = "which is sharded by tokens here (tensor_parallel): merge the adapter into the model"
"""What `lora` says of an adapter that changes a layer with it as `headrace_lora_refusal`."""


class LoraSharding(Protocol):
    """How the matrices of a LoRA adapter are divided for one layer, which has it as `headrace_sharding`."""

    def shard(self, lora_a: torch.Tensor, lora_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's parts."""

    def full_sizes(self) -> tuple[int, int]:
        """Return outputs and inputs of the whole layer."""

    def reduce(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum the product with `lora_a` over the ranks, if each has a part of it."""


class Rows:
    """A layer with some of the rows of the whole layer: its results stay on this rank."""

    def __init__(self, layer: nn.Linear, span: Span, full_rows: int) -> None:
        self._span = span
        self._sizes = full_rows, layer.in_features

    def shard(self, lora_a: torch.Tensor, lora_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LoraSharding`."""
        return lora_a, lora_b[slice(*self._span)]

    def full_sizes(self) -> tuple[int, int]:
        """See `LoraSharding`."""
        return self._sizes

    def reduce(self, rows: torch.Tensor) -> torch.Tensor:
        """See `LoraSharding`."""
        return rows


class Columns:
    """A layer with some of the columns of the whole layer: its results are summed over the ranks."""

    def __init__(self, layer: nn.Linear, span: Span, full_columns: int, peers: Peers) -> None:
        self._span = span
        self._sizes = layer.out_features, full_columns
        self._peers = peers

    def shard(self, lora_a: torch.Tensor, lora_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LoraSharding`."""
        return lora_a[:, slice(*self._span)], lora_b

    def full_sizes(self) -> tuple[int, int]:
        """See `LoraSharding`."""
        return self._sizes

    def reduce(self, rows: torch.Tensor) -> torch.Tensor:
        """See `LoraSharding`."""
        return _sum(rows, self._peers)


class RowParallelLinear(nn.Linear):
    """A projection with a share of the inputs: its results are summed over the ranks."""

    def __init__(self, layer: nn.Linear, peers: Peers) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._peers = peers

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the whole projection."""
        projected = _sum(nn.functional.linear(rows, self.weight), self._peers)
        return projected if self.bias is None else projected + self.bias


class VocabularyEmbedding(nn.Module):
    """Embeddings of a share of the vocabulary: those of the other tokens come from other ranks."""

    headrace_lora_refusal = VOCABULARY_REFUSAL

    def __init__(self, embedding: nn.Embedding, sharding: Sharding, peers: Peers) -> None:
        super().__init__()
        self.embedding = embedding
        self._first, self._end = sharding.tokens
        self._peers = peers

    @property
    def weight(self) -> torch.Tensor:
        """The embeddings of this rank's tokens."""
        return self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of any tokens."""
        own = (tokens >= self._first) & (tokens < self._end)
        rows: torch.Tensor = self.embedding(torch.where(own, tokens - self._first, 0))
        return _sum(rows * own[..., None].to(rows.dtype), self._peers)


class VocabularyHead(nn.Module):
    """A language-model head for a share of the vocabulary: joins the logits of all ranks."""

    headrace_lora_refusal = VOCABULARY_REFUSAL

    def __init__(self, head: nn.Linear, sharding: Sharding, peers: Peers) -> None:
        super().__init__()
        self.head = head
        self._vocabulary = sharding.vocabulary
        self._peers = peers

    @property
    def weight(self) -> torch.Tensor:
        """The weights for this rank's tokens."""
        return self.head.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary."""
        logits: torch.Tensor = self.head(rows)
        joined = self._peers.gather(logits)
        return joined if joined.shape[-1] == self._vocabulary else joined[..., : self._vocabulary].contiguous()


class SummedExperts(nn.Module):
    """The experts of a layer, each with a share of its intermediate values: results are summed over the ranks."""

    def __init__(self, experts: nn.Module, peers: Peers) -> None:
        super().__init__()
        self.experts = experts
        self._peers = peers

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """Return the whole sum."""
        return _sum(self.experts(*arguments, **named), self._peers)


def parallelize(model: Any, sharding: Sharding, peers: Peers) -> None:
    """Replace the layers of a rank's model whose results concern all ranks."""
    _PEERS[peers.number] = peers
    _register_operator()
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if name == "experts" and hasattr(layer, "gate_up_proj"):
                module.experts = SummedExperts(layer, peers)
            elif isinstance(layer, nn.Linear) and (rows := sharding.linear_rows(name)):
                layer.headrace_sharding = Rows(layer, rows, sharding.full_rows(name))
            elif isinstance(layer, nn.Linear) and (columns := sharding.linear_columns(name)):
                summed = RowParallelLinear(layer, peers)
                summed.headrace_sharding = Columns(layer, columns, sharding.full_columns(name), peers)
                setattr(module, name, summed)
    model.set_input_embeddings(VocabularyEmbedding(model.get_input_embeddings(), sharding, peers))
    model.set_output_embeddings(VocabularyHead(model.get_output_embeddings(), sharding, peers))


def _sum(tensor: torch.Tensor, peers: Peers) -> torch.Tensor:
    if not tensor.is_cuda:
        return peers.all_reduce(tensor)
    summed: torch.Tensor = torch.ops.headrace.sum_over_ranks(tensor, peers.number)
    return summed


_PEERS: WeakValueDictionary[int, Peers] = WeakValueDictionary()
"""By their number, for the operator."""


@run_once
def _register_operator() -> Any:
    """Register the sum over ranks as one opaque operator, that torch.compile leaves alone."""

    def sum_over_ranks(tensor: torch.Tensor, number: int) -> torch.Tensor:
        return _PEERS[number].all_reduce(tensor.clone())

    operator = torch.library.custom_op("headrace::sum_over_ranks", sum_over_ranks, mutates_args=(), device_types="cuda")
    operator.register_fake(_shape_of_sum)
    return operator


def _shape_of_sum(tensor: torch.Tensor, _number: int) -> torch.Tensor:
    return torch.empty_like(tensor)
