# SPDX-License-Identifier: Apache-2.0
"""The functions of `triton_python_backend_utils` for data types and byte strings."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.dtypes import BF16, BY_CONFIG_NUMBER, BYTES, DTYPES

Array = npt.NDArray[Any]

_LENGTH = struct.Struct("<I")


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of a data type's number, or None."""
    dtype = BY_CONFIG_NUMBER.get(int(data_type), BF16)
    return None if dtype is BF16 else dtype.numpy.type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the data type's number of a numpy type, or None."""
    dtype = np.dtype(data_type)
    if dtype.kind in "SO":
        return BYTES.config_number
    return next((known.config_number for known in DTYPES.values() if known is not BF16 and known.numpy == dtype), None)


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of a data type's name in a configuration, such as TYPE_FP32."""
    if triton_type_string == "TYPE_STRING":
        return np.object_
    if triton_type_string == "TYPE_BOOL":
        return bool
    if triton_type_string == "TYPE_BF16":
        raise KeyError(triton_type_string)
    return DTYPES[triton_type_string.removeprefix("TYPE_")].numpy.type


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Join the elements, each after its length; elements other than bytes become strings. None for other types."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "SO":
        return None
    pieces: list[bytes] = []
    for element in input_tensor.ravel().tolist():
        raw = element if isinstance(element, bytes) else str(element).encode()
        pieces.append(_LENGTH.pack(len(raw)))
        pieces.append(raw)
    return b"".join(pieces)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Split serialised elements into a one-dimensional array of `bytes`."""
    elements: list[bytes] = []
    position = 0
    while position < len(encoded_tensor):
        (length,) = _LENGTH.unpack_from(encoded_tensor, position)
        position += _LENGTH.size
        elements.append(bytes(encoded_tensor[position : position + length]))
        position += length
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array
