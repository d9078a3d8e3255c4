# SPDX-License-Identifier: Apache-2.0
"""An output as a classification: the largest values of each row, where they stand, and what they are called.

Called by the codecs of `v1` and `v2` for outputs that a client wants so. A pure function of a tensor; knows no protocol:
each writes the classes its own way, and refuses by itself the data types that it does not classify.
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
"""Triton's limit. Every element may become an entry of the answer, which is made in the loop's thread."""

_SORTED_WHOLE = 4096
"""A row up to this size is sorted as it is; of a longer one, what cannot be among the first is left out before."""


class ClassScore(NamedTuple):
    """One class of a row."""

    value: int | float
    """A whole number where the tensor has them; BOOL is 0 or 1."""
    idx: int
    """Its place in the row, seen as one flat list."""
    label: str
    """"" where the label file has no such line."""


def top_classes(tensor: Tensor, count: int, labels: Sequence[str] = (), *, batched: bool) -> list[list[ClassScore]]:
    """The `count` largest values of each row, the largest first; all of them where a row has fewer.

    A row is an entry of the first dimension where `batched`, else the whole tensor. Of equal values the first one goes
    first; NaN goes last. Raises for BYTES, and for more than `MOST_ELEMENTS`, with Triton's texts.
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
    return [_of_row(row, count, labels) for row in values.reshape(rows, values.size // rows)]


def _of_row(row: npt.NDArray[Any], count: int, labels: Sequence[str]) -> list[ClassScore]:
    order = _largest(row, min(count, row.size))
    known = len(labels)
    whole = row.dtype.kind == "b"
    return [
        ClassScore(int(value) if whole else value, index, labels[index] if index < known else "")
        for value, index in zip(row[order].tolist(), order.tolist(), strict=True)
    ]


def _largest(row: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """Where the largest values stand. A stable sort of keys that fall as the values rise."""
    # Of whole numbers the complement: the negative of the least one, or of an unsigned one, does not exist.
    keys = -row if row.dtype.kind == "f" else ~row
    if 0 < count < row.size and row.size > _SORTED_WHOLE:
        last = np.partition(keys, count - 1)[count - 1]
        chosen = np.flatnonzero(keys <= last)
        if chosen.size >= count:  # else there are NaNs among the first, which compare with nothing
            return chosen[np.argsort(keys[chosen], kind="stable")[:count]]
    return np.argsort(keys, kind="stable")[:count]
