# SPDX-License-Identifier: Apache-2.0
"""Read the type hints of a `predict` function as inputs and outputs.

np.ndarray                                      an array; type and shape unknown
npt.NDArray[np.float32]                         with a type
Annotated[npt.NDArray[np.float32], (-1, 16)]    with type and shape; -1 is any size
float, int, bool, str, bytes, np.int32, ...     one value
list[float], list[list[str]]                    a list
X | None, or a default value                    an optional input
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from headrace.backends.python.child.errors import TritonModelException
from headrace.core.dtypes import BF16, BOOL, BYTES, DTYPES, FP64, INT64, DType

Dims = tuple[int, ...]

_PLAIN: Mapping[Any, DType] = {float: FP64, int: INT64, bool: BOOL, str: BYTES, bytes: BYTES}
_NUMPY: Mapping[Any, DType] = {
    **{dtype.numpy.type: dtype for dtype in DTYPES.values() if dtype is not BF16},
    np.str_: BYTES,
    np.bytes_: BYTES,
}
_ANY_NUMBER = frozenset({np.generic, np.number, np.integer, np.inexact, np.floating, np.signedinteger})
_STREAMS = frozenset(
    {
        collections.abc.Iterator,
        collections.abc.Generator,
        collections.abc.AsyncIterator,
        collections.abc.AsyncGenerator,
    }
)
_SERIES = _STREAMS | {collections.abc.Iterable, collections.abc.AsyncIterable}
_WRITE = (
    "write np.ndarray, npt.NDArray[np.float32], Annotated[npt.NDArray[np.float32], (-1, 16)], float, int, bool, str, "
    "bytes, or a list of these"
)


@dataclass(frozen=True, slots=True)
class Hint:
    """The content of one hint. None: unknown."""

    dtype: DType | None = None
    dims: Dims | None = None
    form: Literal["array", "value", "list"] = "array"
    text: bool = False
    """BYTES elements are str."""
    plain: bool = False
    """The value is a Python scalar, not a numpy one."""
    optional: bool = False
    has_default: bool = False
    """If the input is missing, the argument is not passed."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a function."""

    inputs: Mapping[str, Hint]
    outputs: Mapping[str, Hint]
    """Empty if the hint has no names, as for `dict`."""
    streams: bool
    """It returns several responses."""
    awaits: bool
    """It is `async`."""


def read_signature(function: Callable[..., Any], *, bound: bool) -> Signature:
    """Read the hints of a function, or of a method with `self` if it is `bound`."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise TritonModelException(f"the type hints of predict cannot be read: {error}") from None
    parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    inputs: dict[str, Hint] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TritonModelException(
                f"predict has the argument '{parameter}', which has no name for a request to use: name each input"
            )
        hint = _read(hints.get(parameter.name, np.ndarray), f"argument '{parameter.name}' of predict")
        if parameter.default is not parameter.empty:
            hint = replace(hint, optional=True, has_default=True)
        inputs[parameter.name] = hint
    if not inputs:
        raise TritonModelException("predict takes no arguments: give it one for each input of the model")
    returned = hints.get("return", np.ndarray)
    awaits = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    streams = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    origin = typing.get_origin(returned)
    if origin in _STREAMS or (streams and origin in _SERIES):
        awaits = awaits or origin in (collections.abc.AsyncIterator, collections.abc.AsyncGenerator)
        streams = True
        returned = typing.get_args(returned)[0]
    return Signature(inputs, _read_outputs(returned), streams, awaits)


def _read_outputs(annotation: Any) -> dict[str, Hint]:
    fields: Mapping[str, Any] | None = None
    if typing.is_typeddict(annotation) or dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields"):
        # The hints of the class, only for its fields.
        fields = typing.get_type_hints(annotation, include_extras=True)
    elif typing.get_origin(annotation) is tuple:
        parts = typing.get_args(annotation)
        if not parts or Ellipsis in parts:
            raise TritonModelException(f"predict returns {annotation}, of no certain length: name each, tuple[X, Y]")
        fields = {f"output_{index}": part for index, part in enumerate(parts)}
    elif annotation in (dict, tuple) or typing.get_origin(annotation) in (dict, collections.abc.Mapping):
        return {}
    if fields is None:
        return {"output": _read(annotation, "what predict returns")}
    return {name: _read(part, f"output '{name}' of predict") for name, part in fields.items()}


def _read(annotation: Any, where: str) -> Hint:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (np.ndarray, Any, inspect.Parameter.empty):
        return Hint()
    if origin is Annotated:
        return _annotated(_read(parts[0], where), parts[1:], where)
    if origin in (typing.Required, typing.NotRequired):
        return _read(parts[0], where)
    if origin in (typing.Union, types.UnionType):
        non_none = [part for part in parts if part is not types.NoneType]
        if len(non_none) == 1 and len(parts) == 2:
            return replace(_read(non_none[0], where), optional=True)
    elif origin is np.ndarray:
        dtype, text = _array_type(parts[1] if len(parts) > 1 else Any, where)
        return Hint(dtype, _array_dims(parts[0]), text=text)
    elif origin in (list, collections.abc.Sequence):
        element = _read(parts[0], where)
        if element.form != "array":
            return replace(element, dims=(-1,) if element.form == "value" else (-1, *(element.dims or ())), form="list")
    elif annotation in _PLAIN:
        return Hint(_PLAIN[annotation], (1,), "value", text=annotation is str, plain=True)
    elif annotation in _NUMPY:
        return Hint(_NUMPY[annotation], (1,), "value", text=annotation is np.str_)
    raise TritonModelException(f"the type hint of {where} is {_shown(annotation)}, which no tensor can be: {_WRITE}")


def _annotated(hint: Hint, notes: tuple[Any, ...], where: str) -> Hint:
    for note in notes:
        # Other annotations are for other tools.
        if isinstance(note, tuple | list):
            sizes = tuple(note)
            if not sizes or not all(type(size) is int and (size > 0 or size == -1) for size in sizes):
                raise TritonModelException(
                    f"the shape of {where} is {sizes}: use whole numbers above 0, or -1 for any size, such as (-1, 16)"
                )
            if hint.form == "value":
                raise TritonModelException(f"{where} is one value and has no shape: make it an array, or a list")
            return replace(hint, dims=sizes)
    return hint


def _array_type(annotation: Any, where: str) -> tuple[DType | None, bool]:
    """Return the type in `np.dtype[...]`, and whether it is text."""
    parts = typing.get_args(annotation)
    scalar = parts[0] if parts else Any
    scalar = typing.get_origin(scalar) or scalar
    if scalar is Any or isinstance(scalar, typing.TypeVar) or scalar in _ANY_NUMBER:
        return None, False
    if scalar not in _NUMPY:
        names = ", ".join(sorted(scalar_type.__name__ for scalar_type in _NUMPY))
        raise TritonModelException(f"{where} has the type {_shown(scalar)}, which no tensor has: use one of {names}")
    return _NUMPY[scalar], scalar is np.str_


def _array_dims(annotation: Any) -> Dims | None:
    """Return the shape in `np.ndarray[tuple[int, Literal[3]], ...]`; most hints have none."""
    if typing.get_origin(annotation) is not tuple:
        return None
    sizes = []
    for part in typing.get_args(annotation):
        if part is Ellipsis or isinstance(part, typing.TypeVar) or part is Any:
            return None
        literal = typing.get_args(part)
        sizes.append(literal[0] if literal and isinstance(literal[0], int) else -1)
    return tuple(sizes) or None


def _shown(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
