# SPDX-License-Identifier: Apache-2.0
"""Hands waiting requests to idle instances: one at a time, or in batches.

Owned by a version of a model. Everything happens in the loop's thread: `add` puts a request in the queue, and at the end
of the loop's turn `_pump` gives out what the rules allow, so that requests that were read together are seen together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Protocol

from headrace.core.errors import HeadraceError, retold
from headrace.engine.scheduling.batches import BatchLog, BatchRecord, BatchRules, Choice, Reason, choose
from headrace.engine.scheduling.delay import Delay
from headrace.engine.scheduling.limiter import Limited, Limiter
from headrace.engine.scheduling.order import Order
from headrace.engine.scheduling.pace import Pace
from headrace.engine.scheduling.pending import QUEUED, RUNNING, Pending
from headrace.engine.scheduling.queues import Queue


class Runner(Limited, Protocol):
    """One instance and its thread."""

    pace: Pace
    """Whether it computes in the loop's thread."""
    alone: BatchRecord
    idle: BatchRecord
    """The records of a request that waited for nobody: of a model that takes no batches, and of one that does."""

    def run(self, batch: Sequence[Pending], free: Callable[[Runner], None]) -> None:
        """Compute a batch and answer its members; call `free` when another may come, which may be at once."""


class BatchScheduler:
    """For models whose requests do not depend on each other."""

    def __init__(
        self,
        queue: Queue,
        rules: BatchRules | None,
        delay: Delay,
        runners: Sequence[Runner],
        log: BatchLog,
        *,
        limiter: Limiter,
        in_order: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = queue
        self._rules = rules
        """None: one request at a time."""
        self._delay = delay
        self.idle = list(reversed(runners))
        """Who has nothing to do; the last is the next to be given work. Always this list."""
        self._recent, self._reasons = log.recent, log.reasons
        self._limiter = limiter
        self._limited = any(runner.resources for runner in runners)
        self._closed: HeadraceError | None = None
        self.awake = False
        """Whether what waits will be looked at soon."""
        self._timer: asyncio.TimerHandle | None = None
        self.busy = False
        """Whether somebody gives out work right now."""
        self._order = Order() if in_order else None
        self.one_at_a_time = rules is None and not self._limited
        """Whether a request may be computed at once when an instance is idle: see `engine.express`."""

    def add(self, pending: Pending) -> None:
        """Let a request wait for its turn; raises when its queue will not have it."""
        if self._closed is not None:
            raise retold(self._closed, self._closed.message)
        self._queue.append(pending)
        if self._order is not None:
            self._order.follow(pending)
        if not self.awake:
            self.awake = True
            self._loop.call_soon(self._pump)

    @property
    def waiting(self) -> int:
        """Requests that are not being computed yet."""
        return sum(pending.state == QUEUED for pending in self._queue)

    def close(self, reason: HeadraceError) -> None:
        """Tell those that still wait; nothing is given out any more."""
        self._closed = reason
        for pending in list(self._queue):
            pending.cancel(reason)
        self.idle.clear()
        self._stop_timer()

    def _wake(self) -> None:
        if not self.awake:
            self.awake = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Give out all that may be given out now."""
        self.awake = False
        queue, idle = self._queue, self.idle
        self.busy = True
        try:
            while len(queue):
                if self._limited and self.awake:  # others may come before us: see `_free`
                    return
                now_ns = monotonic_ns()
                next_expiry_ns = queue.expire(now_ns)
                waiting = len(queue)
                if not waiting:
                    break
                if not idle:
                    self._look_again(next_expiry_ns, now_ns)
                    return
                if self._rules is None:
                    requests, reason, wait_ns = _ONE
                elif waiting == 1 and not self._delay.nanoseconds:
                    requests, reason, wait_ns = _ALL
                else:
                    requests, reason, wait_ns = choose(queue, self._rules, self._delay.nanoseconds, now_ns)
                if not requests:
                    due_ns = now_ns + wait_ns
                    self._look_again(due_ns if next_expiry_ns is None else min(due_ns, next_expiry_ns), now_ns)
                    return
                runner = self._ready_runner() if self._limited else idle.pop()
                if runner is None:
                    self._look_again(next_expiry_ns, now_ns)
                    return
                if waiting == 1 and wait_ns == _AT_ONCE and runner.pace.inline:
                    self._start_alone(runner, reason)
                else:
                    self._start(runner, requests, reason, now_ns)
            if self._timer is not None:
                self._stop_timer()
        finally:
            self.busy = False

    def _ready_runner(self) -> Runner | None:
        """An idle instance for which there are resources; if there is none, the limiter will wake us."""
        for position in range(len(self.idle) - 1, -1, -1):
            if self._limiter.acquire(self.idle[position], self._wake):
                return self.idle.pop(position)
        return None

    def _start(self, runner: Runner, count: int, reason: Reason, now_ns: int) -> None:
        batch = self._queue.take(count)
        if not batch:  # all of them were cancelled meanwhile
            self._free(runner)
            return
        rows = 0
        oldest_ns = now_ns
        for pending in batch:
            pending.state = RUNNING
            rows += pending.rows
            if pending.arrived_ns < oldest_ns:  # noqa: PLR1730  # a call of min() is dearer
                oldest_ns = pending.arrived_ns
        record = BatchRecord(reason, len(batch), rows, len(self._queue), now_ns - oldest_ns, runner.name)
        self._recent.append(record)
        self._reasons[reason] += 1
        for pending in batch:
            pending.formed = record
        runner.run(batch, self._free)

    def _start_alone(self, runner: Runner, reason: Reason) -> None:
        """As `_start`, for the one request that there is, and that is computed at once."""
        batch = self._queue.take(1)
        for pending in batch:
            record = runner.alone if self._rules is None else runner.idle
            if pending.rows != 1:
                record = record._replace(rows=pending.rows)
            pending.state = RUNNING
            pending.formed = record
            self._recent.append(record)
            self._reasons[reason] += 1
            runner.run(batch, self._free)
            return
        self._free(runner)

    def _free(self, runner: Runner) -> None:
        self.idle.append(runner)
        if self._limited:
            # Not at once: it may be another model's turn.
            again = self._wake if len(self._queue) else None
            if runner.resources:
                self._limiter.release(runner, again)
            elif again is not None:
                again()
        elif len(self._queue) and not self.busy:
            # At once: an instance with a thread of its own computes while we tell the callers of its last batch.
            self._pump()

    def _look_again(self, when_ns: int | None, now_ns: int) -> None:
        self._stop_timer()
        if when_ns is not None:
            # A millisecond is uvloop's finest: rounding up, so that what is waited for has happened.
            self._timer = self._loop.call_later(max(0, when_ns - now_ns) / 1e9, self._timer_rang)

    def _timer_rang(self) -> None:
        self._timer = None
        self._wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_AT_ONCE = -1
"""Of a choice: the request is the next by right, and nothing was weighed."""

_ONE = Choice(1, "one at a time", _AT_ONCE)
_ALL = Choice(1, "idle instance", _AT_ONCE)
