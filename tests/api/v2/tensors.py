# SPDX-License-Identifier: Apache-2.0
"""Arrays of every data type, with the values at their edges, for round trips."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_INTEGERS = {
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}
_FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}


def _edges(kind: Any) -> Array:
    info = np.iinfo(kind)
    return np.array([[info.min, info.max, 0], [1, info.max - 1, info.min + 1]], dtype=kind)


def _fractions(kind: Any) -> Array:
    info = np.finfo(kind)
    return np.array([[info.min, info.max, 0.0], [info.tiny, -1 / 3, info.eps]], dtype=kind)


def _objects(rows: list[list[bytes]]) -> Array:
    array = np.empty((len(rows), len(rows[0])), dtype=object)
    for index, row in enumerate(rows):
        array[index] = row
    return array


ARRAYS: dict[str, Array] = {
    "BOOL": np.array([[True, False, True], [False, False, True]]),
    **{name: _edges(kind) for name, kind in _INTEGERS.items()},
    **{name: _fractions(kind) for name, kind in _FLOATS.items()},
    "BF16": np.array([[1.5, -2.0, 0.0], [3e38, 1e-38, -0.0]], dtype=ml_dtypes.bfloat16),
    "BYTES": _objects([[b"text", b"", "naïve 🚰".encode()], [b"a", b"b" * 1000, b" "]]),
}
"""Two rows of three for every data type; BYTES are UTF-8."""

SPECIAL: dict[str, Array] = {
    name: np.array([[np.inf, -np.inf, np.nan, -0.0]], dtype=kind) for name, kind in _FLOATS.items()
} | {
    "BF16": np.array([[np.inf, -np.inf, np.nan, -0.0]], dtype=ml_dtypes.bfloat16),
    "BYTES": _objects([[b"\xff\xfe", b"\x00", bytes(range(256))]]),
}
"""What JSON cannot carry."""


def same(left: Array, right: Array) -> bool:
    """Equal to the bit: NaN is NaN, and a negative zero is not a zero."""
    if left.shape != right.shape:
        return False
    if left.dtype == object:
        return list(left.ravel()) == list(right.ravel())
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()
