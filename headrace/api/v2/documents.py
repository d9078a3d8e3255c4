# SPDX-License-Identifier: Apache-2.0
"""JSON documents of the v2 protocol, read and written. Called by the handlers, and by `json_codec` for unusual ones."""

from __future__ import annotations

import json
from typing import Any

import orjson

from headrace.core.errors import InvalidArgument
from headrace.net.http.exchange import Buffer, Exchange
from headrace.net.http.heads import OK_JSON


def answer_json(exchange: Exchange, value: Any) -> None:
    """Answer 200 with a JSON document."""
    exchange.respond(OK_JSON, orjson.dumps(value))


def read_document(body: Buffer) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty one."""
    if not len(body):
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        document = parsed_leniently(body, error)
    if not isinstance(document, dict):
        raise InvalidArgument("the request must be a JSON object")
    return document


def parsed_leniently(text: Buffer, error: orjson.JSONDecodeError) -> Any:
    """A document that orjson refused: it may be only because of a NaN, which the standard library knows."""
    content = bytes(text)
    if b"NaN" in content or b"Infinity" in content:
        try:
            document = json.loads(content)
            orjson.dumps(document)  # else there is text in it that is none, or a number that nobody can write
        except (ValueError, TypeError, RecursionError):
            pass
        else:
            return document
    raise InvalidArgument(f"failed to parse the request JSON: {error}") from None
