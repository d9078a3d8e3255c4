# SPDX-License-Identifier: Apache-2.0
"""Request and response heads: the part of an HTTP message before its body, prepared for every HTTP version.

A `ResponseHead` is made once, when a route is set up, and keeps its HTTP/1.1 bytes and its HTTP/2 header block; what
varies from one response to the next (a length, an id) is passed beside it as `extra`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from urllib.parse import parse_qsl

from headrace.core.errors import Code, InvalidArgument

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
"""Every error code as an HTTP status. 499 is nginx's "client closed request": it appears in logs only."""

REASON: dict[int, bytes] = {status.value: status.phrase.encode() for status in HTTPStatus}
REASON[499] = b"Client Closed Request"

_NAME_BYTES = b"abcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~"
"""The characters of an RFC 9110 token, in lower case."""
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]{0,5})?")

Buffer = bytes | bytearray | memoryview
"""Bytes of a body."""

Field = tuple[bytes, bytes]
Fields = Sequence[Field]


class RequestHead:
    """Method, target and fields of a request. Field names are lower case; pseudo-headers are not among them.

    Many requests share one head (HTTP/2 keeps one per distinct header block), so it must never be changed; the exception
    is `memo`, where a layer above may cache what it derived from the head.
    """

    __slots__ = (
        "authority",
        "by_name",
        "content_length",
        "fields",
        "is_simple",
        "memo",
        "method",
        "path",
        "query",
        "scheme",
        "version",
    )

    def __init__(
        self,
        method: bytes,
        target: bytes,
        fields: Fields,
        *,
        version: str,
        scheme: bytes = b"http",
        authority: bytes = b"",
    ) -> None:
        self.method = method
        self.path, _, self.query = target.partition(b"?")
        self.fields = fields
        self.version = version
        self.scheme = scheme
        self.authority = authority
        self.content_length: int | None = None
        """Set by HTTP/2, which has to check it against the frames."""
        self.memo: object = None
        self.by_name = dict(fields)
        """The fields by name; the last one if a name is repeated."""
        self.is_simple = version == "1.1" and method != b"HEAD" and b"accept-encoding" not in self.by_name
        """Whether a complete response in HTTP/1.1 is its head, its length and its body, as most are."""

    def get(self, name: bytes) -> bytes | None:
        """Return the value of a field by its lower-case name; the last one if it is repeated."""
        return self.by_name.get(name)


class ResponseHead:
    """Status and fixed fields of a response. Never put content-length, connection or transfer-encoding here."""

    __slots__ = ("fields", "has_body", "http1", "http2", "raw", "status")

    def __init__(self, status: int, fields: Iterable[Field] = (), *, raw: bool = False) -> None:
        self.status = status
        self.has_body = status >= 200 and status not in (204, 304)
        """Whether a body and its length follow. A 304 would have to give the length of the 200 it replaces."""
        self.raw = raw
        """Whether bodies are sent as they are, never compressed."""
        self.fields = tuple(fields)
        for name, value in self.fields:
            check_field(name, value)
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, REASON.get(status, b"Unknown"))]
        lines += [b"%b: %b\r\n" % field for field in self.fields]
        self.http1: bytes = b"".join(lines)
        """Status line and fields as HTTP/1.1 bytes, without the empty line that ends a head."""
        self.http2: bytes | None = None
        """The same as an HTTP/2 header block; set by `http2.headers` at first use."""


def check_field(name: bytes, value: bytes) -> None:
    """Raise for a field that would split a response head, or that HTTP/2 does not allow."""
    if not name or name.translate(None, _NAME_BYTES) or b"\r" in value or b"\n" in value or b"\0" in value:
        raise ValueError(f"response field {name!r} is not allowed: lower-case name, no line breaks in the value")


def is_valid_host(value: bytes) -> bool:
    """Return whether a value is a host with an optional port (RFC 9110, 7.2); it may be empty."""
    return _HOST.fullmatch(value) is not None


CONTENT_TYPE = b"content-type"
JSON = b"application/json"
PLAIN = b"text/plain; charset=utf-8"

OK_JSON = ResponseHead(200, [(CONTENT_TYPE, JSON)])
OK_PLAIN = ResponseHead(200, [(CONTENT_TYPE, PLAIN)])
OK_EMPTY = ResponseHead(200)


_MAX_PARAMETERS = 64


def parse_query(query: bytes) -> dict[str, str]:
    """Return the query parameters; the last of each name counts."""
    if not query:
        return {}
    try:
        return dict(parse_qsl(query.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS))
    except ValueError:
        raise InvalidArgument(
            f"the query must be NAME=VALUE in UTF-8, with at most {_MAX_PARAMETERS} parameters"
        ) from None
