# SPDX-License-Identifier: Apache-2.0
"""Requests and results: convert arrays, lists and options to an `Inference`, and a response to arrays.

Arguments are checked before anything is sent, as far as that is possible without the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.dtypes import BF16, BYTES, DType, bf16_to_float32, dtype_named, float32_to_bf16
from headrace.core.errors import InvalidArgument
from headrace.core.requests import NO_PARAMETERS, ParameterValue
from headrace.core.requests import Parameters as ResponseParameters
from headrace.core.tensors import Tensor, tensor_from_values

Parameters = Mapping[str, ParameterValue]


@dataclass(frozen=True, slots=True)
class Input:
    """An input with a type or parameters: `Input(values, dtype="BF16")`."""

    values: Any
    """An array, or a list; BF16 takes float32, or its bits as uint16."""
    dtype: str = ""
    """Type in the protocol (FP32, INT64, BF16, BYTES, ...); "" for that of the array."""
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """An output with options: `Output("scores", classes=3)`."""

    name: str
    classes: int = 0
    """Return this many of the largest values with their labels instead of the tensor; read them with `Result.classes`."""
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One request of a sequence, for stateful models."""

    id: int | str
    """The same for all requests of a sequence; not 0 or ""."""
    start: bool = False
    """The first request of the sequence."""
    end: bool = False
    """The last request of the sequence."""


@dataclass(frozen=True, slots=True)
class Inference:
    """A request, independent of the protocol."""

    model: str
    version: str
    id: str
    inputs: tuple[tuple[Tensor, Parameters], ...]
    outputs: tuple[Output, ...]
    parameters: dict[str, ParameterValue]


def build_inference(
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
    """Check and convert the arguments of `infer`."""
    if not isinstance(inputs, Mapping):
        raise InvalidArgument("inputs must be a dictionary from names to arrays, such as {'x': array}")
    if isinstance(outputs, str):
        raise InvalidArgument(f"outputs must be a list, such as ['{outputs}']")
    all_parameters: dict[str, Any] = dict(parameters or {})
    for name, value in all_parameters.items():
        if not isinstance(value, bool | int | float | str):
            kind = type(value).__name__
            raise InvalidArgument(f"parameter '{name}' is a {kind}: use a bool, a number or a string")
    if sequence is not None:
        if not sequence.id:
            raise InvalidArgument("the id of a sequence must not be 0 or empty: that means no sequence")
        all_parameters |= {"sequence_id": sequence.id, "sequence_start": sequence.start, "sequence_end": sequence.end}
    if priority is not None:
        all_parameters["priority"] = priority
    return Inference(
        check_model_name(model),
        str(version),
        request_id,
        tuple(
            (build_tensor(name, value), value.parameters if isinstance(value, Input) else {})
            for name, value in inputs.items()
        ),
        tuple(output if isinstance(output, Output) else Output(output) for output in outputs),
        all_parameters,
    )


def check_model_name(name: str) -> str:
    """Check the name of a model."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument("the name of the model must be text, and not empty")
    return name


def build_tensor(name: str, value: Any) -> Tensor:
    """Convert an input to a tensor; a view of the caller's array where possible."""
    dtype_name = ""
    if isinstance(value, Input):
        value, dtype_name = value.values, value.dtype
    dtype = dtype_named(dtype_name) if dtype_name else None
    if isinstance(value, str | bytes):
        value = [value]
    if isinstance(value, list | tuple):
        return _from_list(name, list(value), dtype)
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        array, own = array.view(np.uint16), BF16
        return Tensor(name, own, array) if dtype in (None, BF16) else _raise_type_error(name, "BF16", dtype)
    if dtype is None:
        return Tensor.of(name, array)
    return Tensor(name, dtype, _convert(name, array, dtype))


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
    """Return the shape of nested lists and the first element. Uneven lists are detected later."""
    shape: list[int] = []
    while isinstance(values, list | tuple):
        shape.append(len(values))
        if not values:
            return shape, None
        values = values[0]
    return shape, values


def _convert(name: str, array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    if dtype is BF16:
        if array.dtype == np.uint16:
            return array
        if array.dtype.kind != "f":
            _raise_type_error(name, str(array.dtype), dtype)
        return float32_to_bf16(array.astype(np.float32))
    if dtype is BYTES:
        return (
            Tensor.of(name, array).array
            if array.dtype.kind in "SUOT"
            else _raise_type_error(name, str(array.dtype), dtype)
        )
    # Floats may lose digits; integers must not change.
    if not np.can_cast(array.dtype, dtype.numpy, "same_kind" if array.dtype.kind == "f" else "safe"):
        _raise_type_error(name, str(array.dtype), dtype)
    return array.astype(dtype.numpy, copy=False)


def _raise_type_error(name: str, own: str, dtype: DType | None) -> Any:
    dtype_name = dtype.name if dtype is not None else "another type"
    raise InvalidArgument(
        f"input '{name}' is {own} and does not become {dtype_name} by itself: convert it with astype()"
    )


@dataclass(frozen=True, slots=True)
class ClassScore:
    """One class of a row."""

    value: float
    index: int
    label: str
    """"" if the model has no label for it."""


class Result(Mapping[str, npt.NDArray[Any]]):
    """The outputs by name, as numpy arrays: BYTES are arrays of `bytes`, BF16 is widened to float32."""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        tensors: Sequence[Tensor],
        request_id: str = "",
        parameters: ResponseParameters = NO_PARAMETERS,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        """The version that ran the request."""
        self.request_id = request_id
        """The id given to `infer`, or the one in the server's log."""
        self.parameters = parameters
        """Parameters of the response."""
        self.tensors = {tensor.name: tensor for tensor in tensors}
        """The outputs as tensors: `tensors["y"].dtype.name` is the type; BF16 is its bits."""

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return one output."""
        tensor = self.tensors.get(name)
        if tensor is None:
            names = ", ".join(self.tensors) or "none"
            raise KeyError(f"no output {name!r}; there are: {names}")
        return bf16_to_float32(tensor.array) if tensor.dtype is BF16 else tensor.array

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.tensors)

    def __len__(self) -> int:
        """Return the number of outputs."""
        return len(self.tensors)

    def classes(self, name: str) -> list[list[ClassScore]]:
        """Return the classes of each row, the largest first, of an output requested as `Output(name, classes=N)`."""
        array = self[name]
        if self.tensors[name].dtype is not BYTES:
            raise InvalidArgument(
                f"output '{name}' is not a classification: ask for it with Output('{name}', classes=5)"
            )
        rows = array.reshape(1, -1) if array.ndim < 2 else array.reshape(array.shape[0], -1)
        return [[_score(name, text) for text in row] for row in rows]

    def __repr__(self) -> str:
        """Show names, types and shapes, not the data."""
        outputs = ", ".join(repr(tensor) for tensor in self.tensors.values())
        return f"Result({self.model_name!r} version {self.model_version}: {outputs})"


def _score(name: str, text: bytes) -> ClassScore:
    """Parse `value:index` or `value:index:label`."""
    value, _, rest = text.decode(errors="replace").partition(":")
    index, _, label = rest.partition(":")
    try:
        return ClassScore(float(value), int(index), label)
    except ValueError:
        raise InvalidArgument(
            f"output '{name}' has text that is not a class: ask for it with Output('{name}', classes=5)"
        ) from None
