# SPDX-License-Identifier: Apache-2.0
"""Delay the first batch of a sequence model until enough requests are queued, as `scheduling.delayed_start` does.

The rules are those of Triton. Direct strategy: all instances start together, when the sequences with a slot have enough
requests and so do those in the backlog. Oldest strategy: each instance starts by itself, when enough of its sequences have a
request; the backlog does not count.
"""

from __future__ import annotations

from headrace.engine.scheduling.delayed_start import StartDelay
from headrace.engine.sequences.lanes import DirectLane, Lane
from headrace.engine.sequences.live import LiveSequence
from headrace.engine.sequences.scheduler import SequenceScheduler
from headrace.models.config.types import DirectStrategy, SequenceBatching


def is_delayed(sequences: SequenceBatching, delay: StartDelay) -> bool:
    """Whether a model has to wait for its first batch."""
    return bool(delay.requests or (delay.backlog_requests and isinstance(sequences.strategy, DirectStrategy)))


class DelayedSequenceScheduler(SequenceScheduler):
    """A sequence scheduler whose instances wait for their first batch, and then work like any other."""

    _delay = StartDelay()
    _delayed_lanes: tuple[Lane, ...] = ()

    def delay_start(self, delay: StartDelay) -> None:
        """Form no batch until this many requests are queued. Call before the first `add`."""
        self._delay = delay
        self._delayed_lanes = tuple(self._lanes)
        for lane in self._delayed_lanes:
            lane.idle = False

    def _review(self, sequence: LiveSequence) -> None:
        super()._review(sequence)
        if self._delayed_lanes:
            still_delayed = tuple(lane for lane in self._delayed_lanes if not self._may_start(lane))
            for lane in self._delayed_lanes:
                if lane not in still_delayed:
                    lane.idle = True
                    self._wake()
            self._delayed_lanes = still_delayed

    def _may_start(self, lane: Lane) -> bool:
        if not isinstance(lane, DirectLane):
            return len(lane.ready) >= self._delay.requests
        backlog = self._roster.backlog_requests
        return backlog >= self._delay.backlog_requests and self.waiting - backlog >= self._delay.requests
