# SPDX-License-Identifier: Apache-2.0
"""The small types of the fake TensorRT."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np


class DataType(Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9
    FP4 = 10


NUMPY = {
    DataType.FLOAT: np.float32,
    DataType.HALF: np.float16,
    DataType.INT8: np.int8,
    DataType.INT32: np.int32,
    DataType.BOOL: np.bool_,
    DataType.UINT8: np.uint8,
    DataType.BF16: np.uint16,
    DataType.INT64: np.int64,
}


class TensorIOMode(Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(Enum):
    DEVICE = 0
    HOST = 1


class TensorFormat(Enum):
    LINEAR = 0
    CHW2 = 1
    HWC8 = 2
    CHW32 = 5


class Dims:
    """A shape. The invalid one says that its length is -1, which Python answers with ValueError."""

    def __init__(self, sizes: Sequence[int] | None) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return -1 if self._sizes is None else len(self._sizes)

    def __getitem__(self, index: int) -> int:
        if self._sizes is None:
            raise IndexError
        return self._sizes[index]
