# SPDX-License-Identifier: Apache-2.0
"""Triton's classification extension: the largest values of each row of an output, with their indexes and labels.

The codecs of `v1` and `v2` call it for outputs that a client requests as classes. Each protocol writes the classes its own
way and refuses the data types that it does not classify.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.dtypes import BF16, BYTES, bf16_to_float32
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Tensor

MOST_ELEMENTS = 1_000_000
"""Triton's limit. Every element may become an entry of the response, which is encoded in the event loop."""

_FULL_SORT = 4096
"""A row up to this size is sorted in full; a longer one is partitioned first."""


class ClassScore(NamedTuple):
    """One class of a row."""

    value: int | float
    """An integer for a tensor of integers; BOOL is 0 or 1."""
    idx: int
    """Index in the flattened row."""
    label: str
    """"" if the label file has no such line."""


def top_classes(tensor: Tensor, count: int, labels: Sequence[str] = (), *, batched: bool) -> list[list[ClassScore]]:
    """Return the `count` largest values of each row, the largest first; all of them if a row has fewer.

    With `batched`, a row is an entry of the first dimension, else the whole tensor. Equal values keep their order; NaN comes
    last. Raises for BYTES and for more than `MOST_ELEMENTS`, with Triton's messages.
    """
    if tensor.dtype is BYTES:
        raise InvalidArgument("class result not available for output due to unsupported type 'BYTES'")
    array = tensor.array
    if array.size > MOST_ELEMENTS:
        raise InvalidArgument(
            f"classification output tensor too large: output '{tensor.name}' has {array.size} elements, at most "
            f"{MOST_ELEMENTS} can be classified. Ask for it without classification"
        )
    values: npt.NDArray[Any] = bf16_to_float32(array) if tensor.dtype is BF16 else array
    rows = values.shape[0] if batched else 1
    if not rows:
        return []
    return [_row_classes(row, count, labels) for row in values.reshape(rows, values.size // rows)]


def _row_classes(row: npt.NDArray[Any], count: int, labels: Sequence[str]) -> list[ClassScore]:
    order = _largest(row, min(count, row.size))
    label_count = len(labels)
    is_bool = row.dtype.kind == "b"
    return [
        ClassScore(int(value) if is_bool else value, index, labels[index] if index < label_count else "")
        for value, index in zip(row[order].tolist(), order.tolist(), strict=True)
    ]


def _largest(row: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """Return the indexes of the largest values: a stable sort by keys that decrease as the values increase."""
    # The complement for integers: the negative of the smallest one, or of an unsigned one, does not exist.
    keys = -row if row.dtype.kind == "f" else ~row
    if 0 < count < row.size and row.size > _FULL_SORT:
        last = np.partition(keys, count - 1)[count - 1]
        chosen = np.flatnonzero(keys <= last)
        if chosen.size >= count:  # else NaNs are among the first, and they compare with nothing
            return chosen[np.argsort(keys[chosen], kind="stable")[:count]]
    return np.argsort(keys, kind="stable")[:count]
