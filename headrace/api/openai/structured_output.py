# SPDX-License-Identifier: Apache-2.0
"""Structured output: `response_format`, and vLLM's `guided_*` and `structured_outputs`.

The backend decides whether it supports a schema.
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


def parse_output_format(fields: Fields) -> OutputFormat | None:
    """Return the output format of a request; None for any text."""
    formats: list[OutputFormat] = []
    value = fields.object("response_format")
    if value is not None:
        response_format = _response_format(Fields(value, fields.param("response_format")))
        formats += [response_format] if response_format is not None else []
    for name, kind in _GUIDED.items():
        if fields.get(name) is not None:
            formats.append(_guided(fields, name, kind))
    structured = fields.object("structured_outputs")
    if structured is not None:
        inner = Fields(structured, fields.param("structured_outputs"))
        inner.reject({"grammar": "grammars are not supported: use 'json' or 'regex'"})
        formats += [_guided(inner, name, name) for name in ("json", "regex", "choice") if inner.get(name) is not None]
    if len(formats) > 1:
        raise fields.error("response_format", "the request has more than one output format")
    return formats[0] if formats else None


def format_field(fields: Fields) -> str:
    """Return the member of a request that has the output format."""
    names = (name for name in (*_GUIDED, "structured_outputs") if fields.get(name) is not None)
    return next(names, "response_format")


def _response_format(fields: Fields) -> OutputFormat | None:
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise fields.error("type", "must be 'text', 'json_object' or 'json_schema'")
    holder = fields
    if kind == "json_schema" and fields.get("schema") is None:
        holder = Fields(fields.object("json_schema") or {}, fields.param("json_schema"))
    schema = holder.object("schema")
    if schema is None:
        if kind == "json_schema":
            raise fields.error("json_schema.schema", "is missing: give the JSON schema of the response")
        return OutputFormat("json_object")
    return OutputFormat("json_schema", _checked(holder, "schema", schema))


def _guided(fields: Fields, name: str, kind: str) -> OutputFormat:
    value = fields.get(name)
    if kind == "json":
        schema = _parse(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise fields.error(name, "must be a JSON schema: an object, or a string with one")
        return OutputFormat("json_schema", _checked(fields, name, schema))
    if kind == "regex":
        return OutputFormat("regex", regex=fields.text(name, _REGEX_CHARACTERS) or "")
    choices = fields.list(name, _CHOICES)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise fields.error(name, "must be a list of strings")
    pattern = "|".join(re.escape(choice) for choice in choices)
    if len(pattern) > _REGEX_CHARACTERS:
        raise fields.error(name, f"has more than {_REGEX_CHARACTERS} characters in all")
    return OutputFormat("regex", regex=f"({pattern})")


def _checked(fields: Fields, name: str, schema: Any) -> Any:
    check_depth(fields.param(name), schema)
    if len(orjson.dumps(schema)) > _SCHEMA_BYTES:
        raise fields.error(name, f"is larger than {_SCHEMA_BYTES} bytes")
    return schema


def _parse(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
