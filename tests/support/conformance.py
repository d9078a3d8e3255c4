# SPDX-License-Identifier: Apache-2.0
"""Is an answer one that an OpenAPI document describes? The checks of schemathesis, for requests of the test's own.

for method, path, operation in operations(document):
    answer = ...
    assert disagreement(document, operation, answer.status, answer.content_type, answer.body) == ""
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs

ALLOWED_SERVER_ERRORS = (501, 503)
"""Not offered, and not now: no accidents."""


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and description of every operation."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def disagreement(
    document: dict[str, Any], operation: dict[str, Any], status: int, content_type: str, body: bytes
) -> str:
    """What the document does not say of an answer; "" if it describes all of it."""
    if status >= 500 and status not in ALLOWED_SERVER_ERRORS:
        return f"a server error: {status} {body[:200]!r}"
    responses = operation["responses"]
    response = responses.get(str(status)) or responses.get(f"{status // 100}XX") or responses.get("default")
    if response is None:
        return f"status {status} is not among {sorted(responses)}: {body[:200]!r}"
    described = _resolve(document, response).get("content")
    if not described or not body:
        return ""
    media_type = content_type.partition(";")[0].strip()
    if media_type not in described:
        return f"{media_type} is not among {sorted(described)} of status {status}"
    schema = described[media_type].get("schema")
    if schema is None or media_type != "application/json":
        return ""
    checker = jsonschema_rs.validator_for({"components": document.get("components", {}), **schema})
    errors = [error.message for error in checker.iter_errors(json.loads(body))]
    return f"status {status}: {errors[0]}" if errors else ""


def _resolve(document: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in value:
        return value
    place: Any = document
    for key in value["$ref"].removeprefix("#/").split("/"):
        place = place[key]
    return _resolve(document, place)
