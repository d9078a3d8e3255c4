# SPDX-License-Identifier: Apache-2.0
"""Parse `--input NAME=VALUE` into the tensors that the model takes.

Used by `infer_run`. Converts types only if nothing is lost, adds a missing batch dimension, and notes both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.client import Input
from headrace.core.dtypes import BF16, BYTES, DType, bf16_to_float32, dtype_named, dtype_of, float32_to_bf16
from headrace.core.errors import InvalidArgument
from headrace.core.names import nearest
from headrace.core.tensors import Tensor, tensor_from_buffer, tensor_from_values

_RAW = re.compile(r"(.+):([A-Za-z0-9]+):([0-9]+(?:,[0-9]+)*)", re.DOTALL)
_RANDOM = re.compile(r"random(?::([0-9]+(?:,[0-9]+)*))?")
_SEED = 0
"""A fixed seed, so that two runs can be compared."""


class Inputs:
    """Builds the inputs of one request."""

    def __init__(self, model: str, metadata: dict[str, Any]) -> None:
        self._model = model
        self._wanted = {str(tensor["name"]): tensor for tensor in metadata.get("inputs") or ()}
        self._random = np.random.default_rng(_SEED)
        self.inputs: dict[str, Input] = {}
        self.notes: list[str] = []

    def add(self, text: str) -> None:
        """Add one `NAME=VALUE`."""
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"--input {text[:64]!a}: write NAME=VALUE, such as {self._example()}")
        wanted = self._wanted.get(name)
        if wanted is None:
            known = suggestion(name, self._wanted)
            raise InvalidArgument(f"model '{self._model}' has no input '{name}'{known}; it takes: {self._all()}")
        datatype = str(wanted.get("datatype") or "")
        shape = [int(size) for size in wanted.get("shape") or ()]
        dtype = dtype_named(datatype) if datatype else None
        tensor = self._read(name, value, dtype, shape)
        if dtype is not None:
            tensor = self._shaped(self._typed(tensor, dtype), shape)
        self.inputs[name] = Input(tensor.array, tensor.dtype.name)

    def missing(self) -> list[str]:
        """Return the inputs of the model that were not given."""
        return [name for name in self._wanted if name not in self.inputs]

    def check_missing(self, missing: list[str], optional: set[str]) -> None:
        """Raise InvalidArgument if a required input is missing."""
        needed = [name for name in missing if name not in optional]
        if needed:
            raise InvalidArgument(
                f"model '{self._model}' takes {self._all()}; not given: {', '.join(needed)}. Add "
                f"--input {needed[0]}=@file.npy, or --random to fill it with random values"
            )

    def _read(self, name: str, text: str, dtype: DType | None, shape: list[int]) -> Tensor:
        if match := _RANDOM.fullmatch(text):
            return self._filled(name, dtype, _sizes(match[1]) if match[1] else None, shape)
        if not text.startswith("@"):
            try:
                values = json.loads(text)
            except ValueError:
                values = text
            return self._from_values(name, values, dtype)
        path = text[1:]
        if raw := _RAW.fullmatch(path):
            return tensor_from_buffer(name, dtype_named(raw[2].upper()), _sizes(raw[3]), _content(raw[1]))
        if path.endswith(".npy"):
            return Tensor.of(name, _loaded(path))
        if path.endswith(".json"):
            try:
                return self._from_values(name, json.loads(_content(path)), dtype)
            except ValueError:
                raise InvalidArgument(f"{path} is not JSON") from None
        if dtype is BYTES:
            return tensor_from_values(name, BYTES, [1], [_content(path)])
        raise InvalidArgument(
            f"{path} has an unknown format: write {name}=@{path}:{dtype.name if dtype else 'FP32'}:SIZES for raw numbers, "
            "or give a .npy or .json file"
        )

    def _from_values(self, name: str, values: Any, dtype: DType | None) -> Tensor:
        shape: list[int] = []
        first = values
        while isinstance(first, list):
            shape.append(len(first))
            first = first[0] if first else None
        if dtype is not None:
            if dtype is BYTES and not isinstance(first, str) and not isinstance(values, list):
                values = str(values)  # a number given for a string
            try:
                return tensor_from_values(name, dtype, shape, values)
            except InvalidArgument as error:
                raise InvalidArgument(f"{error.message}; model '{self._model}' takes {self._one(name)}") from None
        kinds = {bool: "BOOL", int: "INT64", float: "FP32", str: "BYTES"}
        chosen = kinds.get(type(first), "FP32")
        tensor = tensor_from_values(name, dtype_named(chosen), shape, values)
        self.notes.append(f"{name}: sent as {chosen} {list(tensor.shape)}, because the model takes any type")
        return tensor

    def _filled(self, name: str, dtype: DType | None, shape_override: list[int] | None, shape: list[int]) -> Tensor:
        kind = dtype or dtype_named("FP32")
        sizes = shape_override if shape_override is not None else [max(size, 1) if size else 0 for size in shape]
        if shape_override is None and dtype is None:
            sizes = [1, 1]
        array = _random_array(self._random, kind, sizes)
        self.notes.append(f"{name}: random {kind.name} {sizes}")
        return Tensor(name, kind, array)

    def _typed(self, tensor: Tensor, dtype: DType) -> Tensor:
        dtype_of_values = tensor.dtype
        if dtype_of_values is dtype:
            return tensor
        if dtype_of_values is BYTES or dtype is BYTES:
            raise InvalidArgument(
                f"input '{tensor.name}' is {dtype_of_values.name}; model '{self._model}' takes {dtype.name}"
            )
        converted = _cast(tensor.array if dtype_of_values is not BF16 else bf16_to_float32(tensor.array), dtype)
        if converted is None:
            raise InvalidArgument(
                f"input '{tensor.name}' is {dtype_of_values.name} with values that do not fit {dtype.name}, which model "
                f"'{self._model}' takes; convert it before sending if that is intended"
            )
        self.notes.append(f"{tensor.name}: converted from {dtype_of_values.name} to {dtype.name}, the model's type")
        return Tensor(tensor.name, dtype, converted)

    def _shaped(self, tensor: Tensor, model_shape: list[int]) -> Tensor:
        shape = list(tensor.shape)
        if _fits(shape, model_shape):
            return tensor
        # A scalar fits any number of dimensions of size 1.
        if not shape and all(size in (-1, 1) for size in model_shape):
            return Tensor(tensor.name, tensor.dtype, tensor.array.reshape([1] * len(model_shape)))
        fixed = [1, *shape]
        if not _fits(fixed, model_shape):
            raise InvalidArgument(
                f"input '{tensor.name}' has shape {_shape(shape)}; model '{self._model}' takes {self._one(tensor.name)}"
                " (-1 is any size)"
            )
        self.notes.append(f"{tensor.name}: {_shape(shape)} became {_shape(fixed)}: the batch dimension was missing")
        return Tensor(tensor.name, tensor.dtype, tensor.array.reshape(fixed))

    def _one(self, name: str) -> str:
        tensor = self._wanted[name]
        datatype = tensor.get("datatype")
        return f"{name} {datatype} {_shape(tensor.get('shape') or ())}" if datatype else f"{name} of any type and shape"

    def _all(self) -> str:
        return ", ".join(map(self._one, self._wanted)) or "no inputs"

    def _example(self) -> str:
        return f"{next(iter(self._wanted), 'x')}=@file.npy"


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return " (did you mean 'NAME'?)" with the closest known name; "" if there is none."""
    closest = nearest(name, names)
    return f" (did you mean '{closest}'?)" if closest else ""


def _shape(sizes: Iterable[int]) -> str:
    return f"[{','.join(map(str, sizes))}]"


def _fits(shape: list[int], model_shape: list[int]) -> bool:
    return len(shape) == len(model_shape) and all(
        want in (-1, have) for have, want in zip(shape, model_shape, strict=True)
    )


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None


def _loaded(path: str) -> npt.NDArray[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror or 'not a .npy file'}") from None
    except (ValueError, EOFError):
        raise InvalidArgument(f"{path} is not a .npy file, or contains Python objects, which are not loaded") from None
    if not isinstance(loaded, np.ndarray):
        raise InvalidArgument(f"{path} contains several arrays: save one of them with numpy.save")
    dtype_of(loaded)
    return loaded


def _cast(array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any] | None:
    """Convert values to another type; None if that is not possible. Only floats may lose digits."""
    target = np.dtype(np.float32) if dtype is BF16 else dtype.numpy
    with np.errstate(all="ignore"):
        converted = array.astype(target)
    if target.kind == "f" and array.dtype.kind == "f":
        if not np.array_equal(np.isfinite(converted), np.isfinite(array)):
            return None
    elif target.kind == "b" or array.dtype.kind == "b" or not np.array_equal(converted, array):
        return None
    return float32_to_bf16(converted) if dtype is BF16 else converted


def _random_array(random: np.random.Generator, dtype: DType, sizes: list[int]) -> npt.NDArray[Any]:
    if dtype is BYTES:
        numbers = random.integers(0, 1000, sizes).ravel()
        array = np.empty(len(numbers), object)
        array[:] = [b"word%d" % number for number in numbers]
        return array.reshape(sizes)
    if dtype is BF16:
        return float32_to_bf16(random.random(sizes, np.float32))
    if dtype.numpy.kind == "f":
        return random.random(sizes).astype(dtype.numpy)
    if dtype.numpy.kind == "b":
        return random.integers(0, 2, sizes).astype(dtype.numpy)
    # Small, because integers are often indices.
    return random.integers(0, 10, sizes).astype(dtype.numpy)
