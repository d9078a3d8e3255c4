# SPDX-License-Identifier: Apache-2.0
"""Who sits where: the sequences of a model by id, the free seats, the backlog, and those that were idle for too long.

Owned by the scheduler, which is told (`review`) of every sequence that got a seat or has lost its right to one.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from time import monotonic_ns

from headrace.engine.sequences.flags import SequenceId
from headrace.engine.sequences.lanes import Lane
from headrace.engine.sequences.live import LiveSequence


class Roster:
    """The sequences of one version."""

    def __init__(self, lanes: Sequence[Lane], idle_ns: int, review: Callable[[LiveSequence], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lanes = lanes
        self._idle_ns = idle_ns
        self._review = review
        # The lowest slot of any instance first, so that work is spread and batches have few empty rows.
        self._seats = [(slot, index) for index, lane in enumerate(lanes) for slot in range(lane.seats)]
        heapq.heapify(self._seats)
        self._latest: dict[SequenceId, LiveSequence] = {}
        """By id, until it is over."""
        self._live: dict[LiveSequence, None] = {}
        self._backlog: dict[LiveSequence, None] = {}
        """In the order of their STARTs."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def open(self, id: SequenceId) -> LiveSequence | None:
        """The sequence a request without START belongs to."""
        sequence = self._latest.get(id)
        return None if sequence is None or sequence.closed else sequence

    def all(self) -> list[LiveSequence]:
        """All that are not over."""
        return list(self._live)

    @property
    def backlog_requests(self) -> int:
        """Requests of sequences that wait for a seat."""
        return sum(len(sequence.queue) for sequence in self._backlog)

    def enter(self, sequence: LiveSequence) -> LiveSequence | None:
        """Give a new sequence a seat, or a place in the backlog. Returns the one that it has closed, if it has."""
        previous = sequence.before = self._latest.get(sequence.id)
        self._latest[sequence.id] = sequence
        self._live[sequence] = None
        if previous is not None and not previous.closed:
            previous.closed = True
            previous.heir = sequence
            return previous
        self._backlog[sequence] = None
        self._seat_next()
        return None

    def leave(self, sequence: LiveSequence) -> None:
        """A sequence is over: its seat is for another."""
        if sequence.over:
            return
        sequence.over = True
        del self._live[sequence]
        if self._latest[sequence.id] is sequence:
            del self._latest[sequence.id]
            if (before := _before(sequence)) is not None:
                # It never began: whoever comes next under its id still has to wait for that one.
                self._latest[sequence.id] = before
        lane, heir = sequence.lane, sequence.heir
        sequence.lane = sequence.heir = None
        if heir is not None and heir.over:
            heir = None
        if lane is None:
            self._backlog.pop(sequence, None)
            if heir is not None:
                self._backlog[heir] = None
        elif heir is not None:
            self._sit(heir, lane, sequence.slot)
        else:
            heapq.heappush(self._seats, (sequence.slot, self._lanes.index(lane)))
        self._seat_next()

    def watch(self) -> None:
        """A sequence is idle: see to it that it is not for ever."""
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._idle_ns / 1e9, self._reap)

    def close(self) -> None:
        """Nobody is seated or closed for idling any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _seat_next(self) -> None:
        while self._seats and not self._closed:
            sequence = next((waiting for waiting in self._backlog if _before(waiting) is None), None)
            if sequence is None:
                return
            slot, index = heapq.heappop(self._seats)
            del self._backlog[sequence]
            self._sit(sequence, self._lanes[index], slot)

    def _sit(self, sequence: LiveSequence, lane: Lane, slot: int) -> None:
        sequence.lane, sequence.slot, sequence.before = lane, slot, None
        self._review(sequence)

    def _reap(self) -> None:
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
            self._timer = self._loop.call_later(soonest_ns / 1e9, self._reap)


def _before(sequence: LiveSequence) -> LiveSequence | None:
    """The one that a sequence still has to wait for."""
    before = sequence.before
    while before is not None and before.over:
        before = before.before
    return before
