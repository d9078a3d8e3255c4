# SPDX-License-Identifier: Apache-2.0
"""What is said of the routes under `/api`: TensorRT Inference Server 0.7 to 1.x, and of those that are not a protocol's.

Everything under `/api` that fails is 400, with an empty body: the field NV-Status tells why.
"""

from __future__ import annotations

from typing import Any

from headrace.api.openapi.describing import (
    BINARY,
    JSON,
    OF_EVERY_BODY,
    TEXT,
    Operation,
    Schema,
    Table,
    answer,
    errors,
    header,
    operation,
    query,
)

V1 = "TensorRT Inference Server"
METRICS = "Metrics"
DOCUMENT = "This document"

_STATUS = {
    "NV-Status": {
        "description": 'A RequestStatus as text: `code: SUCCESS server_id: "..." request_id: 1`, and `msg` where it failed.',
        "schema": {"type": "string"},
    }
}
_RESPONSE = {
    "NV-InferResponse": {"description": "An InferResponseHeader as text.", "schema": {"type": "string"}},
    **_STATUS,
}
_FORMAT = query("format", "`binary`, `json`, or text.", {"type": "string", "enum": ["text", "binary", "json"]})
_NO = {"400": answer("No; NV-Status tells why.", headers=_STATUS)}
_MESSAGE: dict[str, Any] = {
    TEXT: {"schema": {"type": "string"}},
    BINARY: {"schema": {"description": "A protobuf message."}},
    JSON: {"schema": {"type": "object"}},
}
_SHM = "/api/sharedmemorycontrol"


def v1_table() -> Table:
    """By (method, path)."""
    return {**_questions(), **_inference(), **_control()}


def other_table() -> Table:
    """Metrics, this document and its page."""
    page = {"text/html": {"schema": {"type": "string"}}}
    document = {
        JSON: {"schema": {"type": "object", "required": ["openapi", "info", "paths"]}},
    }
    model = query("model", "Describe this model, and no other.", {"type": "string", "maxLength": 255})
    known = header("If-None-Match", "The `etag` of the document that you have.")
    return {
        ("GET", "/metrics"): operation(
            METRICS, "Counters, gauges and histograms", "In the text format of Prometheus, or in that of OpenMetrics.",
            answers={"200": answer("All of them.", {TEXT: {"schema": {"type": "string"}}})}, failing=(403,),
        ),
        ("GET", "/openapi.json"): operation(
            DOCUMENT, "This document", parameters=[model, known], failing=(404,),
            answers={"200": answer("OpenAPI 3.1.", document), "304": answer("It is as you have it.")},
        ),
        ("GET", "/docs"): operation(DOCUMENT, "A page that shows it", answers={"200": answer("A page.", page)}),
    }  # fmt: skip


def _asked(summary: str, good: Schema, description: str = "", **more: Any) -> Operation:
    """An operation of this protocol: what fails is 400 with NV-Status."""
    made = operation(V1, summary, description, answers={"200": good, **_NO}, **more)
    # Only what happens before the protocol is reached is told in the server's own way.
    kept = ("200", "400", *errors(431, *OF_EVERY_BODY))
    made["responses"] = {status: each for status, each in made["responses"].items() if status in kept}
    return made


def _questions() -> Table:
    table: dict[tuple[str, str], Operation] = {}
    healthy = answer("Yes.", headers=_STATUS)
    told = answer("The status.", _MESSAGE, _STATUS)
    command = query("cmd", "`start` or `stop`.", {"type": "string", "enum": ["start", "stop"]})
    for path, summary in (
        ("/api/health", "No question: needs `live` or `ready`"),
        ("/api/health/live", "Does the server answer?"),
        ("/api/health/ready", "Can all models be asked?"),
    ):
        table[("GET", path)] = _asked(summary, healthy)
    for path in ("/api/status", "/api/status/"):
        table[("GET", path)] = _asked("What are the server and its models doing?", told, parameters=[_FORMAT])
    table[("GET", "/api/status/{model}")] = _asked("What is this model doing?", told, parameters=[_FORMAT])
    for path in ("/api/profile", "/api/profile/"):
        table[("GET", path)] = _asked("Begin or end profiling", healthy, parameters=[command])
    return table


def _inference() -> Table:
    example = 'batch_size: 1 input { name: "INPUT0" byte_size: 64 } output { name: "OUTPUT0" cls { count: 3 } }'
    described = header("NV-InferRequest", f"An InferRequestHeader as text: `{example}`")
    good = answer(
        "The raw outputs, then the InferResponseHeader.", {BINARY: {"schema": {"description": "Bytes."}}}, _RESPONSE
    )
    infer = _asked(
        "Compute one request",
        good,
        "The body has the inputs in the order of the header. With `byte_size` it is a request of 0.7 to 0.10; with "
        "`dims`, or neither, one of 0.11 and later.",
        body={BINARY: {"schema": {"description": "The tensors, one after the other."}}},
        parameters=[described, _FORMAT],
    )
    infer["responses"]["400"] = answer("NV-Status tells why.", headers=_RESPONSE)
    return {("POST", "/api/infer/{model}"): infer, ("POST", "/api/infer/{model}/{version}"): infer}


def _control() -> Table:
    done = answer("Done.", headers=_STATUS)
    regions = answer("The regions.", _MESSAGE, _STATUS)
    off = "Clients may do so only on a server with `--allow-client-shm`."
    table: dict[tuple[str, str], Operation] = {
        ("POST", "/api/modelcontrol/load/{model}"): _asked("Load a model", done),
        ("POST", "/api/modelcontrol/unload/{model}"): _asked("Unload a model", done),
        ("GET", "/api/repository/index"): _asked(
            "Which models are there?", answer("Their names.", _MESSAGE, _STATUS), parameters=[_FORMAT]
        ),
        ("POST", f"{_SHM}/cudaregister/{{name}}/{{device}}/{{size}}"): _asked(
            "Register a CUDA region", done, off, body={BINARY: {"schema": {"description": "The handle."}}}
        ),
        ("POST", f"{_SHM}/unregister/{{name}}"): _asked("Let a region go", done, off),
        ("POST", f"{_SHM}/unregisterall"): _asked("Let all regions go", done, off),
        ("GET", f"{_SHM}/status"): _asked("Which regions are registered?", regions, off, parameters=[_FORMAT]),
        ("POST", f"{_SHM}/status"): _asked("Which regions are registered?", regions, off, parameters=[_FORMAT]),
    }
    # Keys mostly begin with a slash, which clients put into the path as it is.
    for slash in ("/", "//"):
        path = f"{_SHM}/register/{{name}}{slash}{{key}}/{{offset}}/{{size}}"
        table[("POST", path)] = _asked("Register a POSIX region", done, off)
    return table
