# SPDX-License-Identifier: Apache-2.0
"""How many requests are in flight, and whether one more would be answered in time.

Asked by the guards of `apps` before a request is parsed, and told when it is over. Two reasons to refuse at once: the
limit is reached, or, at the rate at which requests have lately been finished, those in flight would keep this one waiting
beyond its own timeout. That rate is believed only up to twice the crowd it was measured in: a server that has seen one
request at a time does not know how many it could do. Must not know what a request is.
"""

from __future__ import annotations

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import InvalidArgument, ResourceExhausted

_WINDOW_SECONDS = 0.1
_WINDOW_REQUESTS = 8
_BELIEVED = 2.0


class Full(ResourceExhausted):
    """For a request beyond the limit."""


class Late(ResourceExhausted):
    """For a request that would wait too long."""


class InFlight:
    """One process's requests. `enter`, then `leave` or `undo`, exactly once."""

    __slots__ = (
        "_busy_since",
        "_crowd",
        "_crowd_sum",
        "_done",
        "_idle_since",
        "_limit",
        "_monotonic",
        "_rate",
        "count",
    )

    def __init__(self, limit: int = 0, clock: Clock | None = None) -> None:
        if limit < 0:
            raise InvalidArgument("requests in flight are limited to 1 or more, or to 0 for any number")
        self._limit = limit
        self._monotonic = (clock or SystemClock()).monotonic
        self.count = 0
        """How many there are."""
        self._rate = 0.0
        """Requests finished in a second, of the time that there were any; 0 while unknown."""
        self._crowd = 0.0
        """How many were in flight while that was measured."""
        # The window that is being measured.
        self._done = 0
        self._crowd_sum = 0
        self._busy_since = 0.0
        self._idle_since = 0.0

    @property
    def rate(self) -> float:
        """Requests finished in a second lately, idle time left out; 0 while unknown."""
        return self._rate

    def enter(self, now: float, timeout: float | None) -> None:
        """One more; or refuse a request that there is no room for, or that would not be answered in time."""
        count = self.count
        if not count:
            self._busy_since += now - self._idle_since
        elif self._done >= _WINDOW_REQUESTS and now - self._busy_since >= _WINDOW_SECONDS:
            self._measure(now)
        if count >= self._limit > 0:
            text = f"{count} requests are in flight, as many as this server takes on"
            raise Full(text, retry_after_seconds=self._drain())
        if timeout is not None and count > timeout * self._rate > 0 and count <= self._crowd * _BELIEVED:
            text = f"{count} requests wait, which takes {count / self._rate:.3g} s; this one has {timeout:.3g} s"
            raise Late(text, retry_after_seconds=max(0.0, self._drain() - timeout))
        self.count = count + 1

    def leave(self) -> None:
        """One less: it is answered, or nobody waits for it any more."""
        count = self.count
        self._crowd_sum += count
        self._done += 1
        self.count = count = count - 1
        if not count:
            self._idle_since = self._monotonic()

    def undo(self) -> None:
        """One less, which was not let in after all."""
        self.count -= 1
        if not self.count:
            self._idle_since = self._monotonic()

    def _measure(self, now: float) -> None:
        # Here and not when one is over: a batch is over at once, and has to be counted whole.
        rate = self._done / (now - self._busy_since)
        crowd = self._crowd_sum / self._done
        self._rate = (self._rate + rate) / 2 if self._rate else rate
        self._crowd = (self._crowd + crowd) / 2 if self._crowd else crowd
        self._done = self._crowd_sum = 0
        self._busy_since = now

    def _drain(self) -> float:
        """How long until those in flight are done."""
        return self.count / self._rate if self._rate else 1.0
