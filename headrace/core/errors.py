# SPDX-License-Identifier: Apache-2.0
"""Errors without a transport: a room raises one of these, each transport has one table that turns it into a status.

    HeadraceError
    ├── InvalidArgument      the request is wrong and will stay wrong
    ├── NotFound             the named thing does not exist
    ├── AlreadyExists        the named thing exists already
    ├── Unauthenticated      we do not know who is asking
    ├── PermissionDenied     we know who is asking, and they may not
    ├── FailedPrecondition   right request, wrong state of the server or the resource
    ├── TooLarge             a size, count or depth is over a limit
    ├── ResourceExhausted    a queue, quota or rate is used up for now
    ├── DeadlineExceeded     the caller's time is over
    ├── Cancelled            the caller went away or asked to stop
    ├── Unimplemented        this server does not do that
    ├── Unavailable          not now: starting, draining, or a dependency is down
    └── Internal             our fault; details go to the log, not to the caller

The tables: `wire/http/status.py` (HTTP), `wire/grpc/status.py` (gRPC), `wire/websocket/closing.py` (WebSocket). A
message tells the reader what to do next and never carries text of an exception we did not raise ourselves.
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """What went wrong, in words every transport can translate."""

    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    FAILED_PRECONDITION = "failed_precondition"
    TOO_LARGE = "too_large"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    UNIMPLEMENTED = "unimplemented"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class HeadraceError(Exception):
    """Base of every error meant for a caller. Raise a subclass, not this."""

    code: Code = Code.INTERNAL
    request_id: str = ""
    """Of an error that a client was told: by which the server's log has more."""
    status: int | str | None = None
    """The same: what the transport called it; None if no server answered."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class InvalidArgument(HeadraceError):
    """Raise when the request itself is wrong: a bad shape, a bad name, text that does not parse."""

    code = Code.INVALID_ARGUMENT


class NotFound(HeadraceError):
    """Raise when the caller names a model, version, job or route that is not there."""

    code = Code.NOT_FOUND


class AlreadyExists(HeadraceError):
    """Raise when the caller creates something under a name that is taken."""

    code = Code.ALREADY_EXISTS


class Unauthenticated(HeadraceError):
    """Raise when credentials are missing or not valid."""

    code = Code.UNAUTHENTICATED


class PermissionDenied(HeadraceError):
    """Raise when the credentials are valid but do not carry the scope."""

    code = Code.PERMISSION_DENIED


class FailedPrecondition(HeadraceError):
    """Raise when the same request would be right in another state: load needs explicit mode, and so on."""

    code = Code.FAILED_PRECONDITION


class TooLarge(HeadraceError):
    """Raise when a body, message, header, count or depth is over its limit; name the limit and its setting."""

    code = Code.TOO_LARGE


class ResourceExhausted(HeadraceError):
    """Raise when a queue is full or a rate is used up; give `retry_after_seconds` when it is known."""

    code = Code.RESOURCE_EXHAUSTED


class DeadlineExceeded(HeadraceError):
    """Raise when the caller's deadline passed before the answer was ready."""

    code = Code.DEADLINE_EXCEEDED


class Cancelled(HeadraceError):
    """Raise when the caller disconnected or cancelled; nobody may be left to read it."""

    code = Code.CANCELLED


class Unimplemented(HeadraceError):
    """Raise when the method, option or format is not offered by this server."""

    code = Code.UNIMPLEMENTED


class Unavailable(HeadraceError):
    """Raise when the same request may succeed later: starting, draining, a dependency down."""

    code = Code.UNAVAILABLE


class Internal(HeadraceError):
    """Raise for our own fault when there is something true and harmless to say; else let the exception fly."""

    code = Code.INTERNAL


def retold(error: HeadraceError, message: str) -> HeadraceError:
    """An error of the same code with another text. A room's own refinement becomes the class of this module it refines."""
    kind: type[HeadraceError] = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return kind(message, retry_after_seconds=error.retry_after_seconds)


INTERNAL_TEXT = "internal error; the server's log has the details under this request id"
"""What a caller reads for an exception that is not a `HeadraceError`: never the exception's own text."""
