# SPDX-License-Identifier: Apache-2.0
"""What is said of the routes of `/predict`, and of those that tell whether the server is well."""

from __future__ import annotations

from typing import Any

from headrace.api.openapi.describing import (
    EVENTS,
    JSON,
    Operation,
    Schema,
    Table,
    answer,
    header,
    json_of,
    operation,
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
            "description": "A list; an object of lists where the model has several outputs; of a batch, one for each row.",
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
_FRESH = header("Cache-Control", "`no-cache` or `no-store`: an answer that was kept will not do.")
_STATUS: Schema = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}


def predict_table() -> Table:
    """By (method, path)."""
    table: dict[tuple[str, str], Operation] = {}
    for path, which in (("/predict", "the default model"), ("/predict/{model}", "a model")):
        table[("POST", path)] = _predict(which)
        table[("GET", path)] = operation(PREDICT, "Not like that", "Use POST.", answers={}, failing=(404, 405))
        table[("GET", f"{path}/stream")] = _stream(which)
    return {**table, **_health()}


def _predict(which: str) -> Operation:
    content: dict[str, Any] = {
        **json_of(_RESPONSE),
        EVENTS: {"schema": {"description": "Of a model that may answer several times, each answer as an event."}},
    }
    return operation(
        PREDICT,
        f"Ask {which}",
        "Numbers in, numbers out.",
        body={JSON: {"schema": _REQUEST, "examples": _EXAMPLES}},
        parameters=[_FRESH],
        failing=INFER_FAILURES,
        answers={"200": answer("What the model predicts.", content)},
    )


def _stream(which: str) -> Operation:
    told = {JSON: {"schema": {"type": "object"}}}
    return operation(
        PREDICT,
        f"Ask {which} over a WebSocket",
        "Each message is as a request of `POST /predict` and is answered by a message; an `id` in it comes back.",
        answers={"101": answer("The WebSocket is open."), "426": answer("A WebSocket is wanted here.", told)},
        failing=(403, 404, 405),
    )


def _health() -> Table:
    no = answer("No; `error` says why.", json_of(_STATUS))
    asked = {
        "/livez": "Does the process answer?",
        "/ready": "Would requests be served?",
        "/readyz": "Would requests be served?",
        "/healthz": "Is the model of /predict loaded, and which version?",
        "/health": "What is there, and how is it?",
    }
    return {
        ("GET", path): operation(
            HEALTH, text, answers={"200": answer("Yes.", json_of(_STATUS)), "503": no} if path != "/livez"
            else {"200": answer("Yes.", json_of(_STATUS))},
        )
        for path, text in asked.items()
    }  # fmt: skip
