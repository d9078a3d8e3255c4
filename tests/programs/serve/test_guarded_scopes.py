# SPDX-License-Identifier: Apache-2.0
"""Which scope each route and method of a server needs."""

from __future__ import annotations

import pytest

from headrace.programs.serve.route_scopes import grpc_scope, http_scope, mount_scope


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/v2/health/live", None),
        ("GET", "/v2/health/ready", None),
        ("GET", "/api/health", None),
        ("GET", "/api/health/ready", None),
        ("GET", "/healthz", None),
        ("GET", "/livez", None),
        ("GET", "/readyz", None),
        ("GET", "/ready", None),
        ("GET", "/health", None),
        ("POST", "/health", "admin"),
        ("GET", "/healthz/secrets", "read"),
        ("POST", "/v2/models/{model}/infer", "infer"),
        ("POST", "/v2/models/{model}/versions/{version}/infer", "infer"),
        ("POST", "/v2/models/{model}/generate", "infer"),
        ("POST", "/v2/models/{model}/generate_stream", "infer"),
        ("POST", "/api/infer/{model}", "infer"),
        ("POST", "/predict", "infer"),
        ("POST", "/predict/{model}", "infer"),
        ("GET", "/predict/stream", "infer"),
        ("GET", "/predict/{model}/stream", "infer"),
        ("GET", "/predictions", "read"),
        ("GET", "/v2", "read"),
        ("GET", "/v2/models/{model}", "read"),
        ("GET", "/v2/models/{model}/ready", "read"),
        ("GET", "/v2/models/{model}/stats", "read"),
        ("GET", "/v2/logging", "read"),
        ("GET", "/v2/systemsharedmemory/status", "read"),
        ("GET", "/metrics", "read"),
        ("GET", "/openapi.json", "read"),
        ("GET", "/docs", "read"),
        ("GET", "/console", None),
        ("GET", "/console/assets/{digest}/{file}", None),
        ("GET", "/console/api/live", "read"),
        ("POST", "/v2/repository/index", "read"),
        ("POST", "/v2/repository/models/{model}/load", "admin"),
        ("POST", "/v2/repository/models/{model}/unload", "admin"),
        ("POST", "/v2/logging", "admin"),
        ("POST", "/v2/trace/setting", "admin"),
        ("POST", "/v2/models/{model}/trace/setting", "admin"),
        ("POST", "/v2/systemsharedmemory/region/{region}/register", "admin"),
        ("POST", "/v2/cudasharedmemory/unregister", "admin"),
        ("POST", "/api/modelcontrol/load/{model}", "admin"),
        ("POST", "/api/sharedmemorycontrol/unregisterall", "admin"),
        ("GET", "/api/profile", "admin"),
        ("GET", "/admin/traffic", "admin"),
        ("DELETE", "/admin/traffic/{model}", "admin"),
        ("PUT", "/something/new", "admin"),
    ],
)
def test_routes(method: str, path: str, scope: str | None) -> None:
    assert http_scope(method, path) == scope


def test_mounts() -> None:
    assert mount_scope("/admin") == "admin"
    assert mount_scope("/api") == "read"


@pytest.mark.parametrize(
    ("service", "methods", "scope"),
    [
        ("grpc.health.v1.Health", ["Check", "Watch"], None),
        ("inference.GRPCInferenceService", ["ServerLive", "ServerReady"], None),
        ("nvidia.inferenceserver.GRPCService", ["Health"], None),
        ("inference.GRPCInferenceService", ["ModelInfer", "ModelStreamInfer"], "infer"),
        ("nvidia.inferenceserver.GRPCService", ["Infer", "StreamInfer"], "infer"),
        ("InferenceService", ["Predict", "PredictStream"], "infer"),
        ("inference.GRPCInferenceService", ["ModelReady", "ModelMetadata", "ModelConfig", "RepositoryIndex"], "read"),
        ("grpc.reflection.v1.ServerReflection", ["ServerReflectionInfo"], "read"),
        ("inference.GRPCInferenceService", ["RepositoryModelLoad", "RepositoryModelUnload"], "admin"),
        ("inference.GRPCInferenceService", ["TraceSetting", "LogSettings", "SystemSharedMemoryRegister"], "admin"),
        ("nvidia.inferenceserver.GRPCService", ["ModelControl", "SharedMemoryControl", "Profile"], "admin"),
        ("some.Service", ["Unknown"], "admin"),
    ],
)
def test_methods(service: str, methods: list[str], scope: str | None) -> None:
    assert {grpc_scope(service, method) for method in methods} == {scope}
