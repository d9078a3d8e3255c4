# SPDX-License-Identifier: Apache-2.0
"""Settings of the v2 protocol, and Triton's restricted APIs: parts of the protocol that need a certain header.

`Gate` wraps the handlers of restricted APIs when routes and services are registered; other handlers are registered
unchanged and cost nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import FailedPrecondition, PermissionDenied
from headrace.net.grpc.call import GrpcCall
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import RequestHead


@dataclass(frozen=True, slots=True)
class TraceDefaults:
    """The trace settings a server starts with, by Triton's names."""

    level: tuple[str, ...] = ("OFF",)
    rate: int = 1000
    """Trace one of this many requests."""
    count: int = -1
    """Maximum number of traces; -1: unlimited."""
    log_frequency: int = 0
    mode: str = "triton"
    file: str = ""
    """Reported and not written: spans go to an OpenTelemetry collector."""


@dataclass(frozen=True, slots=True)
class V2Settings:
    """Settings of the v2 protocol."""

    server_id: str = "headrace"
    """The server's name: `--id`."""

    allow_client_shm: bool = False
    """Whether clients may register shared memory: `--allow-client-shm`."""

    http_header_forward_pattern: str = ""
    """HTTP header fields whose name matches this pattern become request parameters; "" for none."""

    grpc_header_forward_pattern: str = ""
    """gRPC metadata keys that match this pattern become request parameters; "" for none."""

    http_restrictions: tuple[Restriction, ...] = ()
    """The values of `--http-restricted-api`."""

    grpc_restrictions: tuple[Restriction, ...] = ()
    """The values of `--grpc-restricted-protocol`."""

    trace: TraceDefaults | None = None
    """None: off, or every request if the server has a trace collector."""

    stream_unread_bytes: int = field(default=256 * 1024 * 1024)
    """Unread bytes of a response stream, above which the stream is aborted."""


APIS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
GRPC_PREFIX = "triton-grpc-protocol-"


@dataclass(frozen=True, slots=True)
class Restriction:
    """Restricted APIs, and the header that allows them."""

    apis: tuple[str, ...]
    key: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Restriction:
        """Parse `api,api:key=value`, the value of the command-line option."""
        names, separator, rest = text.partition(":")
        key, equals, value = rest.partition("=")
        apis = tuple(name.strip() for name in names.split(","))
        if not separator or not equals or not key.strip() or not value.strip():
            raise FailedPrecondition(f"restriction {text!a}: write api,api:key=value")
        for api in apis:
            if api not in APIS:
                raise FailedPrecondition(f"restriction {text!a}: {api!a} is not one of {', '.join(APIS)}")
        return cls(apis, key.strip(), value.strip())


class Gate:
    """The restrictions of one transport."""

    def __init__(self, restrictions: Sequence[Restriction], noun: str = "API", prefix: str = "") -> None:
        self._noun = noun
        self._required: dict[str, tuple[str, bytes]] = {}
        for restriction in restrictions:
            for api in restriction.apis:
                if api in self._required:
                    raise FailedPrecondition(f"'{api}' is restricted twice: name it once")
                self._required[api] = (f"{prefix}{restriction.key}", restriction.value.encode())

    def http(self, api: str, handler: Handler) -> Handler:
        """Return a route's handler, with a check if its API is restricted."""
        if api not in self._required:
            return handler

        def guarded(exchange: Exchange) -> None:
            self._check(api, exchange.head)
            handler(exchange)

        return guarded

    def grpc(self, api: str, handler: Callable[..., None]) -> Callable[..., None]:
        """Return a gRPC method's handler, unary or streaming, with a check if its API is restricted."""
        if api not in self._required:
            return handler

        def guarded(call: GrpcCall, *message: Any) -> None:
            self._check(api, call.head)
            handler(call, *message)

        return guarded

    def _check(self, api: str, head: RequestHead) -> None:
        key, value = self._required[api]
        if not hmac.compare_digest(head.get(key.lower().encode()) or b"", value):
            raise PermissionDenied(f"This {self._noun} is restricted, expecting header '{key}'")  # Triton's
