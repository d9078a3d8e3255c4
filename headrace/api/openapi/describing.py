# SPDX-License-Identifier: Apache-2.0
"""The words for a description of a route, and what is said of every path parameter and of every error.

Used by the tables of this room. A table is plain data, a mapping from (method, path) to an OpenAPI operation, so another
room can write one for its own routes without this module. The names of placeholders need not be those of the route.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.core.names import NAME_PATTERN

Schema = dict[str, Any]
Operation = dict[str, Any]
Table = Mapping[tuple[str, str], Operation]

JSON = "application/json"
BINARY = "application/octet-stream"
TEXT = "text/plain"
EVENTS = "text/event-stream"

PLACEHOLDER = re.compile(r"\{([a-z0-9_]*)\}")

NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_NUMBER: Schema = {"type": "string", "pattern": "^[0-9]{1,18}$"}

PATH_PARAMETERS: dict[str, tuple[str, Schema]] = {
    "model": ("The model's name.", NAME),
    "version": ("The model's version, a whole number.", _NUMBER),
    "name": ("The region's name, chosen by the client.", {"type": "string", "minLength": 1, "maxLength": 256}),
    "key": ("The name of the shared memory object, as given to `shm_open`.", {"type": "string", "minLength": 1}),
    "offset": ("Where in the object the region begins, in bytes.", _NUMBER),
    "size": ("How many bytes the region has.", _NUMBER),
    "device": ("The number of the GPU.", _NUMBER),
}
"""What a placeholder means, by its name. Any other is text without a slash."""

ERRORS: dict[int, str] = {
    400: "The request is wrong; the text says what to change.",
    403: "The server restricts this part of its API, and the header that opens it was not sent.",
    404: "No such model, version or region.",
    405: "The path exists, but not with this method; `allow` lists those it has.",
    408: "The body did not arrive in time.",
    409: "The request would be right in another state of the server, or the name is taken.",
    413: "The body is larger than the server takes, before or after inflation.",
    429: "A queue is full: try again later, after `retry-after` seconds where it is given.",
    431: "The head is larger, or has more fields, than the server takes.",
    499: "The request was cancelled.",
    500: "A fault of the server or of a model. The log has the details under the `x-request-id` of the answer.",
    501: "The server or the model does not do that.",
    503: "Not now: the model is loading or failed to load, a queue is full, or the server is stopping.",
    504: "The time that the request allows itself is over.",
}
"""What a status means, wherever it is answered with a text."""

OF_EVERY_ROUTE = (400, 431, 500, 503)
OF_EVERY_BODY = (408, 413)


def ref(name: str) -> Schema:
    """A schema of `components`."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_of(schema: Schema, **more: Any) -> dict[str, Any]:
    """The content of a JSON body; `more` may be `example` or `examples`."""
    return {JSON: {"schema": schema, **more}}


def answer(text: str, content: Mapping[str, Any] | None = None, headers: Mapping[str, Any] | None = None) -> Schema:
    """A response; without content, an empty one."""
    made: Schema = {"description": text}
    if headers:
        made["headers"] = dict(headers)
    if content:
        made["content"] = dict(content)
    return made


def errors(*statuses: int) -> dict[str, Schema]:
    """Responses that are errors with a text."""
    return {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted(statuses)}


def header(name: str, text: str, schema: Schema | None = None) -> Schema:
    """A field of the request's head that a client may send."""
    return {"name": name, "in": "header", "description": text, "schema": schema or {"type": "string"}}


def query(name: str, text: str, schema: Schema | None = None) -> Schema:
    """A value of the query that a client may give."""
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
    """One operation. `failing` are the statuses it may have beside those of every route."""
    statuses = {*OF_EVERY_ROUTE, *failing, *(OF_EVERY_BODY if body else ())}
    made: Operation = {"tags": [tag], "summary": summary}
    if description:
        made["description"] = description
    if parameters:
        made["parameters"] = list(parameters)
    if body:
        made["requestBody"] = {"required": body_needed, "content": dict(body)}
    made["responses"] = {**answers, **errors(*(each for each in statuses if str(each) not in answers))}
    return made


def path_parameters(path: str) -> list[Schema]:
    """The parameters of a path with named placeholders."""
    made = []
    for name in PLACEHOLDER.findall(path):
        text, schema = PATH_PARAMETERS.get(name, ("", {"type": "string", "minLength": 1}))
        made.append({"name": name, "in": "path", "required": True, "description": text, "schema": schema})
    return made


def anonymous(path: str) -> str:
    """A path without the names of its placeholders: what two writers of one path agree on."""
    return PLACEHOLDER.sub("{}", path)


def named(path: str, names: list[str]) -> str:
    """The path with names for its placeholders; those that run out are `p1`, `p2`, ..."""
    given = iter(names)
    number = 0

    def name(_: re.Match[str]) -> str:
        nonlocal number
        number += 1
        return f"{{{next(given, f'p{number}')}}}"

    return PLACEHOLDER.sub(name, path)
