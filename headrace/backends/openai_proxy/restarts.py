# SPDX-License-Identifier: Apache-2.0
"""How long to wait before an engine is started again. Asked by `engine`."""

from __future__ import annotations

_FIRST_SECONDS = 0.5
_LONGEST_SECONDS = 60.0
_LIVED_SECONDS = 120.0


class Backoff:
    """Twice as long each time; from the start again after an engine that lived."""

    def __init__(self) -> None:
        self._tries = 0
        self._started_at: float | None = None

    def started(self, now: float) -> None:
        """An engine became healthy."""
        self._started_at = now

    def next_delay(self, now: float) -> float:
        """An engine died, or did not become healthy: the seconds until the next."""
        if self._started_at is not None and now - self._started_at >= _LIVED_SECONDS:
            self._tries = 0
        self._started_at = None
        self._tries += 1
        return float(min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** min(self._tries - 1, 30)))
