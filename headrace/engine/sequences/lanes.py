# SPDX-License-Identifier: Apache-2.0
"""One instance and the sequences that sit with it: which of their requests go together next.

Asked by the scheduler. `DirectLane`: every sequence has a slot, which is its row in each batch. `OldestLane`: sequences
are batched like any requests, the oldest first, but at most one request of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from headrace.engine.scheduling.batches import BatchRules, Reason, choose
from headrace.engine.scheduling.order import Order
from headrace.engine.scheduling.scheduler import Runner
from headrace.engine.sequences.live import LiveSequence, Step
from headrace.models.config.types import DirectStrategy, ModelConfig, OldestStrategy


class Plan(NamedTuple):
    """The next batch; or, when that is empty, how long to wait."""

    steps: Sequence[Step]
    reason: Reason = "sequence"
    wait_ns: int = 0


class Lane:
    """What the scheduler knows of every lane."""

    order: Order | None = None
    """Where answers are to be given in the order of execution."""

    def __init__(self, runner: Runner, seats: int) -> None:
        self.runner = runner
        self.seats = seats
        self.idle = True
        self.ready: set[LiveSequence] = set()
        """Those with a request that the model may have now."""

    def plan(self, now_ns: int) -> Plan:
        """Choose the next batch. At least one sequence must be ready."""
        raise NotImplementedError

    def _heads(self) -> list[Step]:
        return [sequence.head for sequence in self.ready if sequence.head is not None]


class DirectLane(Lane):
    """See the module."""

    def __init__(self, runner: Runner, config: ModelConfig, strategy: DirectStrategy) -> None:
        super().__init__(runner, max(1, config.max_batch_size))
        self._reason: Reason = "sequence" if config.max_batch_size else "one at a time"
        self._least = strategy.minimum_slot_utilization
        # As Triton: without a utilisation to wait for, there is no waiting.
        self._delay_ns = strategy.max_queue_delay_microseconds * 1000 if self._least else 0

    def plan(self, now_ns: int) -> Plan:
        """See `Lane.plan`."""
        steps = self._heads()
        # By the oldest, so that no shape waits for ever behind another.
        oldest = min(steps, key=attrgetter("number"))
        reason = self._reason
        if self._delay_ns and len(steps) / self.seats < self._least:
            waited_ns = now_ns - oldest.arrived_ns
            if waited_ns < self._delay_ns:
                return Plan((), wait_ns=self._delay_ns - waited_ns)
            reason = "delay expired"
        steps = [step for step in steps if step.key == oldest.key]
        steps.sort(key=_slot)
        return Plan(steps, reason)


class OldestLane(Lane):
    """See the module."""

    def __init__(self, runner: Runner, config: ModelConfig, strategy: OldestStrategy) -> None:
        super().__init__(runner, strategy.max_candidate_sequences or max(1, config.max_batch_size))
        self._rules = BatchRules(
            max(1, config.max_batch_size), frozenset(strategy.preferred_batch_sizes), by_shape=True
        )
        self._delay_ns = strategy.max_queue_delay_microseconds * 1000
        self._alone = config.max_batch_size == 0
        if strategy.preserve_ordering:
            self.order = Order()

    def plan(self, now_ns: int) -> Plan:
        """See `Lane.plan`."""
        steps = self._heads()
        steps.sort(key=attrgetter("number"))
        if self._alone:
            return Plan(steps[:1], "one at a time")
        count, reason, wait_ns = choose(steps, self._rules, self._delay_ns, now_ns)
        return Plan(steps[:count], reason, wait_ns)


def _slot(step: Step) -> int:
    return step.sequence.slot if step.sequence is not None else -1
