# SPDX-License-Identifier: Apache-2.0
"""How much nonsense one HTTP/2 connection may send: token buckets for frames that cost us and bring nothing.

Without them: rapid reset (CVE-2023-44487), made-you-reset (CVE-2025-8671), ping, settings, priority and empty-frame floods
(CVE-2019-9512, -9513, -9515, -9518). The numbers are far above what real clients do: grpcio cancelling a thousand
calls at once, or probing bandwidth with pings, stays well inside.
"""

from __future__ import annotations

from headrace.net.http2.frames import ConnectionFault, ErrorCode


class Allowance:
    """A token bucket that refuses the connection when it is empty."""

    __slots__ = ("_at", "_burst", "_left", "_per_second", "_what")

    def __init__(self, what: str, burst: float, per_second: float) -> None:
        self._what = what
        self._burst = self._left = burst
        self._per_second = per_second
        self._at = 0.0

    def spend(self, now: float) -> None:
        """Take one token; raise `ConnectionFault` if there is none."""
        if now != self._at:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
            self._at = now
        self._left -= 1
        if self._left < 0:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._what}")

    def earn(self) -> None:
        """Give one token back: honest work pays for an occasional cancel."""
        if self._left < self._burst:
            self._left += 1


class Guards:
    """The allowances of one connection."""

    __slots__ = ("empty_frames", "pings", "priorities", "resets", "settings")

    def __init__(self, concurrent_streams: int) -> None:
        self.resets = Allowance("stream resets", max(100.0, 2.0 * concurrent_streams), 200.0)
        self.pings = Allowance("pings", 1000.0, 500.0)
        self.settings = Allowance("SETTINGS frames", 100.0, 10.0)
        self.priorities = Allowance("PRIORITY frames", 10_000.0, 1000.0)
        self.empty_frames = Allowance("empty frames", 1000.0, 100.0)
