# SPDX-License-Identifier: Apache-2.0
"""Tensor data types by their v2 protocol names, and the numpy type of each.

Two types have no numpy type of their own. `BF16` is stored as its 16 bits (`uint16`), which every runtime can use without a
copy; `bf16_to_float32` and `float32_to_bf16` convert. `BYTES` is an object array of `bytes`; on the wire each element is a
4-byte little-endian length followed by that many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class DType:
    """A data type: its wire name, its numpy type, and the size of an element (0 if it varies)."""

    name: str
    numpy: np.dtype[Any]
    item_bytes: int


def _fixed(name: str, code: str) -> DType:
    dtype = np.dtype(code)
    return DType(name, dtype, dtype.itemsize)


BOOL = _fixed("BOOL", "|b1")
UINT8 = _fixed("UINT8", "|u1")
UINT16 = _fixed("UINT16", "<u2")
UINT32 = _fixed("UINT32", "<u4")
UINT64 = _fixed("UINT64", "<u8")
INT8 = _fixed("INT8", "|i1")
INT16 = _fixed("INT16", "<i2")
INT32 = _fixed("INT32", "<i4")
INT64 = _fixed("INT64", "<i8")
FP16 = _fixed("FP16", "<f2")
FP32 = _fixed("FP32", "<f4")
FP64 = _fixed("FP64", "<f8")
BF16 = DType("BF16", np.dtype("<u2"), 2)
BYTES = DType("BYTES", np.dtype(object), 0)

DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, FP32, FP64, BF16, BYTES)
}
"""Every data type by its wire name."""

_BY_NUMPY: dict[np.dtype[Any], DType] = {dtype.numpy: dtype for dtype in DTYPES.values() if dtype is not BF16}
_LENGTH = struct.Struct("<I")
# A typed 16: with a plain int, numpy 1 converts a zero-dimensional uint32 to int64.
_HALF = np.uint32(16)


def dtype_named(name: str) -> DType:
    """Return a data type by its wire name."""
    # `name` comes from a client and may be of any JSON type; lists and objects are not hashable.
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise InvalidArgument(f"datatype {str(name)[:32]!a} is not known: use one of {', '.join(DTYPES)}")
    return dtype


def dtype_of(array: npt.NDArray[Any]) -> DType:
    """Return the data type of a numpy array; text and byte strings of any width are `BYTES`. Never returns `BF16`."""
    if array.dtype.kind in "SUOT":
        return BYTES
    dtype = _BY_NUMPY.get(array.dtype.newbyteorder("<"))
    if dtype is None:
        raise InvalidArgument(f"numpy type {array.dtype} has no tensor data type: use one of {', '.join(DTYPES)}")
    return dtype


def bf16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Convert BF16 bits to float32, exactly."""
    return (bits.astype(np.uint32) << _HALF).view(np.float32)


def float32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to BF16 bits, to nearest, ties to even; NaN stays NaN."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    kept = bits >> _HALF
    # Round up if the dropped 16 bits are more than half, or exactly half and the kept bits are odd.
    carry = ((bits & np.uint32(0xFFFF)) + (kept & np.uint32(1)) + np.uint32(0x7FFF)) >> _HALF
    # Rounding up the payload of a NaN could carry into the exponent and produce an infinity.
    return np.where(np.isnan(values), np.uint16(0x7FC0), (kept + carry).astype(np.uint16))


NOT_UTF8 = "a BYTES element is text that UTF-8 cannot carry: it has half of a surrogate pair"


def to_bytes(element: bytes | str) -> bytes:
    """Return one BYTES element: bytes unchanged, text as UTF-8."""
    if isinstance(element, bytes):
        return element
    # Reject other types: `bytes(5)` would be five zeros.
    if not isinstance(element, str):
        raise InvalidArgument(f"a BYTES element has type {type(element).__name__}: use bytes or text")
    try:
        return element.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(NOT_UTF8) from None


def encode_bytes_elements(elements: Iterable[bytes | str]) -> bytes:
    """Encode BYTES elements, each after its 4-byte length."""
    pieces: list[bytes] = []
    for element in elements:
        raw = to_bytes(element)
        pieces.append(_LENGTH.pack(len(raw)))
        pieces.append(raw)
    return b"".join(pieces)


def decode_bytes_elements(buffer: bytes | memoryview, count: int) -> npt.NDArray[np.object_]:
    """Decode exactly `count` BYTES elements that fill `buffer` exactly."""
    end = len(buffer)
    # Each element needs its length, so a count that cannot fit is rejected before memory is allocated.
    if count * _LENGTH.size > end:
        raise InvalidArgument(f"unexpected number of string elements: {count} do not fit in {end} bytes")
    elements = np.empty(count, dtype=object)
    position = 0
    for index in range(count):
        if position + 4 > end:
            raise InvalidArgument(
                f"unexpected number of string elements: expected {count}, the data ends after {index}"
            )
        (length,) = _LENGTH.unpack_from(buffer, position)
        position += 4
        if length > end - position:
            raise InvalidArgument(
                f"string element {index} says it has {length} bytes, but only {end - position} are left"
            )
        elements[index] = bytes(buffer[position : position + length])
        position += length
    if position != end:
        raise InvalidArgument(f"unexpected number of string elements: {end - position} bytes are left after {count}")
    return elements
