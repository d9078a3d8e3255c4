# SPDX-License-Identifier: Apache-2.0
"""OpenAPI operations of `/predict` and of the health routes."""

from __future__ import annotations

from typing import Any

from headrace.api.openapi.operations import (
    EVENTS,
    JSON,
    Operation,
    OperationTable,
    Schema,
    header,
    json_content,
    operation,
    response_object,
)
from headrace.api.openapi.v2_routes import HEALTH, INFER_FAILURES

PREDICT = "Predict"

_VALUES: Schema = {
    "description": "Values without the batch dimension: a list, nested lists, or an object with lists by input name.",
    "anyOf": [{"type": "array", "minItems": 1}, {"type": "object"}],
}
_VERSION: Schema = {
    "description": "A label such as `v1.0.0`, a number, or `latest`.",
    "type": ["string", "integer", "null"],
}
_REQUEST: Schema = {
    "type": "object",
    "properties": {
        "inputs": _VALUES,
        "batch": {"type": "array", "minItems": 1, "items": _VALUES, "description": "Several predictions at once."},
        "model_version": _VERSION,
    },
    "oneOf": [{"required": ["inputs"]}, {"required": ["batch"]}],
}
_RESPONSE: Schema = {
    "type": "object",
    "required": ["predictions", "model_version", "latency_ms"],
    "properties": {
        "predictions": {
            "description": "A list; an object of lists for several outputs; one per row for a batch.",
            "anyOf": [{"type": "array"}, {"type": "object"}],
        },
        "model_version": {"type": "string"},
        "latency_ms": {"type": "number", "minimum": 0},
    },
    "example": {"predictions": [0.5, 0.3], "model_version": "v1.0.0", "latency_ms": 5.2},
}
_EXAMPLES = {
    "one": {"summary": "One prediction", "value": {"inputs": [1.0, 2.0, 3.0, 4.0]}},
    "batch": {"summary": "Several", "value": {"batch": [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]}},
}
_FRESH = header("Cache-Control", "`no-cache` or `no-store`: do not answer from the response cache.")
_STATUS: Schema = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}


def predict_table() -> OperationTable:
    """Return the operations by (method, path)."""
    table: dict[tuple[str, str], Operation] = {}
    for path, which in (("/predict", "the default model"), ("/predict/{model}", "a model")):
        table[("POST", path)] = _predict(which)
        table[("GET", path)] = operation(PREDICT, "Not allowed", "Use POST.", answers={}, failing=(404, 405))
        table[("GET", f"{path}/stream")] = _stream(which)
    return {**table, **_health()}


def _predict(which: str) -> Operation:
    content: dict[str, Any] = {
        **json_content(_RESPONSE),
        EVENTS: {"schema": {"description": "For a decoupled model, one event per response."}},
    }
    return operation(
        PREDICT,
        f"Predict with {which}",
        "Numbers in, numbers out.",
        body={JSON: {"schema": _REQUEST, "examples": _EXAMPLES}},
        parameters=[_FRESH],
        failing=INFER_FAILURES,
        answers={"200": response_object("The predictions.", content)},
    )


def _stream(which: str) -> Operation:
    error = {JSON: {"schema": {"type": "object"}}}
    return operation(
        PREDICT,
        f"Predict with {which} over a WebSocket",
        "Each message is a request like that of `POST /predict` and gets one response message, which repeats its `id`.",
        answers={
            "101": response_object("The WebSocket is open."),
            "426": response_object("Use a WebSocket.", error),
        },
        failing=(403, 404, 405),
    )


def _health() -> OperationTable:
    no = response_object("No; `error` has the reason.", json_content(_STATUS))
    summaries = {
        "/livez": "Is the process live?",
        "/ready": "Is the server ready?",
        "/readyz": "Is the server ready?",
        "/healthz": "Is the model of /predict loaded, and which version?",
        "/health": "State of the server and its models",
    }
    return {
        ("GET", path): operation(
            HEALTH, text, answers={"200": response_object("Yes.", json_content(_STATUS)), "503": no} if path != "/livez"
            else {"200": response_object("Yes.", json_content(_STATUS))},
        )
        for path, text in summaries.items()
    }  # fmt: skip
