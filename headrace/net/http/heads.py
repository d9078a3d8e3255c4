# SPDX-License-Identifier: Apache-2.0
"""Heads of requests and responses: the part before the body, in a form each HTTP version can use without work.

A `ResponseHead` is made once, when a route is set up, and keeps its HTTP/1.1 bytes and its HTTP/2 header block; what
varies from one response to the next (a length, an id) is passed beside it as `extra`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.net.http.status import REASON

_NAME_BYTES = b"abcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~"
"""What RFC 9110 calls a token, in lower case."""

Field = tuple[bytes, bytes]
Fields = Sequence[Field]


class RequestHead:
    """Method, target and fields of a request. Field names are lower case; pseudo-headers are not among them.

    HTTP/2 keeps one of these per distinct header block and hands it to many requests, so it must never be changed;
    `memo` is the one exception: a room above may keep there what it worked out from the head.
    """

    __slots__ = (
        "authority",
        "by_name",
        "content_length",
        "fields",
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
        """The fields by name; the last one where a name is repeated."""

    def get(self, name: bytes) -> bytes | None:
        """The value of a field by its lower-case name; the last one where it is repeated."""
        return self.by_name.get(name)


class ResponseHead:
    """Status and fixed fields of a response. Never put content-length, connection or transfer-encoding here."""

    __slots__ = ("fields", "http1", "http2", "raw", "status")

    def __init__(self, status: int, fields: Iterable[Field] = (), *, raw: bool = False) -> None:
        self.status = status
        self.raw = raw
        """Whether bodies go out as they are: those of a proxy are not ours to compress."""
        self.fields = tuple(fields)
        for name, value in self.fields:
            check_field(name, value)
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, REASON.get(status, b"Unknown"))]
        lines += [b"%b: %b\r\n" % field for field in self.fields]
        self.http1: bytes = b"".join(lines)
        """Status line and fields as HTTP/1.1 bytes, without the empty line that ends a head."""
        self.http2: bytes | None = None
        """The same as an HTTP/2 header block; filled in by `wire.http2` at first use."""


def check_field(name: bytes, value: bytes) -> None:
    """Refuse a field that would split a response head, or that HTTP/2 could not carry."""
    if not name or name.translate(None, _NAME_BYTES) or b"\r" in value or b"\n" in value or b"\0" in value:
        raise ValueError(f"response field {name!r} is not allowed: lower-case name, no line breaks in the value")


CONTENT_TYPE = b"content-type"
JSON = b"application/json"
PLAIN = b"text/plain; charset=utf-8"

OK_JSON = ResponseHead(200, [(CONTENT_TYPE, JSON)])
OK_PLAIN = ResponseHead(200, [(CONTENT_TYPE, PLAIN)])
OK_EMPTY = ResponseHead(200)
