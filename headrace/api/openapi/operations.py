# SPDX-License-Identifier: Apache-2.0
"""Helpers to describe routes as OpenAPI operations, with the common path parameters and errors.

A table is plain data, a mapping from (method, path) to an OpenAPI operation. The names of its placeholders need not be
those of the route.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.core.names import NAME_PATTERN

Schema = dict[str, Any]
Operation = dict[str, Any]
OperationTable = Mapping[tuple[str, str], Operation]

JSON = "application/json"
BINARY = "application/octet-stream"
TEXT = "text/plain"
EVENTS = "text/event-stream"

PLACEHOLDER = re.compile(r"\{([a-z0-9_]*)\}")

NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_NUMBER: Schema = {"type": "string", "pattern": "^[0-9]{1,18}$"}

PATH_PARAMETERS: dict[str, tuple[str, Schema]] = {
    "model": ("The model's name.", NAME),
    "version": ("The model's version, an integer.", _NUMBER),
    "name": ("The region's name, chosen by the client.", {"type": "string", "minLength": 1, "maxLength": 256}),
    "key": ("The name of the shared memory object, as given to `shm_open`.", {"type": "string", "minLength": 1}),
    "offset": ("The offset of the region in the object, in bytes.", _NUMBER),
    "size": ("The size of the region in bytes.", _NUMBER),
    "device": ("The number of the GPU.", _NUMBER),
}
"""Description and schema of a placeholder, by its name. Any other placeholder is a string without a slash."""

ERRORS: dict[int, str] = {
    400: "The request is wrong; the message says what to change.",
    403: "The server restricts this API, and the required header was not sent.",
    404: "No such model, version or region.",
    405: "The path does not have this method; `allow` lists its methods.",
    408: "The body did not arrive in time.",
    409: "The request conflicts with the state of the server, or the name is taken.",
    413: "The body is larger than the server accepts, before or after decompression.",
    429: "A queue is full: try again later, after `retry-after` seconds if given.",
    431: "The request head is larger, or has more fields, than the server accepts.",
    499: "The request was cancelled.",
    500: "An error in the server or in a model. The log has the details under the `x-request-id` of the response.",
    501: "The server or the model does not support the request.",
    503: "The model is loading or failed to load, a queue is full, or the server is stopping.",
    504: "The timeout of the request has passed.",
}
"""The description of each error status."""

OF_EVERY_ROUTE = (400, 431, 500, 503)
OF_EVERY_BODY = (408, 413)


def ref(name: str) -> Schema:
    """Return a reference to a schema of `components`."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_content(schema: Schema, **more: Any) -> dict[str, Any]:
    """Return the content of a JSON body; `more` may be `example` or `examples`."""
    return {JSON: {"schema": schema, **more}}


def response_object(
    text: str, content: Mapping[str, Any] | None = None, headers: Mapping[str, Any] | None = None
) -> Schema:
    """Return a response object; without content, the response is empty."""
    response: Schema = {"description": text}
    if headers:
        response["headers"] = dict(headers)
    if content:
        response["content"] = dict(content)
    return response


def error_responses(*statuses: int) -> dict[str, Schema]:
    """Return references to the error responses of these statuses."""
    return {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted(statuses)}


def header(name: str, text: str, schema: Schema | None = None) -> Schema:
    """Return a parameter in a request header field."""
    return {"name": name, "in": "header", "description": text, "schema": schema or {"type": "string"}}


def query(name: str, text: str, schema: Schema | None = None) -> Schema:
    """Return a parameter in the query."""
    return {"name": name, "in": "query", "description": text, "schema": schema or {"type": "string"}}


def operation(
    tag: str,
    summary: str,
    description: str = "",
    *,
    answers: Mapping[str, Schema],
    failing: Iterable[int] = (),
    body: Mapping[str, Any] | None = None,
    body_needed: bool = True,
    parameters: Iterable[Schema] = (),
) -> Operation:
    """Return one operation. `failing` are the error statuses besides those of every route."""
    statuses = {*OF_EVERY_ROUTE, *failing, *(OF_EVERY_BODY if body else ())}
    operation: Operation = {"tags": [tag], "summary": summary}
    if description:
        operation["description"] = description
    if parameters:
        operation["parameters"] = list(parameters)
    if body:
        operation["requestBody"] = {"required": body_needed, "content": dict(body)}
    failures = error_responses(*(status for status in statuses if str(status) not in answers))
    operation["responses"] = {**answers, **failures}
    return operation


def path_parameters(path: str) -> list[Schema]:
    """Return the parameters of a path with named placeholders."""
    parameters = []
    for name in PLACEHOLDER.findall(path):
        text, schema = PATH_PARAMETERS.get(name, ("", {"type": "string", "minLength": 1}))
        parameters.append({"name": name, "in": "path", "required": True, "description": text, "schema": schema})
    return parameters


def strip_names(path: str) -> str:
    """Remove the names of the placeholders of a path."""
    return PLACEHOLDER.sub("{}", path)


def add_names(path: str, names: list[str]) -> str:
    """Name the placeholders of a path; after the last name they are `p1`, `p2`, ..."""
    remaining = iter(names)
    number = 0

    def name(_: re.Match[str]) -> str:
        nonlocal number
        number += 1
        return f"{{{next(remaining, f'p{number}')}}}"

    return PLACEHOLDER.sub(name, path)
