# SPDX-License-Identifier: Apache-2.0
"""One server behind a router: what it is doing, and how it fared. Made and kept up to date by `backends.Backends`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.telemetry.metrics import DURATION_BUCKETS_SECONDS, Histogram

if TYPE_CHECKING:
    from headrace.fleet.router.health import Health
    from headrace.fleet.router.settings import BackendAddress


class Outcome:
    """How a request went, as far as the backend is to blame. Plain numbers: they are told for every request."""

    OK = 0
    """It answered, with whatever status but those below."""
    REFUSED = 1
    """502, 503 or 504 (gRPC: UNAVAILABLE): it answered that it cannot."""
    FAILED = 2
    """It could not be reached, closed too early, sent garbage, or took too long."""
    CANCELLED = 3
    """The client went away, or the router stops: says nothing of the backend."""
    ERRED = 4
    """It answered with another 5xx (gRPC: INTERNAL, UNKNOWN, DATA_LOSS): an error, but nothing against its health."""


class Stats:
    """Counts of one backend, for the status and the metrics."""

    __slots__ = ("_backend", "cancelled", "erred", "failed", "ok", "refused", "retries")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.ok = 0
        self.erred = 0
        self.refused = 0
        self.failed = 0
        self.cancelled = 0
        self.retries = 0
        """Requests given to it that another backend, or a connection of its own, had failed before."""

    @property
    def requests(self) -> int:
        """All that were given to it: those that are over, and those that it has."""
        return self.done + self.cancelled + self._backend.outstanding

    @property
    def done(self) -> int:
        """Those that are over, but for what clients gave up."""
        return self.ok + self.erred + self.refused + self.failed

    @property
    def well(self) -> int:
        """Those that say nothing against its health."""
        return self.ok + self.erred


class Backend:
    """One server."""

    __slots__ = (
        "address",
        "health",
        "live",
        "name",
        "outstanding",
        "ramp",
        "resting",
        "seconds",
        "share",
        "stats",
        "tunnels",
        "weight",
    )

    def __init__(self, address: BackendAddress, health: Health) -> None:
        self.address = address
        self.name = address.url
        self.weight = address.weight
        self.outstanding = 0
        """Requests it has and has not answered."""
        self.tunnels = 0
        """WebSockets that are open to it."""
        self.resting = False
        """Whether all rest, so that it gets no requests whatever its health. Kept by `Backends`."""
        self.live = True
        """Whether it gets requests: up by its checks and not ejected. Kept by `Backends`."""
        self.ramp = 1.0
        """Share of its normal work during a slow start."""
        self.share = address.weight
        """`weight * ramp`."""
        self.health = health
        self.stats = Stats(self)
        self.seconds = Histogram(DURATION_BUCKETS_SECONDS)
        """How long it takes over HTTP/1.1, from being chosen to the end of its answer."""

    def __repr__(self) -> str:
        return f"Backend({self.name})"

    @property
    def state(self) -> str:
        """One word for people: `up`, `down`, `ejected`, `starting` or `asleep`."""
        if self.resting:
            return "asleep"
        if not self.health.up:
            return "down"
        if self.health.ejected:
            return "ejected"
        return "starting" if self.ramp < 1.0 else "up"
