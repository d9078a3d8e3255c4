# SPDX-License-Identifier: Apache-2.0
"""An alarm in a loop that rings to the tenth of a millisecond. Used by the open loop.

Loops wait in whole milliseconds, which would make each request half a millisecond late on average: more than a small
model takes. Linux has a timer that is a file; Python knows it from 3.13 on, so the C library is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_SHORTEST_SECONDS = 1e-6


class _Times(ctypes.Structure):
    """`struct itimerspec`: again every so long, and first after."""

    _fields_ = [
        ("every_seconds", ctypes.c_long),
        ("every_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    ]


class Alarm:
    """Calls back once for each `ring_in`. Belongs to the loop it was made in."""

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
        """Ring after so long; replaces what was asked for before."""
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
        """Ring no more."""
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
