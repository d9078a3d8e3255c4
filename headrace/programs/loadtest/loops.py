# SPDX-License-Identifier: Apache-2.0
"""The two ways to send: a closed loop asks again when it is answered, an open one when a request is due.

Called by `running`. A closed loop shows what a server can do with so many clients; it slows down with the server, and so
says nothing of what people would wait who do not. An open loop counts from when a request was due: what waited for a
connection, or for us, waited too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from headrace.programs.loadtest.alarms import Alarm
from headrace.programs.loadtest.arrivals import Arrivals
from headrace.programs.loadtest.lanes import NEVER_SENT, Lane, Target
from headrace.programs.loadtest.recording import Recording

MOST_LANES = 1024
"""Connections of an open loop; what is due beyond waits, and its waiting counts."""
_SWEEP_SECONDS = 0.1
_LAST_SECONDS = 0.005

Now = Callable[[], float]


class ClosedLoop:
    """So many workers, each with a lane."""

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
        """What is still under way has taken too long."""
        for lane in self.lanes:
            lane.expire(math.inf)
            lane.close()


class OpenLoop:
    """Sends what is due, on a lane that is free or a new one. `begun` is when the arrivals count from."""

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
        """Ring for the first one."""
        self._alarm = Alarm(self._rang)
        self._rang()

    def _rang(self) -> None:
        self.send_due()
        if self._alarm is not None and self._begun + self._arrivals.next < self._recording.ends:
            self._alarm.ring_in(self._begun + self._arrivals.next - self._now())

    def send_due(self) -> None:
        """Send all that is due and does not wait behind others."""
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
        """What is still waiting was never sent, and what is under way has taken too long."""
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
    """Run a loop to the end of its window, and until the last answer has come or taken too long.

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
        # Not beyond where the window begins or ends, so that what is noted there is of there.
        left = (recording.begins if now < recording.begins else recording.ends) - now
        await asyncio.sleep(min(_SWEEP_SECONDS, left) if left > 0 else _LAST_SECONDS)
    loop.close()
