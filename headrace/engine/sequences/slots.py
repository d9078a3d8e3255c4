# SPDX-License-Identifier: Apache-2.0
"""Slot allocation: the sequences of a model by id, the free slots, the backlog, and the idle timeout.

The scheduler owns it, and is notified (`review`) of every sequence that gets a slot or has to give it up.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from time import monotonic_ns

from headrace.engine.sequences.controls import SequenceId
from headrace.engine.sequences.sequence import ActiveSequence, InstanceSlots


class SequenceSlots:
    """The sequences of one version and their slots."""

    def __init__(
        self, instances: Sequence[InstanceSlots], idle_ns: int, review: Callable[[ActiveSequence], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._instances = instances
        self._idle_ns = idle_ns
        self._review = review
        # The lowest slot of any instance first: this spreads the work, and batches have few empty rows.
        self._free = [(slot, index) for index, instance in enumerate(instances) for slot in range(instance.count)]
        heapq.heapify(self._free)
        self._latest: dict[SequenceId, ActiveSequence] = {}
        """By id, until it is finished."""
        self._active: dict[ActiveSequence, None] = {}
        self._backlog: dict[ActiveSequence, None] = {}
        """In the order of their STARTs."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def find_open(self, id: SequenceId) -> ActiveSequence | None:
        """Return the sequence of a request without START; None if there is none that accepts requests."""
        sequence = self._latest.get(id)
        return None if sequence is None or sequence.closed else sequence

    def all(self) -> list[ActiveSequence]:
        """Return all sequences that are not finished."""
        return list(self._active)

    @property
    def backlog_requests(self) -> int:
        """Number of requests of sequences in the backlog."""
        return sum(len(sequence.queue) for sequence in self._backlog)

    def add(self, sequence: ActiveSequence) -> ActiveSequence | None:
        """Assign a slot to a new sequence, or put it in the backlog. Return the open sequence of its id that it closes."""
        previous = sequence.predecessor = self._latest.get(sequence.id)
        self._latest[sequence.id] = sequence
        self._active[sequence] = None
        if previous is not None and not previous.closed:
            previous.closed = True
            previous.successor = sequence
            return previous
        self._backlog[sequence] = None
        self._assign_free()
        return None

    def remove(self, sequence: ActiveSequence) -> None:
        """Remove a finished sequence and assign its slot to another one."""
        if sequence.finished:
            return
        sequence.finished = True
        del self._active[sequence]
        if self._latest[sequence.id] is sequence:
            del self._latest[sequence.id]
            if (predecessor := _unfinished_predecessor(sequence)) is not None:
                # The sequence never started: the next one of its id must still wait for the predecessor.
                self._latest[sequence.id] = predecessor
        instance, successor = sequence.slots, sequence.successor
        sequence.slots = sequence.successor = None
        if successor is not None and successor.finished:
            successor = None
        if instance is None:
            self._backlog.pop(sequence, None)
            if successor is not None:
                self._backlog[successor] = None
        elif successor is not None:
            self._assign(successor, instance, sequence.slot)
        else:
            heapq.heappush(self._free, (sequence.slot, self._instances.index(instance)))
        self._assign_free()

    def start_idle_timer(self) -> None:
        """Start the timer that closes sequences which are idle too long."""
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._idle_ns / 1e9, self._close_idle)

    def close(self) -> None:
        """Stop assigning slots and closing idle sequences."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _assign_free(self) -> None:
        while self._free and not self._closed:
            sequence = next((waiting for waiting in self._backlog if _unfinished_predecessor(waiting) is None), None)
            if sequence is None:
                return
            slot, index = heapq.heappop(self._free)
            del self._backlog[sequence]
            self._assign(sequence, self._instances[index], slot)

    def _assign(self, sequence: ActiveSequence, instance: InstanceSlots, slot: int) -> None:
        sequence.slots, sequence.slot, sequence.predecessor = instance, slot, None
        self._review(sequence)

    def _close_idle(self) -> None:
        self._timer = None
        now_ns = monotonic_ns()
        soonest_ns: int | None = None
        for sequence in self.all():
            if sequence.idle_since_ns is None:
                continue
            left_ns = sequence.idle_since_ns + self._idle_ns - now_ns
            if left_ns <= 0:
                sequence.closed = True
                self._review(sequence)
            elif soonest_ns is None or left_ns < soonest_ns:
                soonest_ns = left_ns
        if soonest_ns is not None and self._timer is None:
            self._timer = self._loop.call_later(soonest_ns / 1e9, self._close_idle)


def _unfinished_predecessor(sequence: ActiveSequence) -> ActiveSequence | None:
    """Return the sequence that this one still has to wait for."""
    predecessor = sequence.predecessor
    while predecessor is not None and predecessor.finished:
        predecessor = predecessor.predecessor
    return predecessor
