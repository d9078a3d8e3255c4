# SPDX-License-Identifier: Apache-2.0
"""How many requests are in flight, and whether one more would be answered in time.

Asked by the guards of `apps` before a request is parsed, and told when it is over. Three reasons to refuse at once: the
limit is reached; or, at the rate at which requests have lately been finished, those in flight would keep this one waiting
beyond its own timeout; or little room is left, and its sender has had its share of it. That rate is believed only up to
twice the crowd it was measured in: a server that has seen one request at a time does not know how many it could do. Must
not know what a request is.
"""

from __future__ import annotations

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import InvalidArgument, ResourceExhausted

_WINDOW_SECONDS = 0.1
_WINDOW_REQUESTS = 8
_BELIEVED = 2.0
_KEPT_FREE = 0.25
"""The part of the room that is for senders who have less than their share. Who asks alone has no share, and all of it."""
_PRESENT_SECONDS = 60.0
"""How long after its last request a sender still has a share: so that one who asks now and then finds its room."""


class Full(ResourceExhausted):
    """For a request beyond the limit."""


class Late(ResourceExhausted):
    """For a request that would wait too long."""


class OverShare(ResourceExhausted):
    """For a request of one who has as much as is left to each, while others ask too."""


class InFlight:
    """One process's requests. `enter`, then `leave` or `undo`, exactly once; of it, or of a sender's `share`."""

    __slots__ = (
        "_busy_since",
        "_crowd",
        "_crowd_sum",
        "_done",
        "_idle_since",
        "_limit",
        "_monotonic",
        "_present",
        "_present_until",
        "_rate",
        "_shares",
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
        # Who shares the room.
        self._shares: dict[str, Share] = {}
        self._present = 0
        self._present_until = 0.0

    def share(self, name: str, now: float) -> Share:
        """That of a sender, who is one of those present from now on."""
        share = self._shares.get(name)
        if share is None or now >= self._present_until:
            share = self._present_with(name, now)
        share.seen = now
        return share

    def _present_with(self, name: str, now: float) -> Share:
        """Count again who shares the room: once a second at most, or when somebody comes."""
        share = self._shares.setdefault(name, Share(self))
        share.seen = now
        since = now - _PRESENT_SECONDS
        self._shares = {name: each for name, each in self._shares.items() if each.count or each.seen > since}
        self._present = len(self._shares)
        self._present_until = now + 1.0
        return share

    @property
    def rate(self) -> float:
        """Requests finished in a second lately, idle time left out; 0 while unknown."""
        return self._rate

    def enter(self, now: float, timeout: float | None, own: int = -1) -> None:
        """One more; or refuse a request that there is no room for, or that would not be answered in time.

        `own`: how many its sender has already; -1 for a sender who is not told apart.
        """
        count = self.count
        if not count:
            self._busy_since += now - self._idle_since
        elif self._done >= _WINDOW_REQUESTS and now - self._busy_since >= _WINDOW_SECONDS:
            self._measure(now)
        if count >= self._limit > 0:
            text = f"{count} requests are in flight, as many as this server takes on"
            raise Full(text, retry_after_seconds=self._drain())
        room: float = self._limit
        if timeout is not None and self._rate > 0 and count <= self._crowd * _BELIEVED:
            in_time = timeout * self._rate
            if count > in_time:
                text = f"{count} requests wait, which takes {count / self._rate:.3g} s; this one has {timeout:.3g} s"
                raise Late(text, retry_after_seconds=max(0.0, self._drain() - timeout))
            room = min(room, in_time) if room else in_time
        if own > 0 and room and self._present > 1 and count >= room - max(1.0, room * _KEPT_FREE):
            self._check_share(own, room)
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

    def _check_share(self, own: int, room: float) -> None:
        fair = room / self._present
        if own >= fair:
            text = (
                f"{own} requests of this API key are in flight; with {self._present} keys in use, {max(1.0, fair):.0f} "
                "are its share of a server that is nearly full"
            )
            raise OverShare(text, retry_after_seconds=own / self._rate if self._rate else 1.0)

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


class Share:
    """What one sender has in flight."""

    __slots__ = ("_flow", "count", "seen")

    def __init__(self, flow: InFlight) -> None:
        self._flow = flow
        self.count = 0
        """How many there are."""
        self.seen = 0.0
        """When it last asked."""

    def enter(self, now: float, timeout: float | None) -> None:
        """See `InFlight.enter`."""
        self._flow.enter(now, timeout, self.count)
        self.count += 1

    def leave(self) -> None:
        """See `InFlight.leave`."""
        self.count -= 1
        self._flow.leave()

    def undo(self) -> None:
        """See `InFlight.undo`."""
        self.count -= 1
        self._flow.undo()
