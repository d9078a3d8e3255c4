# SPDX-License-Identifier: Apache-2.0
"""Work that goes on to its end although whoever asked for it has left. Used by `services`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Tasks that somebody must hold."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for it; a caller that is cancelled meanwhile does not take it along."""
        return await asyncio.shield(self.leave(work))

    def leave(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Let it go on by itself."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """Until all is done."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # taken note of: whoever waited has it, if anybody did
