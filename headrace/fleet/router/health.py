# SPDX-License-Identifier: Apache-2.0
"""Whether one server should get requests: what active checks say, and what its requests say.

Owned by `backends.Backend`; told by `Backends`, which decides whether one more may be ejected. Pure: time is passed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.fleet.router.settings import HealthSettings, OutlierSettings


class Health:
    """The state of one server. It is up until a check says otherwise."""

    __slots__ = (
        "_checks",
        "_ejected_until",
        "_ejections",
        "_failures",
        "_in_row",
        "_outliers",
        "_quiet_since",
        "_streak",
        "_well",
        "_well_before",
        "_window_ends",
        "checks",
        "ejected",
        "reason",
        "since",
        "up",
    )

    def __init__(self, checks: HealthSettings, outliers: OutlierSettings) -> None:
        self._checks = checks
        self._outliers = outliers
        self.up = True
        """What the active checks say."""
        self.ejected = False
        self.reason = ""
        """Why it gets no requests, or why the last check was bad."""
        self.since = 0.0
        """When it last began to get requests."""
        self.checks = 0
        """Active checks so far."""
        self._streak = 0
        # What goes well is counted by others, and told here only with what does not.
        self._well = 0
        """Requests that had gone well when that was last told."""
        self._well_before = 0
        """Those of them that were before this window."""
        self._in_row = 0
        """Failures since a request last went well."""
        self._failures = 0
        """Those in this window."""
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
        """The soonest that checks can bring a server back."""
        return self._checks.interval_seconds * self._checks.rise if self._checks.path else 1.0

    def checked(self, healthy: bool, now: float, why: str) -> bool:
        """An active check has its answer. True if this changes whether it is up."""
        first = self.checks == 0
        self.checks += 1
        if healthy == self.up:
            self._streak = 0
            if healthy and not self.ejected:
                self.reason = ""
            elif not healthy:
                self.reason = why
            return False
        self._streak += 1
        if not healthy:
            self.reason = why
        # The first answer counts at once: there is nothing before it to weigh it against.
        if not first and self._streak < (self._checks.rise if healthy else self._checks.fall):
            return False
        self._streak = 0
        self.up = healthy
        if healthy:
            self.since = now
            self._in_row = 0
            if not self.ejected:
                self.reason = ""
        return True

    def found_up(self, now: float) -> None:
        """Somebody has seen it answer, and knows that it was not there before: no check need confirm it."""
        self.up = True
        self.ejected = False
        self.reason = ""
        self.since = self._quiet_since = now
        self._streak = 0
        self.spare()

    def not_known(self) -> None:
        """It has just come: it gets no requests before its first check."""
        self.up = False
        self.reason = "it has not been checked yet"

    def renew(self, checks: HealthSettings, outliers: OutlierSettings) -> None:
        """Other settings. Without checks it is up."""
        self._checks, self._outliers = checks, outliers
        if not checks.path and not self.up:
            self.up, self.reason = True, ""

    def failed(self, well: int) -> bool:
        """A request failed, after so many had gone `well`, ever. True if that makes the server one to eject."""
        self._in_row = self._in_row + 1 if well == self._well else 1
        self._well = well
        self._failures += 1
        if self.ejected:
            return False
        outliers = self._outliers
        if 0 < outliers.consecutive_failures <= self._in_row:
            return True
        total = well - self._well_before + self._failures
        enough = outliers.error_rate > 0 and total >= outliers.least_requests
        return enough and self._failures >= outliers.error_rate * total

    def spare(self) -> None:
        """It should be ejected and cannot be: count anew, so as not to ask with every failure."""
        self._in_row = self._failures = 0
        self._well_before = self._well

    def eject(self, now: float, why: str) -> None:
        """Take it out for a while, for longer each time."""
        outliers = self._outliers
        self._ejections += 1
        seconds = min(outliers.ejection_seconds * self._ejections, outliers.longest_ejection_seconds)
        self.ejected = True
        self.reason = f"{why}; out for {seconds:g} s"
        self._ejected_until = now + seconds
        self.spare()

    def tick(self, now: float, well: int) -> bool:
        """Let time pass; so many requests have gone `well`, ever. True if an ejection has ended."""
        if well != self._well:
            self._well, self._in_row = well, 0
        if now >= self._window_ends:
            self._window_ends = now + self._outliers.window_seconds
            self._well_before, self._failures = well, 0
        if self.ejected:
            if now < self._ejected_until:
                return False
            self.ejected = False
            self.reason = ""
            self.since = self._quiet_since = now
            self.spare()
            return True
        if self._ejections and now - self._quiet_since >= self._outliers.ejection_seconds * (self._ejections + 1):
            self._ejections -= 1
            self._quiet_since = now
        return False
