# SPDX-License-Identifier: Apache-2.0
"""Send load: closed loops send when an answer has come, open loops when a request is due."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator

from headrace.core.errors import InvalidArgument
from headrace.programs.loadtest.connections import NEVER_SENT, Lane, Target
from headrace.programs.loadtest.results import Recording

_CLOCK_MONOTONIC = 1
_SHORTEST_SECONDS = 1e-6


class _Times(ctypes.Structure):
    """`struct itimerspec`: interval, and first expiry."""

    _fields_ = [
        ("every_seconds", ctypes.c_long),
        ("every_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    ]


class Alarm:
    """A timer with a precision of a tenth of a millisecond. Belongs to its event loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._late: asyncio.TimerHandle | None = None
        self._library = ctypes.CDLL(None, use_errno=True)
        self._file = -1
        if hasattr(self._library, "timerfd_create"):
            self._file = int(self._library.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self._file >= 0:
            self._loop.add_reader(self._file, self._rang)

    def ring_in(self, seconds: float) -> None:
        """Set the timer; replaces an earlier one."""
        wait = max(seconds, _SHORTEST_SECONDS)
        if self._file < 0:
            if self._late is not None:
                self._late.cancel()
            self._late = self._loop.call_later(wait, self._ring)
            return
        whole = int(wait)
        times = _Times(0, 0, whole, int((wait - whole) * 1e9))
        self._library.timerfd_settime(self._file, 0, ctypes.byref(times), None)

    def close(self) -> None:
        """Stop the timer."""
        if self._late is not None:
            self._late.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _rang(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, 8)
        self._ring()


class Arrivals:
    """Due times of an open loop."""

    def __init__(self, rate: float, *, uniform: bool = False, seed: int = 0) -> None:
        if rate <= 0:
            raise InvalidArgument(f"a rate of {rate:g} requests per second sends nothing: give one above 0")
        self._rate = rate
        self._uniform = uniform
        self._chance = random.Random(seed)  # noqa: S311 - spreads requests, hides nothing
        self._count = 0
        self.next = self._first()
        """Return when the next request is due."""

    def take_until(self, seconds: float) -> Iterator[float]:
        """Return the number of requests that have become due."""
        while self.next <= seconds:
            due = self.next
            self._count += 1
            # By multiplication if possible: sums of small steps drift.
            self.next = self._count / self._rate if self._uniform else due + self._gap()
            yield due

    def _first(self) -> float:
        return 0.0 if self._uniform else self._gap()

    def _gap(self) -> float:
        return self._chance.expovariate(self._rate)


MOST_LANES = 1024
"""Maximum connections of an open loop; further due requests wait, and their waiting counts."""
_SWEEP_SECONDS = 0.1
_LAST_SECONDS = 0.005

Now = Callable[[], float]


class ClosedLoop:
    """A closed loop: each worker sends when its answer has come."""

    def __init__(self, target: Target, workers: int, recording: Recording, now: Now = time.perf_counter) -> None:
        self._now = now
        self._recording = recording
        self.lanes = [target.lane() for _ in range(workers)]
        self.under_way = 0

    def start(self) -> None:
        """Send the first request of each worker."""
        for lane in self.lanes:
            self.under_way += 1
            self._ask(lane)

    def _ask(self, lane: Lane) -> None:
        began = self._now()

        def answered(kind: str, text: str) -> None:
            now = self._now()
            self._recording.take(began, now, kind, text)
            if now < self._recording.ends:
                self._ask(lane)
            else:
                self.under_way -= 1

        lane.ask(answered)

    def close(self) -> None:
        """Fail the requests that are still in flight."""
        for lane in self.lanes:
            lane.expire(math.inf)
            lane.close()


class OpenLoop:
    """An open loop: sends due requests on a free or a new connection. `begun` is the start of the arrivals."""

    def __init__(
        self,
        target: Target,
        arrivals: Arrivals,
        recording: Recording,
        *,
        begun: float,
        most_lanes: int = MOST_LANES,
        now: Now = time.perf_counter,
    ) -> None:
        self._target = target
        self._arrivals = arrivals
        self._recording = recording
        self._begun = begun
        self._most_lanes = most_lanes
        self._now = now
        self._free: list[Lane] = []
        self._waiting: deque[float] = deque()
        self._alarm: Alarm | None = None
        self.lanes: list[Lane] = []
        self.under_way = 0

    def start(self) -> None:
        """Set the timer for the first request."""
        self._alarm = Alarm(self._rang)
        self._rang()

    def _rang(self) -> None:
        self.send_due()
        if self._alarm is not None and self._begun + self._arrivals.next < self._recording.ends:
            self._alarm.ring_in(self._begun + self._arrivals.next - self._now())

    def send_due(self) -> None:
        """Send all due requests that have a connection."""
        until = min(self._now(), self._recording.ends) - self._begun
        for offset in self._arrivals.take_until(until):
            due = self._begun + offset
            self.under_way += 1
            if self._free:
                self._ask(self._free.pop(), due)
            elif len(self.lanes) < self._most_lanes:
                self.lanes.append(self._target.lane())
                self._ask(self.lanes[-1], due)
            else:
                self._waiting.append(due)
                self._recording.most_waiting = max(self._recording.most_waiting, len(self._waiting))

    def _ask(self, lane: Lane, due: float) -> None:
        self._recording.take_late(due, self._now())

        def answered(kind: str, text: str) -> None:
            self.under_way -= 1
            self._recording.take(due, self._now(), kind, text)
            if self._waiting:
                self._ask(lane, self._waiting.popleft())
            else:
                self._free.append(lane)

        lane.ask(answered)

    def close(self) -> None:
        """Fail the requests that were never sent, and those in flight."""
        if self._alarm is not None:
            self._alarm.close()
        now = self._now()
        for due in self._waiting:
            self._recording.take(due, now, NEVER_SENT, "more requests were due than connections could carry")
        self._waiting.clear()
        for lane in self.lanes:
            lane.expire(math.inf)
            lane.close()


async def drive(
    loop: ClosedLoop | OpenLoop, recording: Recording, timeout_seconds: float, look: Callable[[float], None]
) -> None:
    """Run a loop to the end of its window, and until the last answer has come or timed out.

    `look` is called now and then with the time.
    """
    loop.start()
    last = recording.ends + timeout_seconds + _SWEEP_SECONDS
    while (now := time.perf_counter()) < last:
        if now >= recording.ends and not loop.under_way:
            break
        look(now)
        for lane in loop.lanes:
            lane.expire(now - timeout_seconds)
        # Not beyond the start or end of the window, so that samples belong to it.
        left = (recording.begins if now < recording.begins else recording.ends) - now
        await asyncio.sleep(min(_SWEEP_SECONDS, left) if left > 0 else _LAST_SECONDS)
    loop.close()
