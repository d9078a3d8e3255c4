# SPDX-License-Identifier: Apache-2.0
"""The rules of the dynamic batcher: how many queued requests form a batch, and how long a batch may wait for more.

Schedulers call `choose_batch` with the requests of a queue in order. The rules are those of Triton's dynamic batcher:
requests are never reordered or split; the largest preferred size that can be reached is used at once; any other batch waits
until it cannot grow or the queue delay of its oldest request has expired.

The queue delay is fixed, or chosen so that latency stays below a target (`max_queue_delay_microseconds: auto`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headrace.engine.scheduling.pending_request import ANSWERED, BatchReason, PendingRequest


@dataclass(frozen=True, slots=True)
class BatchRules:
    """The batching settings of a model's configuration."""

    max_rows: int
    preferred: frozenset[int] = frozenset()
    by_shape: bool = False
    """Whether requests can differ in shape, so that the key of each must be compared with that of the first."""
    largest_preferred: int = field(init=False)
    """Batches are not larger than this unless the delay of their oldest request has expired."""

    def __post_init__(self) -> None:
        """Set `largest_preferred`."""
        object.__setattr__(self, "largest_preferred", max(self.preferred, default=self.max_rows))


class BatchChoice(NamedTuple):
    """How many requests at the front of a queue to run now; if 0, choose again after `wait_ns`."""

    requests: int
    reason: BatchReason = "idle instance"
    wait_ns: int = 0


def choose_batch(waiting: Iterable[PendingRequest], rules: BatchRules, delay_ns: int, now_ns: int) -> BatchChoice:
    """Choose the batch at the front of a queue with at least one request that is not cancelled."""
    max_rows, largest, preferred = rules.max_rows, rules.largest_preferred, rules.preferred
    rows = count = best = 0
    best_reason: BatchReason = "full"
    blocked: BatchReason | None = None
    oldest_ns = now_ns
    for pending in waiting:
        if pending.state == ANSWERED:
            continue
        if count == 0:
            first = pending
        else:
            if rows + pending.rows > largest and not best:
                best, best_reason = count, "full"
            if rows + pending.rows > max_rows:
                blocked = "full"
                break
            if rules.by_shape and pending.key != first.key:
                blocked = "shape change"
                break
        rows += pending.rows
        count += 1
        oldest_ns = min(oldest_ns, pending.arrived_ns)
        if rows in preferred:
            best, best_reason = count, "preferred"
        if rows >= max_rows:
            blocked = "full"
            break
    waited_ns = now_ns - oldest_ns
    expired = delay_ns != 0 and waited_ns >= delay_ns
    if best and not expired:
        return BatchChoice(best, best_reason)
    if blocked is not None:
        return BatchChoice(count, blocked)
    if rows >= largest:
        return BatchChoice(count, "full")
    if expired:
        return BatchChoice(count, "delay expired")
    if delay_ns == 0:
        return BatchChoice(count, "idle instance")
    return BatchChoice(0, wait_ns=delay_ns - waited_ns)


_WINDOW = 512
"""Latencies in the sample for the 99th percentile."""

_ADJUST_EVERY = 32
"""Batches between two adjustments."""

_USELESS_DELAY = 1.1
"""Requests per batch up to which the delay collected no further requests."""

_PAUSED_ADJUSTMENTS = 16
"""Adjustments without a delay after it was useless."""


class QueueDelay(Protocol):
    """How long the oldest request of a batch may wait for more requests."""

    nanoseconds: int
    is_adaptive: bool
    """Whether `batch_finished` must be called."""

    def batch_finished(self, latencies_ns: list[int], rows: int, compute_ns: int) -> None:
        """Record an answered batch: the total latency of each request, and the batch's compute time."""


class FixedDelay:
    """The delay of the configuration."""

    is_adaptive = False

    def __init__(self, nanoseconds: int) -> None:
        self.nanoseconds = nanoseconds

    def batch_finished(self, latencies_ns: list[int], rows: int, compute_ns: int) -> None:
        """Do nothing: the delay is fixed."""


class AutoDelay:
    """The longest delay that is useful and that the latency target allows: the smaller of two bounds.

    Budget: the target minus the 99th percentile of the time that requests spend otherwise (waiting for busy instances,
    computing). Useful time: the time in which the largest batch fills at the current arrival rate. It is 0 if not even one
    more request would arrive within the budget, or if a delay was tried and none arrived: a single client that sends its
    next request after each response has a high rate and never benefits from waiting. Nor is the delay much longer than the
    observed span from the first to the last request of a batch. While the observed percentile is above the target, the
    delay is halved.
    """

    is_adaptive = True

    def __init__(self, target_ms: float, largest_batch: int) -> None:
        self.nanoseconds = 0
        self.p99_ns = 0
        """The percentile at the last adjustment."""
        self.rows_per_second = 0.0
        self._target_ns = int(target_ms * 1e6)
        self._largest = largest_batch
        self._latencies: deque[int] = deque(maxlen=_WINDOW)
        self._other_ns: deque[int] = deque(maxlen=_WINDOW)
        """Latencies without the delay."""
        self._spans: list[int] = []
        """Since the last adjustment: from the first request of each batch to its last."""
        self._rows = 0
        self._requests = 0
        self._batches = 0
        self._paused = 0
        self._since_ns: int | None = None

    def batch_finished(self, latencies_ns: list[int], rows: int, compute_ns: int) -> None:
        """Record an answered batch."""
        # Subtract the delay of the oldest request.
        waited = min(self.nanoseconds, max(latencies_ns) - compute_ns)
        self._latencies.extend(latencies_ns)
        self._spans.append(max(latencies_ns) - min(latencies_ns))
        self._other_ns.append(max(latencies_ns) - max(0, waited))
        self._rows += rows
        self._requests += len(latencies_ns)
        self._batches += 1

    def adjust(self, now_ns: int) -> None:
        """Choose the delay again, every `_ADJUST_EVERY` batches. Called by the version after `batch_finished`."""
        if self._since_ns is None:
            self._begin(now_ns)
            return
        if self._batches < _ADJUST_EVERY:
            return
        elapsed = max(1, now_ns - self._since_ns)
        # A batch has 0 rows if all its requests were cancelled while it was computed.
        self.rows_per_second = max(1, self._rows) * 1e9 / elapsed
        if self.nanoseconds and self._requests <= self._batches * _USELESS_DELAY:
            self._paused = _PAUSED_ADJUSTMENTS
        span = sorted(self._spans)[len(self._spans) * 9 // 10]
        self._begin(now_ns)
        self.p99_ns = _p99(self._latencies)
        if self._paused:
            self._paused -= 1
            self.nanoseconds = 0
            return
        if self.p99_ns > self._target_ns:
            self.nanoseconds //= 2
            # Latencies under the longer delay do not apply to the shorter one.
            self._latencies.clear()
            return
        budget = max(0, self._target_ns - _p99(self._other_ns)) * 4 // 5
        per_row = 1e9 / self.rows_per_second
        useful = int(per_row * (self._largest - 1))
        if self.nanoseconds:
            useful = min(useful, 2 * span)
        chosen = min(budget, useful)
        if chosen < per_row:
            chosen = 0
        # Half way at a time: the measurements lag behind the delay.
        self.nanoseconds = (self.nanoseconds + chosen) // 2 if chosen else 0

    def _begin(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._rows = self._requests = self._batches = 0
        self._spans.clear()


def _p99(values: deque[int]) -> int:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] if ordered else 0
