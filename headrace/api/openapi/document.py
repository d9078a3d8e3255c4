# SPDX-License-Identifier: Apache-2.0
"""The document without its models: made of the routes that a server really has, and of what the tables say of them.

Called by `service`. A route that no table knows is listed all the same, so that the document is never short of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.api.openapi.describing import (
    ERRORS,
    PLACEHOLDER,
    Operation,
    Table,
    anonymous,
    answer,
    json_of,
    named,
    path_parameters,
    ref,
)
from headrace.api.openapi.models import TAG as LOADED
from headrace.api.openapi.schemas import shared_schemas
from headrace.api.openapi.v1_routes import DOCUMENT, METRICS, V1, other_table, v1_table
from headrace.api.openapi.v2_routes import HEALTH, INFERENCE, MEMORY, MODELS, REPOSITORY, SETTINGS, STATISTICS, v2_table
from headrace.net.http.routes import Routes
from headrace.version import __version__

OTHER = "Other"
_TAGS = {
    LOADED: "Each model that can be asked now, with the names, types and lengths of its tensors.",
    INFERENCE: "The same for all models.",
    HEALTH: "For load balancers and orchestrators.",
    MODELS: "What there is and how it is configured.",
    REPOSITORY: "What could be there: loading and unloading.",
    STATISTICS: "What was done so far.",
    METRICS: "The same and more, for Prometheus.",
    SETTINGS: "Of the running server.",
    MEMORY: "Tensors that do not travel through the socket.",
    V1: "The protocol of 0.7 to 1.x. Whatever fails is 400, and the field NV-Status tells why.",
    DOCUMENT: "What you are reading.",
    OTHER: "Not described.",
}
_ABOUT = (
    "Headrace's inference server: Triton's v2 protocol with its extensions, the protocol of TensorRT Inference Server "
    '0.7 to 1.x, and metrics. Errors of v2 are JSON, `{"error": text}`. Every GET answers HEAD, too. The same models '
    "can be asked over gRPC."
)


def described_routes(tables: Iterable[Table] = ()) -> dict[tuple[str, str], tuple[str, Operation]]:
    """What is known of routes: by method and path without names, the path with names and the operation. The last wins."""
    known: dict[tuple[str, str], tuple[str, Operation]] = {}
    for table in (v2_table(), v1_table(), other_table(), *tables):
        for (method, path), operation in table.items():
            known[method, anonymous(path)] = (path, operation)
    return known


def undescribed(routes: Routes, tables: Iterable[Table] = ()) -> list[tuple[str, str]]:
    """Routes of a server that no table knows. For tests: there should be none."""
    known = described_routes(tables)
    return [route for route in routes.listed() if route not in known]


def base_document(routes: Routes, tables: Iterable[Table] = (), title: str = "Headrace") -> dict[str, Any]:
    """The document of a server's routes."""
    known = described_routes(tables)
    paths: dict[str, Any] = {}
    used: set[str] = set()
    for method, plain in routes.listed():
        path, operation = known.get((method, plain)) or _unknown(plain)
        made = {**operation, "operationId": _operation_id(method, path)}
        parameters = [*path_parameters(path), *made.pop("parameters", ())]
        if parameters:
            made["parameters"] = parameters
        paths.setdefault(path, {})[method.lower()] = made
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
    return named(plain, []), {
        "tags": [OTHER],
        "summary": "Not described",
        "responses": {"default": answer("Anything.")},
    }


def _operation_id(method: str, path: str) -> str:
    # A double slash, or one at the end, makes a route of its own, which must have an id of its own.
    words = [part or "slash" for part in PLACEHOLDER.sub(r"by-\1", path).split("/")[1:]]
    return ".".join([method.lower(), *words])


def _error_responses() -> dict[str, Any]:
    return {f"Error{status}": answer(text, json_of(ref("Error"))) for status, text in ERRORS.items()}
