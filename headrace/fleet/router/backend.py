# SPDX-License-Identifier: Apache-2.0
"""One backend: its address, load, statistics and health state. Pure: time is passed in.

`backends.Backends` keeps the state up to date and decides how many backends may be ejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.telemetry.metrics import DURATION_BUCKETS_SECONDS, Histogram

if TYPE_CHECKING:
    from headrace.fleet.router.settings import BackendAddress, HealthSettings, OutlierSettings


class Outcome:
    """How a request ended, as far as the backend is concerned. Plain numbers: every request reports one."""

    OK = 0
    """It answered, with any status but those below."""
    REFUSED = 1
    """502, 503 or 504 (gRPC: UNAVAILABLE): it answered that it cannot serve the request."""
    FAILED = 2
    """It could not be reached, closed the connection too early, sent an invalid response, or timed out."""
    CANCELLED = 3
    """The client disconnected or the router stops: says nothing about the backend."""
    ERRED = 4
    """It answered with another 5xx (gRPC: INTERNAL, UNKNOWN, DATA_LOSS): an error that does not affect its health."""


class BackendStats:
    """Request counts of one backend, for the status and the metrics."""

    __slots__ = ("_backend", "cancelled", "erred", "failed", "ok", "refused", "retries")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.ok = 0
        self.erred = 0
        self.refused = 0
        self.failed = 0
        self.cancelled = 0
        self.retries = 0
        """Requests sent to it after an earlier attempt had failed."""

    @property
    def requests(self) -> int:
        """All requests sent to it: finished and open."""
        return self.done + self.cancelled + self._backend.outstanding

    @property
    def done(self) -> int:
        """Finished requests, without cancelled ones."""
        return self.ok + self.erred + self.refused + self.failed

    @property
    def healthy(self) -> int:
        """Requests that do not count against its health."""
        return self.ok + self.erred


class Backend:
    """One server behind the router."""

    __slots__ = (
        "address",
        "health",
        "live",
        "name",
        "outstanding",
        "ramp",
        "seconds",
        "share",
        "stats",
        "suspended",
        "tunnels",
        "weight",
    )

    def __init__(self, address: BackendAddress, health: Health) -> None:
        self.address = address
        self.name = address.url
        self.weight = address.weight
        self.outstanding = 0
        """Open requests."""
        self.tunnels = 0
        """Open WebSockets."""
        self.suspended = False
        """Whether the service is scaled to zero, so that no backend gets requests. Set by `Backends`."""
        self.live = True
        """Whether it gets requests: up by its checks, not ejected and not suspended. Set by `Backends`."""
        self.ramp = 1.0
        """Share of its normal load during a slow start."""
        self.share = address.weight
        """`weight * ramp`."""
        self.health = health
        self.stats = BackendStats(self)
        self.seconds = Histogram(DURATION_BUCKETS_SECONDS)
        """Duration of HTTP requests, from the choice of the backend to the end of the response."""

    def __repr__(self) -> str:
        return f"Backend({self.name})"

    @property
    def state(self) -> str:
        """One word for people: `up`, `down`, `ejected`, `starting` or `asleep`."""
        if self.suspended:
            return "asleep"
        if not self.health.up:
            return "down"
        if self.health.ejected:
            return "ejected"
        return "starting" if self.ramp < 1.0 else "up"


class Health:
    """Health state of one backend: active checks and outlier detection. It is up until a check fails."""

    __slots__ = (
        "_checks",
        "_consecutive_failures",
        "_ejected_until",
        "_ejections",
        "_failures",
        "_healthy",
        "_healthy_before",
        "_outliers",
        "_quiet_since",
        "_streak",
        "_window_ends",
        "checks",
        "ejected",
        "ejected_times",
        "failed_checks",
        "reason",
        "since",
        "up",
    )

    def __init__(self, checks: HealthSettings, outliers: OutlierSettings) -> None:
        self._checks = checks
        self._outliers = outliers
        self.up = True
        """Result of the active checks."""
        self.ejected = False
        self.reason = ""
        """Why it gets no requests, or why the last check failed."""
        self.since = 0.0
        """When it last started to get requests."""
        self.checks = 0
        """Active checks so far."""
        self.failed_checks = 0
        self.ejected_times = 0
        """Ejections so far."""
        self._streak = 0
        # Healthy requests are counted by `BackendStats`; the count is passed in with failures and ticks only.
        self._healthy = 0
        """Healthy requests at the last update."""
        self._healthy_before = 0
        """Healthy requests before the current window."""
        self._consecutive_failures = 0
        self._failures = 0
        """Failures in the current window."""
        self._window_ends = 0.0
        self._ejections = 0
        self._ejected_until = 0.0
        self._quiet_since = 0.0

    @property
    def ejections(self) -> int:
        """Ejections that still count: the next one is longer by as many steps."""
        return self._ejections

    @property
    def recovery_seconds(self) -> float:
        """The shortest time in which active checks can bring a backend back."""
        return self._checks.interval_seconds * self._checks.rise if self._checks.path else 1.0

    def checked(self, healthy: bool, now: float, reason: str) -> bool:
        """Record the result of an active check. Returns True if it changes `up`."""
        first = self.checks == 0
        self.checks += 1
        self.failed_checks += not healthy
        if healthy == self.up:
            self._streak = 0
            if healthy and not self.ejected:
                self.reason = ""
            elif not healthy:
                self.reason = reason
            return False
        self._streak += 1
        if not healthy:
            self.reason = reason
        # The first result counts at once: there is no earlier state to weigh it against.
        if not first and self._streak < (self._checks.rise if healthy else self._checks.fall):
            return False
        self._streak = 0
        self.up = healthy
        if healthy:
            self.since = now
            self._consecutive_failures = 0
            if not self.ejected:
                self.reason = ""
        return True

    def set_up(self, now: float) -> None:
        """Mark it as up: it has just started and answered, so that no check has to confirm it."""
        self.up = True
        self.ejected = False
        self.reason = ""
        self.since = self._quiet_since = now
        self._streak = 0
        self.reset_failures()

    def set_unchecked(self) -> None:
        """Mark a new backend as down until its first check."""
        self.up = False
        self.reason = "it has not been checked yet"

    def update_settings(self, checks: HealthSettings, outliers: OutlierSettings) -> None:
        """Apply new settings. Without checks the backend is up."""
        self._checks, self._outliers = checks, outliers
        if not checks.path and not self.up:
            self.up, self.reason = True, ""

    def failed(self, healthy: int) -> bool:
        """Record a failed request; `healthy`: all healthy requests so far. Returns True if the backend is an outlier."""
        self._consecutive_failures = self._consecutive_failures + 1 if healthy == self._healthy else 1
        self._healthy = healthy
        self._failures += 1
        if self.ejected:
            return False
        outliers = self._outliers
        if 0 < outliers.consecutive_failures <= self._consecutive_failures:
            return True
        total = healthy - self._healthy_before + self._failures
        enough = outliers.error_rate > 0 and total >= outliers.least_requests
        return enough and self._failures >= outliers.error_rate * total

    def reset_failures(self) -> None:
        """Start counting failures again."""
        self._consecutive_failures = self._failures = 0
        self._healthy_before = self._healthy

    def eject(self, now: float, reason: str) -> None:
        """Take it out of rotation, for longer each time."""
        outliers = self._outliers
        self._ejections += 1
        self.ejected_times += 1
        seconds = min(outliers.ejection_seconds * self._ejections, outliers.longest_ejection_seconds)
        self.ejected = True
        self.reason = f"{reason}; out for {seconds:g} s"
        self._ejected_until = now + seconds
        self.reset_failures()

    def tick(self, now: float, healthy: int) -> bool:
        """Let time pass; `healthy`: all healthy requests so far. Returns True if an ejection has ended."""
        if healthy != self._healthy:
            self._healthy, self._consecutive_failures = healthy, 0
        if now >= self._window_ends:
            self._window_ends = now + self._outliers.window_seconds
            self._healthy_before, self._failures = healthy, 0
        if self.ejected:
            if now < self._ejected_until:
                return False
            self.ejected = False
            self.reason = ""
            self.since = self._quiet_since = now
            self.reset_failures()
            return True
        if self._ejections and now - self._quiet_since >= self._outliers.ejection_seconds * (self._ejections + 1):
            self._ejections -= 1
            self._quiet_since = now
        return False
