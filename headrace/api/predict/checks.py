# SPDX-License-Identifier: Apache-2.0
"""What is refused before a model sees it: too much, too long, out of bounds, no number.

Made once from the settings; called by `known` and `reading`. Texts name the setting, so that whoever is refused knows whom
to ask. Shapes and types are the model's own business and not looked at here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.api.predict.settings import InputChecks
from headrace.core.dtypes import BF16, DType, bf16_to_float32
from headrace.core.errors import InvalidArgument, TooLarge

_FEW = 64
_NOT_FINITE = "NaN or infinity in the inputs: send finite numbers only"


class Checker:
    """One set of checks. Those that are off cost nothing."""

    def __init__(self, checks: InputChecks) -> None:
        self._numbers = checks.most_numbers if checks.enabled else 0
        self._rows = checks.most_rows if checks.enabled else 0
        self._longest = checks.longest_sequence if checks.enabled else 0
        self._least = checks.least if checks.enabled else None
        self._most = checks.most if checks.enabled else None
        self.finite = checks.enabled and not checks.allow_nan
        """Whether NaN and infinities are refused."""
        self.refuses_empty = checks.enabled
        self.bounds = self._least is not None or self._most is not None
        """Whether `check_bounds` has anything to do."""

    def check_rows(self, count: int) -> None:
        """The number of predictions in one request."""
        if not count:
            raise InvalidArgument("'batch' cannot be empty: send at least one row")
        if self._rows and count > self._rows:
            raise TooLarge(
                f"'batch' has {count} rows; at most {self._rows} are taken (max_rows): send several requests"
            )

    def check_size(self, label: str, shape: Sequence[int]) -> None:
        """The size of one prediction's input, where the model leaves it open."""
        count = math.prod(shape)
        if not count and self.refuses_empty:
            raise InvalidArgument(f"{label} cannot be empty")
        if self._numbers and count > self._numbers:
            raise TooLarge(f"{label} has {count} values, which exceeds the maximum of {self._numbers} (max_inputs)")
        if self._longest and shape and max(shape) > self._longest:
            raise TooLarge(
                f"{label} has a sequence of {max(shape)}, which exceeds max_sequence_length, {self._longest}: cut it"
            )

    def check_bounds(self, label: str, dtype: DType, array: npt.NDArray[Any]) -> None:
        """Every number lies between the bounds; of what is no number, nothing is asked."""
        if dtype is BF16:
            array = bf16_to_float32(array)
        if array.dtype.kind not in "iuf" or not array.size:
            return
        if self._least is not None and array.min() < self._least:
            raise InvalidArgument(f"{label} has {_number(array.min())}; the least value taken is {self._least:g}")
        if self._most is not None and array.max() > self._most:
            raise InvalidArgument(f"{label} has {_number(array.max())}; the largest value taken is {self._most:g}")

    def check_finite(self, numbers: npt.NDArray[np.floating[Any]]) -> None:
        """No NaN, no infinity, in a flat array of floats."""
        if not self.finite:
            return
        # A sum is finite only if all of them are; for few numbers it is quicker than to ask numpy about each.
        if len(numbers) <= _FEW and math.isfinite(sum(numbers.tolist())):
            return
        if not np.isfinite(numbers).all():
            raise not_finite()


def not_finite() -> InvalidArgument:
    """For inputs with a number that is none."""
    return InvalidArgument(_NOT_FINITE)


def _number(value: Any) -> str:
    return f"{value.item():g}"
