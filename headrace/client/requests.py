# SPDX-License-Identifier: Apache-2.0
"""What a caller wants computed: arrays, lists and options become an `Inference`, which both protocols can write.

Checks here what can be known without the model, so that the mistake is told where it was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.dtypes import BF16, BYTES, DType, dtype_named, float32_to_bf16
from headrace.core.errors import InvalidArgument
from headrace.core.messages import ParameterValue
from headrace.core.tensors import Tensor, tensor_from_values

Parameters = Mapping[str, ParameterValue]


@dataclass(frozen=True, slots=True)
class Input:
    """An input with more to say than an array has: `Input(values, dtype="BF16")`."""

    values: Any
    """An array, or a list; BF16 takes float32, or its bits as uint16."""
    dtype: str = ""
    """Its type in the protocol's words (FP32, INT64, BF16, BYTES, ...); "" for that of the array."""
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """An output with more to say than a name: `Output("scores", classes=3)`."""

    name: str
    classes: int = 0
    """Ask for so many of the largest values with their labels instead of the tensor; read them by `Result.classes`."""
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One request of a sequence, for models with a memory."""

    id: int | str
    """The same for all requests of a sequence; not 0 or ""."""
    start: bool = False
    """The first request of the sequence."""
    end: bool = False
    """The last one."""


@dataclass(frozen=True, slots=True)
class Inference:
    """A request in no protocol's words."""

    model: str
    version: str
    id: str
    inputs: tuple[tuple[Tensor, Parameters], ...]
    outputs: tuple[Output, ...]
    parameters: dict[str, ParameterValue]


def inference_of(
    model: str,
    inputs: Any,
    *,
    outputs: Sequence[str | Output] = (),
    version: int | str = "",
    parameters: Parameters | None = None,
    request_id: str = "",
    sequence: SequenceStep | None = None,
    priority: int | None = None,
) -> Inference:
    """Check and convert what `infer` was given."""
    if not isinstance(inputs, Mapping):
        raise InvalidArgument("inputs must be a dictionary from names to arrays, such as {'x': array}")
    if isinstance(outputs, str):
        raise InvalidArgument(f"outputs must be a list, such as ['{outputs}']")
    said: dict[str, Any] = dict(parameters or {})
    for name, value in said.items():
        if not isinstance(value, bool | int | float | str):
            kind = type(value).__name__
            raise InvalidArgument(f"parameter '{name}' is a {kind}: use a truth value, a number or text")
    if sequence is not None:
        if not sequence.id:
            raise InvalidArgument("the id of a sequence must not be 0 or empty: that means no sequence")
        said |= {"sequence_id": sequence.id, "sequence_start": sequence.start, "sequence_end": sequence.end}
    if priority is not None:
        said["priority"] = priority
    return Inference(
        model_named(model),
        str(version),
        request_id,
        tuple(
            (tensor_of(name, each), each.parameters if isinstance(each, Input) else {}) for name, each in inputs.items()
        ),
        tuple(each if isinstance(each, Output) else Output(each) for each in outputs),
        said,
    )


def model_named(name: str) -> str:
    """A model's name that is one."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument("the name of the model must be text, and not empty")
    return name


def tensor_of(name: str, value: Any) -> Tensor:
    """An input as a tensor; a view of the caller's array where that is possible."""
    wanted = ""
    if isinstance(value, Input):
        value, wanted = value.values, value.dtype
    dtype = dtype_named(wanted) if wanted else None
    if isinstance(value, str | bytes):
        value = [value]
    if isinstance(value, list | tuple):
        return _from_list(name, list(value), dtype)
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        array, own = array.view(np.uint16), BF16
        return Tensor(name, own, array) if dtype in (None, BF16) else _refused(name, "BF16", dtype)
    if dtype is None:
        return Tensor.of(name, array)
    return Tensor(name, dtype, _converted(name, array, dtype))


def _from_list(name: str, values: list[Any], dtype: DType | None) -> Tensor:
    shape, first = _shape_of(values)
    if dtype is None:
        if not isinstance(first, str | bytes):
            raise InvalidArgument(
                f"input '{name}' is a list of {type(first).__name__}, which has no tensor type of its own: give a numpy "
                "array, or say the type: Input(values, dtype='FP32')"
            )
        dtype = BYTES
    return tensor_from_values(name, dtype, shape, values)


def _shape_of(values: Any) -> tuple[list[int], Any]:
    """The shape of nested lists if they are even, which is checked later; and the first element."""
    shape: list[int] = []
    while isinstance(values, list | tuple):
        shape.append(len(values))
        if not values:
            return shape, None
        values = values[0]
    return shape, values


def _converted(name: str, array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    if dtype is BF16:
        if array.dtype == np.uint16:
            return array
        if array.dtype.kind != "f":
            _refused(name, str(array.dtype), dtype)
        return float32_to_bf16(array.astype(np.float32))
    if dtype is BYTES:
        return Tensor.of(name, array).array if array.dtype.kind in "SUOT" else _refused(name, str(array.dtype), dtype)
    # Floats may lose digits, which is what smaller floats are for; whole numbers may not change.
    if not np.can_cast(array.dtype, dtype.numpy, "same_kind" if array.dtype.kind == "f" else "safe"):
        _refused(name, str(array.dtype), dtype)
    return array.astype(dtype.numpy, copy=False)


def _refused(name: str, own: str, dtype: DType | None) -> Any:
    wanted = dtype.name if dtype is not None else "another type"
    raise InvalidArgument(f"input '{name}' is {own} and does not become {wanted} by itself: convert it with astype()")
