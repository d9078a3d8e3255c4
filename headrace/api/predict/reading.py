# SPDX-License-Identifier: Apache-2.0
"""The fields of a request as a question to the data plane: one prediction, or a batch of them.

Called by HTTP and WebSocket. A batch becomes as few requests of the engine as its model allows: rows of one shape go
together, up to `max_batch_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from headrace.api.predict.checks import Checker
from headrace.api.predict.known import KnownInput, KnownModel
from headrace.api.predict.models import Models
from headrace.api.predict.values import shape_of, tensor_of
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.messages import GuidedRequest, InferRequest
from headrace.core.tensors import Tensor
from headrace.net.http.heads import RequestHead

KeyOf = Callable[[str, RequestHead, Mapping[str, object]], str]
"""Whom a request is for, from its model, its head and its fields; "" for nobody in particular."""

Row = Sequence[Tensor]
"""A request's tensors."""

Guide = tuple[str, bool]
"""A request's `sticky_key`, and whether it wants a fresh answer."""

MISSING = "Missing inputs"
FIELDS = frozenset(("inputs", "batch", "model_version"))
_NOT_NOTES = frozenset(("inputs", "batch", "id"))
"""Fields that no note is mistaken for: they have lists, or a name that is like too many."""
_CACHE_CONTROL = b"cache-control"
_FRESH = (b"no-cache", b"no-store")


class Part(NamedTuple):
    """Some rows of a batch, computed together."""

    row: Row
    rows: int
    added: bool
    """Whether a dimension in front is ours and not the client's."""


class Question:
    """What a client wants to know."""

    __slots__ = ("added", "guide", "known", "request")

    parts: Sequence[Part] | None = None
    """Of a batch; None where the answer is one prediction."""
    many = False
    """Whether it takes more than one request."""

    def __init__(self, known: KnownModel, version: str, guide: Guide | None, row: Row, added: bool) -> None:
        self.known = known
        self.guide = guide
        self.added = added
        """Whether a dimension in front is ours and not the client's."""
        self.request = self.request_for(row, version) if guide else InferRequest(known.name, row, version)
        """In most cases all there is; of a batch, the first part's."""

    def request_for(self, row: Row, version: str) -> InferRequest:
        """A request for the same model."""
        if self.guide is None:
            return InferRequest(self.known.name, row, version)
        key, fresh = self.guide
        return GuidedRequest(self.known.name, row, version, sticky_key=key, fresh=fresh)


class BatchQuestion(Question):
    """The same for several rows."""

    __slots__ = ("many", "parts")

    def __init__(self, known: KnownModel, version: str, guide: Guide | None, parts: Sequence[Part]) -> None:
        super().__init__(known, version, guide, parts[0].row, parts[0].added)
        self.parts = parts
        self.many = len(parts) > 1


class Reader:
    """Reads fields. `more_fields` are those that `key_of` may look for, beside our own."""

    def __init__(
        self,
        models: Models,
        checker: Checker,
        key_of: KeyOf | None = None,
        more_fields: Collection[str] = (),
        *,
        fields: frozenset[str] = FIELDS,
        obeys_cache_control: bool = True,
    ) -> None:
        self._models = models
        self._checker = checker
        self._key_of = key_of
        self._fields = fields
        self._more_fields = more_fields
        """May change."""
        self._cache_control = _CACHE_CONTROL if obeys_cache_control else b""

    def question(self, name: str, head: RequestHead, fields: Mapping[str, Any]) -> Question:
        """What is asked; raises for what cannot be asked like that."""
        if not fields.keys() <= self._fields and not (fields.keys() - self._fields).issubset(self._more_fields):
            self._check_unknown(fields)
        known, version = self._models.find(name, fields.get("model_version"))
        guide = None
        if self._key_of is not None or self._cache_control in head.by_name:
            guide = self.guide(name, head, fields)
        if "inputs" in fields:
            if "batch" in fields:
                raise InvalidArgument("send 'inputs' or 'batch', not both")
            values = fields["inputs"]
            only = known.only
            if only is not None and type(values) is list:
                tensor, added = only.tensor("inputs", values)
                return Question(known, version, guide, (tensor,), added)
            part = self._row(known, "inputs", values)
            return Question(known, version, guide, part.row, part.added)
        if "batch" not in fields:
            raise InvalidArgument(f'{MISSING}: send {{"inputs": [...]}} or {{"batch": [[...], ...]}}')
        return BatchQuestion(known, version, guide, self._batch(known, fields["batch"]))

    def guide(self, name: str, head: RequestHead, fields: Mapping[str, object]) -> Guide | None:
        """Whom a request is for, and whether an answer that was kept will not do; None for nobody and any answer."""
        control = head.by_name.get(self._cache_control)
        fresh = control is not None and any(word in control.lower() for word in _FRESH)
        key = self._key_of(name, head, fields) if self._key_of is not None else ""
        return (key, fresh) if key or fresh else None

    def find(self, name: str, wanted: object = None) -> tuple[KnownModel, str]:
        """See `Models.find`."""
        return self._models.find(name, wanted)

    def _row(self, known: KnownModel, label: str, values: Any) -> Part:
        """One prediction's inputs: a list for a model's only input, or an object with each by its name."""
        if not isinstance(values, dict):
            if known.only is None:
                raise InvalidArgument(
                    f"model '{known.name}' has several inputs: send {label} as an object with {known.input_names()}"
                )
            if values is None or isinstance(values, str):
                raise InvalidArgument(f"{label} must be a list of values, or an object with lists by input name")
            tensor, added = known.only.tensor(label, values)
            return Part((tensor,), 1, added)
        tensors = []
        all_added = True
        for name, given in values.items():
            spec = known.inputs.get(name)
            if spec is None:
                near = _nearest(name, known.inputs)
                raise InvalidArgument(f"{label}: model '{known.name}' has no input {_quoted(name)}{near}")
            tensor, added = spec.tensor(f"{label}.{name}", given)
            all_added &= added
            tensors.append(tensor)
        missing = [name for name, spec in known.inputs.items() if name not in values and not spec.optional]
        if missing or not tensors:
            raise InvalidArgument(f"{label} lacks {', '.join(map(_quoted, missing)) or 'values'}")
        return Part(tensors, 1, all_added)

    def _batch(self, known: KnownModel, rows: Any) -> Sequence[Part]:
        if not isinstance(rows, list):
            raise InvalidArgument("'batch' must be a list of rows, each as 'inputs' would be")
        self._checker.check_rows(len(rows))
        if known.most and known.only is not None and not isinstance(rows[0], dict):
            try:
                return self._together(known, known.only, rows)
            except HeadraceError:
                pass  # row by row there may be a way, or at least the words for what is wrong
        parts = [self._row(known, f"batch[{index}]", row) for index, row in enumerate(rows)]
        return list(_joined(parts, known.most)) if known.most > 1 else parts

    def _together(self, known: KnownModel, only: KnownInput, rows: list[Any]) -> Sequence[Part]:
        """Rows of one shape, read in one go."""
        shape, added = only.row_shape("batch[0]", shape_of(rows[0]))
        if only.dtype is None:
            raise InvalidArgument("any type: to be seen row by row")
        whole = tensor_of("batch", only.name, only.dtype, (len(rows), *shape), rows)
        if self._checker.bounds:
            self._checker.check_bounds("batch", only.dtype, whole.array)
        most = known.most
        if len(rows) <= most:
            return (Part((whole,), len(rows), added),)
        pieces = [whole.array[start : start + most] for start in range(0, len(rows), most)]
        return [Part((Tensor(whole.name, whole.dtype, piece),), len(piece), added) for piece in pieces]

    def _check_unknown(self, fields: Mapping[str, Any]) -> None:
        """Let a caller's own notes pass, such as the user by whom a split of yesterday chose; tell what is spelt wrong."""
        known = self._fields.union(self._more_fields)
        for name in fields.keys() - known:
            if isinstance(fields[name], (str, int)) and not _nearest(name, known - _NOT_NOTES):
                continue
            near = _nearest(name, known) or f": the fields are {', '.join(sorted(known))}"
            raise InvalidArgument(f"the request has no field {_quoted(name)}{near}")


def _joined(parts: Sequence[Part], most: int) -> Sequence[Part]:
    """Neighbours of one shape as one part."""
    joined: list[Part] = []
    for _, alike in groupby(parts, lambda part: [(each.name, each.dtype, each.shape) for each in part.row]):
        group = list(alike)
        for start in range(0, len(group), most):
            piece = group[start : start + most]
            tensors = [
                Tensor(first.name, first.dtype, np.concatenate([part.row[index].array for part in piece]))
                for index, first in enumerate(piece[0].row)
            ]
            joined.append(Part(tensors, len(piece), piece[0].added))
    return joined


def _nearest(name: str, names: Collection[str]) -> str:
    near = get_close_matches(name[:64], names, 1, 0.55)
    return f": did you mean '{near[0]}'?" if near else ""


def _quoted(name: str) -> str:
    return ascii(name[:64])
