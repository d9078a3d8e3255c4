# SPDX-License-Identifier: Apache-2.0
"""Positive numbers counted in buckets whose bounds grow by a constant factor: bounded memory, and counts that add up.

Used for latencies and for differences between answers. The middle of a bucket is within 1 % of everything in it. There
are some 2,800 possible buckets, of which those in use exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log

Tally = dict[int, int]
"""How many were in each bucket."""

_RELATIVE_ERROR = 0.01
_GROWTH = (1 + _RELATIVE_ERROR) / (1 - _RELATIVE_ERROR)
_PER_LOG = 1 / math.log(_GROWTH)
_SMALLEST = 1e-12
_LARGEST = 1e12
_TOP = ceil(log(_LARGEST) * _PER_LOG)
ZERO = -10_000
"""The bucket of what is too small to tell from 0."""


def bucket_of(value: float) -> int:
    """The bucket that a number counts in; NaN counts as the largest there is."""
    if value <= _SMALLEST:
        return ZERO
    return ceil(log(value) * _PER_LOG) if value < _LARGEST else _TOP


def value_of(bucket: int) -> float:
    """The middle of a bucket."""
    return 0.0 if bucket == ZERO else float(2 * _GROWTH**bucket / (_GROWTH + 1))


def total(tally: Mapping[int, int]) -> int:
    """How many were counted."""
    return sum(tally.values())


def quantiles(tally: Mapping[int, int], wanted: Sequence[float]) -> list[float]:
    """The value at each of these ranks, from 0 to 1: the one at `floor(q * (n - 1))`; NaN where nothing was counted."""
    buckets = sorted(tally)
    count = total(tally)
    return [_value_at(math.floor(each * (count - 1)), buckets, tally) for each in wanted]


def mean(tally: Mapping[int, int]) -> float:
    """The average, within the error of the buckets; NaN of nothing."""
    count = total(tally)
    return sum(value_of(bucket) * times for bucket, times in tally.items()) / count if count else math.nan


def added(tallies: Iterable[Mapping[int, int]]) -> Tally:
    """Several as one."""
    made: Tally = {}
    for tally in tallies:
        for bucket, times in tally.items():
            made[bucket] = made.get(bucket, 0) + times
    return made


def coarse(tally: Mapping[int, int], together: int = 10) -> list[tuple[float, int]]:
    """Upper bound and count of every `together` buckets, from the first in use to the last: enough to draw."""
    if not tally:
        return []
    groups: Tally = {}
    first = min((bucket for bucket in tally if bucket != ZERO), default=0)
    for bucket, times in tally.items():
        group = (max(bucket, first) - 1) // together
        groups[group] = groups.get(group, 0) + times
    first, last = min(groups), max(groups)
    return [(float(_GROWTH ** ((group + 1) * together)), groups.get(group, 0)) for group in range(first, last + 1)]


def _value_at(rank: int, buckets: Sequence[int], tally: Mapping[int, int]) -> float:
    seen = 0
    for bucket in buckets:
        seen += tally[bucket]
        if seen > rank:
            return value_of(bucket)
    return math.nan
