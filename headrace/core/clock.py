# SPDX-License-Identifier: Apache-2.0
"""Clocks that are passed in, so that tests can control time.

Code that waits, expires or measures takes a `Clock`; only programs create a `SystemClock`.
"""

from __future__ import annotations

import time
from typing import Protocol

_wall_time = time.time


class Clock(Protocol):
    """A monotonic clock for durations and a wall clock for timestamps."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""

    def wall(self) -> float:
        """Return seconds since 1970-01-01 UTC; may jump."""


class SystemClock:
    """The operating system's clocks."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since 1970-01-01 UTC."""
        return _wall_time()


def shift_wall_clock(seconds: float) -> None:
    """Let the wall clock of this process differ from the system's by so many seconds. For `fault_points`."""
    global _wall_time  # noqa: PLW0603  # of every SystemClock

    def shifted() -> float:
        return time.time() + seconds

    _wall_time = shifted


class ManualClock:
    """A clock that moves only when `advance` is called. For tests and simulations."""

    def __init__(self, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start."""
        return self._now

    def wall(self) -> float:
        """Return seconds since 1970-01-01 UTC."""
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        if seconds < 0:
            raise ValueError("a clock only moves forward")
        self._now += seconds
