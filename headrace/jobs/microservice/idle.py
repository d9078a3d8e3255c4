# SPDX-License-Identifier: Apache-2.0
"""Since when nobody has used a service, and when that is too long. Asked by `service` when it may be.

Counted from the moment the model is loaded; inference and chat requests begin it anew, status polls do not. Time comes from
a `Clock`, so that tests need not wait for half an hour.
"""

from __future__ import annotations

from headrace.core.clock import Clock
from headrace.jobs.microservice.settings import IdleSettings

_MINUTE = 60.0
_LONGEST_SECONDS = 60.0
"""Between two looks: a machine that slept, or a clock that was set, is noticed then."""


class IdleWatch:
    """One service's rest."""

    def __init__(self, settings: IdleSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._since: float | None = None
        self._running = 0
        self._told = False
        self.last_request_wall: float | None = None

    def loaded(self) -> None:
        """Begin to count."""
        self._since = self._clock.monotonic()

    def began(self) -> None:
        """A request has come."""
        self._running += 1
        self._touch()

    def ended(self) -> None:
        """It is answered: what it took is no rest."""
        self._running -= 1
        self._touch()

    @property
    def minutes(self) -> float:
        """How long it rests already; 0 before the model is loaded and while a request runs."""
        if self._since is None or self._running:
            return 0.0
        return (self._clock.monotonic() - self._since) / _MINUTE

    @property
    def least_seconds(self) -> float:
        """Before that, it cannot have rested for too long: hundreds of services that only look are felt."""
        return min((self.settings.timeout_minutes - self.minutes) * _MINUTE, _LONGEST_SECONDS)

    def expired(self) -> bool:
        """True once for each rest that has become too long."""
        settings = self.settings
        if not settings.enabled or self._told or self._since is None or self._running:
            return False
        if self.minutes < settings.timeout_minutes:
            return False
        self._told = True
        return True

    def again(self) -> None:
        """Who was to hear of it has not: say it once more, after another such rest."""
        self._told = False
        self._since = self._clock.monotonic()

    def _touch(self) -> None:
        self._since = self._clock.monotonic()
        self.last_request_wall = self._clock.wall()
        self._told = False
