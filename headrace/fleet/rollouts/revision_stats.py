# SPDX-License-Identifier: Apache-2.0
"""Statistics of each revision from `/router/status` of the routers: requests, errors and latency.

Counters of a running router only grow; a smaller value means that it restarted and counts from zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

StatsKey = tuple[str, str]
"""Name of a router, and a revision."""
_QUANTILE = 0.9


@dataclass(frozen=True)
class RequestStats:
    """Requests of one revision."""

    requests: int = 0
    """Completed requests; those that the client cancelled do not count."""
    errors: int = 0
    """Requests whose backend was unreachable, broke off or answered with 5xx."""
    timed: int = 0
    seconds: float = 0.0
    """Total duration of the timed requests."""
    times: tuple[int, ...] = ()
    """Number of timed requests per latency bucket."""

    def plus(self, other: RequestStats) -> RequestStats:
        """Return the sum."""
        times = tuple(a + b for a, b in zip_longest(self.times, other.times, fillvalue=0))
        return RequestStats(
            self.requests + other.requests,
            self.errors + other.errors,
            self.timed + other.timed,
            self.seconds + other.seconds,
            times,
        )

    def since(self, before: RequestStats) -> RequestStats:
        """Return the difference to `before`; everything if the router has restarted."""
        times = tuple(a - b for a, b in zip_longest(self.times, before.times, fillvalue=0))
        if self.requests < before.requests or self.errors < before.errors or min(times, default=0) < 0:
            return self
        return RequestStats(
            self.requests - before.requests,
            self.errors - before.errors,
            self.timed - before.timed,
            max(0.0, self.seconds - before.seconds),
            times,
        )

    @property
    def error_percent(self) -> float:
        """Share of errors among the requests, in percent."""
        return 100 * self.errors / self.requests if self.requests else 0.0

    @property
    def mean_seconds(self) -> float:
        """Mean duration of the timed requests."""
        return self.seconds / self.timed if self.timed else 0.0

    def quantile_seconds(self, bounds: tuple[float, ...], share: float = _QUANTILE) -> float:
        """Estimate a latency quantile from the buckets."""
        if not self.timed or not bounds:
            return 0.0
        rank = share * self.timed
        for index, (count, total) in enumerate(zip(self.times, accumulate(self.times), strict=True)):
            if total >= rank and count:
                if index >= len(bounds):
                    break
                low = bounds[index - 1] if index else 0.0
                return low + (bounds[index] - low) * (rank - (total - count)) / count
        return bounds[-1]


@dataclass(frozen=True)
class RouterStats:
    """Statistics of all routers of a service at one moment."""

    stats: Mapping[StatsKey, RequestStats]
    bounds: tuple[float, ...] = ()
    """Upper bounds of the buckets of `RequestStats.times`."""
    routers: tuple[str, ...] = ()
    """All routers, including those that have not seen any revision yet."""

    def baseline(self, *revisions: str) -> dict[StatsKey, RequestStats]:
        """Return the counters to compare with later. Routers that are missing there start at zero."""
        return {
            (router, name): self.stats.get((router, name), RequestStats())
            for router in self.routers
            for name in revisions
        }

    def since(self, revision: str, before: Mapping[StatsKey, RequestStats]) -> RequestStats:
        """Return the sum of a revision over all routers since a baseline."""
        total = RequestStats()
        for (router, name), item in self.stats.items():
            if name == revision:
                total = total.plus(item.since(before.get((router, name), RequestStats())))
        return total


def parse_router_stats(statuses: Mapping[str, Any]) -> RouterStats | None:
    """Parse the status of routers, by name. None if one has not answered: its requests would be missing."""
    stats: dict[StatsKey, RequestStats] = {}
    bounds: tuple[float, ...] = ()
    for router, status in statuses.items():
        revisions = status.get("revisions") if isinstance(status, Mapping) else None
        if not isinstance(revisions, Mapping):
            return None
        bounds = tuple(float(number) for number in _numbers(revisions.get("bounds"))) or bounds
        counts = revisions.get("counts")
        for revision, item in counts.items() if isinstance(counts, Mapping) else ():
            if isinstance(item, Mapping):
                stats[(router, str(revision))] = _parse_stats(item)
    return RouterStats(stats, bounds, tuple(statuses))


def _parse_stats(statuses: Mapping[str, Any]) -> RequestStats:
    times = tuple(int(number) for number in _numbers(statuses.get("times")))
    requests, errors, seconds = (_number(statuses.get(name)) for name in ("requests", "errors", "seconds"))
    return RequestStats(int(requests), int(errors), sum(times), seconds, times)


def _numbers(value: Any) -> Iterable[float]:
    return [item for item in value if isinstance(item, int | float)] if isinstance(value, list) else []


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0
