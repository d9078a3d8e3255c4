# SPDX-License-Identifier: Apache-2.0
"""How long to wait before a process is started again. Asked by `instance`."""

from __future__ import annotations

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 30.0
_LIVED_SECONDS = 60.0


class Backoff:
    """At once the first time, then twice as long each time; from the start again after a process that lived."""

    def __init__(self) -> None:
        self._tries = 0
        self._started_at: float | None = None

    def started(self, now: float) -> None:
        """A process became ready."""
        self._started_at = now

    def next_delay(self, now: float) -> float:
        """A process died, or did not become ready: the seconds until the next."""
        if self._started_at is not None and now - self._started_at >= _LIVED_SECONDS:
            self._tries = 0
        self._started_at = None
        self._tries += 1
        if self._tries == 1:
            return 0.0
        return float(min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** min(self._tries - 2, 30)))
