# SPDX-License-Identifier: Apache-2.0
"""Arguments of the transports (`http`, `grpc`): the options of a client, and the deadline and id of each call."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.client.http1 import check_fields
from headrace.client.retries import Deadline, Retry
from headrace.core.errors import InvalidArgument

_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a client."""

    timeout: float
    retry: Retry
    verify: Any
    """True: the system's authorities; a path: those of that file; False: no check (HTTP only); or an `ssl.SSLContext`."""
    cert: str | tuple[str, str] | None
    fields: tuple[tuple[str, str], ...] = field(repr=False)
    compression: str


def check_options(
    *,
    timeout: float,
    retry: Retry,
    verify: Any,
    cert: str | tuple[str, str] | None,
    token: str,
    headers: Mapping[str, str] | None,
    compression: str | None,
) -> Options:
    """Check the arguments of a client."""
    fields = dict(headers or {})
    if token:
        fields["authorization"] = f"Bearer {token}"
    if compression not in (None, "", "gzip", "deflate"):
        raise InvalidArgument(f"compression {compression!a} is not known: use 'gzip' or 'deflate'")
    Deadline(timeout, "")
    return Options(timeout, retry, verify, cert, check_fields(fields), compression or "")


@dataclass(frozen=True, slots=True)
class Call:
    """One request, all attempts together."""

    deadline: Deadline
    id: str
    """The id in the server's log."""
    fields: tuple[tuple[str, str], ...] = field(repr=False)


def request_id_for(request_id: str) -> str:
    """Return the id of a request for logs: the caller's own if a header can carry it."""
    return request_id if _HEADER_SAFE.fullmatch(request_id) else secrets.token_hex(8)
