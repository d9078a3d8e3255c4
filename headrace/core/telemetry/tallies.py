# SPDX-License-Identifier: Apache-2.0
"""Histograms of durations for paths where every tenth of a microsecond counts.

Fed by the engine's statistics. Only what is slow is counted here: how many durations there were in all is known to who
keeps one, so the first bucket is the rest, and a quick request costs a comparison. Exact all the same. Must not know
what was timed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from headrace.core.telemetry.metrics import DURATION_BUCKETS_SECONDS

DURATION_BOUNDS_NS = tuple(round(seconds * 1e9) for seconds in DURATION_BUCKETS_SECONDS)
"""Upper ends of the buckets, included in them."""

QUICK_NS = DURATION_BOUNDS_NS[0]
"""What took no longer than this is in the first bucket, and need not be counted."""

LOAD_RATIO_BOUNDS = (1.05, 1.10, 1.25, 1.5, 2.0, 10.0, 50.0)
"""How many times as long as its computation a request took: Triton's bounds, of its first releases."""

LOAD_EXCESSES = tuple(bound - 1 for bound in LOAD_RATIO_BOUNDS)
"""The same, as what a ratio is over 1."""


class SlowTally:
    """Durations over `QUICK_NS`, by bucket."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * len(DURATION_BOUNDS_NS)

    def add(self, duration_ns: int, times: int = 1) -> None:
        """Count one that is over `QUICK_NS`."""
        self._counts[bisect_left(DURATION_BOUNDS_NS, duration_ns) - 1] += times

    def add_all(self, durations_ns: Sequence[int]) -> None:
        """Count those of them that are over `QUICK_NS`. What was done together took about as long: often one bucket."""
        shortest = bisect_left(DURATION_BOUNDS_NS, min(durations_ns))
        if shortest == bisect_left(DURATION_BOUNDS_NS, max(durations_ns)):
            if shortest:
                self._counts[shortest - 1] += len(durations_ns)
        else:
            for duration_ns in durations_ns:
                if duration_ns > QUICK_NS:
                    self.add(duration_ns)

    def counts(self, total: int) -> list[int]:
        """How many in each bucket, when there were `total` durations, quick ones among them."""
        return [total - sum(self._counts), *self._counts]
