# SPDX-License-Identifier: Apache-2.0
"""Statistics of a traffic split: counts per version since the split began, the recent window for rollback, and metrics.

`split_version` and `shadow` write the counts in the event loop's thread; `report` reads them. Only errors of the version
itself count as errors: a wrong or cancelled request says nothing about the version that got it. Latencies and differences
are counted in buckets whose bounds grow by a constant factor: bounded memory, and the counts of several processes add up.
The middle of a bucket is within 1 % of everything in it; of some 2,800 possible buckets, only those in use exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import Code, HeadraceError
from headrace.core.telemetry.metrics import Counter, Registry
from headrace.engine.traffic.settings import RollbackRules

Numbers = dict[str, Any]
"""Counts in nested JSON objects; those of several processes can be added."""

_SLICES = 6
_OWN_ERRORS = (Code.UNAVAILABLE, Code.INTERNAL, Code.DEADLINE_EXCEEDED)


class VersionCounts:
    """Counts of one version or shadow."""

    __slots__ = ("answered", "cancelled", "diverted", "errors", "latencies", "refused", "requests")

    def __init__(self) -> None:
        self.requests = 0
        """All requests sent to the version."""
        self.answered = 0
        self.errors = 0
        self.refused = 0
        """Invalid requests."""
        self.cancelled = 0
        self.diverted = 0
        """Requests that went to another version because this one is rolled back or missing."""
        self.latencies: BucketCounts = {}
        """Latencies of successful requests in seconds."""

    def succeeded(self, seconds: float) -> None:
        """Count a successful request."""
        self.answered += 1
        bucket = bucket_of(seconds)
        self.latencies[bucket] = self.latencies.get(bucket, 0) + 1

    def failed(self, error: BaseException) -> bool:
        """Count a failed request; return whether it is the version's own error."""
        if isinstance(error, HeadraceError) and error.code not in _OWN_ERRORS:
            if error.code is Code.CANCELLED:
                self.cancelled += 1
            else:
                self.refused += 1
            return False
        self.errors += 1
        return True

    def numbers(self) -> Numbers:
        """Return the counts as JSON, for other processes."""
        numbers: Numbers = {name: getattr(self, name) for name in self.__slots__ if name != "latencies"}
        numbers["latencies"] = {str(bucket): count for bucket, count in self.latencies.items()}
        return numbers


class RollbackWindow:
    """Counts of all, failed and slow requests in the last seconds, in `_SLICES` slices that are dropped one by one."""

    __slots__ = ("_ends", "_monotonic", "_rules", "_seconds", "_slices", "errors", "judged", "slow")

    def __init__(self, rules: RollbackRules, clock: Clock) -> None:
        self._rules = rules
        self._monotonic = clock.monotonic
        self._seconds = rules.window_seconds / _SLICES
        self.clear()

    def clear(self) -> None:
        """Reset the window."""
        self.judged = self.errors = self.slow = 0
        self._ends = self._monotonic() + self._seconds
        self._slices: list[list[int]] = [[0, 0, 0] for _ in range(_SLICES)]

    def add(self, seconds: float, *, error: bool) -> str:
        """Count a request; return why the version must be rolled back, "" if it must not."""
        if self._monotonic() >= self._ends:
            self._drop_old_slices()
        newest = self._slices[-1]
        newest[0] += 1
        self.judged += 1
        if error:
            newest[1] += 1
            self.errors += 1
        elif self._rules.p99_ms and seconds * 1000 > self._rules.p99_ms:
            newest[2] += 1
            self.slow += 1
        bad = self.errors or self.slow
        return self._verdict() if bad and self.judged >= self._rules.least_requests else ""

    def _verdict(self) -> str:
        rules = self._rules
        of = f"of the last {self.judged} requests in {rules.window_seconds:g} s"
        if rules.error_rate and self.errors > rules.error_rate * self.judged:
            return f"{self.errors} errors {of}, which is more than error_rate {rules.error_rate:g} allows"
        # The 99th percentile is over the limit if at least as many requests are slow as there are above its rank.
        good = self.judged - self.errors
        if rules.p99_ms and self.slow and self.slow >= good - math.floor(0.99 * (good - 1)):
            return f"{self.slow} {of} took longer than p99_ms {rules.p99_ms:g}"
        return ""

    def _drop_old_slices(self) -> None:
        late = self._monotonic() - self._ends
        passed = int(late / self._seconds) + 1
        dropped = min(passed, _SLICES)
        self._slices = self._slices[dropped:] + [[0, 0, 0] for _ in range(dropped)]
        self._ends += passed * self._seconds
        self.judged, self.errors, self.slow = (sum(column) for column in zip(*self._slices, strict=True))


BucketCounts = dict[int, int]
"""Number of values in each bucket."""

_RELATIVE_ERROR = 0.01
_GROWTH = (1 + _RELATIVE_ERROR) / (1 - _RELATIVE_ERROR)
_PER_LOG = 1 / math.log(_GROWTH)
_SMALLEST = 1e-12
_LARGEST = 1e12
_TOP = ceil(log(_LARGEST) * _PER_LOG)
ZERO = -10_000
"""The bucket of values that are practically 0."""


def bucket_of(value: float) -> int:
    """Return the bucket of a number; NaN is in the largest bucket."""
    if value <= _SMALLEST:
        return ZERO
    return ceil(log(value) * _PER_LOG) if value < _LARGEST else _TOP


def value_of(bucket: int) -> float:
    """Return the middle of a bucket."""
    return 0.0 if bucket == ZERO else float(2 * _GROWTH**bucket / (_GROWTH + 1))


def total(tally: Mapping[int, int]) -> int:
    """Return the number of counted values."""
    return sum(tally.values())


def quantiles(tally: Mapping[int, int], fractions: Sequence[float]) -> list[float]:
    """Return the value at each rank from 0 to 1, the one at `floor(q * (n - 1))`; NaN if nothing was counted."""
    buckets = sorted(tally)
    count = total(tally)
    return [_value_at(math.floor(quantile * (count - 1)), buckets, tally) for quantile in fractions]


def mean(tally: Mapping[int, int]) -> float:
    """Return the mean, within the error of the buckets; NaN if nothing was counted."""
    count = total(tally)
    return sum(value_of(bucket) * times for bucket, times in tally.items()) / count if count else math.nan


def added(tallies: Iterable[Mapping[int, int]]) -> BucketCounts:
    """Return the sum of several counts."""
    sums: BucketCounts = {}
    for tally in tallies:
        for bucket, times in tally.items():
            sums[bucket] = sums.get(bucket, 0) + times
    return sums


def coarse(tally: Mapping[int, int], together: int = 10) -> list[tuple[float, int]]:
    """Return upper bound and count of every group of `together` buckets, for drawing a histogram."""
    if not tally:
        return []
    groups: BucketCounts = {}
    first = min((bucket for bucket in tally if bucket != ZERO), default=0)
    for bucket, times in tally.items():
        group = (max(bucket, first) - 1) // together
        groups[group] = groups.get(group, 0) + times
    first, last = min(groups), max(groups)
    return [(float(_GROWTH ** ((group + 1) * together)), groups.get(group, 0)) for group in range(first, last + 1)]


def _value_at(rank: int, buckets: Sequence[int], tally: Mapping[int, int]) -> float:
    count = 0
    for bucket in buckets:
        count += tally[bucket]
        if count > rank:
            return value_of(bucket)
    return math.nan


_LABELS = ("model", "version")


class TrafficMetrics:
    """The metrics of all splits of a server. Counters only: those of several workers add up."""

    def __init__(self, registry: Registry) -> None:
        self._requests = registry.counter(
            "headrace_traffic_requests_total", "Requests without a version that a split sent to this version", _LABELS
        )
        self._errors = registry.counter(
            "headrace_traffic_errors_total",
            "Requests of this version that failed with an error of the version itself",
            _LABELS,
        )
        self._diverted = registry.counter(
            "headrace_traffic_diverted_total",
            "Requests for this version that another version got, because this one is rolled_back or missing",
            (*_LABELS, "reason"),
        )
        self._rollbacks = registry.counter(
            "headrace_traffic_rollbacks_total", "Times that a version was rolled back", _LABELS
        )
        self._shadows = registry.counter(
            "headrace_traffic_shadow_requests_total",
            "Copies for a shadow: agreed or differed, failed, or dropped because too many were under way or it is missing",
            (*_LABELS, "outcome"),
        )

    def requests(self, model: str, version: str) -> Counter:
        """Return the counter of requests."""
        return self._requests.labels(model=model, version=version)

    def errors(self, model: str, version: str) -> Counter:
        """Return the counter of the version's own errors."""
        return self._errors.labels(model=model, version=version)

    def diverted(self, model: str, version: str, reason: str) -> Counter:
        """Return the counter of requests that went to another version."""
        return self._diverted.labels(model=model, version=version, reason=reason)

    def rollbacks(self, model: str, version: str) -> Counter:
        """Return the counter of rollbacks."""
        return self._rollbacks.labels(model=model, version=version)

    def shadows(self, model: str, version: str, outcome: str) -> Counter:
        """Return the counter of shadow copies by outcome."""
        return self._shadows.labels(model=model, version=version, outcome=outcome)
