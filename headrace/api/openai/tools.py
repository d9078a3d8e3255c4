# SPDX-License-Identifier: Apache-2.0
"""The tools of a request, and what its `tool_choice` makes of its answer. Called by `chat`.

A model that may call goes by its template and is read afterwards (`calls`); one that must call is held to a JSON schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.api.openai.calls import CALL_FORMATS, CallReader, NamedCall, RequiredCalls
from headrace.api.openai.fields import Fields
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.errors import FailedPrecondition
from headrace.core.generation import OutputFormat

TOOL_FORMAT = "tool_format"
"""A model's parameter: how it writes calls of its own accord."""

_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
_TOOL_BYTES = 1024 * 1024
_CALLS = 16
"""In one answer, of a model that must call."""
_ANYTHING: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tools:
    """What the template is told, what the answer is held to, and who reads it."""

    listed: tuple[Mapping[str, Any], ...] = ()
    output_format: OutputFormat | None = None
    reader: Callable[[], CallReader] | None = None
    """Makes one for each choice; None where a text is only a text."""
    held_by: str = ""
    """With `output_format`: the member of the request that it was made of."""


NO_TOOLS = Tools()


def read_tools(fields: Fields, settings: OpenAiSettings, parameters: Mapping[str, str]) -> Tools:
    """From `tools` and `tool_choice`; `parameters` are the model's."""
    fields.refuse(
        {
            "functions": "is OpenAI's older way: use 'tools'",
            "function_call": "is OpenAI's older way: use 'tool_choice'",
        }
    )
    tools = _listed(fields, settings)
    choice = fields.get("tool_choice")
    if choice is None:
        choice = "auto" if tools else "none"
    names = {tool["function"]["name"]: tool["function"] for tool in tools}
    if choice == "none" or (choice == "auto" and not tools):
        return NO_TOOLS
    if choice == "auto":
        return Tools(tools, None, _reader(parameters, frozenset(names)))
    if not tools:
        raise fields.refused("tool_choice", "asks for a call, but there are no 'tools'")
    if choice == "required":
        most = _CALLS if fields.boolean("parallel_tool_calls", True) else 1
        return Tools(tools, OutputFormat("json_schema", _required_schema(names, most)), RequiredCalls, "tools")
    name = _named(choice)
    if name is None:
        raise fields.refused(
            "tool_choice", "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': NAME}}"
        )
    if name not in names:
        raise fields.refused("tool_choice", f"{name[:128]!a} is not one of the tools")
    schema = names[name].get("parameters") or _ANYTHING
    number = list(names).index(name)
    field = f"tools[{number}].function.parameters"
    return Tools(tools, OutputFormat("json_schema", schema), lambda: NamedCall(name), field)


def _named(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _reader(parameters: Mapping[str, str], names: frozenset[str]) -> Callable[[], CallReader]:
    kind = parameters.get(TOOL_FORMAT, "") or "hermes"
    made = CALL_FORMATS.get(kind)
    if made is None:
        known = ", ".join(sorted(CALL_FORMATS))
        raise FailedPrecondition(f"the model's parameter '{TOOL_FORMAT}' is {kind[:64]!a}; it can be one of: {known}")
    return lambda: made(names)


def _listed(fields: Fields, settings: OpenAiSettings) -> tuple[Mapping[str, Any], ...]:
    given = fields.list("tools", settings.tools) or []
    for index, tool in enumerate(given):
        at = f"{fields.param('tools')}[{index}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise fields.refused(f"tools[{index}].type", "must be 'function'")
        function = Fields(tool, at).object("function")
        if function is None:
            raise fields.refused(f"tools[{index}].function", "is missing")
        inner = Fields(function, f"{at}.function")
        name = inner.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise inner.refused("name", "must be 1 to 128 letters, digits, '_', '-', '.' or ':'")
        inner.object("parameters")
    if given and len(orjson.dumps(given)) > _TOOL_BYTES:
        raise fields.refused("tools", f"are larger than {_TOOL_BYTES} bytes in all")
    return tuple(given)


def _required_schema(functions: Mapping[str, Mapping[str, Any]], most: int) -> dict[str, Any]:
    """A list of calls: `[{"name": ..., "arguments": {...}}]`."""
    items, shared = [], {}
    for number, (name, function) in enumerate(functions.items()):
        arguments: Any = function.get("parameters") or _ANYTHING
        if b'"$ref"' in orjson.dumps(arguments):
            # What it refers to is counted from its own beginning, which is elsewhere now.
            home = f"tool{number}"
            shared[home] = _moved(arguments, f"#/$defs/{home}/")
            arguments = {"$ref": f"#/$defs/{home}"}
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": items}}
    return {**schema, "$defs": shared} if shared else schema


def _moved(schema: Any, home: str) -> Any:
    """A schema whose references begin at `home`. The request's depth is limited, so this may call itself."""
    if isinstance(schema, list):
        return [_moved(each, home) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, home) for name, value in schema.items()}
    target = moved.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = (home + target[2:]).rstrip("/")
    return moved
