# SPDX-License-Identifier: Apache-2.0
"""The models that every Headrace carries, for a first look and for measuring the path to a model without the model.

`identity` gives back what it gets, of any type and shape; `first1000` takes images `[n, 3, 224, 224]` and gives the first
1,000 numbers of each, so that a large request has the small answer of a classifier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from headrace.core.dtypes import FP32, DType
from headrace.engine.batching import Compute


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """What a built-in model takes and does. No `dtype` or `dims` means any."""

    name: str
    compute: Compute
    dtype: DType | None = None
    dims: tuple[int, ...] | None = None
    max_rows: int = 64


def _identity(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return rows


def _first_thousand(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return rows.reshape(len(rows), -1)[:, :1000]


BUILTIN_MODELS = (
    BuiltinModel("identity", _identity),
    BuiltinModel("first1000", _first_thousand, FP32, (3, 224, 224)),
)
