# SPDX-License-Identifier: Apache-2.0
"""The interface between `session` and a protocol; `http` and `grpc` implement it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.client.http1 import check_fields
from headrace.client.inference import Inference, Result
from headrace.client.retries import Deadline, Retry
from headrace.core.errors import InvalidArgument

_FIT_FOR_HEADERS = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


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


def request_id_for(given: str) -> str:
    """Return the id of a request for logs: the caller's own if a header can carry it."""
    return given if _FIT_FOR_HEADERS.fullmatch(given) else secrets.token_hex(8)


class Stream(Protocol):
    """The results of one request."""

    async def next(self) -> Result | None:
        """Return the next result; None at the end. Raises `HeadraceError` or `AttemptFailed`."""

    def close(self) -> None:
        """Stop the request; the server is informed."""


class Transport(Protocol):
    """One protocol to one server. Methods raise `AttemptFailed`, or a `HeadraceError` that is final."""

    async def infer(self, inference: Inference, call: Call) -> Result:
        """Run a request."""

    async def stream(self, inference: Inference, call: Call) -> Stream:
        """Run a request with any number of results."""

    async def live(self, call: Call) -> bool:
        """Return whether the server answers."""

    async def ready(self, call: Call, model: str, version: str) -> bool:
        """Return whether the server, or a model, is ready."""

    async def metadata(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """Return the metadata of a model, or of the server for ""."""

    async def config(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """Return a model's configuration."""

    async def statistics(self, call: Call, model: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of each version."""

    async def index(self, call: Call, ready: bool) -> list[dict[str, str]]:
        """Return the models of the repository."""

    async def load(self, call: Call, model: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model."""

    async def unload(self, call: Call, model: str, dependents: bool) -> None:
        """Unload a model."""

    async def close(self) -> None:
        """Close all connections."""
