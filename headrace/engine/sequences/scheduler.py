# SPDX-License-Identifier: Apache-2.0
"""Hands the requests of sequences to the instances of a model with a memory.

Owned by a version of a model, in the loop's thread. A sequence begins with START and takes a seat with one instance, or
waits for one in the backlog; its requests are computed there one after the other. Its seat is free again when its END is
answered, when it was idle for too long, or when a request of it is cancelled before it was computed: what follows would
be computed as if that request had never been, so the rest of the sequence is cancelled with it. A request that is
cancelled while it is computed, or that fails, leaves the sequence as it is. START for a sequence that is still open
begins it anew, in the same seat, after what is waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic_ns

from headrace.backends.contract import Array
from headrace.core.errors import Cancelled, HeadraceError, Unimplemented, retold
from headrace.engine.execution.request_runner import RequestRunner
from headrace.engine.scheduling.batches import BatchLog, BatchRecord
from headrace.engine.scheduling.limiter import Limiter
from headrace.engine.scheduling.pending import RUNNING, Pending
from headrace.engine.scheduling.scheduler import Runner
from headrace.engine.sequences.composing import Composer
from headrace.engine.sequences.flags import SequenceId, many_rows, not_started, read_flags
from headrace.engine.sequences.lanes import DirectLane, Lane, OldestLane, Plan
from headrace.engine.sequences.live import Entry, LiveSequence, Step
from headrace.engine.sequences.roster import Roster
from headrace.models.config.types import DirectStrategy, ModelConfig, SequenceBatching


class SequenceScheduler:
    """For models whose requests depend on those before them."""

    def __init__(
        self,
        config: ModelConfig,
        sequences: SequenceBatching,
        runners: Sequence[Runner],
        log: BatchLog,
        *,
        limiter: Limiter,
        initial_states: Mapping[str, Array] | None = None,
    ) -> None:
        if sequences.iterative:
            raise Unimplemented(
                f"model '{config.name}' has iterative_sequence, which is not offered: remove it from sequence_batching, "
                "and let a decoupled model give its responses one by one"
            )
        self._loop = asyncio.get_running_loop()
        self._name = config.name
        self._log = log
        self._limiter = limiter
        self._composer = Composer(config, sequences, initial_states or {})
        strategy = sequences.strategy
        self._lanes: list[Lane]
        if isinstance(strategy, DirectStrategy):
            self._lanes = [DirectLane(runner, config, strategy) for runner in runners]
        else:
            self._lanes = [OldestLane(runner, config, strategy) for runner in runners]
        self._fills = isinstance(strategy, DirectStrategy)
        self._roster = Roster(self._lanes, sequences.max_sequence_idle_microseconds * 1000, self._review)
        self._numbers = 0
        self.waiting = 0
        """Requests that are not being computed yet."""
        self._awake = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed: HeadraceError | None = None

    def add(self, pending: Pending) -> None:
        """Let a request wait for its turn; raises when it belongs to no sequence."""
        if self._closed is not None:
            raise retold(self._closed, self._closed.message)
        if pending.rows > 1:
            raise many_rows(self._name)
        flags = read_flags(pending.request, self._name)
        sequence = self._begun(flags.id) if flags.start else self._roster.open(flags.id)
        if sequence is None:
            raise not_started(flags.id, self._name)
        self._numbers += 1
        self.waiting += 1
        pending.on_cancel = partial(self._cancelled, sequence)
        sequence.queue.append(Entry(pending, flags, self._numbers))
        sequence.closed = flags.end
        self._review(sequence)

    def close(self, reason: HeadraceError) -> None:
        """Tell those that still wait; nothing is given out any more."""
        self._closed = reason
        self._roster.close()
        self._stop_timer()
        for sequence in self._roster.all():
            self._drop(sequence, reason)

    def _begun(self, id: SequenceId) -> LiveSequence:
        sequence = self._composer.begin(id)
        previous = self._roster.enter(sequence)
        if previous is not None:
            self._review(previous)
        return sequence

    def _review(self, sequence: LiveSequence) -> None:
        """Something about a sequence has changed: see what it can do next. May be called too often, never too seldom."""
        sequence.idle_since_ns = None
        lane = sequence.lane
        if sequence.running is None and sequence.queue:
            if lane is not None and self._closed is None:
                if sequence.head is None:
                    sequence.head = self._step(sequence)
                lane.ready.add(sequence)
                self._wake()
            return
        if lane is not None:
            lane.ready.discard(sequence)
        if sequence.running is not None:
            return
        if sequence.closed:
            self._roster.leave(sequence)
        elif lane is not None:
            sequence.idle_since_ns = monotonic_ns()
            self._roster.watch()

    def _step(self, sequence: LiveSequence) -> Step:
        """The first request of a queue, with the state it will be computed with."""
        pending, flags, number = sequence.queue[0]
        key = self._composer.states.key(pending.key, sequence.state)
        return Step(
            pending.owner,
            pending.request,
            key,
            pending.arrived_ns,
            self._stepped,
            sequence=sequence,
            asked=pending,
            flags=flags,
            number=number,
        )

    def _stepped(self, step: Step) -> None:
        """The model is done with a request, however that went."""
        sequence = step.sequence
        if sequence is not None:
            sequence.running = None
            self._review(sequence)

    def _cancelled(self, sequence: LiveSequence) -> None:
        sequence.closed = True
        self._drop(
            sequence,
            Cancelled(f"another request of sequence {sequence.id} was cancelled, which ends it: START it again"),
        )
        self._review(sequence)

    def _drop(self, sequence: LiveSequence, reason: HeadraceError) -> None:
        dropped = list(sequence.queue)
        self.waiting -= len(dropped)
        sequence.queue.clear()
        sequence.head = None
        for pending, _, _ in dropped:
            pending.on_cancel = None
            pending.cancel(reason)

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Give every idle instance its next batch, where there is one."""
        self._awake = False
        if self._closed is not None:
            return
        wait_ns = 0
        now_ns = monotonic_ns()
        for lane in self._lanes:
            if not lane.idle or not lane.ready:
                continue
            plan = lane.plan(now_ns)
            if not plan.steps:
                wait_ns = min(wait_ns or plan.wait_ns, plan.wait_ns)
            elif self._limiter.acquire(lane.runner, self._wake):
                self._start(lane, plan, now_ns)
        self._stop_timer()
        if wait_ns:
            self._timer = self._loop.call_later(wait_ns / 1e9, self._timer_rang)

    def _start(self, lane: Lane, plan: Plan, now_ns: int) -> None:
        lane.idle = False
        self.waiting -= len(plan.steps)
        waited_ns = now_ns - min(step.arrived_ns for step in plan.steps)
        record = BatchRecord(plan.reason, len(plan.steps), len(plan.steps), self.waiting, waited_ns, lane.runner.name)
        self._log.add(record)
        for step in plan.steps:
            self._set_out(step, lane, record)
        batch = plan.steps
        if self._fills and not isinstance(lane.runner, RequestRunner):
            batch = self._with_fillers(batch, now_ns)
        lane.runner.run(batch, partial(self._free, lane))

    def _set_out(self, step: Step, lane: Lane, record: BatchRecord) -> None:
        self._composer.complete(step)
        sequence, asked = step.sequence, step.asked
        if sequence is not None:
            sequence.queue.popleft()
            sequence.head = None
            sequence.running = step
            lane.ready.discard(sequence)
        step.state = RUNNING
        step.formed = record
        if asked is not None:
            asked.state = RUNNING
            asked.formed = record
            asked.on_cancel = None
            if lane.order is not None:
                lane.order.follow(asked)

    def _with_fillers(self, steps: Sequence[Step], now_ns: int) -> list[Step]:
        """The steps at the rows of their slots."""
        rows: dict[int, Step] = {step.sequence.slot: step for step in steps if step.sequence is not None}
        return [rows.get(slot) or self._composer.filler(steps[0], now_ns) for slot in range(max(rows) + 1)]

    def _free(self, lane: Lane, runner: Runner) -> None:
        # Not at once: a runner is free before it has answered, and the sequences of its last batch go on only then.
        if self._closed is not None:
            self._limiter.release(runner)
            return
        lane.idle = True
        self._limiter.release(runner, self._wake if lane.ready else None)
        if lane.ready:
            self._wake()

    def _timer_rang(self) -> None:
        self._timer = None
        self._wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
