# SPDX-License-Identifier: Apache-2.0
"""Errors for callers: the classes of `core.errors` by HTTP status, gRPC code or connection failure.

Every error has `request_id` (the id in the server's log, "" if none was sent) and `status` (the HTTP status, the name of the
gRPC code, or None when no server responded).
"""

from __future__ import annotations

import os
import socket
import ssl
from typing import Any, cast

from headrace.client.sockets import Address
from headrace.core import errors
from headrace.core.errors import HeadraceError, Internal, Unavailable

HTTP_ERRORS: dict[int, type[HeadraceError]] = {
    400: errors.InvalidArgument,
    401: errors.Unauthenticated,
    403: errors.PermissionDenied,
    404: errors.NotFound,
    405: errors.Unimplemented,
    408: errors.DeadlineExceeded,
    409: errors.FailedPrecondition,
    413: errors.TooLarge,
    429: errors.ResourceExhausted,
    431: errors.TooLarge,
    499: errors.Cancelled,
    500: errors.Internal,
    501: errors.Unimplemented,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.DeadlineExceeded,
}

GRPC_ERRORS: dict[str, type[HeadraceError]] = {
    "CANCELLED": errors.Cancelled,
    "UNKNOWN": errors.Internal,
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.AlreadyExists,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "RESOURCE_EXHAUSTED": errors.ResourceExhausted,
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "ABORTED": errors.FailedPrecondition,
    "OUT_OF_RANGE": errors.InvalidArgument,
    "UNIMPLEMENTED": errors.Unimplemented,
    "INTERNAL": errors.Internal,
    "UNAVAILABLE": errors.Unavailable,
    "DATA_LOSS": errors.Internal,
    "UNAUTHENTICATED": errors.Unauthenticated,
}

_MAX_MESSAGE_CHARACTERS = 4096


def http_error(status: int, message: str, request_id: str, retry_after: float | None = None) -> HeadraceError:
    """Return the error for an HTTP status of 300 or more."""
    kind = HTTP_ERRORS.get(status)
    if kind is None:
        kind = errors.InvalidArgument if 400 <= status < 500 else errors.Internal if status >= 500 else Unavailable
    return with_request_id(kind(message[:_MAX_MESSAGE_CHARACTERS], retry_after_seconds=retry_after), request_id, status)


def grpc_error(code: str, message: str, request_id: str, retry_after: float | None = None) -> HeadraceError:
    """Return the error for a gRPC code."""
    kind = GRPC_ERRORS.get(code, errors.Internal)
    return with_request_id(kind(message[:_MAX_MESSAGE_CHARACTERS], retry_after_seconds=retry_after), request_id, code)


def with_request_id(error: HeadraceError, request_id: str, status: int | str | None = None) -> HeadraceError:
    """Set an error's `request_id` and `status`, unless it has them."""
    attributes = vars(error)
    if "request_id" not in attributes:
        attributes["request_id"] = request_id
        attributes["status"] = status
        if request_id and status is not None:
            error.add_note(f"request id {request_id}: the server's log may have more under this id")
    return error


def is_from_server(error: HeadraceError) -> bool:
    """Return whether a server returned the error; False for one that the client raised itself."""
    return vars(error).get("status") is not None


def retry_after_seconds(field: str | None) -> float | None:
    """Parse a Retry-After field; None if it is missing, or not a number of seconds."""
    return float(field) if field and field.isdigit() and len(field) < 8 else None


def invalid_response(what: str) -> HeadraceError:
    """Return the error for a response that does not follow the v2 protocol."""
    return Internal(f"the server's answer cannot be read ({what}): is it a server of the v2 protocol?")


def connection_error(
    address: Address, cause: BaseException | str, *, connecting: bool = False, unsent: bool = False
) -> HeadraceError:
    """Return the error for a connection that could not be opened, or broke."""
    if isinstance(cause, str):
        return Unavailable(f"{address}: {cause}")
    reason = _reason(cause)
    if isinstance(cause, socket.gaierror):
        return Unavailable(f"the host of {address} is not known ({reason}): check its name")
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Unavailable(
            f"the certificate of {address} is not trusted ({cause.verify_message}): give the file of its authority "
            "with verify='ca.pem'"
        )
    if isinstance(cause, ssl.SSLError):
        return Unavailable(
            f"no TLS with {address} ({reason}): check that this port speaks TLS and whether it wants a certificate "
            "of the client (cert=...)"
        )
    if connecting:
        return Unavailable(
            f"no server answers at {address} ({reason}): check that one runs there ('headrace serve') and that host "
            "and port are right"
        )
    if unsent:
        return Unavailable(
            f"the connection to {address} broke before the whole request was sent ({reason}): see the server's log"
        )
    return Unavailable(
        f"the connection to {address} broke before the answer came ({reason}): see the server's log; the request "
        "may have been computed"
    )


def _reason(cause: BaseException) -> str:
    """Return the operating system's reason."""
    # The texts that asyncio puts into `strerror` say less.
    if type(cause) is not socket.gaierror and not isinstance(cause, ssl.SSLError) and getattr(cause, "errno", None):
        return os.strerror(cast("OSError", cause).errno or 0)
    reason: Any = getattr(cause, "reason", None) or getattr(cause, "strerror", None)
    return str(reason or cause or type(cause).__name__)[:200]
