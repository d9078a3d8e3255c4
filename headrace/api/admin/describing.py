# SPDX-License-Identifier: Apache-2.0
"""What the OpenAPI document says of `/admin`. Plain data, given to `api.openapi` by the composition root."""

from __future__ import annotations

from typing import Any

_TAG = "Traffic"
_JSON = "application/json"
_OBJECT = {"type": "object"}
_SHARES: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}}
_SPLIT: dict[str, Any] = {
    "type": "object",
    "required": ["weights"],
    "additionalProperties": False,
    "properties": {
        "weights": {**_SHARES, "minProperties": 1, "description": "Shares that sum to 1, or percentages, by version."},
        "sticky": {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: {"type": "string"} for name in ("header", "cookie", "field")},
        },
        "shadows": {**_SHARES, "description": "Shares of the requests, from 0 to 1, that are copied to a version."},
        "tolerance": {"type": "number", "minimum": 0},
        "baseline": {"type": "string"},
        "rollback": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "error_rate": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
                "p99_ms": {"type": "number", "minimum": 0},
                "least_requests": {"type": "integer", "minimum": 1},
                "window_seconds": {"type": "number", "exclusiveMinimum": 0},
            },
        },
    },
    "example": {"weights": {"1": 0.9, "2": 0.1}, "sticky": {"header": "x-user-id"}, "rollback": {"error_rate": 0.05}},
}
_ROLLBACK: dict[str, Any] = {
    "type": "object",
    "required": ["version"],
    "additionalProperties": False,
    "properties": {"version": {"type": "string"}, "reason": {"type": "string"}},
    "example": {"version": "2", "reason": "complaints"},
}


def admin_table() -> dict[tuple[str, str], dict[str, Any]]:
    """By (method, path)."""
    model = "/admin/traffic/{model}"
    return {
        ("GET", "/admin/traffic"): _operation("How versions share the traffic of all models"),
        ("GET", model): _operation("How versions share a model's traffic", 404),
        ("PUT", model): _operation("Let versions share a model's traffic", 404, body=_SPLIT),
        ("POST", model): _operation("The same as PUT", 404, body=_SPLIT),
        ("DELETE", model): _operation("Give all traffic to the newest version again", 404),
        ("GET", f"{model}/report"): _operation("What the versions did, and whether they differ", 404),
        ("POST", f"{model}/rollback"): _operation("Take a version's traffic away", 404, 409, body=_ROLLBACK),
    }


def _operation(summary: str, *failing: int, body: dict[str, Any] | None = None) -> dict[str, Any]:
    statuses = sorted({400, 431, 500, 503, *failing, *((408, 413) if body else ())})
    made: dict[str, Any] = {"tags": [_TAG], "summary": summary}
    if body is not None:
        made["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    made["responses"] = {
        "200": {"description": "Done, and how it is now.", "content": {_JSON: {"schema": _OBJECT}}},
        **{str(status): {"$ref": f"#/components/responses/Error{status}"} for status in statuses},
    }
    return made
