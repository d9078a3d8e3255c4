# SPDX-License-Identifier: Apache-2.0
"""The scheduler: passes queued requests to idle instances, one at a time or in batches.

Each version of a model owns one. Everything runs in the event loop's thread: `add` puts a request in the queue, and at the
end of the loop's iteration `_dispatch` starts what the batching rules allow, so that requests that were read together are
batched together.

With it: the delayed first batch for tests (Triton's environment variables), and the choice between the event loop's thread
and a thread of the instance (`ExecutionPlacement`).
"""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Literal, NamedTuple, Protocol

from headrace.core.errors import HeadraceError, InvalidArgument, with_message
from headrace.engine.scheduling.dynamic_batcher import BatchChoice, BatchRules, QueueDelay, choose_batch
from headrace.engine.scheduling.pending_request import (
    QUEUED,
    RUNNING,
    BatchLog,
    BatchReason,
    BatchRecord,
    PendingRequest,
    ResponseOrder,
)
from headrace.engine.scheduling.queues import BackgroundLast, FifoQueue, Queue
from headrace.engine.scheduling.rate_limiter import RateLimited, RateLimiter


class Runner(RateLimited, Protocol):
    """An instance of a model, as seen by a scheduler."""

    execution: ExecutionPlacement
    """Whether it computes in the event loop's thread."""
    single_record: BatchRecord
    idle_record: BatchRecord
    """Batch records of a single request that did not wait, for models without and with batching."""

    def run(self, batch: Sequence[PendingRequest], free: Callable[[Runner], None]) -> None:
        """Compute a batch and answer its requests; call `free` when the instance can take another, maybe at once."""


class BatchScheduler:
    """The scheduler of models without state: requests do not depend on each other."""

    def __init__(
        self,
        queue: Queue,
        rules: BatchRules | None,
        delay: QueueDelay,
        runners: Sequence[Runner],
        log: BatchLog,
        *,
        limiter: RateLimiter,
        in_order: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = queue
        self._rules = rules
        """None: one request at a time."""
        self._delay = delay
        self.idle = list(reversed(runners))
        """Idle instances; the last one is used next. Always the same list object."""
        self._recent, self._reasons = log.recent, log.reasons
        self._limiter = limiter
        self._limited = any(runner.resources for runner in runners)
        self._closed: HeadraceError | None = None
        self.dispatch_scheduled = False
        """Whether `_dispatch` is scheduled."""
        self._timer: asyncio.TimerHandle | None = None
        self.dispatching = False
        """Whether `_dispatch` is running."""
        self._order = ResponseOrder() if in_order else None
        self.one_at_a_time = rules is None and not self._limited
        """Whether a request may be computed at once if an instance is idle (`engine.express`)."""
        plain_rules = rules is not None and not rules.preferred and not delay.is_adaptive and not delay.nanoseconds
        self.may_skip_queue = (
            plain_rules
            and type(queue) is FifoQueue
            and not self._limited
            and not in_order
            and type(self) is BatchScheduler
        )
        """The same, for a model with batching that computes requests more quickly than a batch of them can be formed
        (`ExecutionPlacement.alone`): no rule could make such a request wait."""

    def add(self, pending: PendingRequest) -> None:
        """Queue a request; raise if the queue does not accept it."""
        if self._closed is not None:
            raise with_message(self._closed, self._closed.message)
        if pending.request.is_background and not isinstance(self._queue, BackgroundLast):
            # Only now: most models never have any, and their queue stays the quicker one.
            self._queue = BackgroundLast(self._queue)
        self._queue.append(pending)
        if self._order is not None:
            self._order.track(pending)
        if not self.dispatch_scheduled:
            self.dispatch_scheduled = True
            self._loop.call_soon(self._dispatch)

    @property
    def active_sequences(self) -> int:
        """0: requests do not depend on earlier ones."""
        return 0

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return sum(pending.state == QUEUED for pending in self._queue)

    def close(self, reason: HeadraceError) -> None:
        """Cancel all queued requests and start no more."""
        self._closed = reason
        for pending in list(self._queue):
            pending.cancel(reason)
        self.idle.clear()
        self._stop_timer()

    def _wake(self) -> None:
        if not self.dispatch_scheduled:
            self.dispatch_scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Start every batch that may start now."""
        self.dispatch_scheduled = False
        queue, idle = self._queue, self.idle
        self.dispatching = True
        try:
            while len(queue):
                if self._limited and self.dispatch_scheduled:  # another model's turn may come first: see `_free`
                    return
                now_ns = monotonic_ns()
                next_expiry_ns = queue.expire(now_ns)
                waiting = len(queue)
                if not waiting:
                    break
                if not idle:
                    self._set_timer(next_expiry_ns, now_ns)
                    return
                if self._rules is None:
                    requests, reason, wait_ns = _ONE
                elif waiting == 1 and not self._delay.nanoseconds:
                    requests, reason, wait_ns = _ALL
                else:
                    requests, reason, wait_ns = choose_batch(queue, self._rules, self._delay.nanoseconds, now_ns)
                if not requests:
                    due_ns = now_ns + wait_ns
                    self._set_timer(due_ns if next_expiry_ns is None else min(due_ns, next_expiry_ns), now_ns)
                    return
                runner = self._ready_runner() if self._limited else idle.pop()
                if runner is None:
                    self._set_timer(next_expiry_ns, now_ns)
                    return
                if waiting == 1 and wait_ns == _AT_ONCE and runner.execution.inline:
                    self._start_single(runner, reason)
                else:
                    self._start(runner, requests, reason, now_ns)
            if self._timer is not None:
                self._stop_timer()
        finally:
            self.dispatching = False

    def _ready_runner(self) -> Runner | None:
        """Return an idle instance whose resources could be acquired; if there is none, the rate limiter calls `_wake`."""
        for position in range(len(self.idle) - 1, -1, -1):
            if self._limiter.acquire(self.idle[position], self._wake):
                return self.idle.pop(position)
        return None

    def _start(self, runner: Runner, count: int, reason: BatchReason, now_ns: int) -> None:
        batch = self._queue.take(count)
        if not batch:  # all were cancelled meanwhile
            self._free(runner)
            return
        rows = 0
        oldest_ns = now_ns
        for pending in batch:
            pending.state = RUNNING
            rows += pending.rows
            if pending.arrived_ns < oldest_ns:  # noqa: PLR1730  # a call of min() costs more
                oldest_ns = pending.arrived_ns
        record = BatchRecord(reason, len(batch), rows, len(self._queue), now_ns - oldest_ns, runner.name)
        self._recent.append(record)
        self._reasons[reason] += 1
        for pending in batch:
            pending.batch_record = record
        runner.run(batch, self._free)

    def _start_single(self, runner: Runner, reason: BatchReason) -> None:
        """Start the only queued request on an instance that computes in the event loop's thread."""
        batch = self._queue.take(1)
        for pending in batch:
            record = runner.single_record if self._rules is None else runner.idle_record
            if pending.rows != 1:
                record = record._replace(rows=pending.rows)
            pending.state = RUNNING
            pending.batch_record = record
            self._recent.append(record)
            self._reasons[reason] += 1
            runner.run(batch, self._free)
            return
        self._free(runner)

    def _free(self, runner: Runner) -> None:
        self.idle.append(runner)
        if self._limited:
            # Not immediately: it may be another model's turn.
            on_room = self._wake if len(self._queue) else None
            if runner.resources:
                self._limiter.release(runner, on_room)
            elif on_room is not None:
                on_room()
        elif len(self._queue) and not self.dispatching:
            # Immediately: an instance with its own thread computes while the event loop answers its last batch.
            self._dispatch()

    def _set_timer(self, when_ns: int | None, now_ns: int) -> None:
        self._stop_timer()
        if when_ns is not None:
            # uvloop rounds up to milliseconds, so the awaited time has passed when the timer fires.
            self._timer = self._loop.call_later(max(0, when_ns - now_ns) / 1e9, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_AT_ONCE = -1
"""`wait_ns` of a choice that did not need the batching rules."""

_ONE = BatchChoice(1, "one at a time", _AT_ONCE)
_ALL = BatchChoice(1, "idle instance", _AT_ONCE)


REQUESTS_VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"
BACKLOG_VARIABLE = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"
START_DELAYED = f"no batch before enough requests are queued, as {REQUESTS_VARIABLE} or {BACKLOG_VARIABLE} says"
"""Warning in the log for each delayed model, since its first requests seem to hang."""
_COUNT = re.compile("[0-9]{0,9}")


class StartDelay(NamedTuple):
    """Number of requests that must be queued before the first batch (0: no delay)."""

    requests: int = 0
    backlog_requests: int = 0
    """The same for sequences in the backlog (direct strategy only)."""


def read_start_delay(environment: Mapping[str, str]) -> StartDelay:
    """Read both variables; raise `InvalidArgument` for a value that is not a count."""
    return StartDelay(_count(environment, REQUESTS_VARIABLE), _count(environment, BACKLOG_VARIABLE))


def _count(environment: Mapping[str, str], variable: str) -> int:
    value = environment.get(variable, "").strip()
    if not _COUNT.fullmatch(value):
        raise InvalidArgument(
            f"the environment variable {variable} is {value[:32]!a}: set it to a whole number of requests, or unset it"
        )
    return int(value or 0)


class DelayedBatchScheduler(BatchScheduler):
    """A batch scheduler that delays its first batch until enough requests are queued, for tests with exact batch counts.

    A class of its own, so that other schedulers do not pay for it.
    """

    _first_batch_after = 0

    def delay_start(self, requests: int) -> None:
        """Form no batch until this many requests are queued. Call before the first `add`."""
        self._first_batch_after = requests
        # `add` schedules `_dispatch` only if it is not scheduled yet.
        self.dispatch_scheduled = True

    def add(self, pending: PendingRequest) -> None:
        """Queue a request; start when enough are queued."""
        super().add(pending)
        if self._first_batch_after and len(self._queue) >= self._first_batch_after:
            self._first_batch_after = 0
            self._loop.call_soon(self._dispatch)


INLINE_BELOW_NS = 150_000
THREAD_ABOVE_NS = 250_000
_ROW_NS = 4_000
"""Additional time that each row of a batch may take."""

_SAMPLES = 8
"""Executions in a thread before a model may run inline; the fastest one counts, since others may have waited for the GIL."""

_MAX_STRIKES = 4
"""Slow executions, minus fast ones, before a model moves to a thread: one slow execution on a busy machine does not make a
slow model. A very slow execution counts as several, unless another program may have had the core meanwhile. So at most four
executions of up to `_INTERRUPTED_NS` block the event loop, or one that is longer."""

_INTERRUPTED_NS = 20_000_000
"""How long an interruption by other programs may last: a few turns of the kernel's scheduler."""

ALONE_BELOW_NS = 5_000
"""A model that computes in less is not batched: queueing a request, and cutting its rows out of a batch, takes longer."""

ALONE_ABOVE_NS = 20_000
"""A model that is not batched, and takes longer, is batched again."""


def interruptions() -> int:
    """Return how often the kernel has taken the core from this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class ExecutionPlacement:
    """Whether an instance computes in the event loop's thread (inline) or in its own; measured, unless configured.

    Passing work to a thread and back takes about 50 us; a computation that blocks the event loop for much longer delays
    every other connection.
    """

    def __init__(
        self,
        runs: Literal["auto", "inline", "thread"] = "auto",
        interruptions: Callable[[], int] = interruptions,
    ) -> None:
        self.inline = runs == "inline"
        self.alone = False
        """Whether it also computes so quickly that requests are better not batched. Only if it is inline."""
        self.slow_ns = THREAD_ABOVE_NS if runs == "auto" else 1 << 62
        """Inline executions that took longer must be recorded; faster ones only while there are `strikes`."""
        self.strikes = 0
        self._is_measured = runs == "auto"
        self._fastest_ns = self._fastest_compute_ns = THREAD_ABOVE_NS
        self._samples = 0
        self._count_interruptions = interruptions
        self._interruptions = 0

    def record(self, ns: int, rows: int = 1, compute_ns: int = THREAD_ABOVE_NS) -> None:
        """Record the duration of an execution, and of the model's own part of it."""
        if not self._is_measured:
            return
        # A large batch may take longer: it replaces as many other executions.
        ns -= (rows - 1) * _ROW_NS
        if self.inline:
            self._record_inline(ns)
            return
        self._fastest_ns = min(self._fastest_ns, ns)
        self._fastest_compute_ns = min(self._fastest_compute_ns, compute_ns)
        self._samples += 1
        if self._samples == _SAMPLES:
            self.inline = self._fastest_ns < INLINE_BELOW_NS
            self.alone = self.inline and self._fastest_compute_ns < ALONE_BELOW_NS
            self.slow_ns = ALONE_ABOVE_NS if self.alone else THREAD_ABOVE_NS
            self._interruptions = self._count_interruptions()
            self._fastest_ns = self._fastest_compute_ns = THREAD_ABOVE_NS
            self._samples = 0

    def _record_inline(self, ns: int) -> None:
        if ns > self.slow_ns:
            self.strikes += 1 if self._may_be_interrupted(ns) else 1 + ns // (4 * THREAD_ABOVE_NS)
        elif self.strikes:
            self.strikes -= 1
        if self.strikes >= _MAX_STRIKES:
            self.inline = ns <= THREAD_ABOVE_NS
            self.alone = False
            self.slow_ns = THREAD_ABOVE_NS
            self.strikes = 0

    def _may_be_interrupted(self, ns: int) -> bool:
        """Return whether other programs may be the reason that this execution, of those that were slow, was slow."""
        before, self._interruptions = self._interruptions, self._count_interruptions()
        return ns < _INTERRUPTED_NS and self._interruptions != before
