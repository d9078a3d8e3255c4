# SPDX-License-Identifier: Apache-2.0
"""JSON values as a model's tensor: which shape they have, whether the model takes it, and what is wrong if not.

Called by `known` for all that is not the plain case. The conversion itself is `core.tensors`'; here is the shape, and an
error that says which value it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.core.dtypes import BF16, BOOL, BYTES, FP32, DType
from headrace.core.errors import InvalidArgument
from headrace.core.limits import TENSOR_RANK
from headrace.core.tensors import Tensor, tensor_from_values

Dims = tuple[int, ...]

_WORDS = {"b": "true or false", "i": "a whole number", "u": "a whole number", "f": "a number", "O": "a string"}
_TYPES: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "O": (str,)}


def shape_of(values: Any) -> Dims:
    """The shape of nested lists, by their first elements."""
    shape: list[int] = []
    while isinstance(values, list):
        shape.append(len(values))
        if not values or len(shape) > TENSOR_RANK:
            break
        values = values[0]
    return tuple(shape)


def is_ragged(values: Any, depth: int = 0) -> bool:
    """Whether rows side by side have different lengths, or one of them is none."""
    if not isinstance(values, list) or depth > TENSOR_RANK:
        return False
    lengths = {len(each) if isinstance(each, list) else -1 for each in values}
    return len(lengths) > 1 or (lengths != {-1} and any(is_ragged(each, depth + 1) for each in values))


def guessed_dtype(values: Any) -> DType:
    """For a model that takes any: numbers are FP32, as most models want them."""
    while isinstance(values, list) and values:
        values = values[0]
    return BOOL if isinstance(values, bool) else BYTES if isinstance(values, str) else FP32


def tensor_of(label: str, name: str, dtype: DType, shape: Sequence[int], values: Any) -> Tensor:
    """The tensor. Whole numbers may be written as 2.0, since not every client has two kinds of number."""
    kind = "f" if dtype is BF16 else dtype.numpy.kind
    try:
        return tensor_from_values(name, dtype, shape, values)
    except InvalidArgument as error:
        if kind in "iu":
            whole, changed = _whole(values)
            if changed:
                return tensor_of(label, name, dtype, shape, whole)
        raise InvalidArgument(_explained(label, kind, dtype, values) or f"{label}: {error.message}") from None


def _whole(values: Any, depth: int = 0) -> tuple[Any, bool]:
    """The same with whole numbers for floats that are whole."""
    if isinstance(values, list) and depth <= TENSOR_RANK:
        pairs = [_whole(value, depth + 1) for value in values]
        return [value for value, _ in pairs], any(changed for _, changed in pairs)
    if type(values) is float and values.is_integer():
        return int(values), True
    return values, False


def _explained(label: str, kind: str, dtype: DType, values: Any) -> str | None:
    """What is wrong with the first value that is wrong; None if it is not the kind of mistake that a value makes."""
    wrong = _first_wrong(values, len(shape_of(values)), frozenset(_TYPES[kind]))
    if wrong is None:
        return None
    place, value, ragged = wrong
    path = label + "".join(f"[{index}]" for index in reversed(place))
    if ragged:
        return f"{path} is ragged: all its rows must have the same length"
    if isinstance(value, list):
        return f"{path} is a list where the values before it are not: all rows must have the same shape"
    return f"{path} is {_shown(value)}, but the model takes {dtype.name}: send {_WORDS[kind]}"


def _first_wrong(values: Any, rank: int, types: frozenset[type]) -> tuple[list[int], Any, bool] | None:
    """Where it is, the innermost index first, and what; and whether it is a list of lists of different lengths."""
    if not isinstance(values, list) or not rank:
        return None if type(values) in types else ([], values, False)
    kinds = set(map(type, values))
    if kinds <= types:
        return None
    if list in kinds and len({len(each) if type(each) is list else -1 for each in values}) > 1:
        return [], values, True
    for index, each in enumerate(values):
        wrong = _first_wrong(each, rank - 1, types)
        if wrong is not None:
            wrong[0].append(index)
            return wrong
    return None


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {value[:32]!a}"
    return "an object" if isinstance(value, dict) else f"{value:g}"
