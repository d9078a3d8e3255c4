# SPDX-License-Identifier: Apache-2.0
"""Exponential backoff for restarts of processes that die."""

from __future__ import annotations


class Backoff:
    """Doubles the delay after each death, up to a limit, and resets after a process that ran long enough."""

    def __init__(self, delays: tuple[float, float], *, longest: float, lived: float) -> None:
        """`delays`: before the first and the second restart; `lived`: seconds of life after which the delay resets."""
        self._first, self._second = delays
        self._longest = longest
        self._lived = lived
        self._tries = 0
        self._started_at: float | None = None

    def started(self, now: float) -> None:
        """Record that the process became ready."""
        self._started_at = now

    def next_delay(self, now: float) -> float:
        """Record that the process died or did not become ready; return the seconds until the next start."""
        if self._started_at is not None and now - self._started_at >= self._lived:
            self._tries = 0
        self._started_at = None
        self._tries += 1
        if self._tries == 1:
            return self._first
        return float(min(self._longest, self._second * 2 ** min(self._tries - 2, 30)))
