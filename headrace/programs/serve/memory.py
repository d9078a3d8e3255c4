# SPDX-License-Identifier: Apache-2.0
"""Gives memory back to the system after a large request.

glibc keeps what is freed, up to 64 MiB and more once large blocks have been freed: a server that was sent one big body
would stay as big. Started by `server`; looks every few seconds whether the process has grown, and if so has glibc return
what is free. What has grown for good (a model, a cache) is only looked at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_EVERY_SECONDS = 4.0
_GROWN_BYTES = 8 << 20
_STATM = Path("/proc/self/statm")


class MemoryReturner:
    """Watches one process. Does nothing where the C library is not glibc."""

    def __init__(self, trim: Callable[[int], int] | None = None) -> None:
        self._trim = trim or getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._smallest = 0
        self._timer: asyncio.TimerHandle | None = None
        self._trimming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on."""
        if self._trim is not None:
            self._smallest = resident_bytes()
            self._wait()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._trimming is not None:
            self._trimming.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_EVERY_SECONDS, self._look)

    def _look(self) -> None:
        if resident_bytes() > self._smallest + _GROWN_BYTES:
            self._trimming = asyncio.create_task(self._give_back())
        else:
            self._wait()

    async def _give_back(self) -> None:
        if self._trim is not None:
            # In a thread: it takes milliseconds, for which the interpreter is free.
            await asyncio.to_thread(self._trim, 0)
        self._smallest = resident_bytes()
        self._wait()


def resident_bytes() -> int:
    """What the process has in memory."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
