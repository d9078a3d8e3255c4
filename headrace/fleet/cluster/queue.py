# SPDX-License-Identifier: Apache-2.0
"""The queue of what to look at: each once, however often it is asked for, and never twice at the same time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

Key = tuple[str, str]
"""Namespace and name. Of another kind than services, the name has the plural of its kind and a slash before it."""

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 300.0


class Queue:
    """Calls `work` for keys. One that fails is tried again, later and later."""

    def __init__(self, work: Callable[[Key], Awaitable[bool]], workers: int = 4) -> None:
        self._work = work
        self._workers = workers
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def add(self, key: Key) -> None:
        """Look at it soon."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._running:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    def add_later(self, key: Key, seconds: float) -> None:
        """Look at it then, or before if somebody asks."""
        if key not in self._timers:
            self._timers[key] = asyncio.get_running_loop().call_later(seconds, self.add, key)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs, or is to be tried again."""
        return not (self._waiting or self._running or self._again or self._timers)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._one())

    async def _one(self) -> None:
        while True:
            key = await self._ready.get()
            self._waiting.discard(key)
            self._running.add(key)
            try:
                done = await self._work(key)
            finally:
                self._running.discard(key)
            if done:
                self._failures.pop(key, None)
            else:
                self._failures[key] = times = self._failures.get(key, 0) + 1
                self.add_later(key, backoff(times))
            if key in self._again:
                self._again.discard(key)
                self.add(key)


def backoff(times: int) -> float:
    """How long to wait after so many failures in a row. By chance a little less, so that not all come at once."""
    return min(FIRST_SECONDS * 2.0 ** min(times - 1, 20), LONGEST_SECONDS) * random.uniform(0.75, 1.0)  # noqa: S311
