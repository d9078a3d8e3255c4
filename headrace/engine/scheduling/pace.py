# SPDX-License-Identifier: Apache-2.0
"""Whether a model is quick enough to compute in the event loop's own thread. Measured, unless the configuration says.

Owned by a runner, told of every execution. Handing work to a thread and back costs some 50 us; a computation that holds
the loop for much longer than that keeps every other connection waiting.
"""

from __future__ import annotations

from typing import Literal

INLINE_BELOW_NS = 150_000
THREAD_ABOVE_NS = 250_000
_LOOKS = 8
"""Executions before a model is moved; the quickest of them counts, since others may have waited for the interpreter."""


class Pace:
    """Where the next execution takes place."""

    def __init__(self, runs: Literal["auto", "inline", "thread"] = "auto") -> None:
        self.inline = runs == "inline"
        self.measures = runs == "auto"
        self._quickest_ns = THREAD_ABOVE_NS
        self._looks = 0
        self._average_ns = 0.0

    def took(self, ns: int) -> None:
        """An execution took so long. To be told only if it `measures`."""
        if self.inline:
            self._average_ns += (ns - self._average_ns) / _LOOKS
            if self._average_ns > THREAD_ABOVE_NS:
                self.inline = False
                self._quickest_ns, self._looks = ns, 0
            return
        self._quickest_ns = min(self._quickest_ns, ns)
        self._looks += 1
        if self._looks == _LOOKS:
            if self._quickest_ns < INLINE_BELOW_NS:
                self.inline = True
                self._average_ns = self._quickest_ns
            self._quickest_ns, self._looks = THREAD_ABOVE_NS, 0
