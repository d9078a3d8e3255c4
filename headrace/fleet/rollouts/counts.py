# SPDX-License-Identifier: Apache-2.0
"""What routers saw of each revision: requests, errors and how long they took. Read of `/router/status`, added and compared.

Counts only grow while a router lives; what has fallen has begun anew, and counts from zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

Seen = tuple[str, str]
"""A router, by a name of its own, and a revision."""
_QUANTILE = 0.9


@dataclass(frozen=True)
class Counts:
    """Of one revision."""

    requests: int = 0
    """That are over: those that the client gave up do not count."""
    errors: int = 0
    """Of these: it could not be reached, broke off, or answered with 5xx."""
    timed: int = 0
    seconds: float = 0.0
    """That the timed ones took together."""
    times: tuple[int, ...] = ()
    """How many of them took how long, by bucket."""

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        times = tuple(a + b for a, b in zip_longest(self.times, other.times, fillvalue=0))
        return Counts(
            self.requests + other.requests,
            self.errors + other.errors,
            self.timed + other.timed,
            self.seconds + other.seconds,
            times,
        )

    def since(self, before: Counts) -> Counts:
        """What came after `before`; all of it where the router has begun anew."""
        times = tuple(a - b for a, b in zip_longest(self.times, before.times, fillvalue=0))
        if self.requests < before.requests or self.errors < before.errors or min(times, default=0) < 0:
            return self
        return Counts(
            self.requests - before.requests,
            self.errors - before.errors,
            self.timed - before.timed,
            max(0.0, self.seconds - before.seconds),
            times,
        )

    @property
    def error_percent(self) -> float:
        """Of the requests."""
        return 100 * self.errors / self.requests if self.requests else 0.0

    @property
    def mean_seconds(self) -> float:
        """Of the timed ones."""
        return self.seconds / self.timed if self.timed else 0.0

    def quantile_seconds(self, bounds: tuple[float, ...], share: float = _QUANTILE) -> float:
        """What so many of the timed ones took at most, as far as buckets can say."""
        if not self.timed or not bounds:
            return 0.0
        wanted = share * self.timed
        for place, (count, total) in enumerate(zip(self.times, accumulate(self.times), strict=True)):
            if total >= wanted and count:
                if place >= len(bounds):
                    break
                low = bounds[place - 1] if place else 0.0
                return low + (bounds[place] - low) * (wanted - (total - count)) / count
        return bounds[-1]


@dataclass(frozen=True)
class Counted:
    """What all routers of a service told at one moment."""

    seen: Mapping[Seen, Counts]
    bounds: tuple[float, ...] = ()
    """Upper ends of the buckets of `Counts.times`."""
    routers: tuple[str, ...] = ()
    """Who told; also those that know of no revision yet."""

    def at(self, *revisions: str) -> dict[Seen, Counts]:
        """What to compare with later. Whoever is not among these begins at zero."""
        return {(each, name): self.seen.get((each, name), Counts()) for each in self.routers for name in revisions}

    def of(self, revision: str, before: Mapping[Seen, Counts]) -> Counts:
        """A revision since then, by all routers that are there."""
        total = Counts()
        for (router, name), each in self.seen.items():
            if name == revision:
                total = total.plus(each.since(before.get((router, name), Counts())))
        return total


def counted(told: Mapping[str, Any]) -> Counted | None:
    """What routers tell, by their names. None where one of them does not answer: its requests would be missing."""
    seen: dict[Seen, Counts] = {}
    bounds: tuple[float, ...] = ()
    for router, status in told.items():
        found = status.get("revisions") if isinstance(status, Mapping) else None
        if not isinstance(found, Mapping):
            return None
        bounds = tuple(float(each) for each in _numbers(found.get("bounds"))) or bounds
        counts = found.get("counts")
        for revision, each in counts.items() if isinstance(counts, Mapping) else ():
            if isinstance(each, Mapping):
                seen[(router, str(revision))] = _counts(each)
    return Counted(seen, bounds, tuple(told))


def _counts(told: Mapping[str, Any]) -> Counts:
    times = tuple(int(each) for each in _numbers(told.get("times")))
    requests, errors, seconds = (_first(told.get(name)) for name in ("requests", "errors", "seconds"))
    return Counts(int(requests), int(errors), sum(times), seconds, times)


def _numbers(found: Any) -> Iterable[float]:
    return [each for each in found if isinstance(each, int | float)] if isinstance(found, list) else []


def _first(found: Any) -> float:
    return found if isinstance(found, int | float) else 0
