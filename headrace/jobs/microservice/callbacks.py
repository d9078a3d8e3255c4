# SPDX-License-Identifier: Apache-2.0
"""Tells TAO's API that a service should be deleted: it is idle, or will never serve. Called by `service`.

The URL is the operator's own (TAO_LOGGING_SERVER_URL), not a client's: it may be anywhere, and the rules for clients' URLs
would be wrong here. It is asked with the admin's key, so no redirect is followed.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from headrace.jobs.microservice.settings import CallbackSettings

log = logging.getLogger("headrace.microservice")

Reason = Literal["idle_timeout_exceeded", "initialization_failed", "model_loading_failed"]
REQUESTED = "AUTO_DELETION_REQUESTED"
_SUFFIX = ":status_update"


def status_update(settings: CallbackSettings, reason: Reason, told: Mapping[str, Any]) -> bytes:
    """The body: an experiment's number and, as JSON within JSON, what is asked and why."""
    status = {"status": REQUESTED, "message": REQUESTED, "reason": reason, **told}
    return json.dumps({"experiment_number": settings.experiment_number, "status": json.dumps(status)}).encode()


def post(settings: CallbackSettings, body: bytes, pause: Callable[[float], None] = time.sleep) -> bool:
    """Send it, trying again a few times; whether it arrived. Blocks, and never raises: what goes wrong is logged."""
    for number in range(settings.tries):
        if number:
            pause(settings.pause_seconds * 2 ** (number - 1))
        try:
            status = _send(settings, body)
        except (OSError, http.client.HTTPException) as error:
            log.warning("the status update could not be sent: %s", type(error).__name__)
            continue
        if status < 300:
            return True
        log.warning("the status update was refused with status %d", status)
        if status < 500 and status not in (408, 429):
            return False
    return False


def _send(settings: CallbackSettings, body: bytes) -> int:
    parts = urlsplit(settings.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=settings.timeout_seconds)
    fields = {"authorization": f"Bearer {settings.admin_key}", "content-type": "application/json"}
    try:
        path = (parts.path or "/") + _SUFFIX
        connection.request("POST", path + (f"?{parts.query}" if parts.query else ""), body, fields)
        response = connection.getresponse()
        response.read(65_536)
        return response.status
    finally:
        connection.close()
