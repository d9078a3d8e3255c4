# SPDX-License-Identifier: Apache-2.0
"""HTTP status numbers: the reason phrases, and the one table from our error codes to them."""

from __future__ import annotations

from http import HTTPStatus

from headrace.core.errors import Code

HTTP_STATUS: dict[Code, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.FAILED_PRECONDITION: 409,
    Code.TOO_LARGE: 413,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.DEADLINE_EXCEEDED: 504,
    Code.CANCELLED: 499,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.INTERNAL: 500,
}
"""Every error code as an HTTP status. 499 is nginx's "client closed request": seen in logs, read by nobody."""

REASON: dict[int, bytes] = {status.value: status.phrase.encode() for status in HTTPStatus}
REASON[499] = b"Client Closed Request"
