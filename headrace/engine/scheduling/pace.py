# SPDX-License-Identifier: Apache-2.0
"""Whether a model is quick enough to compute in the event loop's own thread. Measured, unless the configuration says.

Owned by a runner, told of its executions. Handing work to a thread and back costs some 50 us; a computation that holds
the loop for much longer than that keeps every other connection waiting.
"""

from __future__ import annotations

from typing import Literal

INLINE_BELOW_NS = 150_000
THREAD_ABOVE_NS = 250_000
_ROW_NS = 4_000
"""What each row of a batch may add."""

_LOOKS = 8
"""Executions in a thread before a model comes inline; the quickest of them counts, since others may have waited for the
interpreter."""

_STRIKES = 4
"""Slow executions, less quick ones, before a model leaves: a machine that was busy once is not a slow model. A very slow
execution counts as several."""


class Pace:
    """Where the next execution takes place."""

    def __init__(self, runs: Literal["auto", "inline", "thread"] = "auto") -> None:
        self.inline = runs == "inline"
        self.slow_ns = THREAD_ABOVE_NS if runs == "auto" else 1 << 62
        """Inline executions that took longer are to be told; others only while there are `strikes`."""
        self.strikes = 0
        self._measures = runs == "auto"
        self._quickest_ns = THREAD_ABOVE_NS
        self._looks = 0

    def took(self, ns: int, rows: int = 1) -> None:
        """An execution of so many rows took so long."""
        if not self._measures:
            return
        # A large batch may take longer: it spares as many other executions.
        ns -= (rows - 1) * _ROW_NS
        if self.inline:
            if ns > THREAD_ABOVE_NS:
                self.strikes += 1 + ns // (4 * THREAD_ABOVE_NS)
            elif self.strikes:
                self.strikes -= 1
            if self.strikes >= _STRIKES:
                self.inline = False
                self.strikes = self._looks = 0
                self._quickest_ns = THREAD_ABOVE_NS
            return
        self._quickest_ns = min(self._quickest_ns, ns)
        self._looks += 1
        if self._looks == _LOOKS:
            self.inline = self._quickest_ns < INLINE_BELOW_NS
            self._quickest_ns, self._looks = THREAD_ABOVE_NS, 0
