# SPDX-License-Identifier: Apache-2.0
"""What `session` needs of a protocol, and what both protocols are told. `http` and `grpc` have it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.client.http1 import check_fields
from headrace.client.requests import Inference
from headrace.client.results import Result
from headrace.client.retrying import Deadline, Retry
from headrace.core.errors import InvalidArgument

_FIT_FOR_HEADERS = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


@dataclass(frozen=True, slots=True)
class Options:
    """How a client speaks to its server."""

    timeout: float
    retry: Retry
    verify: Any
    """True: the system's authorities; a path: those of that file; False: none (HTTP only); or an `ssl.SSLContext`."""
    cert: str | tuple[str, str] | None
    fields: tuple[tuple[str, str], ...] = field(repr=False)
    compression: str


def options_of(
    *,
    timeout: float,
    retry: Retry,
    verify: Any,
    cert: str | tuple[str, str] | None,
    token: str,
    headers: Mapping[str, str] | None,
    compression: str | None,
) -> Options:
    """Check what a client was made with."""
    fields = dict(headers or {})
    if token:
        fields["authorization"] = f"Bearer {token}"
    if compression not in (None, "", "gzip", "deflate"):
        raise InvalidArgument(f"compression {compression!a} is not known: use 'gzip' or 'deflate'")
    Deadline(timeout, "")
    return Options(timeout, retry, verify, cert, check_fields(fields), compression or "")


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a caller, all its tries together."""

    deadline: Deadline
    id: str
    """By which the server's log has it."""
    fields: tuple[tuple[str, str], ...] = field(repr=False)


def call_id(given: str) -> str:
    """The id of a request in logs: the caller's own where headers can carry it."""
    return given if _FIT_FOR_HEADERS.fullmatch(given) else secrets.token_hex(8)


class Stream(Protocol):
    """The results of one request, one by one."""

    async def next(self) -> Result | None:
        """The next one; None at the end. Raises `HeadraceError` or `Failed`."""

    def close(self) -> None:
        """Leave it; the server is told, and stops."""


class Transport(Protocol):
    """One protocol to one server. Methods raise `retrying.Failed`, or a `HeadraceError` that is final."""

    async def infer(self, inference: Inference, call: Call) -> Result:
        """Compute."""

    async def stream(self, inference: Inference, call: Call) -> Stream:
        """Compute what may have any number of results."""

    async def live(self, call: Call) -> bool:
        """Whether the server answers."""

    async def ready(self, call: Call, model: str, version: str) -> bool:
        """Whether the server, or a model, would serve requests."""

    async def metadata(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """Of a model; of the server for ""."""

    async def config(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """A model's configuration."""

    async def statistics(self, call: Call, model: str, version: str) -> list[dict[str, Any]]:
        """What each version has done."""

    async def index(self, call: Call, ready: bool) -> list[dict[str, str]]:
        """The models of the repository."""

    async def load(self, call: Call, model: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model."""

    async def unload(self, call: Call, model: str, dependents: bool) -> None:
        """Unload a model."""

    async def close(self) -> None:
        """End all connections."""
