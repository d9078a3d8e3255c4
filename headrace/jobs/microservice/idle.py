# SPDX-License-Identifier: Apache-2.0
"""Idle timeout of a microservice, and the status update that asks TAO's API to delete it.

Idle time counts from the moment the model is loaded; inference and chat requests reset it, status polls do not.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from headrace.core.clock import Clock
from headrace.core.errors import InvalidArgument
from headrace.jobs.microservice.settings import CallbackSettings, IdleSettings
from headrace.net.http_client import request

_MINUTE = 60.0
_MAX_CHECK_SECONDS = 60.0
"""Longest time between two checks, to notice that the machine was suspended or its clock set."""

log = logging.getLogger("headrace.microservice")
Reason = Literal["idle_timeout_exceeded", "initialization_failed", "model_loading_failed"]
REQUESTED = "AUTO_DELETION_REQUESTED"
_SUFFIX = ":status_update"


class IdleTimer:
    """Measures how long a service has been idle."""

    def __init__(self, settings: IdleSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._since: float | None = None
        self._running = 0
        self._reported = False
        self.last_request_wall: float | None = None

    def loaded(self) -> None:
        """Start the timer."""
        self._since = self._clock.monotonic()

    def request_started(self) -> None:
        """Count a request that starts."""
        self._running += 1
        self._touch()

    def request_ended(self) -> None:
        """Count a request that ends."""
        self._running -= 1
        self._touch()

    @property
    def minutes(self) -> float:
        """Return the idle time; 0 before the model is loaded and while a request runs."""
        if self._since is None or self._running:
            return 0.0
        return (self._clock.monotonic() - self._since) / _MINUTE

    @property
    def next_check_seconds(self) -> float:
        """Return the time until the next check: frequent checks of hundreds of services cost CPU."""
        return min((self.settings.timeout_minutes - self.minutes) * _MINUTE, _MAX_CHECK_SECONDS)

    def expired(self) -> bool:
        """Return True once per idle period that exceeds the timeout."""
        settings = self.settings
        if not settings.enabled or self._reported or self._since is None or self._running:
            return False
        if self.minutes < settings.timeout_minutes:
            return False
        self._reported = True
        return True

    def report_again(self) -> None:
        """Report the timeout again after another idle period: the last report failed."""
        self._reported = False
        self._since = self._clock.monotonic()

    def _touch(self) -> None:
        self._since = self._clock.monotonic()
        self.last_request_wall = self._clock.wall()
        self._reported = False


def status_update_body(settings: CallbackSettings, reason: Reason, fields: Mapping[str, Any]) -> bytes:
    """Return the body of a status update: the experiment number, and the request as JSON in JSON."""
    status = {"status": REQUESTED, "message": REQUESTED, "reason": reason, **fields}
    return json.dumps({"experiment_number": settings.experiment_number, "status": json.dumps(status)}).encode()


def post_status_update(settings: CallbackSettings, body: bytes, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Send a status update with a few retries; return whether it arrived. Blocks; logs errors, never raises.

    The URL comes from the operator (TAO_LOGGING_SERVER_URL), so the rules for URLs of clients do not apply. No redirect is
    followed, because the request has the admin key.
    """
    for attempt in range(settings.tries):
        if attempt:
            sleep(settings.pause_seconds * 2 ** (attempt - 1))
        try:
            status = _send(settings, body)
        except (OSError, InvalidArgument) as error:
            log.warning("Could not send the status update: %s", type(error).__name__)
            continue
        if status < 300:
            return True
        log.warning("The status update was rejected with status %d.", status)
        if status < 500 and status not in (408, 429):
            return False
    return False


def _send(settings: CallbackSettings, body: bytes) -> int:
    parts = urlsplit(settings.url)
    url = parts._replace(path=(parts.path or "/") + _SUFFIX).geturl()
    headers = {"authorization": f"Bearer {settings.admin_key}"}
    return request("POST", url, body=body, headers=headers, seconds=settings.timeout_seconds).status
