# SPDX-License-Identifier: Apache-2.0
"""What the OpenAPI document says of `/console`. Plain data, given to `api.openapi` by the composition root."""

from __future__ import annotations

from typing import Any

from headrace.engine.scheduling.watching import KEPT

_TAG = "Console"
_PAGE = {"text/html": {"schema": {"type": "string"}}}
_ANY = {"*/*": {"schema": {"type": "string"}}}
_NUMBERS = {"application/json": {"schema": {"type": "object"}}}
_WISH = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": {"type": "string"},
        "requests": {"type": "integer", "minimum": 0, "maximum": KEPT, "default": 20},
        "id": {"type": "string"},
    },
}


def console_table() -> dict[tuple[str, str], dict[str, Any]]:
    """By (method, path)."""
    return {
        ("GET", "/console"): _operation("A page for who looks on", {"200": ("The page.", _PAGE)}),
        ("GET", "/console/"): _operation(
            "The same with a slash too many", {"200": ("The page.", _PAGE), "308": ("It is at /console.", None)}
        ),
        ("GET", "/console/assets/{digest}/{file}"): _operation(
            "A file of the page", {"200": ("The file, as it will always be.", _ANY)}, 404
        ),
        ("GET", "/console/api/live"): _operation(
            "What the server does right now", {"200": ("Counts since the start, which pages make rates of.", _NUMBERS)}
        ),
        ("GET", "/console/api/requests"): _operation(
            "Timelines of requests that were watched", {"200": ("What is watched, and what was seen.", _NUMBERS)}
        ),
        ("POST", "/console/api/requests"): {
            **_operation("Watch the next requests of a model", {"200": ("The same.", _NUMBERS)}, 404, 429),
            "requestBody": {"required": True, "content": {"application/json": {"schema": _WISH}}},
        },
    }


def _operation(summary: str, answers: dict[str, tuple[str, Any]], *failing: int) -> dict[str, Any]:
    told = {
        status: {"description": text, **({"content": content} if content else {})}
        for status, (text, content) in answers.items()
    }
    errors = {
        str(status): {"$ref": f"#/components/responses/Error{status}"} for status in (400, 431, 500, 503, *failing)
    }
    return {"tags": [_TAG], "summary": summary, "responses": {**told, **errors}}
