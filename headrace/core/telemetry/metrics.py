# SPDX-License-Identifier: Apache-2.0
"""Numbers that the hot path adds to: counters, gauges and histograms; `summaries` has the fourth kind.

A room declares families on the `registry.Registry` it is given, resolves each series once, as in
`requests.labels(model="m")`, and keeps it; from then on an update is an attribute add, with no look-up and no lock.
Several threads may feed a series: CPython with its lock does not switch threads inside `x.value += n` on plain numbers,
and if it ever did, an add would be lost and nothing else. Must not know how the numbers are written (`exposition`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

DURATION_BUCKETS_SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""From a tenth of a millisecond, where small models live, to half a minute, where people give up."""


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        """Count `amount` more; never negative, which is not checked here."""
        self.value += amount


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        """Make it `value`."""
        self.value = value

    def add(self, amount: float = 1) -> None:
        """Make it `amount` more; a negative amount makes it less."""
        self.value += amount


class Histogram:
    """How many observations were at most so large, for each of some bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        """Upper ends of the buckets, included in them; rising, without infinity."""
        self.counts = [0] * (len(bounds) + 1)
        """Observations in each bucket alone (not added up), and those over the last bound."""
        self.sum: float = 0

    def observe(self, value: float) -> None:
        """Take one observation; never NaN, which would spoil the sum for good."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def check_bounds(bounds: Sequence[float]) -> tuple[float, ...]:
    """Return bucket bounds as a histogram keeps them, or say what is wrong with them."""
    finite = tuple(float(bound) for bound in bounds if bound != math.inf)
    # OpenMetrics forbids the sum of a histogram with negative bounds.
    if not finite or not all(math.isfinite(bound) and bound >= 0 for bound in finite):
        raise ValueError(f"histogram buckets {list(bounds)} are not allowed: give at least one bound, each 0 or more")
    if any(low >= high for low, high in pairwise(finite)):
        raise ValueError(f"histogram buckets {list(bounds)} are not allowed: each must be larger than the one before")
    return finite
