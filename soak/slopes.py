# SPDX-License-Identifier: Apache-2.0
"""Detect growth in samples: a slope that is robust to outliers, its confidence bounds, and the verdict.

The slope is Theil's and Sen's: the median of those between all pairs of points. Its bounds are by the ranks of the pairs
(Sen 1968).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WARM_UP_SHARE = 0.2
"""What is made once and kept (caches, pools, allocators' reserves) is made then."""
_BLOCKS = 24
"""Neighbours are alike, so what is judged are the medians of so many pieces of the run."""
_SURE = 3.3
"""Of a thousand that do not grow, one is said to."""
_HOUR_SECONDS = 3600.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much something may grow."""

    an_hour: float
    """In units; as a share of its level where `share` says so."""
    least: float
    """Growth over the run that is not worth a word, in the same measure."""
    share: bool = False


@dataclass(frozen=True, slots=True)
class Slope:
    """How steep, in units an hour, and between what it is surely."""

    an_hour: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of one thing that was measured."""

    name: str
    unit: str
    level: float
    """The median after the warm-up."""
    slope: Slope
    grows: bool
    why: str


def judge(name: str, unit: str, seconds: Sequence[float], values: Sequence[float], allowed: Allowance) -> Verdict:
    """Say whether it grows: surely more than allowed, over the whole run and over its second half, and not by a trifle.

    What climbs to a level and stays there grows over the whole, but not in the second half; a step is none in one of them.
    """
    x, y = _settled(np.asarray(seconds, float), np.asarray(values, float))
    if len(x) < 8:
        return Verdict(name, unit, math.nan, Slope(math.nan, math.nan, math.nan), False, "too few samples to say")
    level = float(np.median(y))
    scale = level if allowed.share else 1.0
    whole, later = theil_sen(x, y), theil_sen(x[len(x) // 2 :], y[len(y) // 2 :])
    grown = whole.an_hour * float(x[-1] - x[0]) / _HOUR_SECONDS
    limit, least = allowed.an_hour * scale, allowed.least * scale
    grows = whole.low > limit and later.an_hour > limit and grown > least
    growth = f"{grown:+.3g} {unit} in {x[-1] - x[0]:.0f} s"
    why = f"{growth}: more than {limit:.3g} an hour, and no end to it" if grows else growth
    return Verdict(name, unit, level, whole, grows, why)


def theil_sen(x: Floats, y: Floats) -> Slope:
    """The median slope of all pairs, an hour, and its bounds."""
    first, second = np.triu_indices(len(x), 1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first])) * _HOUR_SECONDS
    count, pairs = len(x), len(slopes)
    spread = _SURE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low, high = int((pairs - spread) / 2), int((pairs + spread) / 2) + 1
    return Slope(float(np.median(slopes)), float(slopes[max(low, 0)]), float(slopes[min(high, pairs - 1)]))


def _settled(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Without the warm-up and what was not measured, as medians of pieces."""
    if not len(x):
        return x, y
    start = x[0] + WARM_UP_SHARE * (x[-1] - x[0])
    settled = (x >= start) & np.isfinite(y)
    x, y = x[settled], y[settled]
    pieces = max(1, math.ceil(len(x) / _BLOCKS))
    groups = range(0, len(x), pieces)
    return (
        np.array([np.median(x[group : group + pieces]) for group in groups]),
        np.array([np.median(y[group : group + pieces]) for group in groups]),
    )
