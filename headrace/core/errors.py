# SPDX-License-Identifier: Apache-2.0
"""Errors without a transport: code raises one of these, and each transport has one table that maps it to a status.

    HeadraceError
    ├── InvalidArgument      the request is wrong and will stay wrong
    ├── NotFound             the named thing does not exist
    ├── AlreadyExists        the named thing exists already
    ├── Unauthenticated      the caller is not authenticated
    ├── PermissionDenied     the caller is authenticated, but not allowed
    ├── FailedPrecondition   the server or the resource is in the wrong state for the request
    ├── TooLarge             a size, count or depth is over a limit
    ├── ResourceExhausted    a queue, quota or rate is used up for now
    ├── DeadlineExceeded     the caller's deadline passed
    ├── Cancelled            the caller disconnected or cancelled
    ├── Unimplemented        this server does not offer that
    ├── Unavailable          not now: starting, draining, or a dependency is down
    └── Internal             a fault of the server; details go to the log, not to the caller

The tables are in `net.http`, `net.grpc` and `net.websocket`. A message says what to do next and never contains the text of
an exception that Headrace did not raise itself.
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """The error codes, which every transport can map."""

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
    """Base of every error for callers. Raise a subclass, not this."""

    code: Code = Code.INTERNAL
    request_id: str = ""
    """In a client: the request id, under which the server's log has details."""
    status: int | str | None = None
    """In a client: the transport's status; None if no server responded."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class InvalidArgument(HeadraceError):
    """Raise when the request itself is wrong: a bad shape, a bad name, text that does not parse."""

    code = Code.INVALID_ARGUMENT


class NotFound(HeadraceError):
    """Raise when the caller names a model, version, job or route that does not exist."""

    code = Code.NOT_FOUND


class AlreadyExists(HeadraceError):
    """Raise when the caller creates something under a name that is taken."""

    code = Code.ALREADY_EXISTS


class Unauthenticated(HeadraceError):
    """Raise when credentials are missing or invalid."""

    code = Code.UNAUTHENTICATED


class PermissionDenied(HeadraceError):
    """Raise when the credentials are valid but do not carry the scope."""

    code = Code.PERMISSION_DENIED


class FailedPrecondition(HeadraceError):
    """Raise when the request would succeed in another state: load needs explicit mode, and so on."""

    code = Code.FAILED_PRECONDITION


class TooLarge(HeadraceError):
    """Raise when a body, message, header, count or depth is over its limit; name the limit and its setting."""

    code = Code.TOO_LARGE


class ResourceExhausted(HeadraceError):
    """Raise when a queue is full or a rate is used up; give `retry_after_seconds` when it is known."""

    code = Code.RESOURCE_EXHAUSTED


class DeadlineExceeded(HeadraceError):
    """Raise when the caller's deadline passed before the response was ready."""

    code = Code.DEADLINE_EXCEEDED


class Cancelled(HeadraceError):
    """Raise when the caller disconnected or cancelled; the error may not be delivered."""

    code = Code.CANCELLED


class Unimplemented(HeadraceError):
    """Raise when the method, option or format is not offered by this server."""

    code = Code.UNIMPLEMENTED


class Unavailable(HeadraceError):
    """Raise when the same request may succeed later: starting, draining, a dependency down."""

    code = Code.UNAVAILABLE


class Internal(HeadraceError):
    """Raise for a fault of the server if its message is safe to show; otherwise let the exception propagate."""

    code = Code.INTERNAL


def with_message(error: HeadraceError, message: str) -> HeadraceError:
    """Return an error of the same code with another message. A subclass from another module becomes its base in this one."""
    kind: type[HeadraceError] = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    changed = kind(message, retry_after_seconds=error.retry_after_seconds)
    changed.request_id, changed.status = error.request_id, error.status
    return changed


def error_of(code: str, message: str) -> HeadraceError:
    """Return the error that another process of ours sent as the value of its code and its message."""
    # Only the classes of this module: packages define others.
    known = {kind.code.value: kind for kind in HeadraceError.__subclasses__() if kind.__module__ == __name__}
    return known.get(code, Internal)(message)


INTERNAL_TEXT = "internal error; the server's log has the details under this request id"
"""The message for an exception that is not a `HeadraceError`: never the exception's own text."""


BAD_CONFIGURATION = 2
"""Exit code for wrong options or configuration: restarting the program unchanged will fail again."""
