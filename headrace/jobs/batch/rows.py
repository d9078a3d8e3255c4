# SPDX-License-Identifier: Apache-2.0
"""One input of a model of tensors: values of items to rows, rows to the tensor of a batch. Called by `asking`.

A list of numbers, which most items are, is packed into bytes, and a batch is those bytes put together: a tenth of what an
array for each item takes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.dtypes import FP32
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Tensor, tensor_from_values
from headrace.jobs.batch.blocks import PlainInput
from headrace.models.config.types import InputSpec, fits

Row = bytes | npt.NDArray[Any]
"""Bytes of numbers, or an array; without the batch's dimension."""

_DEEPEST = 16
_CODES = {
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_REALS, _WHOLES = frozenset({int, float}), frozenset({int})


class RowsOf:
    """An input."""

    def __init__(self, spec: InputSpec) -> None:
        self._spec = spec
        self._dtype = spec.dtype or FP32
        self._code = _CODES.get(self._dtype.name, "")
        self._kinds = _REALS if self._dtype.name.startswith("FP") else _WHOLES

    def row(self, values: Any) -> tuple[Any, Row]:
        """The values of one item, and what other rows of its batch must have in common with it."""
        if type(values) is list and self._code:
            packed = self._packed(values)
            if packed is not None:
                return len(values), packed
        array = self._array(values)
        return array.shape, array

    @property
    def plain(self) -> PlainInput | None:
        """For the short way, if an item of this input is a list of so many numbers."""
        dims = self._spec.dims
        if not self._code or dims is None or len(dims) != 1 or dims[0] < 1:
            return None
        return PlainInput(self._spec.name, dims[0], self._dtype.numpy, _packer(dims[0], self._code).pack)

    def joined(self, rows: Sequence[Row] | npt.NDArray[Any]) -> Tensor:
        """Rows of one sort as a batch."""
        if isinstance(rows, np.ndarray):
            array = rows
        elif isinstance(rows[0], bytes):
            array = np.frombuffer(b"".join(rows), self._dtype.numpy).reshape(len(rows), -1)  # type: ignore[arg-type]
        else:
            array = np.stack(rows)
        return Tensor(self._spec.name, self._dtype, array)

    def _packed(self, values: list[Any]) -> bytes | None:
        """A list of numbers that fits; None for what is unusual or wrong, which the long way tells."""
        dims = self._spec.dims
        if not values or not self._kinds.issuperset(map(type, values)):
            return None
        if dims is None or len(dims) != 1 or dims[0] not in (len(values), -1):
            return None
        try:
            return _packer(len(values), self._code).pack(*values)
        except (struct.error, OverflowError):
            return None

    def _array(self, values: Any) -> npt.NDArray[Any]:
        spec = self._spec
        if isinstance(values, np.ndarray):
            tensor = Tensor.of(spec.name, np.ascontiguousarray(values))
            if spec.dtype is not None and tensor.dtype is not spec.dtype:
                raise InvalidArgument(
                    f"the array is of {tensor.dtype.name}, and the input {spec.name!a} of {self._dtype.name}"
                )
        else:
            shape = _shape_of(spec.name, values)
            if not shape and spec.dims == (1,):
                shape = [1]
            tensor = tensor_from_values(spec.name, self._dtype, shape, values)
        if spec.dims is not None and not fits(tensor.array.shape, spec.dims):
            wanted = list(spec.dims)
            raise InvalidArgument(
                f"the input {spec.name!a} has the shape {list(tensor.array.shape)}, and one item has {wanted}"
                + (" (-1 is any size)" if -1 in wanted else "")
            )
        return tensor.array


@lru_cache(maxsize=256)
def _packer(count: int, code: str) -> struct.Struct:
    return struct.Struct(f"<{count}{code}")


def _shape_of(name: str, values: Any) -> list[int]:
    shape: list[int] = []
    while isinstance(values, list):
        shape.append(len(values))
        if len(shape) > _DEEPEST:
            raise InvalidArgument(f"the input {name!a} is nested too deeply: at most {_DEEPEST} lists in each other")
        values = values[0] if values else None
    return shape
