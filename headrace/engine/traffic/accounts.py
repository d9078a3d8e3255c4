# SPDX-License-Identifier: Apache-2.0
"""What one version did with the traffic it was given: since the split began, and in the last seconds, for rollback.

Written by `lanes` and `shadowing` in the loop's thread; read by `reporting`. An error is one of the version's own: a
request that was wrong, or that nobody waited for any more, says nothing about the version that got it.
"""

from __future__ import annotations

import math
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import Code, HeadraceError
from headrace.engine.traffic.histograms import Tally, bucket_of
from headrace.engine.traffic.settings import Rollback

Numbers = dict[str, Any]
"""Counts, in objects of any depth: those of several processes can be added up."""

_SLICES = 6
_ITS_OWN = (Code.UNAVAILABLE, Code.INTERNAL, Code.DEADLINE_EXCEEDED)


class Account:
    """The counts of one version."""

    __slots__ = ("answered", "cancelled", "diverted", "errors", "latencies", "refused", "requests")

    def __init__(self) -> None:
        self.requests = 0
        """Given to the version, whatever became of them."""
        self.answered = 0
        self.errors = 0
        self.refused = 0
        """Wrong requests."""
        self.cancelled = 0
        self.diverted = 0
        """Meant for the version, and given to another because it is rolled back or not there."""
        self.latencies: Tally = {}
        """Of what was answered, in seconds."""

    def succeeded(self, seconds: float) -> None:
        """A request was answered."""
        self.answered += 1
        bucket = bucket_of(seconds)
        self.latencies[bucket] = self.latencies.get(bucket, 0) + 1

    def failed(self, error: BaseException) -> bool:
        """A request was not answered; whether that is the version's fault."""
        if isinstance(error, HeadraceError) and error.code not in _ITS_OWN:
            if error.code is Code.CANCELLED:
                self.cancelled += 1
            else:
                self.refused += 1
            return False
        self.errors += 1
        return True

    def numbers(self) -> Numbers:
        """As JSON for other processes."""
        made: Numbers = {name: getattr(self, name) for name in self.__slots__ if name != "latencies"}
        made["latencies"] = {str(bucket): times for bucket, times in self.latencies.items()}
        return made


class Window:
    """How many of the last seconds' requests were good, wrong and slow. In `_SLICES`, each forgotten as a whole."""

    __slots__ = ("_ends", "_monotonic", "_rules", "_seconds", "_slices", "errors", "judged", "slow")

    def __init__(self, rules: Rollback, clock: Clock) -> None:
        self._rules = rules
        self._monotonic = clock.monotonic
        self._seconds = rules.window_seconds / _SLICES
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self.judged = self.errors = self.slow = 0
        self._ends = self._monotonic() + self._seconds
        self._slices: list[list[int]] = [[0, 0, 0] for _ in range(_SLICES)]

    def add(self, seconds: float, *, error: bool) -> str:
        """Count a request; why the version is to be rolled back, or "" if it is not."""
        if self._monotonic() >= self._ends:
            self._forget()
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
        # The value at the 99th percentile's rank is over the bound when so many above that rank are.
        good = self.judged - self.errors
        if rules.p99_ms and self.slow and self.slow >= good - math.floor(0.99 * (good - 1)):
            return f"{self.slow} {of} took longer than p99_ms {rules.p99_ms:g}"
        return ""

    def _forget(self) -> None:
        late = self._monotonic() - self._ends
        passed = int(late / self._seconds) + 1
        dropped = min(passed, _SLICES)
        self._slices = self._slices[dropped:] + [[0, 0, 0] for _ in range(dropped)]
        self._ends += passed * self._seconds
        self.judged, self.errors, self.slow = (sum(column) for column in zip(*self._slices, strict=True))
