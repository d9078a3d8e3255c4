# SPDX-License-Identifier: Apache-2.0
"""What is known of a model before its next request comes: how its inputs are read, its outputs written, its versions named.

Made by `models` once per configuration. A request's inputs come without the batch dimension, as people think of them; here
it is added, and the one that a model of its own shape has in front, if it was left out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from headrace.api.predict.checks import Checker
from headrace.api.predict.labels import PARAMETER, parse_labels
from headrace.api.predict.values import Dims, guessed_dtype, is_ragged, shape_of, tensor_of
from headrace.core.dtypes import FP32, FP64
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Tensor
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec, fits

_CODES = {FP32: "f", FP64: "d"}
_NUMBERS = frozenset((int, float))


class KnownInput:
    """One input."""

    __slots__ = (
        "_checker",
        "_count",
        "_open",
        "_pack",
        "_size",
        "batched",
        "dims",
        "dtype",
        "fixed",
        "model",
        "name",
        "optional",
    )

    def __init__(self, spec: InputSpec, config: ModelConfig, checker: Checker) -> None:
        self.model = config.name
        self.name = spec.name
        self.dtype = spec.dtype
        self.dims = spec.dims
        self.optional = spec.optional
        self.batched = config.max_batch_size > 0
        self.fixed = self.dims is not None and -1 not in self.dims
        self._open = self.dims.count(-1) if self.dims is not None else 0
        self._count = math.prod(size for size in self.dims or () if size != -1)
        self._checker = checker
        code = _CODES.get(self.dtype) if self.dtype is not None else None
        plain = self.batched and self.fixed and self.dims is not None and len(self.dims) == 1 and code is not None
        self._size = self.dims[0] if plain and self.dims else -1
        """Of a vector of floats, which most models take and which is read without a detour; -1 for others."""
        self._pack = struct.Struct(f"<{self._size}{code}").pack if plain else None

    def tensor(self, label: str, values: Any) -> tuple[Tensor, bool]:
        """One prediction's input; and whether a dimension was added in front that is not the batch."""
        pack = self._pack
        if (
            pack is None
            or type(values) is not list
            or len(values) != self._size
            or not _NUMBERS.issuperset(map(type, values))
        ):
            return self._tensor(label, values)
        try:
            data = pack(*values)
        except (struct.error, OverflowError):
            raise InvalidArgument(f"{label} has values that do not fit {self._type_name}") from None
        tensor = Tensor(self.name, self.dtype, np.ndarray((1, self._size), self.dtype.numpy, data))  # type: ignore[arg-type,union-attr]
        if self._checker.bounds:
            self._checker.check_bounds(label, tensor.dtype, tensor.array)
        return tensor, False

    def _tensor(self, label: str, values: Any) -> tuple[Tensor, bool]:
        try:
            row, added = self.row_shape(label, shape_of(values))
        except InvalidArgument:
            if is_ragged(values):
                raise InvalidArgument(f"{label} is ragged: all its rows must have the same length") from None
            raise
        dtype = self.dtype or guessed_dtype(values)
        tensor = tensor_of(label, self.name, dtype, (1, *row) if self.batched else row, values)
        if self._checker.bounds:
            self._checker.check_bounds(label, dtype, tensor.array)
        return tensor, added

    def row_shape(self, label: str, shape: Dims) -> tuple[Dims, bool]:
        """The shape that the model is given for one prediction, without the batch, from the one that was sent."""
        dims = self.dims
        if dims is None:
            self._checker.check_size(label, shape)
            return shape, False
        if self.fixed and shape == dims:
            return shape, False
        self._checker.check_size(label, shape)
        if fits(shape, dims):
            return shape, False
        if self.batched:
            if shape[:1] == (1,) and fits(shape[1:], dims):
                return shape[1:], False
        elif fits((1, *shape), dims):
            return (1, *shape), True
        if shape == () and dims == (1,):
            return dims, False
        raise self._wrong_shape(label, shape)

    def counted_shape(self, label: str, count: int) -> tuple[Dims, bool]:
        """The same for numbers that come without a shape."""
        dims = self.dims
        if dims is None or self._open > 1:
            return self.row_shape(label, (count,))
        rest = self._count
        if not self._open:
            if count == rest:
                return dims, False
        elif rest and count % rest == 0:
            self._checker.check_size(label, (count,))
            return tuple(count // rest if size == -1 else size for size in dims), False
        self._checker.check_size(label, (count,))
        raise InvalidArgument(f"{label} has {count} values, but {self._takes()}")

    @property
    def _type_name(self) -> str:
        return self.dtype.name if self.dtype is not None else "any type"

    def _takes(self) -> str:
        dims = "any shape" if self.dims is None else f"shape {_listed(self.dims)}"
        return f"model '{self.model}' takes {dims} of {self._type_name}"

    def _wrong_shape(self, label: str, shape: Dims) -> InvalidArgument:
        text = f"{label} has shape {_listed(shape)}, but {self._takes()}"
        if self.batched and self.dims is not None and len(shape) == len(self.dims) + 1:
            text += '; send several rows as {"batch": [...]}'
        return InvalidArgument(text)


class KnownOutput:
    """One output."""

    __slots__ = ("_ones", "alone", "row")

    def __init__(self, spec: OutputSpec | None, batched: bool) -> None:
        dims = spec.dims if spec is not None else None
        self._ones = tuple(size == 1 for size in dims) if dims is not None else ()
        fixed = dims is not None and -1 not in dims
        self.row = self.row_shape(dims) if fixed and dims is not None else None
        """How one prediction is written, where that is always the same."""
        self.alone = (1, *dims) if fixed and batched and dims is not None else None
        """The shape of one prediction as the model gives it, where that is."""

    def row_shape(self, shape: Dims, added: bool = False) -> Dims:
        """A prediction's shape without the dimensions that are always 1, but for the last of them."""
        # Those that only happen to be 1 stay: else the shape of an answer would depend on the length of a text.
        ones = self._ones if len(self._ones) == len(shape) else (False,) * len(shape)
        kept = [
            size
            for index, (size, always) in enumerate(zip(shape, ones, strict=True))
            if size != 1 or not (always or (added and index == 0))
        ]
        return tuple(kept) or (1,)


class KnownModel:
    """One model."""

    def __init__(self, config: ModelConfig, checker: Checker) -> None:
        self.config = config
        self.name = config.name
        self.most = config.max_batch_size
        self.decoupled = config.decoupled
        self.labels = parse_labels(config.parameters.get(PARAMETER, ""), config.name)
        self.inputs: Mapping[str, KnownInput] = {spec.name: KnownInput(spec, config, checker) for spec in config.inputs}
        required = [known for known in self.inputs.values() if not known.optional] or list(self.inputs.values())
        self.only = required[0] if len(required) == 1 else None
        """The input that needs no name; None where there are several."""
        self.outputs: Mapping[str, KnownOutput] = {
            spec.name: KnownOutput(spec, self.most > 0) for spec in config.outputs
        }
        self.one_output = len(config.outputs) == 1
        plain = self.one_output and config.outputs[0].dtype in (FP32, FP64)
        self.plain = self.outputs[config.outputs[0].name] if plain else None
        """The output, where there is one and it is of floats that JSON can have as they are."""
        self._tails: dict[str, bytes] = {}

    def tail(self, version: str) -> bytes:
        """What follows the predictions of a version in JSON, up to the latency."""
        tail = self._tails.get(version)
        if tail is None:
            label = orjson.dumps(self.labels.label(version))
            tail = self._tails[version] = b',"model_version":%b,"latency_ms":' % label
        return tail

    def input_names(self) -> str:
        """For error texts."""
        return ", ".join(f"'{name}'" for name in self.inputs)


def _listed(shape: Dims) -> str:
    return f"[{', '.join(map(str, shape))}]"
