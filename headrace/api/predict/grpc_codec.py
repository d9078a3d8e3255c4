# SPDX-License-Identifier: Apache-2.0
"""`PredictRequest` and `PredictResponse`, bytes to numbers and back.

Called by `grpc`. A message as every generated client writes it is nothing but its floats behind a length: these are read
where they lie. Any other form of the same message is protobuf's to read.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from headrace.api.predict.schema import predict_schema
from headrace.core.dtypes import BF16, FP32, bf16_to_float32
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Buffer, Tensor

_FLOATS_TAG = 0x0A
_VERSION_TAG = b"\x12"
_LATENCY = struct.Struct("<Bf")
_LATENCY_TAG = 0x1D
_FLOAT_BYTES = 4
_ONE_BYTE = 0x80
"""A length below this takes one byte."""


class PredictCodec:
    """Holds the message classes."""

    def __init__(self) -> None:
        self._request = predict_schema().message("PredictRequest")

    def decode(self, message: Buffer) -> tuple[npt.NDArray[np.float32], str]:
        """The inputs, and the version that is wanted."""
        if len(message) > 2 and message[0] == _FLOATS_TAG:
            size, start = _varint(message, 1)
            if start + size == len(message) and size % _FLOAT_BYTES == 0:
                return np.frombuffer(message, np.float32, offset=start), ""
        try:
            request = self._request.FromString(bytes(message))
        except DecodeError:
            raise InvalidArgument("the message is not a PredictRequest") from None
        return np.array(request.inputs, np.float32), request.model_version

    def encode(self, tensor: Tensor, version: str, latency_ms: float) -> list[Buffer]:
        """A response: the output's numbers as floats."""
        numbers: Any = tensor.array
        if tensor.dtype is BF16:
            numbers = bf16_to_float32(numbers)
        elif tensor.dtype is not FP32:
            with np.errstate(over="ignore"):
                numbers = numbers.astype(np.float32)
        data = numbers.tobytes()
        label = version.encode()
        head = b"\x0a%b" % _length(len(data)) if data else b""
        return [
            head,
            data,
            b"%b%b%b" % (_VERSION_TAG, _length(len(label)), label) + _LATENCY.pack(_LATENCY_TAG, latency_ms),
        ]


def _varint(message: Buffer, position: int) -> tuple[int, int]:
    """A length and where it ends; (-1, 0) for what is no length of this world."""
    value = shift = 0
    while position < len(message) and shift < 35:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < _ONE_BYTE:
            return value, position
        shift += 7
    return -1, 0


def _length(size: int) -> bytes:
    if size < _ONE_BYTE:
        return bytes((size,))
    written = bytearray()
    while size >= _ONE_BYTE:
        written.append(size & 0x7F | _ONE_BYTE)
        size >>= 7
    written.append(size)
    return bytes(written)
