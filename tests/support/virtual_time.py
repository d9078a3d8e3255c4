# SPDX-License-Identifier: Apache-2.0
"""Run coroutines in virtual time: an event loop whose clock jumps to the next timer whenever nothing else is to be done.

clock = LoopClock()
run_virtual(scenario(clock), clock)       # `await asyncio.sleep(3600)` inside it takes microseconds

The clock that the code under test is given, and the loop's own `time()`, are the same, so back-off, idle limits and periods
all pass. Sockets and threads work: while a thread of the loop's executor is busy, time does not jump.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_THREAD_PAUSE = 0.001
"""Seconds of real time between two looks at whether a thread has finished."""


class LoopClock:
    """The clock of a virtual loop; it satisfies `headrace.core.clock.Clock`."""

    def __init__(self, start: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        self._now += max(0.0, seconds)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits for a timer."""

    def __init__(self, clock: LoopClock) -> None:
        self.clock = clock
        self._busy_threads = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.clock.monotonic()

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Count the work that threads do for this loop: real time passes until it is done."""
        future = super().run_in_executor(executor, func, *args)
        self._busy_threads += 1
        future.add_done_callback(self._thread_done)
        return future

    @property
    def waits_for_threads(self) -> bool:
        return self._busy_threads > 0

    def _thread_done(self, _: Any) -> None:
        self._busy_threads -= 1


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Select without waiting; where the loop would have slept, move its clock instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if timeout is None:  # no timer at all: only a thread or a socket can go on
            return super().select(None if self._loop.waits_for_threads else 10.0)
        if self._loop.waits_for_threads:
            return super().select(_THREAD_PAUSE)
        self._loop.clock.advance(timeout)
        return events


def run_virtual(
    main: Coroutine[Any, Any, T],
    clock: LoopClock | None = None,
    *,
    real_seconds: float = 60.0,
    loop: Callable[[LoopClock], VirtualLoop] = VirtualLoop,
) -> T:
    """Run a coroutine to its end in virtual time; `real_seconds` bounds how long that may really take."""
    clock = clock or LoopClock()
    ends = time.monotonic() + real_seconds

    async def bounded() -> T:
        task = asyncio.ensure_future(main)
        while not task.done():
            await asyncio.wait((task,), timeout=60.0)  # virtual seconds
            if not task.done() and time.monotonic() > ends:
                task.cancel()
                raise TimeoutError(f"a scenario in virtual time took more than {real_seconds:g} real seconds")
        return task.result()

    with asyncio.Runner(loop_factory=lambda: loop(clock)) as runner:
        return runner.run(bounded())
