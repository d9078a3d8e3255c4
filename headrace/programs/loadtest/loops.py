# SPDX-License-Identifier: Apache-2.0
"""Send load: a closed loop sends the next request after an answer, an open loop when a request is due."""

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
from headrace.programs.loadtest.connections import NEVER_SENT, Connection, Target
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


class Timer:
    """A timer with a precision of a tenth of a millisecond. Belongs to its event loop."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._library = ctypes.CDLL(None, use_errno=True)
        self._file = -1
        if hasattr(self._library, "timerfd_create"):
            self._file = int(self._library.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self._file >= 0:
            self._loop.add_reader(self._file, self._fired)

    def set(self, seconds: float) -> None:
        """Set the timer; replaces an earlier one."""
        wait = max(seconds, _SHORTEST_SECONDS)
        if self._file < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(wait, self._callback)
            return
        whole_seconds = int(wait)
        times = _Times(0, 0, whole_seconds, int((wait - whole_seconds) * 1e9))
        self._library.timerfd_settime(self._file, 0, ctypes.byref(times), None)

    def close(self) -> None:
        """Stop the timer."""
        if self._handle is not None:
            self._handle.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _fired(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, 8)
        self._callback()


class Arrivals:
    """Due times of an open loop."""

    def __init__(self, rate: float, *, uniform: bool = False, seed: int = 0) -> None:
        if rate <= 0:
            raise InvalidArgument(f"a rate of {rate:g} requests per second sends nothing: give one above 0")
        self._rate = rate
        self._uniform = uniform
        self._rng = random.Random(seed)  # noqa: S311 - spreads requests, hides nothing
        self._count = 0
        self.next = self._first()
        """When the next request is due, in seconds since the start."""

    def pop_due(self, seconds: float) -> Iterator[float]:
        """Yield the due times up to now."""
        while self.next <= seconds:
            due = self.next
            self._count += 1
            # By multiplication if possible: sums of small steps drift.
            self.next = self._count / self._rate if self._uniform else due + self._gap()
            yield due

    def _first(self) -> float:
        return 0.0 if self._uniform else self._gap()

    def _gap(self) -> float:
        return self._rng.expovariate(self._rate)


MAX_CONNECTIONS = 1024
"""Maximum connections of an open loop; further due requests wait, and the wait counts as latency."""
_SWEEP_SECONDS = 0.1
_LAST_SECONDS = 0.005

Now = Callable[[], float]


class ClosedLoop:
    """A closed loop: each worker sends its next request after the answer to the last one."""

    def __init__(self, target: Target, workers: int, recording: Recording, now: Now = time.perf_counter) -> None:
        self._now = now
        self._recording = recording
        self.connections = [target.new_connection() for _ in range(workers)]
        self.in_flight = 0

    def start(self) -> None:
        """Send the first request of each worker."""
        for connection in self.connections:
            self.in_flight += 1
            self._send(connection)

    def _send(self, connection: Connection) -> None:
        began = self._now()

        def on_done(kind: str, text: str) -> None:
            now = self._now()
            self._recording.record(began, now, kind, text)
            if now < self._recording.ends:
                self._send(connection)
            else:
                self.in_flight -= 1

        connection.send(on_done)

    def close(self) -> None:
        """Fail the requests that are still in flight."""
        for connection in self.connections:
            connection.expire(math.inf)
            connection.close()


class OpenLoop:
    """An open loop: sends due requests on a free or a new connection. Due times count from `start_time`."""

    def __init__(
        self,
        target: Target,
        arrivals: Arrivals,
        recording: Recording,
        *,
        start_time: float,
        max_connections: int = MAX_CONNECTIONS,
        now: Now = time.perf_counter,
    ) -> None:
        self._target = target
        self._arrivals = arrivals
        self._recording = recording
        self._start_time = start_time
        self._max_connections = max_connections
        self._now = now
        self._free: list[Connection] = []
        self._waiting: deque[float] = deque()
        self._timer: Timer | None = None
        self.connections: list[Connection] = []
        self.in_flight = 0

    def start(self) -> None:
        """Set the timer for the first request."""
        self._timer = Timer(self._fired)
        self._fired()

    def _fired(self) -> None:
        self.send_due()
        if self._timer is not None and self._start_time + self._arrivals.next < self._recording.ends:
            self._timer.set(self._start_time + self._arrivals.next - self._now())

    def send_due(self) -> None:
        """Send all due requests that have a connection."""
        until = min(self._now(), self._recording.ends) - self._start_time
        for offset in self._arrivals.pop_due(until):
            due = self._start_time + offset
            self.in_flight += 1
            if self._free:
                self._send(self._free.pop(), due)
            elif len(self.connections) < self._max_connections:
                self.connections.append(self._target.new_connection())
                self._send(self.connections[-1], due)
            else:
                self._waiting.append(due)
                self._recording.most_waiting = max(self._recording.most_waiting, len(self._waiting))

    def _send(self, connection: Connection, due: float) -> None:
        self._recording.record_sent(due, self._now())

        def on_done(kind: str, text: str) -> None:
            self.in_flight -= 1
            self._recording.record(due, self._now(), kind, text)
            if self._waiting:
                self._send(connection, self._waiting.popleft())
            else:
                self._free.append(connection)

        connection.send(on_done)

    def close(self) -> None:
        """Fail the requests that were never sent, and those in flight."""
        if self._timer is not None:
            self._timer.close()
        now = self._now()
        for due in self._waiting:
            self._recording.record(due, now, NEVER_SENT, "no connection was free until the end")
        self._waiting.clear()
        for connection in self.connections:
            connection.expire(math.inf)
            connection.close()


async def drive(
    loop: ClosedLoop | OpenLoop, recording: Recording, timeout_seconds: float, on_tick: Callable[[float], None]
) -> None:
    """Run a loop to the end of its window, and until the last answer has come or timed out.

    `on_tick` is called with the time about ten times a second.
    """
    loop.start()
    last = recording.ends + timeout_seconds + _SWEEP_SECONDS
    while (now := time.perf_counter()) < last:
        if now >= recording.ends and not loop.in_flight:
            break
        on_tick(now)
        for connection in loop.connections:
            connection.expire(now - timeout_seconds)
        # Not beyond the start or end of the window, so that samples belong to it.
        seconds_left = (recording.begins if now < recording.begins else recording.ends) - now
        await asyncio.sleep(min(_SWEEP_SECONDS, seconds_left) if seconds_left > 0 else _LAST_SECONDS)
    loop.close()
