# SPDX-License-Identifier: Apache-2.0
"""Check the inputs of a request and convert JSON values to tensors; errors say which value is wrong.

Messages name the setting that refuses a request. The shape is checked here; `core.tensors` converts the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.api.predict.settings import InputChecks
from headrace.core.dtypes import BF16, BOOL, BYTES, FP32, DType, bf16_to_float32
from headrace.core.errors import InvalidArgument, TooLarge
from headrace.core.limits import TENSOR_RANK
from headrace.core.tensors import Tensor, tensor_from_values

_FEW = 64
_NOT_FINITE = "NaN or infinity in the inputs: send finite numbers only"


Dims = tuple[int, ...]
_TYPE_NAMES = {"b": "true or false", "i": "an integer", "u": "an integer", "f": "a number", "O": "a string"}
_TYPES: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "O": (str,)}


class InputValidator:
    """Applies `InputChecks`. Disabled checks cost nothing."""

    def __init__(self, checks: InputChecks) -> None:
        self._numbers = checks.most_numbers if checks.enabled else 0
        self._rows = checks.most_rows if checks.enabled else 0
        self._longest = checks.longest_sequence if checks.enabled else 0
        self._least = checks.least if checks.enabled else None
        self._most = checks.most if checks.enabled else None
        self.finite = checks.enabled and not checks.allow_nan
        """Whether to refuse NaN and infinities."""
        self.refuses_empty = checks.enabled
        self.bounds = self._least is not None or self._most is not None
        """Whether `check_bounds` checks anything."""

    def check_rows(self, count: int) -> None:
        """Check the number of predictions in one request."""
        if not count:
            raise InvalidArgument("'batch' cannot be empty: send at least one row")
        if self._rows and count > self._rows:
            raise TooLarge(f"'batch' has {count} rows; the maximum is {self._rows} (max_rows): send several requests")

    def check_size(self, label: str, shape: Sequence[int]) -> None:
        """Check the size of one prediction's input, where the model does not fix it."""
        count = math.prod(shape)
        if not count and self.refuses_empty:
            raise InvalidArgument(f"{label} cannot be empty")
        if self._numbers and count > self._numbers:
            raise TooLarge(f"{label} has {count} values, which exceeds the maximum of {self._numbers} (max_inputs)")
        if self._longest and shape and max(shape) > self._longest:
            raise TooLarge(
                f"{label} has a sequence of {max(shape)}, which exceeds max_sequence_length, {self._longest}: shorten it"
            )

    def check_bounds(self, label: str, dtype: DType, array: npt.NDArray[Any]) -> None:
        """Check that every number is within the bounds."""
        if dtype is BF16:
            array = bf16_to_float32(array)
        if array.dtype.kind not in "iuf" or not array.size:
            return
        if self._least is not None and array.min() < self._least:
            raise InvalidArgument(f"{label} has {_number(array.min())}; the smallest allowed value is {self._least:g}")
        if self._most is not None and array.max() > self._most:
            raise InvalidArgument(f"{label} has {_number(array.max())}; the largest allowed value is {self._most:g}")

    def check_finite(self, numbers: npt.NDArray[np.floating[Any]]) -> None:
        """Check that a flat array has no NaN and no infinity."""
        if not self.finite:
            return
        # A sum is finite only if all numbers are; for few numbers it is faster than numpy.
        if len(numbers) <= _FEW and math.isfinite(sum(numbers.tolist())):
            return
        if not np.isfinite(numbers).all():
            raise not_finite_error()


def not_finite_error() -> InvalidArgument:
    """Return the error for inputs with NaN or infinity."""
    return InvalidArgument(_NOT_FINITE)


def _number(value: Any) -> str:
    return f"{value.item():g}"


def shape_of(values: Any) -> Dims:
    """Return the shape of nested lists, by their first elements."""
    shape: list[int] = []
    while isinstance(values, list):
        shape.append(len(values))
        if not values or len(shape) > TENSOR_RANK:
            break
        values = values[0]
    return tuple(shape)


def is_ragged(values: Any, depth: int = 0) -> bool:
    """Return whether sibling rows have different lengths, or only some of them are lists."""
    if not isinstance(values, list) or depth > TENSOR_RANK:
        return False
    lengths = {len(value) if isinstance(value, list) else -1 for value in values}
    return len(lengths) > 1 or (lengths != {-1} and any(is_ragged(value, depth + 1) for value in values))


def guess_dtype(values: Any) -> DType:
    """Return the data type for a model that accepts any: FP32 for numbers."""
    while isinstance(values, list) and values:
        values = values[0]
    return BOOL if isinstance(values, bool) else BYTES if isinstance(values, str) else FP32


def parse_tensor(label: str, name: str, dtype: DType, shape: Sequence[int], values: Any) -> Tensor:
    """Convert JSON values to a tensor. Integers may be written as 2.0, since some clients have only floats."""
    kind = "f" if dtype is BF16 else dtype.numpy.kind
    try:
        return tensor_from_values(name, dtype, shape, values)
    except InvalidArgument as error:
        if kind in "iu":
            integers, changed = _to_integers(values)
            if changed:
                return parse_tensor(label, name, dtype, shape, integers)
        raise InvalidArgument(_explain(label, kind, dtype, values) or f"{label}: {error.message}") from None


def _to_integers(values: Any, depth: int = 0) -> tuple[Any, bool]:
    """Replace integral floats by integers; return whether there were any."""
    if isinstance(values, list) and depth <= TENSOR_RANK:
        pairs = [_to_integers(value, depth + 1) for value in values]
        return [value for value, _ in pairs], any(changed for _, changed in pairs)
    if type(values) is float and values.is_integer():
        return int(values), True
    return values, False


def _explain(label: str, kind: str, dtype: DType, values: Any) -> str | None:
    """Return a message about the first wrong value; None if no single value is wrong."""
    wrong = _first_wrong(values, len(shape_of(values)), frozenset(_TYPES[kind]))
    if wrong is None:
        return None
    indexes, value, ragged = wrong
    path = label + "".join(f"[{index}]" for index in reversed(indexes))
    if ragged:
        return f"{path} is ragged: all its rows must have the same length"
    if isinstance(value, list):
        return f"{path} is a list where the values before it are not: all rows must have the same shape"
    return f"{path} is {_format_value(value)}, but the model takes {dtype.name}: send {_TYPE_NAMES[kind]}"


def _first_wrong(values: Any, rank: int, types: frozenset[type]) -> tuple[list[int], Any, bool] | None:
    """Return the indexes of the first wrong value (innermost first), the value, and whether it is a ragged list."""
    if not isinstance(values, list) or not rank:
        return None if type(values) in types else ([], values, False)
    kinds = set(map(type, values))
    if kinds <= types:
        return None
    if list in kinds and len({len(value) if type(value) is list else -1 for value in values}) > 1:
        return [], values, True
    for index, value in enumerate(values):
        wrong = _first_wrong(value, rank - 1, types)
        if wrong is not None:
            wrong[0].append(index)
            return wrong
    return None


def _format_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {value[:32]!a}"
    return "an object" if isinstance(value, dict) else f"{value:g}"
