# SPDX-License-Identifier: Apache-2.0
"""The data types of requests, of PyTorch, and of exported programs, side by side."""

from __future__ import annotations

from typing import Any

import torch

from headrace.core.dtypes import (
    BF16,
    BOOL,
    FP16,
    FP32,
    FP64,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    DType,
)

_TABLE: tuple[tuple[DType, Any, int], ...] = (
    (BOOL, torch.bool, 12),
    (UINT8, torch.uint8, 1),
    (UINT16, torch.uint16, 28),
    (UINT32, torch.uint32, 34),
    (UINT64, torch.uint64, 35),
    (INT8, torch.int8, 2),
    (INT16, torch.int16, 3),
    (INT32, torch.int32, 4),
    (INT64, torch.int64, 5),
    (FP16, torch.float16, 6),
    (FP32, torch.float32, 7),
    (FP64, torch.float64, 8),
    (BF16, torch.bfloat16, 13),
)
TORCH_TYPES: dict[DType, Any] = {ours: theirs for ours, theirs, _ in _TABLE}
"""Of each data type but BYTES, which PyTorch has no tensors of."""
DTYPES: dict[Any, DType] = {theirs: ours for ours, theirs, _ in _TABLE}
DTYPES_BY_NUMBER = {number: ours for ours, _, number in _TABLE}
TORCH_BY_NUMBER: dict[int, Any] = {
    **{number: theirs for _, theirs, number in _TABLE},
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
}
"""`torch._export.serde.schema.ScalarType`."""
