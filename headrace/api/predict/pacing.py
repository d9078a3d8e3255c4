# SPDX-License-Identifier: Apache-2.0
"""How many messages one connection may send in a second; and when it has overdone it for too long."""

from __future__ import annotations

FLOODING_SECONDS = 5.0
"""Who goes on over the limit for so long without a break does not listen."""
_BREAK_SECONDS = 1.0


class Pace:
    """A bucket with a second's worth of messages in it. `rate` 0 is any."""

    __slots__ = ("_left", "_looked_at", "_refused_at", "_since", "flooding", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.flooding = False
        """Whether the last one refused was one too many."""
        self._left = max(rate, 1.0)
        self._looked_at = now
        self._refused_at = self._since = -_BREAK_SECONDS

    def take(self, now: float) -> float:
        """0 if a message may come now; else in how many seconds it may."""
        rate = self.rate
        if rate <= 0:
            return 0.0
        left = min(max(rate, 1.0), self._left + (now - self._looked_at) * rate)
        self._looked_at = now
        if left >= 1.0:
            self._left = left - 1.0
            return 0.0
        self._left = left
        if now - self._refused_at > _BREAK_SECONDS:
            self._since = now
        self._refused_at = now
        self.flooding = now - self._since >= FLOODING_SECONDS
        return (1.0 - left) / rate
