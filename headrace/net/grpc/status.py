# SPDX-License-Identifier: Apache-2.0
"""gRPC status codes, the mapping from our error codes to them, and the encoding of a status in trailers."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from urllib.parse import quote

from headrace.core.errors import Code
from headrace.net.http2.headers import encode_field


class Status(IntEnum):
    """Status codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


GRPC_STATUS: dict[Code, Status] = {
    Code.INVALID_ARGUMENT: Status.INVALID_ARGUMENT,
    Code.NOT_FOUND: Status.NOT_FOUND,
    Code.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    Code.UNAUTHENTICATED: Status.UNAUTHENTICATED,
    Code.PERMISSION_DENIED: Status.PERMISSION_DENIED,
    Code.FAILED_PRECONDITION: Status.FAILED_PRECONDITION,
    Code.TOO_LARGE: Status.RESOURCE_EXHAUSTED,
    Code.RESOURCE_EXHAUSTED: Status.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED: Status.DEADLINE_EXCEEDED,
    Code.CANCELLED: Status.CANCELLED,
    Code.UNIMPLEMENTED: Status.UNIMPLEMENTED,
    Code.UNAVAILABLE: Status.UNAVAILABLE,
    Code.INTERNAL: Status.INTERNAL,
}
"""Every error code as a gRPC status. A message over its limit is RESOURCE_EXHAUSTED, as in grpcio."""

# Printable ASCII except the percent sign is not escaped (gRPC over HTTP/2, "Status-Message").
_SAFE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


# grpcio drops metadata over 8 KiB, and the status with it; a character takes up to twelve bytes when it is escaped.
_MESSAGE_BYTES = 4096


def status_block(status: Status, message: str) -> bytes:
    """Return the header block of `grpc-status` and `grpc-message`. A long message is cut."""
    return _remembered_block(status, message[:_MESSAGE_BYTES])


@lru_cache(maxsize=256)
def _remembered_block(status: Status, message: str) -> bytes:
    block = encode_field(b"grpc-status", b"%d" % status)
    if message:
        text = _escaped(message)
        if len(text) > _MESSAGE_BYTES:
            text = _escaped(message[: _MESSAGE_BYTES // 12])
        block += encode_field(b"grpc-message", text.encode())
    return block


def _escaped(message: str) -> str:
    return quote(message, safe=_SAFE, errors="replace")


OK_BLOCK = status_block(Status.OK, "")
