# SPDX-License-Identifier: Apache-2.0
"""The key by which one user always sees one version: from a header, a cookie or a field, whichever comes first.

`key_of` is for protocols that have the request's head; `key_in` for what reaches the engine, whose parameters may have the
key. Both give the same key for the same user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.core.messages import InferRequest
from headrace.engine.traffic.settings import StickyBy

PARAMETER = "sticky_key"
"""The parameter by which any protocol may give the key."""


class Headers(Protocol):
    """Header fields of a request, as a protocol with headers has them."""

    @property
    def fields(self) -> Sequence[tuple[bytes, bytes]]:
        """Names in lower case, and values, in the order they came."""

    def get(self, name: bytes, /) -> bytes | None:
        """Return the value of a field; None if there is none."""


def key_of(sticky: StickyBy, head: Headers, fields: Mapping[str, object]) -> str:
    """The key of a request; "" if it has none of what the split names."""
    if sticky.header:
        value = head.get(sticky.header.lower().encode())
        if value:
            return value.decode("latin-1").strip()
    if sticky.cookie:
        value = _cookie(head, sticky.cookie.encode())
        if value:
            return value.decode("latin-1")
    return _text(fields.get(sticky.field)) if sticky.field else ""


def key_in(request: InferRequest, sticky: StickyBy) -> str:
    """The key that a request carries, or that its parameters have.

    Headers are parameters where the server forwards them (`--http-header-forward-pattern`).
    """
    if request.sticky_key:
        return request.sticky_key
    parameters = request.parameters
    if not parameters:
        return ""
    for name in (sticky.header.lower(), sticky.field, PARAMETER):
        if name:
            key = _text(parameters.get(name))
            if key:
                return key
    return ""


def _text(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) else ""


def _cookie(head: Headers, name: bytes) -> bytes:
    # HTTP/2 may send each cookie as a field of its own.
    for field, value in head.fields:
        if field == b"cookie":
            for pair in value.split(b";"):
                found, _, content = pair.strip().partition(b"=")
                if found == name:
                    return content.strip().strip(b'"')
    return b""
