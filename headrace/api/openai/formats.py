# SPDX-License-Identifier: Apache-2.0
"""What the text of an answer must be: `response_format`, and the names that other servers have for the same wish.

Called by `chat` and `completions`. Whether a schema can be followed is for the backend to say.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from headrace.api.openai.fields import Fields, check_depth
from headrace.core.generation import OutputFormat

_SCHEMA_BYTES = 256 * 1024
_REGEX_CHARACTERS = 8192
_CHOICES = 256
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}


def read_format(fields: Fields) -> OutputFormat | None:
    """None for any text."""
    wanted: list[OutputFormat] = []
    given = fields.object("response_format")
    if given is not None:
        of_response = _response_format(Fields(given, fields.param("response_format")))
        wanted += [of_response] if of_response is not None else []
    for name, kind in _GUIDED.items():
        if fields.get(name) is not None:
            wanted.append(_guided(fields, name, kind))
    structured = fields.object("structured_outputs")
    if structured is not None:
        inner = Fields(structured, fields.param("structured_outputs"))
        inner.refuse({"grammar": "grammars are not supported: use 'json' or 'regex'"})
        wanted += [_guided(inner, name, name) for name in ("json", "regex", "choice") if inner.get(name) is not None]
    if len(wanted) > 1:
        raise fields.refused("response_format", "the request says more than once what the text must be")
    return wanted[0] if wanted else None


def format_field(fields: Fields) -> str:
    """The member that says what the text must be, of a request that has one."""
    given = (name for name in (*_GUIDED, "structured_outputs") if fields.get(name) is not None)
    return next(given, "response_format")


def _response_format(fields: Fields) -> OutputFormat | None:
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise fields.refused("type", "must be 'text', 'json_object' or 'json_schema'")
    holder = fields
    if kind == "json_schema" and fields.get("schema") is None:
        holder = Fields(fields.object("json_schema") or {}, fields.param("json_schema"))
    schema = holder.object("schema")
    if schema is None:
        if kind == "json_schema":
            raise fields.refused("json_schema.schema", "is missing: give the JSON schema of the answer")
        return OutputFormat("json_object")
    return OutputFormat("json_schema", _checked(holder, "schema", schema))


def _guided(fields: Fields, name: str, kind: str) -> OutputFormat:
    value = fields.get(name)
    if kind == "json":
        schema = _parsed(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise fields.refused(name, "must be a JSON schema: an object, or its text")
        return OutputFormat("json_schema", _checked(fields, name, schema))
    if kind == "regex":
        return OutputFormat("regex", regex=fields.text(name, _REGEX_CHARACTERS) or "")
    choices = fields.list(name, _CHOICES)
    if not choices or not all(isinstance(each, str) and each for each in choices):
        raise fields.refused(name, "must be a list of texts")
    pattern = "|".join(re.escape(each) for each in choices)
    if len(pattern) > _REGEX_CHARACTERS:
        raise fields.refused(name, f"has more than {_REGEX_CHARACTERS} characters in all")
    return OutputFormat("regex", regex=f"({pattern})")


def _checked(fields: Fields, name: str, schema: Any) -> Any:
    check_depth(fields.param(name), schema)
    if len(orjson.dumps(schema)) > _SCHEMA_BYTES:
        raise fields.refused(name, f"is larger than {_SCHEMA_BYTES} bytes")
    return schema


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
