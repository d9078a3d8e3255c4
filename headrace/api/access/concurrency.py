# SPDX-License-Identifier: Apache-2.0
"""Admission control: limit the requests in flight and reject those that would miss their deadline.

The guards of `programs.serve` call it before a request is parsed and when it has ended. A request is refused at once
for one of three reasons: the limit is reached; at the recent completion rate it would wait longer than its timeout; or
little capacity is left and its client has used its fair share. The measured rate is used only up to twice the
concurrency it was measured at: a server that has seen one request at a time does not know how many it can compute at
once.
"""

from __future__ import annotations

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import InvalidArgument, ResourceExhausted

_WINDOW_SECONDS = 0.1
_WINDOW_REQUESTS = 8
_EXTRAPOLATION = 2.0
_RESERVED = 0.25
"""The part of the capacity reserved for clients below their fair share. A single active client may use all of it."""
_ACTIVE_SECONDS = 60.0
"""How long a client keeps its share after its last request, so that occasional clients get capacity."""


class InFlightLimitReached(ResourceExhausted):
    """The limit on requests in flight is reached."""


class DeadlineUnreachable(ResourceExhausted):
    """The request would wait longer than its timeout."""


class FairShareExceeded(ResourceExhausted):
    """The client has used its fair share while other clients are active."""


class InFlight:
    """The requests in flight of one process. Call `enter`, then `leave` or `undo` exactly once, on it or on a `share`."""

    __slots__ = (
        "_active",
        "_active_until",
        "_busy_since",
        "_concurrency",
        "_concurrency_sum",
        "_done",
        "_idle_since",
        "_limit",
        "_monotonic",
        "_rate",
        "_shares",
        "count",
    )

    def __init__(self, limit: int = 0, clock: Clock | None = None) -> None:
        if limit < 0:
            raise InvalidArgument("the limit on requests in flight must be 1 or more, or 0 for no limit")
        self._limit = limit
        self._monotonic = (clock or SystemClock()).monotonic
        self.count = 0
        """Requests in flight."""
        self._rate = 0.0
        """Requests completed per second, idle time excluded; 0 while unknown."""
        self._concurrency = 0.0
        """Mean requests in flight while the rate was measured."""
        # The current measurement window.
        self._done = 0
        self._concurrency_sum = 0
        self._busy_since = 0.0
        self._idle_since = 0.0
        # The clients that share the capacity.
        self._shares: dict[str, ClientShare] = {}
        self._active = 0
        self._active_until = 0.0

    def share(self, name: str, now: float) -> ClientShare:
        """Return the share of a client, which counts as active from now on."""
        share = self._shares.get(name)
        if share is None or now >= self._active_until:
            share = self._count_active(name, now)
        share.seen = now
        return share

    def _count_active(self, name: str, now: float) -> ClientShare:
        """Count the active clients again: once a second, or when a new one arrives."""
        share = self._shares.setdefault(name, ClientShare(self))
        share.seen = now
        since = now - _ACTIVE_SECONDS
        self._shares = {name: other for name, other in self._shares.items() if other.count or other.seen > since}
        self._active = len(self._shares)
        self._active_until = now + 1.0
        return share

    @property
    def rate(self) -> float:
        """Requests completed per second recently, idle time excluded; 0 while unknown."""
        return self._rate

    def enter(self, now: float, timeout: float | None, own: int = -1) -> None:
        """Admit one request, or raise if there is no capacity or it would not be answered in time.

        `own`: requests in flight of the same client; -1 if clients are not distinguished.
        """
        count = self.count
        if not count:
            self._busy_since += now - self._idle_since
        elif self._done >= _WINDOW_REQUESTS and now - self._busy_since >= _WINDOW_SECONDS:
            self._measure(now)
        if count >= self._limit > 0:
            message = f"{count} requests are in flight, the limit of this server"
            raise InFlightLimitReached(message, retry_after_seconds=self._drain_seconds())
        capacity: float = self._limit
        if timeout is not None and self._rate > 0 and count <= self._concurrency * _EXTRAPOLATION:
            in_time = timeout * self._rate
            if count > in_time:
                message = (
                    f"{count} requests are queued, which takes {count / self._rate:.3g} s; this one has {timeout:.3g} s"
                )
                raise DeadlineUnreachable(message, retry_after_seconds=max(0.0, self._drain_seconds() - timeout))
            capacity = min(capacity, in_time) if capacity else in_time
        if own > 0 and capacity and self._active > 1 and count >= capacity - max(1.0, capacity * _RESERVED):
            self._check_fair_share(own, capacity)
        self.count = count + 1

    def leave(self) -> None:
        """Count a request as completed: it was answered, or its client disconnected."""
        count = self.count
        self._concurrency_sum += count
        self._done += 1
        self.count = count = count - 1
        if not count:
            self._idle_since = self._monotonic()

    def undo(self) -> None:
        """Take back an `enter`: the request was not admitted after all."""
        self.count -= 1
        if not self.count:
            self._idle_since = self._monotonic()

    def _check_fair_share(self, own: int, capacity: float) -> None:
        fair = capacity / self._active
        if own >= fair:
            message = (
                f"{own} requests of this API key are in flight; with {self._active} keys in use, {max(1.0, fair):.0f} "
                "are its share of a server that is nearly full"
            )
            raise FairShareExceeded(message, retry_after_seconds=own / self._rate if self._rate else 1.0)

    def _measure(self, now: float) -> None:
        # On arrival and not on completion: the requests of a batch complete together and must be counted together.
        rate = self._done / (now - self._busy_since)
        concurrency = self._concurrency_sum / self._done
        self._rate = (self._rate + rate) / 2 if self._rate else rate
        self._concurrency = (self._concurrency + concurrency) / 2 if self._concurrency else concurrency
        self._done = self._concurrency_sum = 0
        self._busy_since = now

    def _drain_seconds(self) -> float:
        """Return the seconds until the requests in flight are done."""
        return self.count / self._rate if self._rate else 1.0


class ClientShare:
    """The requests in flight of one client."""

    __slots__ = ("_in_flight", "count", "seen")

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self.count = 0
        """Requests in flight."""
        self.seen = 0.0
        """The time of the last request."""

    def enter(self, now: float, timeout: float | None) -> None:
        """Admit one request of this client."""
        self._in_flight.enter(now, timeout, self.count)
        self.count += 1

    def leave(self) -> None:
        """Count a request of this client as completed."""
        self.count -= 1
        self._in_flight.leave()

    def undo(self) -> None:
        """Take back an `enter`."""
        self.count -= 1
        self._in_flight.undo()
