# SPDX-License-Identifier: Apache-2.0
"""Layers that compute differently for some rows of a step.

Made by `adapters.loading`, told by the runner before each step which rows are whose. A step packs the tokens of many
sequences into one row of rows; those of one adapter are gathered, go through its two small matrices, and are added where
they came from. Rows without an adapter are computed as if there were none, and so is a step without any.

The layer of the model stays where it is and only its `forward` is replaced: its name, its weight and the weights that are
tied to it are the same as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from headrace.backends.llm.adapters.folder import Change
from headrace.core.errors import NotFound

Rows = Any
"""A slice, or a tensor of numbers."""
Group = tuple[str, Rows]
"""An adapter, and its rows."""


class Owner(Protocol):
    """A sequence, as far as it matters here."""

    adapter: str


class PieceLike(Protocol):
    """A part of a sequence that a step computes."""

    @property
    def sequence(self) -> Owner:
        """Whose tokens they are."""

    @property
    def count(self) -> int:
        """How many rows it has."""

    @property
    def samples(self) -> bool:
        """Whether its last row goes through the head."""


class Adapters:
    """All adapters of a model, and whose turn it is."""

    def __init__(self, names: Sequence[str], device: Any) -> None:
        self.names = tuple(names)
        self.body: Sequence[Group] = ()
        """For the layers that see every row of the step."""
        self.head: Sequence[Group] = ()
        """For the layer that sees only the rows after which a token is sampled."""
        self._device = device
        self._layers: list[ChangedLayer] = []

    @property
    def active(self) -> bool:
        """Whether the step that was told last has rows of an adapter."""
        return bool(self.body)

    def check(self, name: str) -> None:
        """Refuse a name that is not there; "" is the model as it is."""
        if name and name not in self.names:
            known = ", ".join(self.names) or "none"
            raise NotFound(f"adapter '{name[:64]}' is not loaded: this model has {known}")

    def use(self, pieces: Sequence[PieceLike]) -> None:
        """Tell whose the rows of the next step are. For `Runner.before_forward`."""
        if not any(piece.sequence.adapter for piece in pieces):
            self.body = self.head = ()
            return
        body: dict[str, list[tuple[int, int]]] = {}
        head: dict[str, list[tuple[int, int]]] = {}
        row = sampled = 0
        for piece in pieces:
            name = piece.sequence.adapter
            if name:
                _extend(body.setdefault(name, []), row, row + piece.count)
                if piece.samples:
                    _extend(head.setdefault(name, []), sampled, sampled + 1)
            row += piece.count
            sampled += piece.samples
        self.body = [(name, self._rows(spans)) for name, spans in body.items()]
        self.head = [(name, self._rows(spans)) for name, spans in head.items()]

    @contextmanager
    def everywhere(self, name: str) -> Iterator[None]:
        """Compute something outside of a step, such as a picture, all of it with one adapter or none."""
        before = self.body, self.head
        self.body = self.head = [(name, slice(None))] if name else ()
        try:
            yield
        finally:
            self.body, self.head = before

    def wrap(self, layer: Any, *, is_head: bool) -> ChangedLayer:
        """Have a layer of the model look here before it answers."""
        changed = ChangedLayer(self, layer, is_head=is_head)
        self._layers.append(changed)
        return changed

    def close(self) -> None:
        """Give the model its own layers back."""
        for layer in self._layers:
            layer.unwrap()
        self._layers.clear()

    def _rows(self, spans: Sequence[tuple[int, int]]) -> Rows:
        if len(spans) == 1:
            return slice(*spans[0])
        numbers = [number for first, end in spans for number in range(first, end)]
        return torch.tensor(numbers).to(self._device, non_blocking=True)


class ChangedLayer:
    """Stands in for the `forward` of a linear layer."""

    def __init__(self, adapters: Adapters, layer: Any, *, is_head: bool) -> None:
        self._adapters = adapters
        self._layer = layer
        self._plain = layer.forward
        self._is_head = is_head
        self._changes: dict[str, Change] = {}
        self._replaced: dict[str, tuple[Any, Any]] = {}
        layer.forward = self

    def add(self, name: str, change: Change) -> None:
        """What an adapter adds here."""
        self._changes[name] = change

    def replace(self, name: str, tensors: Mapping[str, Any]) -> None:
        """The whole layer, of an adapter that has its own."""
        self._replaced[name] = tensors["weight"], tensors.get("bias", self._layer.bias)

    def unwrap(self) -> None:
        """Put the layer's own `forward` back."""
        del self._layer.forward

    def __call__(self, rows: Any) -> Any:
        """Compute the layer."""
        plain = self._plain(rows)
        groups = self._adapters.head if self._is_head else self._adapters.body
        if not groups:
            return plain
        given, result = rows.reshape(-1, rows.shape[-1]), plain.view(-1, plain.shape[-1])
        for name, chosen in groups:
            if name in self._replaced:
                result[chosen] = torch.nn.functional.linear(given[chosen], *self._replaced[name])
            change = self._changes.get(name)
            if change is None:
                continue
            added = torch.nn.functional.linear(torch.nn.functional.linear(given[chosen], change.down), change.up)
            if isinstance(chosen, slice):
                result[chosen].add_(added, alpha=change.scaling)
            else:
                result.index_add_(0, chosen, added, alpha=change.scaling)
        return plain


def _extend(spans: list[tuple[int, int]], first: int, end: int) -> None:
    """Add a span, as part of the last one where they touch."""
    if spans and spans[-1][1] == first:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((first, end))
