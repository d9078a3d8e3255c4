# SPDX-License-Identifier: Apache-2.0
"""Parts of the protocol that only those may use who send a certain header: Triton's restricted APIs.

Built from settings when routes and services are filled. A handler that nothing restricts is registered as it is, so a
server without restrictions pays nothing for them.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import FailedPrecondition, PermissionDenied
from headrace.net.grpc.call import GrpcCall
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import RequestHead

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
    """Some parts, and the header that opens them."""

    apis: tuple[str, ...]
    key: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Restriction:
        """Read `api,api:key=value`, as the flags give it."""
        names, separator, rest = text.partition(":")
        key, equals, value = rest.partition("=")
        apis = tuple(name.strip() for name in names.split(","))
        if not separator or not equals or not key.strip() or not value.strip():
            raise FailedPrecondition(f"restriction {text!a}: write api,api:key=value")
        for api in apis:
            if api not in APIS:
                raise FailedPrecondition(f"restriction {text!a}: {api!a} is none of {', '.join(APIS)}")
        return cls(apis, key.strip(), value.strip())


class Gate:
    """The restrictions of one transport."""

    def __init__(self, restrictions: Sequence[Restriction], noun: str = "API", prefix: str = "") -> None:
        self._noun = noun
        self._needed: dict[str, tuple[str, bytes]] = {}
        for restriction in restrictions:
            for api in restriction.apis:
                if api in self._needed:
                    raise FailedPrecondition(f"'{api}' is restricted twice: name it once")
                self._needed[api] = (f"{prefix}{restriction.key}", restriction.value.encode())

    def http(self, api: str, handler: Handler) -> Handler:
        """A handler of a route, behind the gate if its part is restricted."""
        if api not in self._needed:
            return handler

        def guarded(exchange: Exchange) -> None:
            self._check(api, exchange.head)
            handler(exchange)

        return guarded

    def grpc(self, api: str, handler: Callable[..., None]) -> Callable[..., None]:
        """The same for a handler of a gRPC method, unary or streaming."""
        if api not in self._needed:
            return handler

        def guarded(call: GrpcCall, *message: Any) -> None:
            self._check(api, call.head)
            handler(call, *message)

        return guarded

    def _check(self, api: str, head: RequestHead) -> None:
        key, value = self._needed[api]
        if not hmac.compare_digest(head.get(key.lower().encode()) or b"", value):
            raise PermissionDenied(f"This {self._noun} is restricted, expecting header '{key}'")  # Triton's
