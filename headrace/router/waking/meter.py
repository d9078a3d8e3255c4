# SPDX-License-Identifier: Apache-2.0
"""What the load is: concurrency and requests per second, a sample of each for every second of the last minute.

Fed by `activator`, some times a second, from counts that the backends have anyway: requests pay nothing for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.router.waking.deciding import STABLE_SECONDS, Sample
from headrace.router.waking.settings import CONCURRENCY

_BUCKET_SECONDS = 1.0


class Meter:
    """See the module."""

    def __init__(self) -> None:
        most = int(STABLE_SECONDS / _BUCKET_SECONDS) + 1
        self._concurrency: deque[Sample] = deque(maxlen=most)
        self._rps: deque[Sample] = deque(maxlen=most)
        self._began: float | None = None
        self._total = 0.0
        self._looks = 0
        self._count = 0

    def add(self, now: float, at_once: int, arrived: int) -> None:
        """`at_once` requests are under way; `arrived` have come, ever."""
        if self._began is None:
            self._began, self._count = now, arrived
        self._total += at_once
        self._looks += 1
        passed = now - self._began
        if passed < _BUCKET_SECONDS:
            return
        self._concurrency.append(Sample(now, self._total / self._looks))
        self._rps.append(Sample(now, max(0, arrived - self._count) / passed))
        self._began, self._count = now, arrived
        self._total, self._looks = 0.0, 0

    def samples(self, metric: str) -> Sequence[Sample]:
        """The oldest first."""
        return self._concurrency if metric == CONCURRENCY else self._rps

    def forget(self) -> None:
        """What was before a sleep says nothing of what comes after it."""
        self._concurrency.clear()
        self._rps.clear()
        self._began = None
        self._total, self._looks = 0.0, 0
