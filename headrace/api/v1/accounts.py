# SPDX-License-Identifier: Apache-2.0
"""The server's name, the one counter of requests over both transports, and how often each kind of request succeeded.

Made by the composition root, one for `V1Http` and `V1Grpc` together. Also turns an outcome into a RequestStatus, which
every answer of this protocol carries.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from headrace.api.v1.schema import message_class
from headrace.api.v1.texts import one_line
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import INTERNAL_TEXT, Code, HeadraceError, InvalidArgument

log = logging.getLogger("headrace.api.v1")

_MOST_CHARACTERS = 2048
"""Of a message: it travels in a field of the response's head."""

_CODES = {
    Code.INVALID_ARGUMENT: "INVALID_ARG",
    Code.TOO_LARGE: "INVALID_ARG",
    Code.NOT_FOUND: "NOT_FOUND",
    Code.ALREADY_EXISTS: "ALREADY_EXISTS",
    Code.UNAVAILABLE: "UNAVAILABLE",
    Code.RESOURCE_EXHAUSTED: "UNAVAILABLE",
    Code.DEADLINE_EXCEEDED: "UNAVAILABLE",
    Code.CANCELLED: "UNAVAILABLE",
    Code.UNIMPLEMENTED: "UNSUPPORTED",
    Code.FAILED_PRECONDITION: "UNSUPPORTED",
    Code.PERMISSION_DENIED: "UNSUPPORTED",
    Code.UNAUTHENTICATED: "UNSUPPORTED",
    Code.INTERNAL: "INTERNAL",
}
"""Every error code as a RequestStatusCode."""


class UnknownMode(InvalidArgument):
    """For a health mode or a command that does not exist: the only errors the protocol calls UNKNOWN."""

    code = Code.INVALID_ARGUMENT


@dataclass(frozen=True, slots=True)
class V1Settings:
    """What this protocol tells of the server."""

    server_id: str = "inference:0"
    """In every status; `--id`."""

    version: str = ""
    """The server's version, as it shows it."""

    clock: Clock = field(default_factory=SystemClock)
    """What the uptime and the durations of requests are measured by; the uptime counts from when `V1Accounts` is made."""

    allow_profiling: bool = False
    """Answer `profile` with success, though nothing is profiled: what 1.x did."""


class Tally:
    """How many requests of one kind succeeded, and how long they took."""

    __slots__ = ("count", "total_ns")

    def __init__(self) -> None:
        self.count = self.total_ns = 0


class V1Accounts:
    """See the module."""

    def __init__(self, settings: V1Settings | None = None) -> None:
        self.settings = settings or V1Settings()
        self._started = self.settings.clock.monotonic()
        self._last = 0
        self._success = one_line(self.status(0)) + b" request_id: %d"
        self.tallies = {kind: Tally() for kind in ("status", "profile", "health", "model_control", "shm", "repository")}

    @property
    def uptime_ns(self) -> int:
        """Since the server was made."""
        return int((self.now() - self._started) * 1e9)

    def now(self) -> float:
        """Seconds, for `succeeded`."""
        return self.settings.clock.monotonic()

    def next_id(self) -> int:
        """A number for a request that has reached the core: 1, 2, ..."""
        self._last += 1
        return self._last

    def succeeded(self, kind: str, since: float) -> None:
        """Count a request that began at `since`."""
        tally = self.tallies[kind]
        tally.count += 1
        tally.total_ns += int((self.now() - since) * 1e9)

    def status(self, request_id: int, error: BaseException | None = None) -> Any:
        """The RequestStatus of a request; id 0 for one that was refused before it reached the core.

        An exception that is not ours goes to the log, with the id that goes to the client.
        """
        return message_class("RequestStatus")(
            code=_code_of(error),
            msg=self._text_of(request_id, error),
            server_id=self.settings.server_id,
            request_id=request_id,
        )

    def status_text(self, request_id: int, error: BaseException | None = None) -> bytes:
        """The same as the text of NV-Status."""
        return one_line(self.status(request_id, error)) if error is not None else self._success % request_id

    def _text_of(self, request_id: int, error: BaseException | None) -> str:
        if error is None:
            return ""
        if isinstance(error, HeadraceError):
            # It may quote what a client sent; what is no text in it must not become an error in the error.
            return error.message[:_MOST_CHARACTERS].encode(errors="replace").decode()
        log.error("a request failed", exc_info=error, extra={"request_id": f"{self.settings.server_id} {request_id}"})
        return INTERNAL_TEXT


def _code_of(error: BaseException | None) -> str:
    if error is None:
        return "SUCCESS"
    if isinstance(error, UnknownMode):
        return "UNKNOWN"
    return _CODES[error.code] if isinstance(error, HeadraceError) else "INTERNAL"
