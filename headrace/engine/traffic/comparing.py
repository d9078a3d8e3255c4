# SPDX-License-Identifier: Apache-2.0
"""Whether two versions gave the same answer, and how far apart they are. Called by `shadowing`, in any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.dtypes import BF16, bf16_to_float32
from headrace.core.tensors import Tensor


class Comparison(NamedTuple):
    """Of two answers to one request."""

    agrees: bool
    """Whole numbers and texts the same, floating-point numbers within the tolerance; the same outputs of the same shapes."""
    difference: float | None
    """The largest between two floating-point numbers; None where there are none to compare."""
    same_choice: bool | None
    """Whether the largest number of each vector is at the same place; None where there are no vectors."""


def compare(one: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> Comparison:
    """Compare all outputs, by name."""
    agrees = {tensor.name for tensor in one} == {tensor.name for tensor in other}
    by_name = {tensor.name: tensor for tensor in other}
    differences: list[float] = []
    choices: list[bool] = []
    for tensor in one:
        match = by_name.get(tensor.name)
        if match is None:
            continue
        mine, theirs = _array(tensor), _array(match)
        if mine.shape != theirs.shape or mine.dtype.kind != theirs.dtype.kind:
            agrees = False
        elif mine.dtype.kind != "f":
            agrees = agrees and bool(np.array_equal(mine, theirs))
        elif mine.size:
            close, difference = _floats(mine, theirs, tolerance)
            agrees = agrees and close
            differences.append(difference)
            if mine.ndim and mine.shape[-1] > 1:
                choices.append(bool(np.array_equal(mine.argmax(-1), theirs.argmax(-1))))
    return Comparison(agrees, max(differences, default=None), all(choices) if choices else None)


def _floats(mine: npt.NDArray[Any], theirs: npt.NDArray[Any], tolerance: float) -> tuple[bool, float]:
    # In double precision: the difference of two halves may be no half.
    one, two = mine.astype(np.float64, copy=False), theirs.astype(np.float64, copy=False)
    close = bool(np.isclose(one, two, rtol=tolerance, atol=tolerance, equal_nan=True).all())
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - two)
    same = (one == two) | (np.isnan(one) & np.isnan(two))
    apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
    return close, float(apart.max())


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    array = np.asarray(tensor.array)
    return bf16_to_float32(array) if tensor.dtype is BF16 else array
