# SPDX-License-Identifier: Apache-2.0
"""Which scope a route or a gRPC method needs. Read by `guarded` when one is added.

What is not known here needs `admin` if it can change anything: a route that is added without a thought is closed.
"""

from __future__ import annotations

from headrace.api.access.settings import Scope
from headrace.core.handing import PREFILL_PATH

_OPEN = frozenset(("/healthz", "/livez", "/readyz", "/ready", "/health", "/api/health", "/console", "/console/"))
_OPEN_UNDER = ("/v2/health/", "/api/health/", "/console/assets/")
"""The console's page is open, since it asks for the key; what it shows is not."""
_INFER_UNDER = ("/predict/", "/api/infer/")
_INFER_ENDS = ("/infer", "/generate", "/generate_stream")
_OPENAI_MODELS = "/v1/models"
"""Clients look there before they ask a model."""
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
    """What a route needs; None for one that is open to all."""
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
    """What everything under a prefix needs that no route answers."""
    return "admin" if prefix.startswith(_ADMIN_UNDER) else "infer" if prefix == "/v1" else "read"


def grpc_scope(service: str, method: str) -> Scope | None:
    """What a method needs; None for one that is open to all."""
    if service in _OPEN_SERVICES or method in _OPEN_METHODS:
        return None
    if method in _INFER_METHODS:
        return "infer"
    return "read" if method in _READ_METHODS else "admin"
