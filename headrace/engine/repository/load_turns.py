# SPDX-License-Identifier: Apache-2.0
"""Turns of loads: those of known size run together, and one whose memory is measured runs alone. Used by `on_demand`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LoadTurns:
    """Lets loads of known size run together, and a load whose memory is measured alone; first come, first served."""

    def __init__(self, together: int) -> None:
        """At most `together` loads run at once."""
        self._together = together
        self._running = 0
        self._alone = False
        self._queue: deque[tuple[bool, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait for a turn."""
        turn = (alone, asyncio.get_running_loop().create_future())
        self._queue.append(turn)
        self._start()
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn in self._queue:
                self._queue.remove(turn)
            else:
                self._end()
            raise
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        self._running -= 1
        self._alone = self._alone and self._running > 0
        self._start()

    def _start(self) -> None:
        while self._queue and self._may_start(self._queue[0][0]):
            alone, turn = self._queue.popleft()
            if not turn.cancelled():
                self._running += 1
                self._alone = alone
                turn.set_result(None)

    def _may_start(self, alone: bool) -> bool:
        return not self._alone and self._running < (1 if alone else self._together)
