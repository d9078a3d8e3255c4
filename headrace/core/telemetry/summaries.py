# SPDX-License-Identifier: Apache-2.0
"""Quantiles of the last minute or so, in bounded memory and with a bounded error.

Declared on a `registry.Registry` like the other metrics; dearer than a histogram, so off unless someone asks for it.

The error: values are counted in buckets whose bounds grow by a constant factor, so the middle of a bucket is within
`RELATIVE_ERROR` of everything in it (the idea of DDSketch, https://arxiv.org/abs/1908.10693). A quantile `q` of `n`
values is the one at rank `floor(q * (n - 1))` in rising order, answered within that error.
The memory: values under `SMALLEST` count as 0 and values over `LARGEST` as `LARGEST`, which leaves about 2,400 possible
buckets per slice; only those in use exist.
The window: it is cut into `SLICES` and the oldest slice is forgotten as a whole, so what is answered covers between
`SLICES - 1` and `SLICES` parts of the window.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, log

from headrace.core.clock import Clock

RELATIVE_ERROR = 0.01
SMALLEST = 1e-9
LARGEST = 1e12
SLICES = 6

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
DEFAULT_WINDOW_SECONDS = 60.0

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG = 1 / math.log(_GROWTH)
_TOP = math.ceil(math.log(LARGEST) * _PER_LOG)
_ZERO = -(1 << 30)


class Summary:
    """Quantiles over a sliding window; the sum and the count are of all time, as Prometheus wants them."""

    __slots__ = ("_monotonic", "_slice_ends", "_slice_seconds", "_slices", "count", "quantiles", "sum")

    def __init__(self, clock: Clock, quantiles: Sequence[float], window_seconds: float) -> None:
        self.quantiles = quantiles
        self.count = 0
        self.sum: float = 0
        self._monotonic = clock.monotonic
        self._slice_seconds = window_seconds / SLICES
        self._slice_ends = self._monotonic() + self._slice_seconds
        self._slices: list[dict[int, int]] = [{} for _ in range(SLICES)]

    def observe(self, value: float) -> None:
        """Take one observation; never NaN, which would spoil the sum for good."""
        if self._monotonic() >= self._slice_ends:
            self._forget()
        if value <= SMALLEST:
            bucket = _ZERO
        elif value < LARGEST:
            bucket = ceil(log(value) * _PER_LOG)
        else:
            bucket = _TOP
        newest = self._slices[-1]
        newest[bucket] = newest.get(bucket, 0) + 1
        self.count += 1
        self.sum += value

    def values(self) -> list[float]:
        """The value at each of `quantiles`, in the same order; NaN where the window is empty."""
        return quantile_values(self.quantiles, self.tally())

    def tally(self) -> dict[int, int]:
        """The window's values as counts of buckets: those of several summaries can be added up."""
        if self._monotonic() >= self._slice_ends:
            self._forget()
        tally: Tally[int] = Tally()
        for part in self._slices:
            tally.update(part.copy())
        return tally

    def _forget(self) -> None:
        """Drop the slices whose time is over, and begin new ones."""
        late = self._monotonic() - self._slice_ends
        passed = min(int(late / self._slice_seconds) + 1, SLICES)
        self._slices = self._slices[passed:] + [{} for _ in range(passed)]
        self._slice_ends += (int(late / self._slice_seconds) + 1) * self._slice_seconds


def quantile_values(quantiles: Sequence[float], tally: Mapping[int, int]) -> list[float]:
    """The value at each of `quantiles`, of values that are counted as `Summary.tally` does."""
    buckets = sorted(tally)
    ranks = list(accumulate(tally[bucket] for bucket in buckets))
    return [_value_at(quantile, buckets, ranks) for quantile in quantiles]


def _value_at(quantile: float, buckets: list[int], ranks: list[int]) -> float:
    if not buckets:
        return math.nan
    rank = math.floor(quantile * (ranks[-1] - 1))
    bucket = next(bucket for bucket, upto in zip(buckets, ranks, strict=True) if upto > rank)
    return 0.0 if bucket == _ZERO else 2 * _GROWTH**bucket / (_GROWTH + 1)


def check_quantiles(quantiles: Sequence[float]) -> tuple[float, ...]:
    """Return quantiles as a summary keeps them, or say what is wrong with them."""
    if not all(0 <= quantile <= 1 for quantile in quantiles) or len(set(quantiles)) != len(quantiles):
        raise ValueError(f"quantiles {list(quantiles)} are not allowed: each must be from 0 to 1, and only once")
    return tuple(float(quantile) for quantile in quantiles)
