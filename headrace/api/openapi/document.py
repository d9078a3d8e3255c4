# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of a server's routes, without the operations of its models.

A route that no table describes is listed without a description, so that the document is always complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.api.openapi.models import TAG as LOADED
from headrace.api.openapi.operations import (
    ERRORS,
    PLACEHOLDER,
    Operation,
    OperationTable,
    add_names,
    json_content,
    path_parameters,
    ref,
    response_object,
    strip_names,
)
from headrace.api.openapi.schemas import shared_schemas
from headrace.api.openapi.v1_routes import DOCUMENT, METRICS, V1, other_table, v1_table
from headrace.api.openapi.v2_routes import HEALTH, INFERENCE, MEMORY, MODELS, REPOSITORY, SETTINGS, STATISTICS, v2_table
from headrace.net.http.routes import Routes
from headrace.version import __version__

OTHER = "Other"
_TAGS = {
    LOADED: "Each loaded model, with the names, types and sizes of its tensors.",
    INFERENCE: "Inference with any model.",
    HEALTH: "For load balancers and orchestrators.",
    MODELS: "Metadata and configuration.",
    REPOSITORY: "Load and unload models.",
    STATISTICS: "Inference statistics.",
    METRICS: "Metrics for Prometheus.",
    SETTINGS: "Settings of the running server.",
    MEMORY: "Tensors that do not pass through the socket.",
    V1: "The protocol of 0.7 to 1.x. Every error is a 400; the field NV-Status has the reason.",
    DOCUMENT: "This OpenAPI document.",
    OTHER: "Not described.",
}
_ABOUT = (
    "Headrace's inference server: Triton's v2 protocol with its extensions, the protocol of TensorRT Inference Server "
    '0.7 to 1.x, and metrics. Errors of v2 are JSON, `{"error": text}`. Every GET route also answers HEAD. The same models '
    "are available over gRPC."
)


def described_routes(tables: Iterable[OperationTable] = ()) -> dict[tuple[str, str], tuple[str, Operation]]:
    """Return the described routes: by (method, path without names), the path with names and the operation.

    A later table overrides an earlier one.
    """
    known: dict[tuple[str, str], tuple[str, Operation]] = {}
    for table in (v2_table(), v1_table(), other_table(), *tables):
        for (method, path), operation in table.items():
            known[method, strip_names(path)] = (path, operation)
    return known


def undescribed_routes(routes: Routes, tables: Iterable[OperationTable] = ()) -> list[tuple[str, str]]:
    """Return the routes of a server that no table describes; for tests."""
    known = described_routes(tables)
    return [route for route in routes.listed() if route not in known]


def base_document(routes: Routes, tables: Iterable[OperationTable] = (), title: str = "Headrace") -> dict[str, Any]:
    """Return the document of a server's routes."""
    known = described_routes(tables)
    paths: dict[str, Any] = {}
    used: set[str] = set()
    for method, plain in routes.listed():
        path, operation = known.get((method, plain)) or _unknown(plain)
        entry = {**operation, "operationId": _operation_id(method, path)}
        parameters = [*path_parameters(path), *entry.pop("parameters", ())]
        if parameters:
            entry["parameters"] = parameters
        paths.setdefault(path, {})[method.lower()] = entry
        used.update(operation["tags"])
    used.add(LOADED)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": _ABOUT, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items() if name in used]
        + [{"name": name} for name in sorted(used - _TAGS.keys())],
        "paths": paths,
        "components": {"schemas": shared_schemas(), "responses": _error_responses()},
    }


def _unknown(plain: str) -> tuple[str, Operation]:
    return add_names(plain, []), {
        "tags": [OTHER],
        "summary": "Not described",
        "responses": {"default": response_object("Anything.")},
    }


def _operation_id(method: str, path: str) -> str:
    # A double slash, or one at the end, makes another route, which needs another id.
    parts = [part or "slash" for part in PLACEHOLDER.sub(r"by-\1", path).split("/")[1:]]
    return ".".join([method.lower(), *parts])


def _error_responses() -> dict[str, Any]:
    return {f"Error{status}": response_object(text, json_content(ref("Error"))) for status, text in ERRORS.items()}
