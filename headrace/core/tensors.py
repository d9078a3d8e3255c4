# SPDX-License-Identifier: Apache-2.0
"""Tensors of requests and responses: a name, a data type, and a numpy array that is a view of the received bytes.

The codecs of `api` build tensors here. Sizes are checked here, so the engine never gets an array of a wrong size.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.dtypes import (
    BF16,
    BYTES,
    FP32,
    NOT_UTF8,
    DType,
    bf16_to_float32,
    decode_bytes_elements,
    dtype_of,
    encode_bytes_elements,
    float32_to_bf16,
    of_model,
    to_bytes,
)
from headrace.core.errors import InvalidArgument
from headrace.core.limits import TENSOR_RANK

_MAX_ELEMENTS = 1 << 48
_MAX_INT64 = (1 << 63) - 1
_MAX_NESTING = 100
"""Lists within lists in the JSON data of a tensor. Triton's limit."""

Buffer = bytes | bytearray | memoryview

_COPIED_BYTES = 1024
"""Up to this size a copy is faster than a view."""


class WrongElementCount(InvalidArgument):
    """The values of a tensor are more or fewer than its shape says."""


class WrongElementType(InvalidArgument):
    """A value of a tensor has a type that its data type does not take."""


class Tensor:
    """A named array. `array` has the numpy type of `dtype` (see `core.dtypes`)."""

    __slots__ = ("array", "dtype", "name")

    def __init__(self, name: str, dtype: DType, array: npt.NDArray[Any]) -> None:
        self.name = name
        self.dtype = dtype
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions, outermost first."""
        return self.array.shape

    @classmethod
    def of(cls, name: str, array: npt.NDArray[Any]) -> Tensor:
        """Wrap an array and derive the data type from its numpy type; copy only if the numpy type must change."""
        dtype = dtype_of(array)
        if array.dtype != dtype.numpy:
            array = _bytes_array(array.ravel()).reshape(array.shape) if dtype is BYTES else array.astype(dtype.numpy)
        return cls(name, dtype, array)

    def to_buffer(self) -> Buffer:
        """Return the elements as wire bytes in row-major order; a view if the array is large and contiguous."""
        if self.dtype is BYTES:
            return encode_bytes_elements(self.array.ravel())
        array = self.array
        if array.nbytes <= _COPIED_BYTES:
            return array.tobytes()
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        return array.reshape(-1).data.cast("B")

    def __repr__(self) -> str:
        """Return name, type and shape; never the data, which may be large or private."""
        return f"Tensor({self.name!r}, {self.dtype.name}, {list(self.shape)})"


def element_count(name: str, shape: Sequence[int]) -> int:
    """Return the number of elements of a client's shape; reject sizes that overflow, are negative or not integers."""
    if len(shape) > TENSOR_RANK:
        raise InvalidArgument(f"tensor '{name}' has {len(shape)} dimensions; at most {TENSOR_RANK} are allowed")
    addressable = 1
    for size in shape:
        # `bool` is a subclass of `int` in Python, but `True` as a dimension is a client's mistake.
        if type(size) is not int or size < 0:
            raise InvalidArgument(f"tensor '{name}' has dimension {_shown(size)}; use whole numbers of 0 or more")
        # A 0 counts as 1: numpy rejects a shape that it could not address even if the array is empty.
        addressable *= size or 1
        if addressable > _MAX_INT64:  # both messages begin with Triton's words
            raise InvalidArgument(
                f"the shape of tensor '{name}' causes total element count to exceed maximum size of {_MAX_INT64}"
            )
    if addressable > _MAX_ELEMENTS:
        raise InvalidArgument(
            f"byte size overflow for input '{name}': its shape has more than {_MAX_ELEMENTS} elements"
        )
    return math.prod(shape)


def tensor_from_buffer(name: str, dtype: DType, shape: Sequence[int], buffer: Buffer, model: str = "") -> Tensor:
    """Return `buffer` as a tensor, without a copy except for BYTES. The size must match exactly.

    `model` is for the message of an error, which has Triton's words.
    """
    count = element_count(name, shape)
    if dtype is BYTES:
        return Tensor(name, dtype, decode_bytes_elements(memoryview(buffer), count, name, model).reshape(shape))
    expected = count * dtype.item_bytes
    if len(buffer) != expected:
        raise InvalidArgument(
            f"input byte size mismatch for input '{name}'{of_model(model)}. Expected {expected}, got {len(buffer)}: "
            f"shape {list(shape)} of {dtype.name} needs {expected} bytes"
        )
    return Tensor(name, dtype, np.frombuffer(buffer, dtype.numpy).reshape(shape))


def tensor_from_values(name: str, dtype: DType, shape: Sequence[int], values: Any) -> Tensor:
    """Build a tensor from parsed JSON values: flat or nested, in row-major order."""
    count = element_count(name, shape)
    leaves, kinds = _flatten(name, values)
    if len(leaves) != count:
        raise WrongElementCount(f"tensor '{name}' has {len(leaves)} elements, but shape {list(shape)} needs {count}")
    kind = dtype.numpy.kind if dtype is not BF16 else "f"
    if not kinds <= _ACCEPTS[kind]:
        wrong = next(leaf for leaf in leaves if type(leaf) not in _ACCEPTS[kind])
        raise WrongElementType(f"tensor '{name}' of {dtype.name} has {_shown(wrong)}, which is not {_EXPECTED[kind]}")
    try:
        array = _bytes_array(leaves) if dtype is BYTES else _numeric_array(dtype, leaves)
    except (OverflowError, struct.error):
        raise InvalidArgument(f"tensor '{name}' has values that do not fit {dtype.name}") from None
    return Tensor(name, dtype, array.reshape(shape))


# Python types that JSON values, or elements of a protobuf field, may have for each numpy kind.
_ACCEPTS: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}, "O": {str, bytes}}
_EXPECTED = {"b": "true or false", "i": "a whole number", "u": "a whole number", "f": "a number", "O": "a string"}


def _flatten(name: str, values: Any) -> tuple[Sequence[Any], set[type]]:
    """Return the values without nesting, and the set of their types.

    This must happen before numpy gets them: numpy stores strings at the width of the longest, so one string of a megabyte
    among ten thousand short ones would take forty gigabytes; and it converts mixed types instead of rejecting them.
    """
    leaves = values if type(values) is list or _is_row(values) else [values]
    for _ in range(_MAX_NESTING):
        kinds = set(map(type, leaves))
        if list not in kinds:
            return leaves, kinds
        if len(kinds) > 1 or len(set(map(len, leaves))) > 1:
            raise InvalidArgument(f"tensor '{name}' has rows of different lengths")
        leaves = list(chain.from_iterable(leaves))
    raise InvalidArgument(
        f"JSON nesting depth exceeds maximum allowed limit ({_MAX_NESTING}): send the data of tensor '{name}' flat, or "
        "nested as its shape says"
    )


def _is_row(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str | bytes)


def _numeric_array(dtype: DType, leaves: Sequence[Any]) -> npt.NDArray[Any]:
    # `struct` rounds like numpy, rejects values that do not fit, and is faster than numpy with such a check.
    if dtype is not BF16:
        return np.frombuffer(struct.pack(f"<{len(leaves)}{dtype.struct_code}", *leaves), dtype.numpy)
    as_float32 = _numeric_array(FP32, leaves)
    array = float32_to_bf16(as_float32)
    if np.any(np.isinf(bf16_to_float32(array)) & np.isfinite(as_float32)):
        raise OverflowError
    return array


def _bytes_array(elements: Iterable[Any]) -> npt.NDArray[np.object_]:
    # Nearly all elements from JSON are text: encode it inline, without a call per element.
    try:
        flat = [element.encode() if type(element) is str else to_bytes(element) for element in elements]
    except UnicodeEncodeError as error:
        raise InvalidArgument(NOT_UTF8) from error
    array = np.empty(len(flat), dtype=object)
    array[:] = flat
    return array


def _shown(value: object) -> str:
    """Format a client's value for an error message: short and safe to print."""
    if isinstance(value, str | bytes):
        return ascii(value[:32])
    # Python refuses to print integers with too many digits.
    if isinstance(value, int) and not -_MAX_ELEMENTS < value < _MAX_ELEMENTS:
        return "a very large number"
    return ascii(value) if isinstance(value, int | float | None) else f"a value of type {type(value).__name__}"
