# SPDX-License-Identifier: Apache-2.0
"""A work queue of object keys: duplicates collapse, no key is processed twice at a time, failures retry with back-off."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from headrace.platforms.kubernetes_client.objects import Key

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 300.0
"""The first and the longest delay before a retry."""


class WorkQueue:
    """Calls `process` for each key, which returns False if the key has to be retried."""

    def __init__(self, process: Callable[[Key], Awaitable[bool]], workers: int = 4) -> None:
        self._process = process
        self._workers = workers
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: set[Key] = set()
        self._running: set[Key] = set()
        self._requeue: set[Key] = set()
        """Keys that were added while they were being processed."""
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def add(self, key: Key) -> None:
        """Queue a key now."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._running:
            self._requeue.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue a key after a delay, unless it is added before."""
        if key not in self._timers:
            self._timers[key] = asyncio.get_running_loop().call_later(seconds, self.add, key)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or waiting for a retry."""
        return not (self._queued or self._running or self._requeue or self._timers)

    async def run(self) -> None:
        """Process keys until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        while True:
            key = await self._ready.get()
            self._queued.discard(key)
            self._running.add(key)
            try:
                done = await self._process(key)
            finally:
                self._running.discard(key)
            if done:
                self._failures.pop(key, None)
            else:
                self._failures[key] = failures = self._failures.get(key, 0) + 1
                self.add_after(key, backoff(failures))
            if key in self._requeue:
                self._requeue.discard(key)
                self.add(key)


def backoff(failures: int) -> float:
    """Return the seconds to wait after that many failures in a row, with jitter so that retries spread out."""
    return min(FIRST_SECONDS * 2.0 ** min(failures - 1, 20), LONGEST_SECONDS) * random.uniform(0.75, 1.0)  # noqa: S311
