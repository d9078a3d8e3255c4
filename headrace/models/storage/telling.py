# SPDX-License-Identifier: Apache-2.0
"""Progress of one download, from several threads and not too often: bytes, rate and what remains. Used by `cache`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from headrace.core.telemetry.progress import Progress, ProgressEvent
from headrace.models.storage.problems import readable_bytes

_REPORT_SECONDS = 0.2
_RATE_SECONDS = 5.0
"""The rate is that of the last so many seconds."""


class Told:
    """One download. `heard` may be called in any thread."""

    def __init__(
        self, progress: Progress, task: str, total: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress
        self._task = task
        self._total = total
        self._clock = clock
        self._done = 0
        self._lock = threading.Lock()
        self._next = 0.0
        self._seen: deque[tuple[float, int]] = deque()

    def heard(self, size: int) -> None:
        """So many bytes more."""
        with self._lock:
            self._done += size
            now = self._clock()
            if not self._seen:
                # What an earlier try left is heard first, and did not come at any rate.
                self._seen.append((now, self._done))
            if now < self._next:
                return
            self._next = now + _REPORT_SECONDS
            self._progress(ProgressEvent(self._task, self._done, self._total, "bytes", self._pace(now)))

    def say(self, state: Literal["running", "finished", "failed"]) -> None:
        """Begun, or over."""
        message = {"running": "downloading", "failed": "the download failed", "finished": "downloaded"}[state]
        with self._lock:
            self._progress(ProgressEvent(self._task, self._done, self._total, "bytes", message, state))

    def _pace(self, now: float) -> str:
        self._seen.append((now, self._done))
        while len(self._seen) > 2 and now - self._seen[0][0] > _RATE_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        if now <= since or self._done <= before:
            return "downloading"
        rate = (self._done - before) / (now - since)
        text = f"downloading at {readable_bytes(rate)}/s"
        if self._total is None or self._total < self._done:
            return text
        return f"{text}, {readable_seconds((self._total - self._done) / rate)} left"


def readable_seconds(seconds: float) -> str:
    """For people: 12 s, 3 min 5 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
