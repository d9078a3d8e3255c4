# SPDX-License-Identifier: Apache-2.0
"""How long a batch may wait for more requests: a fixed time, or one chosen so that latency stays under a target.

Read by the scheduler before each choice; `AutoDelay` (`max_queue_delay_microseconds: auto`) is told of every finished
batch by the version. Waiting is worth it while more requests arrive than an instance can compute one by one; it must
never cost more than the target leaves.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

_WINDOW = 512
"""Latencies that the 99th percentile is taken of."""

_REVIEW_EVERY = 32
"""Batches between two looks."""

_NOBODY_CAME = 1.1
"""Requests per batch up to which the wait was for nobody."""

_REST_REVIEWS = 16
"""How long waiting is left off when nobody came."""


class Delay(Protocol):
    """How long the oldest request of a batch may wait."""

    nanoseconds: int
    learns: bool
    """Whether it wants to be told."""

    def finished(self, latencies_ns: list[int], rows: int, compute_ns: int) -> None:
        """A batch is answered: how long each of its requests took in all, and the batch to compute."""


class FixedDelay:
    """What the configuration says."""

    learns = False

    def __init__(self, nanoseconds: int) -> None:
        self.nanoseconds = nanoseconds

    def finished(self, latencies_ns: list[int], rows: int, compute_ns: int) -> None:
        """Nothing to learn."""


class AutoDelay:
    """The longest delay that pays and that the target allows.

    Two bounds, and the smaller holds. The room: the target, less the 99th percentile of what requests spend beside this
    wait (queueing behind busy instances, computing). The use: the time in which, at the rate of arrivals, the largest
    batch fills; and nothing at all when in that room not even one companion would arrive, or when it was tried and none
    did: a single client that sends its next request after each answer makes a fine rate and is never helped by waiting.
    Nor is the wait much longer than companions were seen to take: two such clients have both come after a moment, and the
    rest of any wait is for nobody.
    Where the observed percentile is over the target all the same, the delay is halved until it is not.
    """

    learns = True

    def __init__(self, target_ms: float, largest_batch: int) -> None:
        self.nanoseconds = 0
        self.p99_ns = 0
        """As last observed."""
        self.rows_per_second = 0.0
        self._target_ns = int(target_ms * 1e6)
        self._largest = largest_batch
        self._latencies: deque[int] = deque(maxlen=_WINDOW)
        self._beside: deque[int] = deque(maxlen=_WINDOW)
        self._spans: list[int] = []
        """Since the last look: from the first request of each batch to its last."""
        self._rows = 0
        self._requests = 0
        self._batches = 0
        self._rest = 0
        self._since_ns: int | None = None

    def finished(self, latencies_ns: list[int], rows: int, compute_ns: int) -> None:
        """See `Delay.finished`."""
        # What the requests would have spent without the wait of their oldest.
        waited = min(self.nanoseconds, max(latencies_ns) - compute_ns)
        self._latencies.extend(latencies_ns)
        self._spans.append(max(latencies_ns) - min(latencies_ns))
        self._beside.append(max(latencies_ns) - max(0, waited))
        self._rows += rows
        self._requests += len(latencies_ns)
        self._batches += 1

    def review(self, now_ns: int) -> None:
        """Choose anew, every few batches. Called by the version that owns it, after `finished`."""
        if self._since_ns is None:
            self._begin(now_ns)
            return
        if self._batches < _REVIEW_EVERY:
            return
        elapsed = max(1, now_ns - self._since_ns)
        # Of 0 rows are batches whose callers all gave up while they were computed.
        self.rows_per_second = max(1, self._rows) * 1e9 / elapsed
        if self.nanoseconds and self._requests <= self._batches * _NOBODY_CAME:
            self._rest = _REST_REVIEWS
        span = sorted(self._spans)[len(self._spans) * 9 // 10]
        self._begin(now_ns)
        self.p99_ns = _p99(self._latencies)
        if self._rest:
            self._rest -= 1
            self.nanoseconds = 0
            return
        if self.p99_ns > self._target_ns:
            self.nanoseconds //= 2
            # What was seen under the longer delay says nothing of the shorter.
            self._latencies.clear()
            return
        room = max(0, self._target_ns - _p99(self._beside)) * 4 // 5
        per_row = 1e9 / self.rows_per_second
        useful = int(per_row * (self._largest - 1))
        if self.nanoseconds:
            useful = min(useful, 2 * span)
        chosen = min(room, useful)
        if chosen < per_row:
            chosen = 0
        # Half way at a time: the measures follow the delay, and a jump would be judged by stale ones.
        self.nanoseconds = (self.nanoseconds + chosen) // 2 if chosen else 0

    def _begin(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._rows = self._requests = self._batches = 0
        self._spans.clear()


def _p99(values: deque[int]) -> int:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] if ordered else 0
