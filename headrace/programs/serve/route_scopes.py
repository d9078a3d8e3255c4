# SPDX-License-Identifier: Apache-2.0
"""Which scope a route or gRPC method needs, and routes that refuse changes from web pages of other sites.

A browser sends the requests of a page to any address that its machine reaches, loopback included, and names the page in
`Origin`. `OwnPagesRoutes` checks it for every route that can change the server, unless API keys are required. Programs
send no `Origin`. To resist DNS rebinding, the host must be an address, `localhost`, a name without a dot or this
machine's own name; with TLS any name is accepted, since the browser has verified the certificate.
"""

from __future__ import annotations

import ipaddress
import socket

from headrace.api.access.settings import Scope
from headrace.core.errors import PermissionDenied
from headrace.core.kv_transfer import PREFILL_PATH
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import RequestHead
from headrace.net.http.routes import Routes
from headrace.net.websocket.handshake import same_origin

_OPEN = frozenset(("/healthz", "/livez", "/readyz", "/ready", "/health", "/api/health", "/console", "/console/"))


_OPEN_UNDER = ("/v2/health/", "/api/health/", "/console/assets/")
"""The console's page is open, since it asks for the key; its data is not."""


_INFER_UNDER = ("/predict/", "/api/infer/")


_INFER_ENDS = ("/infer", "/generate", "/generate_stream")


_OPENAI_MODELS = "/v1/models"
"""Clients read it before they call a model."""


_OPENAI = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/embeddings", PREFILL_PATH))


_ADMIN_UNDER = ("/admin", "/api/profile")


_READS_BY_POST = frozenset(("/v2/repository/index",))


_OPEN_SERVICES = frozenset(("grpc.health.v1.Health",))


_OPEN_METHODS = frozenset(("ServerLive", "ServerReady", "Health"))


_INFER_METHODS = frozenset(("ModelInfer", "ModelStreamInfer", "Infer", "StreamInfer", "Predict", "PredictStream"))


_READ_METHODS = frozenset(
    (
        "ServerMetadata",
        "ModelReady",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
        "SystemSharedMemoryStatus",
        "CudaSharedMemoryStatus",
        "Status",
        "Repository",
        "ServerReflectionInfo",
    )
)


def http_scope(method: str, path: str) -> Scope | None:
    """Return the scope of a route; None if it is open to all."""
    reads = method in ("GET", "HEAD", "OPTIONS")
    if reads and (path in _OPEN or path.startswith(_OPEN_UNDER)):
        return None
    if path == "/predict" or path.startswith(_INFER_UNDER):
        return "infer"
    if path in _OPENAI or path.startswith(_OPENAI_MODELS):
        return "infer"
    if path.startswith("/v2/models/") and path.endswith(_INFER_ENDS):
        return "infer"
    if path.startswith(_ADMIN_UNDER):
        return "admin"
    return "read" if reads or path in _READS_BY_POST else "admin"


def mount_scope(prefix: str) -> Scope:
    """Return the scope of everything below a prefix that no route answers."""
    return "admin" if prefix.startswith(_ADMIN_UNDER) else "infer" if prefix == "/v1" else "read"


def grpc_scope(service: str, method: str) -> Scope | None:
    """Return the scope of a gRPC method; None if it is open to all."""
    if service in _OPEN_SERVICES or method in _OPEN_METHODS:
        return None
    if method in _INFER_METHODS:
        return "infer"
    return "read" if method in _READ_METHODS else "admin"


_OTHER_PAGE = "pages of this Origin may not change this server: use its own page, a program, or --api-keys-file"


_READING = ("GET", "HEAD", "OPTIONS")


def may_change(head: RequestHead) -> bool:
    """Return whether a request without a key may change the server: it is from a program, or from a page of this server."""
    if head.get(b"origin") is None:
        return True
    return same_origin(head) and (head.scheme == b"https" or _is_ours(head.get(b"host") or b""))


def _is_ours(host: bytes) -> bool:
    """Return whether a Host can only be this machine or its network."""
    text = host.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0].rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return ("." not in name and name != "") or name.endswith(".localhost") or name == socket.gethostname().lower()
    return True


class OwnPagesRoutes(Routes):
    """Routes that refuse changes from pages of other sites, unless they need a key anyway."""

    def add(self, method: str, path: str, handler: Handler, *, streams_body: bool = False) -> None:
        """Add a route."""
        if method not in _READING and http_scope(method, path) == "admin" and not self.needs_keys():
            handler = _closed(handler)
        super().add(method, path, handler, streams_body=streams_body)

    def needs_keys(self) -> bool:
        """Return whether every change needs an API key, which other sites' pages do not have."""
        return False


def _closed(handler: Handler) -> Handler:
    def checked(exchange: Exchange) -> None:
        if not may_change(exchange.head):
            raise PermissionDenied(_OTHER_PAGE)
        handler(exchange)

    return checked
