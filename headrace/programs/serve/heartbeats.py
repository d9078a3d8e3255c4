# SPDX-License-Identifier: Apache-2.0
"""Tells a worker that hangs from one that works: each beats once a second, and its supervisor counts the seconds without.

Made by `server` before it forks: the counters lie in memory that all processes have in common, so that a beat is an addition
and a look at it a read. `Watchdog` is asked by `supervisor`; it judges, and ends nobody.

A beat comes from the worker's event loop, for that is what answers clients. But a loop is silent, too, while a library holds
Python's lock: as a large model is loaded, or in one long computation. It then uses the CPU or reads from a disk. One
that was stopped, or waits for a lock for ever, does neither. So silence is counted twice over:

    silent and at rest     hangs, after as many seconds as it is told
    silent and at work     hangs after ten times as many, once the worker serves; never while it starts, for nobody knows
                           how long a model may take to be opened

Only time that the supervisor itself has seen counts: a machine that slept, or a container that was paused, is no silence.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BEAT_SECONDS = 1.0
LONGEST_LOOK_SECONDS = 2 * BEAT_SECONDS
"""What may pass between two looks and still count."""
_AT_WORK = 10


class Heartbeats:
    """A counter for each worker, and whether it serves. To be made before the workers are forked."""

    def __init__(self, count: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, 2 * 8 * count)).cast("Q")

    def keep_beating(self, index: int) -> None:
        """In the worker: beat as long as its loop turns, which must be running."""
        self.beat(index)
        asyncio.get_running_loop().call_later(BEAT_SECONDS, self.keep_beating, index)

    def beat(self, index: int) -> None:
        """Once."""
        self._cells[2 * index] += 1

    def serve(self, index: int) -> None:
        """In the worker: its models are there."""
        self._cells[2 * index + 1] = 1

    def begin(self, index: int) -> int:
        """In the supervisor, before a process has this place: the beats of those before it."""
        self._cells[2 * index + 1] = 0
        return self._cells[2 * index]

    def beats(self, index: int) -> int:
        """How many there were."""
        return self._cells[2 * index]

    def serves(self, index: int) -> bool:
        """Whether the worker has started."""
        return bool(self._cells[2 * index + 1])


class Effort(NamedTuple):
    """What a process has done, as /proc tells it."""

    state: str
    """`D`: it waits for a disk. `T`: it was stopped."""
    ticks: int
    """Of CPU time, of all its threads: hundredths of a second."""
    faults: int
    """Pages that a disk had to be read for."""

    def since(self, before: Effort) -> bool:
        """Whether it is at work, or was since then."""
        return self.state == "D" or (self.ticks, self.faults) != (before.ticks, before.faults)


def effort_of(pid: int) -> Effort:
    """Of a process that was not reaped yet. Where there is no /proc nobody can tell rest from work: then it works."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return Effort("D", 0, 0)
    # The name, in parentheses, may hold anything, parentheses and spaces too.
    fields = text[text.rindex(b")") + 2 :].split()
    return Effort(fields[0].decode(), int(fields[11]) + int(fields[12]), int(fields[9]))


@dataclass(slots=True)
class _Pulse:
    beats: int
    effort: Effort | None = None
    """At the last look that found it silent."""
    resting: float = 0.0
    working: float = 0.0


class Watchdog:
    """See the module. `seconds`: how long a worker may be silent and at rest."""

    def __init__(self, beats: Heartbeats, seconds: float, *, effort_of: Callable[[int], Effort] = effort_of) -> None:
        self.seconds = seconds
        self._beats = beats
        self._effort_of = effort_of
        self._pulses: dict[int, _Pulse] = {}

    def begin(self, index: int) -> None:
        """Another process is about to have this place."""
        self._pulses[index] = _Pulse(self._beats.begin(index))

    def looked(self, index: int, pid: int, passed: float) -> str:
        """Look at a worker, so many seconds after the last time: in what way it hangs; "" if it does not."""
        pulse, beats = self._pulses[index], self._beats.beats(index)
        if beats != pulse.beats:
            self._pulses[index] = _Pulse(beats)
            return ""
        effort, before = self._effort_of(pid), pulse.effort
        pulse.effort = effort
        if before is None:
            return ""
        passed = min(passed, LONGEST_LOOK_SECONDS)
        if effort.since(before):
            # Work makes up for rest, second by second: on a crowded machine who computes has to wait now and then, and
            # threads that wait for Python's lock wake up for a little.
            pulse.working += passed
            pulse.resting = max(0.0, pulse.resting - passed)
        else:
            pulse.resting += passed
        return self._judged(pulse, effort, serves=self._beats.serves(index))

    def _judged(self, pulse: _Pulse, effort: Effort, *, serves: bool) -> str:
        if pulse.resting >= self.seconds:
            silent = "has been stopped" if effort.state in ("T", "t") else "has answered nothing and done nothing"
            return f"{silent} for {pulse.resting:.0f} s"
        if serves and pulse.working >= _AT_WORK * self.seconds:
            return f"has answered nothing for {pulse.working:.0f} s in which it computed"
        return ""
