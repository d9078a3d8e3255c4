# SPDX-License-Identifier: Apache-2.0
"""What the OpenAPI document says of `/console`. Plain data, given to `api.openapi` by the composition root."""

from __future__ import annotations

from typing import Any

_TAG = "Console"
_PAGE = {"text/html": {"schema": {"type": "string"}}}
_ANY = {"*/*": {"schema": {"type": "string"}}}
_NUMBERS = {"application/json": {"schema": {"type": "object"}}}


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
