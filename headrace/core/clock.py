# SPDX-License-Identifier: Apache-2.0
"""Time as a value that is passed in, so that tests can move it.

Rooms that wait, expire or measure take a `Clock`; only composition roots make a `SystemClock`.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one that never jumps, for durations, and one that people read."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `Clock.wall`."""
        return time.time()


class ManualClock:
    """A clock that stands still until it is told to move. For tests and for simulations."""

    def __init__(self, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._now

    def wall(self) -> float:
        """See `Clock.wall`."""
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        if seconds < 0:
            raise ValueError("a clock only moves forward")
        self._now += seconds
