# SPDX-License-Identifier: Apache-2.0
"""What came back while it was looked at. Filled by the loops, read by `measured`.

Only requests that began in the window count, however long after it they end: to leave out those that were still under
way would leave out the slowest. Throughput counts what was answered within the window, whenever it began.
"""

from __future__ import annotations

from array import array
from collections import Counter


class Recording:
    """Times are of `time.perf_counter`."""

    def __init__(self, begins: float, ends: float) -> None:
        self.begins = begins
        self.ends = ends
        self.latencies = array("d")
        """Seconds, of requests that were answered well."""
        self.late = array("d")
        """Seconds from when requests were due to when they were sent: our own fault."""
        self.failed_after = array("d")
        """Seconds, of those that failed."""
        self.finished = 0
        """Answered well within the window."""
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        """The first text of each kind of error."""
        self.most_waiting = 0
        """The longest queue of requests that were due and found no connection."""

    @property
    def seconds(self) -> float:
        """How long the window is."""
        return self.ends - self.begins

    def take(self, began: float, now: float, kind: str, text: str) -> None:
        """A request ended. `began` is when it was due, or sent."""
        if not kind and self.begins <= now < self.ends:
            self.finished += 1
        if not self.begins <= began < self.ends:
            return
        if not kind:
            self.latencies.append(now - began)
            return
        self.errors[kind] += 1
        self.failed_after.append(now - began)
        self.examples.setdefault(kind, text)

    def take_late(self, due: float, now: float) -> None:
        """A request was sent."""
        if self.begins <= due < self.ends:
            self.late.append(max(now - due, 0.0))
