# SPDX-License-Identifier: Apache-2.0
"""OpenAPI operations of the routes under `/api` (TensorRT Inference Server 0.7 to 1.x), `/metrics` and this document.

Every error under `/api` is a 400 with an empty body; the field NV-Status has the reason.
"""

from __future__ import annotations

from typing import Any

from headrace.api.openapi.operations import (
    BINARY,
    JSON,
    OF_EVERY_BODY,
    TEXT,
    Operation,
    OperationTable,
    Schema,
    error_responses,
    header,
    operation,
    query,
    response_object,
)

V1 = "TensorRT Inference Server"
METRICS = "Metrics"
DOCUMENT = "This document"

_STATUS = {
    "NV-Status": {
        "description": 'A RequestStatus as text: `code: SUCCESS server_id: "..." request_id: 1`, and `msg` on errors.',
        "schema": {"type": "string"},
    }
}
_RESPONSE = {
    "NV-InferResponse": {"description": "An InferResponseHeader as text.", "schema": {"type": "string"}},
    **_STATUS,
}
_FORMAT = query("format", "`binary`, `json`, or text.", {"type": "string", "enum": ["text", "binary", "json"]})
_ERROR = {"400": response_object("Error; NV-Status has the reason.", headers=_STATUS)}
_MESSAGE: dict[str, Any] = {
    TEXT: {"schema": {"type": "string"}},
    BINARY: {"schema": {"description": "A protobuf message."}},
    JSON: {"schema": {"type": "object"}},
}
_SHM = "/api/sharedmemorycontrol"


def v1_table() -> OperationTable:
    """Return the operations by (method, path)."""
    return {**_health(), **_inference(), **_control()}


def other_table() -> OperationTable:
    """Return the operations of `/metrics`, `/openapi.json` and `/docs`."""
    page = {"text/html": {"schema": {"type": "string"}}}
    document = {
        JSON: {"schema": {"type": "object", "required": ["openapi", "info", "paths"]}},
    }
    model = query("model", "Describe only this model.", {"type": "string", "maxLength": 255})
    etag = header("If-None-Match", "The `etag` of an earlier response.")
    return {
        ("GET", "/metrics"): operation(
            METRICS, "Counters, gauges and histograms", "In the text format of Prometheus or OpenMetrics.",
            answers={"200": response_object("The metrics.", {TEXT: {"schema": {"type": "string"}}})}, failing=(403,),
        ),
        ("GET", "/openapi.json"): operation(
            DOCUMENT, "This document", parameters=[model, etag], failing=(404,),
            answers={"200": response_object("OpenAPI 3.1.", document), "304": response_object("Not modified.")},
        ),
        ("GET", "/docs"): operation(DOCUMENT, "This document as a page", answers={"200": response_object("A page.", page)}),
    }  # fmt: skip


def _operation(summary: str, success: Schema, description: str = "", **more: Any) -> Operation:
    """Return an operation of this protocol: every error is a 400 with NV-Status."""
    described = operation(V1, summary, description, answers={"200": success, **_ERROR}, **more)
    # Only errors before the protocol's handlers have the server's usual form.
    kept = ("200", "400", *error_responses(431, *OF_EVERY_BODY))
    responses = described["responses"]
    described["responses"] = {status: response for status, response in responses.items() if status in kept}
    return described


def _health() -> OperationTable:
    table: dict[tuple[str, str], Operation] = {}
    healthy = response_object("Yes.", headers=_STATUS)
    status = response_object("The status.", _MESSAGE, _STATUS)
    command = query("cmd", "`start` or `stop`.", {"type": "string", "enum": ["start", "stop"]})
    for path, summary in (
        ("/api/health", "An error: use `live` or `ready`"),
        ("/api/health/live", "Is the server live?"),
        ("/api/health/ready", "Is the server ready?"),
    ):
        table[("GET", path)] = _operation(summary, healthy)
    for path in ("/api/status", "/api/status/"):
        table[("GET", path)] = _operation("Status of the server and its models", status, parameters=[_FORMAT])
    table[("GET", "/api/status/{model}")] = _operation("Status of one model", status, parameters=[_FORMAT])
    for path in ("/api/profile", "/api/profile/"):
        table[("GET", path)] = _operation("Start or stop profiling", healthy, parameters=[command])
    return table


def _inference() -> OperationTable:
    example = 'batch_size: 1 input { name: "INPUT0" byte_size: 64 } output { name: "OUTPUT0" cls { count: 3 } }'
    request_header = header("NV-InferRequest", f"An InferRequestHeader as text: `{example}`")
    success = response_object(
        "The raw outputs, then the InferResponseHeader.", {BINARY: {"schema": {"description": "Bytes."}}}, _RESPONSE
    )
    infer = _operation(
        "Run inference",
        success,
        "The body has the inputs in the order of the header. A header with `byte_size` is a request of 0.7 to 0.10; one "
        "with `dims`, or neither, is one of 0.11 and later.",
        body={BINARY: {"schema": {"description": "The tensors, one after the other."}}},
        parameters=[request_header, _FORMAT],
    )
    infer["responses"]["400"] = response_object("Error; NV-Status has the reason.", headers=_RESPONSE)
    return {("POST", "/api/infer/{model}"): infer, ("POST", "/api/infer/{model}/{version}"): infer}


def _control() -> OperationTable:
    done = response_object("Done.", headers=_STATUS)
    regions = response_object("The regions.", _MESSAGE, _STATUS)
    note = "Needs a server with `--allow-client-shm`."
    table: dict[tuple[str, str], Operation] = {
        ("POST", "/api/modelcontrol/load/{model}"): _operation("Load a model", done),
        ("POST", "/api/modelcontrol/unload/{model}"): _operation("Unload a model", done),
        ("GET", "/api/repository/index"): _operation(
            "List the models", response_object("The names of the models.", _MESSAGE, _STATUS), parameters=[_FORMAT]
        ),
        ("POST", f"{_SHM}/cudaregister/{{name}}/{{device}}/{{size}}"): _operation(
            "Register a CUDA region", done, note, body={BINARY: {"schema": {"description": "The handle."}}}
        ),
        ("POST", f"{_SHM}/unregister/{{name}}"): _operation("Unregister a region", done, note),
        ("POST", f"{_SHM}/unregisterall"): _operation("Unregister all regions", done, note),
        ("GET", f"{_SHM}/status"): _operation("List the regions", regions, note, parameters=[_FORMAT]),
        ("POST", f"{_SHM}/status"): _operation("List the regions", regions, note, parameters=[_FORMAT]),
    }
    # Keys usually begin with a slash, which clients put into the path unescaped.
    for slash in ("/", "//"):
        path = f"{_SHM}/register/{{name}}{slash}{{key}}/{{offset}}/{{size}}"
        table[("POST", path)] = _operation("Register a POSIX region", done, note)
    return table
