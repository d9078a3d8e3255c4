# SPDX-License-Identifier: Apache-2.0
"""Conversion between tensors and the arguments and results of a `predict` function: arrays, scalars, lists, strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.backends.python.child.errors import TritonModelException
from headrace.backends.python.child.type_hints import Dims, Hint
from headrace.core.dtypes import BYTES, DType, to_bytes
from headrace.core.errors import HeadraceError

Array = npt.NDArray[Any]


class WrongInput(Exception):
    """An invalid input, with what to send instead."""


@dataclass(frozen=True, slots=True)
class Output:
    """An output as the configuration declares it. None and (): not declared."""

    name: str
    dtype: DType | None
    dims: Dims


def to_argument(name: str, array: Array, hint: Hint) -> Any:
    """Convert an input to the function's argument."""
    if hint.text:
        array = _decoded(name, array)
    if hint.form == "array":
        return array
    if hint.form == "list":
        return array.tolist()
    if array.size != 1:
        raise WrongInput(f"input '{name}' is one value, and shape {list(array.shape)} has {array.size}: send shape [1]")
    value = array.reshape(1)[0]
    return value.item() if hint.plain and isinstance(value, np.generic) else value


def to_outputs(returned: Any, outputs: Sequence[Output]) -> list[tuple[Output, Any]]:
    """Return what a function returned, by output."""
    if isinstance(returned, Mapping):
        named: Mapping[str, Any] = returned
    elif dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        named = {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    elif isinstance(returned, tuple) and (len(outputs) > 1 or hasattr(returned, "_fields")):
        if len(returned) != len(outputs):
            raise TritonModelException(
                f"predict returned {len(returned)} values for the outputs {_names(outputs)}: return {len(outputs)}"
            )
        named = {output.name: value for output, value in zip(outputs, returned, strict=True)}
    elif len(outputs) == 1:
        named = {outputs[0].name: returned}
    else:
        raise TritonModelException(
            f"predict returned a {type(returned).__name__} for the outputs {_names(outputs)}: return a dict or a tuple"
        )
    known = {output.name for output in outputs}
    for name in named:
        if name not in known:
            raise TritonModelException(
                f"predict returned '{name}', which is not an output of the model ({_names(outputs)}): rename it, or "
                "declare it in the type hint"
            )
    for output in outputs:
        if output.name not in named:
            raise TritonModelException(f"predict returned no '{output.name}'; its outputs are {_names(outputs)}")
    return [(output, named[output.name]) for output in outputs]


def to_array(value: Any, output: Output, *, batched: bool) -> Array:
    """Convert a returned value to an array of the declared type and shape."""
    if value is None:
        raise TritonModelException(f"predict returned None for output '{output.name}': end it with a return")
    array = _text(value, output) if output.dtype is BYTES else _numbers(value, output)
    dims = (-1, *output.dims) if batched else output.dims
    if not output.dims:
        return array if array.ndim else array.reshape(1)
    if not batched and array.ndim == 0 and all(size in (1, -1) for size in dims):
        array = array.reshape((1,) * len(dims))
    elif batched and array.ndim == 1 and output.dims in ((1,), (-1,)):
        # One value per row, as from argmax.
        array = array.reshape(-1, 1)
    if len(array.shape) != len(dims) or any(w not in (-1, s) for w, s in zip(dims, array.shape, strict=True)):
        raise TritonModelException(
            f"predict returned shape {list(array.shape)} for output '{output.name}', which has {list(dims)}: correct one "
            "of them; a hint with a shape is Annotated[npt.NDArray[np.float32], (-1, 16)]"
        )
    return array


def _numbers(value: Any, output: Output) -> Array:
    try:
        array = np.asarray(value)
    except ValueError:
        raise TritonModelException(f"predict returned rows of different lengths for output '{output.name}'") from None
    if output.dtype is None:
        return _text(value, output) if array.dtype.kind in "USO" else array
    if array.dtype == output.dtype.numpy:
        return array
    # No conversion from float to int: the intent is unclear.
    if not np.can_cast(array.dtype, output.dtype.numpy, "same_kind"):
        raise TritonModelException(
            f"predict returned {array.dtype} for output '{output.name}', which is {output.dtype.name}: convert it with "
            "astype, or say the right type in the hint, such as npt.NDArray[np.int64]"
        )
    return array.astype(output.dtype.numpy)


def _text(value: Any, output: Output) -> Array:
    # Objects from the start: numpy's own byte strings lose trailing zeros.
    given = value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
    array = np.empty(given.size, dtype=object)
    try:
        array[:] = [to_bytes(element) for element in given.ravel().tolist()]
    except HeadraceError as error:
        raise TritonModelException(f"output '{output.name}' of predict: {error.message}") from None
    return array.reshape(given.shape)


def _decoded(name: str, array: Array) -> Array:
    text = np.empty(array.size, dtype=object)
    try:
        text[:] = [bytes(element).decode() for element in array.ravel()]
    except UnicodeDecodeError:
        raise WrongInput(f"input '{name}' has an element that is not UTF-8, and the model takes text") from None
    return text.reshape(array.shape)


def _names(outputs: Sequence[Output]) -> str:
    return ", ".join(output.name for output in outputs)
