# SPDX-License-Identifier: Apache-2.0
"""How long to wait before what died is started again. Asked by backends that start processes."""

from __future__ import annotations


class Backoff:
    """Twice as long each time, up to a limit; from the start again after one that lived."""

    def __init__(self, delays: tuple[float, float], *, longest: float, lived: float) -> None:
        """`delays`: before the first and the second try; `lived`: seconds after which a death is a first one again."""
        self._first, self._second = delays
        self._longest = longest
        self._lived = lived
        self._tries = 0
        self._started_at: float | None = None

    def started(self, now: float) -> None:
        """It became ready."""
        self._started_at = now

    def next_delay(self, now: float) -> float:
        """It died, or did not become ready: the seconds until the next."""
        if self._started_at is not None and now - self._started_at >= self._lived:
            self._tries = 0
        self._started_at = None
        self._tries += 1
        if self._tries == 1:
            return self._first
        return float(min(self._longest, self._second * 2 ** min(self._tries - 2, 30)))
