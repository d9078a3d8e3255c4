# SPDX-License-Identifier: Apache-2.0
"""What the load is: a sample for every second of the last minute, of requests at once and per second, or of another number.

Fed by `router.waking` and `local.scaling`, from counts that are there anyway: requests pay nothing for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.fleet.autoscaling.deciding import KNATIVE, Sample, Windows

CONCURRENCY, RPS = "concurrency", "rps"
_BUCKET_SECONDS = 1.0


class Meter:
    """See the module."""

    def __init__(self, windows: Windows = KNATIVE) -> None:
        self._bucket = min(_BUCKET_SECONDS, windows.panic_seconds / 3)
        most = int(windows.stable_seconds / self._bucket) + 1
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
        if passed < self._bucket:
            return
        self._keep(self._concurrency, now, self._total / self._looks, passed)
        self._keep(self._rps, now, max(0, arrived - self._count) / passed, passed)
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

    def _keep(self, samples: deque[Sample], now: float, value: float, passed: float) -> None:
        """One for each second that passed, so that seconds count alike however seldom somebody looked."""
        buckets = min(int(passed / self._bucket), samples.maxlen or 1)
        samples.extend(Sample(now - each * self._bucket, value) for each in range(buckets - 1, -1, -1))
