# SPDX-License-Identifier: Apache-2.0
"""Tensor data types: one row per type, from which protocols, configurations and backends derive their tables.

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


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """A data type. There is one object for each, so types are compared and hashed by identity, which every request does."""

    name: str
    """Name in the v2 protocol."""
    numpy: np.dtype[Any]
    item_bytes: int
    """Size of an element; 0 if it varies."""
    config_name: str
    """Name in a model configuration."""
    config_number: int
    """Number in a model configuration, which is also Triton's."""
    struct_code: str
    """Format character of `struct`; "" if it has none."""
    contents_field: str
    """Field of InferTensorContents in v2 over gRPC; "" for types that are only sent raw."""


def _row(name: str, number: int, code: str, struct_code: str = "", contents_field: str = "") -> DType:
    numpy = np.dtype(code)
    item_bytes = 0 if numpy.hasobject else numpy.itemsize
    config_name = "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"
    return DType(name, numpy, item_bytes, config_name, number, struct_code, contents_field)


BOOL = _row("BOOL", 1, "|b1", "?", "bool_contents")
UINT8 = _row("UINT8", 2, "|u1", "B", "uint_contents")
UINT16 = _row("UINT16", 3, "<u2", "H", "uint_contents")
UINT32 = _row("UINT32", 4, "<u4", "I", "uint_contents")
UINT64 = _row("UINT64", 5, "<u8", "Q", "uint64_contents")
INT8 = _row("INT8", 6, "|i1", "b", "int_contents")
INT16 = _row("INT16", 7, "<i2", "h", "int_contents")
INT32 = _row("INT32", 8, "<i4", "i", "int_contents")
INT64 = _row("INT64", 9, "<i8", "q", "int64_contents")
FP16 = _row("FP16", 10, "<f2", "e")
FP32 = _row("FP32", 11, "<f4", "f", "fp32_contents")
FP64 = _row("FP64", 12, "<f8", "d", "fp64_contents")
BF16 = _row("BF16", 14, "<u2")
BYTES = _row("BYTES", 13, "|O", "", "bytes_contents")

DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, FP32, FP64, BF16, BYTES)
}
"""Every data type by its name in the v2 protocol."""
BY_CONFIG_NAME: dict[str, DType] = {dtype.config_name: dtype for dtype in DTYPES.values()}
BY_CONFIG_NUMBER: dict[int, DType] = {dtype.config_number: dtype for dtype in DTYPES.values()}
_BY_NUMPY: dict[np.dtype[Any], DType] = {dtype.numpy: dtype for dtype in DTYPES.values() if dtype is not BF16}
BY_FRAMEWORK_NAME: dict[str, DType] = {
    **{dtype.numpy.name: dtype for dtype in _BY_NUMPY.values() if dtype is not BYTES},
    "bfloat16": BF16,
    "string": BYTES,
}
"""Every data type by its name in TensorFlow; other frameworks use most of these names."""
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
    high = bits >> _HALF
    # Round up if the dropped 16 bits are more than half, or exactly half and the kept bits are odd.
    carry = ((bits & np.uint32(0xFFFF)) + (high & np.uint32(1)) + np.uint32(0x7FFF)) >> _HALF
    # Rounding up the payload of a NaN could carry into the exponent and produce an infinity.
    return np.where(np.isnan(values), np.uint16(0x7FC0), (high + carry).astype(np.uint16))


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


def decode_bytes_elements(
    buffer: bytes | memoryview, count: int, name: str = "", model: str = ""
) -> npt.NDArray[np.object_]:
    """Decode exactly `count` BYTES elements that fill `buffer` exactly. Errors have Triton's words."""
    end = len(buffer)
    # Each element needs its length, so a count that cannot fit is rejected before memory is allocated.
    if count * _LENGTH.size > end:
        raise _wrong_count(buffer, count, name, model)
    elements = np.empty(count, dtype=object)
    position = 0
    for index in range(count):
        if position + 4 > end:
            raise _wrong_count(buffer, count, name, model)
        (length,) = _LENGTH.unpack_from(buffer, position)
        position += 4
        if length > end - position:
            raise _incomplete(_what(name, model), length, end - position)
        elements[index] = bytes(buffer[position : position + length])
        position += length
    if position != end:
        raise _wrong_count(buffer, count, name, model)
    return elements


def of_model(model: str) -> str:
    """Return Triton's words that name the model in an error; none for no model."""
    return f" for model '{model[:256]}'" if model else ""


def _what(name: str, model: str) -> str:
    return f"inference input '{name}'{of_model(model)}" if name else "the tensor"


def _wrong_count(buffer: bytes | memoryview, count: int, name: str, model: str) -> InvalidArgument:
    """Count the elements that are really there, for the message."""
    what = _what(name, model)
    position, elements, end = 0, 0, len(buffer)
    while position < end:
        if position + 4 > end:
            return InvalidArgument(
                f"incomplete string length indicator for {what}, expecting 4 bytes but only {end - position} bytes "
                "available: each element is its length in 4 bytes, then its bytes"
            )
        (length,) = _LENGTH.unpack_from(buffer, position)
        position += 4
        if length > end - position:
            return _incomplete(what, length, end - position)
        position += length
        elements += 1
    return InvalidArgument(
        f"expected {count} string elements for {what}, got {elements}: the shape says how many to send"
    )


def _incomplete(what: str, length: int, available: int) -> InvalidArgument:
    return InvalidArgument(
        f"incomplete string data for {what}, expecting string of length {length} but only {available} bytes available: each "
        "element is its length in 4 bytes, then its bytes"
    )
