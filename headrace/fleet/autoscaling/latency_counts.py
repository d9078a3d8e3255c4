# SPDX-License-Identifier: Apache-2.0
"""Counts of latencies by bucket: what routers count, and what percentiles of a time window are computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

_FIRST_BOUND, _FACTOR, _BOUNDS = 0.001, 1.25, 54
LATENCY_BOUNDS_SECONDS = tuple(float(f"{_FIRST_BOUND * _FACTOR**number:.3g}") for number in range(_BOUNDS))
"""Upper bounds of the buckets, from 1 ms to 137 s: narrow, so that a percentile is exact to some per cent."""


@dataclass(frozen=True, slots=True)
class LatencyCounts:
    """Latencies by bucket."""

    counts: tuple[int, ...] = ()
    """Latencies in each bucket of `LATENCY_BOUNDS_SECONDS`, and those over the last bound. Empty: none."""
    sum: float = 0.0
    """Seconds of all together."""

    @property
    def total(self) -> int:
        """Number of latencies."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean in seconds; 0 without any."""
        return self.sum / total if (total := self.total) else 0.0

    def percentile(self, percent: float) -> float:
        """Return a percentile in seconds, interpolated within its bucket; 0 without any."""
        rank, below = self.total * percent / 100, 0
        for index, count in enumerate(self.counts):
            if count and below + count >= rank:
                low = LATENCY_BOUNDS_SECONDS[index - 1] if index else 0.0
                high = LATENCY_BOUNDS_SECONDS[min(index, _BOUNDS - 1)]
                return low + (high - low) * (rank - below) / count
            below += count
        return 0.0

    def up_to(self, seconds: float) -> LatencyCounts:
        """Return the counts without buckets that begin above a latency. Their sum is that of the middles of the buckets."""
        if seconds >= LATENCY_BOUNDS_SECONDS[-1]:
            return self
        kept = tuple(
            count if (LATENCY_BOUNDS_SECONDS[index - 1] if index else 0.0) <= seconds else 0
            for index, count in enumerate(self.counts)
        )
        return LatencyCounts(kept, sum(map(_middle_times, range(len(kept)), kept)))

    def since(self, before: LatencyCounts) -> LatencyCounts:
        """Return what was counted after an earlier reading. A counter that decreased was restarted."""
        if not before.counts or self.total < before.total:
            return self
        pairs = zip(self.counts, before.counts, strict=True)
        return LatencyCounts(tuple(max(0, new - old) for new, old in pairs), max(0.0, self.sum - before.sum))


def add_counts(several: Iterable[LatencyCounts]) -> LatencyCounts:
    """Return the sum of several."""
    counted = [counts for counts in several if counts.counts]
    if not counted:
        return LatencyCounts()
    return LatencyCounts(
        tuple(map(sum, zip(*(counts.counts for counts in counted), strict=True))), sum(counts.sum for counts in counted)
    )


def parse_counts(counts: object, seconds: object) -> LatencyCounts:
    """Return the counts that a router's status has; none if they do not have our buckets."""
    if not isinstance(counts, Sequence) or len(counts) != _BOUNDS + 1 or not isinstance(seconds, int | float):
        return LatencyCounts()
    numbers = tuple(count for count in counts if isinstance(count, int) and count >= 0)
    if len(numbers) != len(counts) or not 0 <= seconds < inf:
        return LatencyCounts()
    return LatencyCounts(numbers, float(seconds))


def _middle_times(index: int, count: int) -> float:
    low = LATENCY_BOUNDS_SECONDS[index - 1] if index else 0.0
    return count * (low + LATENCY_BOUNDS_SECONDS[min(index, _BOUNDS - 1)]) / 2
