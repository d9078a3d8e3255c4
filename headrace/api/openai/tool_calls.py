# SPDX-License-Identifier: Apache-2.0
"""The `tools` and `tool_choice` of a request.

A model that may call a tool writes calls in its own format (`output_formats`). A model that must call one is held to a JSON
schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from headrace.api.openai.call_syntax import JsonCalls
from headrace.api.openai.fields import Fields
from headrace.api.openai.format_parser import FormatParser, ToolFormat
from headrace.api.openai.output_buffer import Functions
from headrace.api.openai.output_formats import OutputFormats
from headrace.api.openai.output_parser import OutputParser, Piece, ToolCall, ignore_malformed_call
from headrace.api.openai.response_ids import RANDOM_IDS, ResponseIds, new_call_id
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.generation import OutputFormat

_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
_TOOL_BYTES = 1024 * 1024
_CALLS = 16
"""Maximum calls in one response with `tool_choice: required`."""
_ANYTHING: Mapping[str, Any] = {"type": "object"}
_REQUIRED_CALLS = ToolFormat((), JsonCalls(), bare="[")


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools for the template, the output format that `tool_choice` requires, and the parser of the output."""

    definitions: tuple[Mapping[str, Any], ...] = ()
    output_format: OutputFormat | None = None
    parser: Callable[[], OutputParser] | None = None
    """Creates a parser for each choice; None if the output is plain text."""
    format_source: str = ""
    """The member of the request that `output_format` comes from."""


def parse_tools(fields: Fields, settings: OpenAiSettings, formats: OutputFormats) -> Tools:
    """Parse `tools` and `tool_choice`; `formats` are the model's."""
    fields.reject(
        {
            "functions": "is deprecated: use 'tools'",
            "function_call": "is deprecated: use 'tool_choice'",
        }
    )
    tools = _definitions(fields, settings)
    choice = fields.get("tool_choice")
    if choice is None:
        choice = "auto" if tools else "none"
    names = {tool["function"]["name"]: tool["function"] for tool in tools}
    if choice == "none" or (choice == "auto" and not tools):
        return Tools(parser=formats.parser_factory({}))
    functions = {name: function.get("parameters") or _ANYTHING for name, function in names.items()}
    if choice == "auto":
        return Tools(tools, None, formats.parser_factory(functions))
    if not tools:
        raise fields.error("tool_choice", "requires a call, but there are no 'tools'")
    if choice == "required":
        most = _CALLS if fields.boolean("parallel_tool_calls", True) else 1
        schema = _required_schema(functions, most)
        return Tools(tools, OutputFormat("json_schema", schema), partial(required_calls_parser, functions), "tools")
    name = _chosen_name(choice)
    if name is None:
        raise fields.error(
            "tool_choice", "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': NAME}}"
        )
    if name not in names:
        raise fields.error("tool_choice", f"{name[:128]!a} is not one of the tools")
    field = f"tools[{list(names).index(name)}].function.parameters"
    return Tools(tools, OutputFormat("json_schema", functions[name]), partial(NamedCallParser, name), field)


def _chosen_name(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _definitions(fields: Fields, settings: OpenAiSettings) -> tuple[Mapping[str, Any], ...]:
    tools = fields.list("tools", settings.tools) or []
    for index, tool in enumerate(tools):
        at = f"{fields.param('tools')}[{index}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise fields.error(f"tools[{index}].type", "must be 'function'")
        function = Fields(tool, at).object("function")
        if function is None:
            raise fields.error(f"tools[{index}].function", "is missing")
        inner = Fields(function, f"{at}.function")
        name = inner.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise inner.error("name", "must be 1 to 128 letters, digits, '_', '-', '.' or ':'")
        inner.object("parameters")
    if tools and len(orjson.dumps(tools)) > _TOOL_BYTES:
        raise fields.error("tools", f"are larger than {_TOOL_BYTES} bytes together")
    return tuple(tools)


def _required_schema(functions: Functions, most: int) -> dict[str, Any]:
    """Return the schema of a list of calls: `[{"name": ..., "arguments": {...}}]`."""
    items, shared = [], {}
    for number, (name, parameters) in enumerate(functions.items()):
        arguments: Any = parameters
        if b'"$ref"' in orjson.dumps(arguments):
            # Its references are relative to its own root, which moves into `$defs`.
            root = f"tool{number}"
            shared[root] = _move_refs(arguments, f"#/$defs/{root}/")
            arguments = {"$ref": f"#/$defs/{root}"}
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


def _move_refs(schema: Any, root: str) -> Any:
    """Return a schema whose references start at `root`. The depth of a request is limited, so recursion is safe."""
    if isinstance(schema, list):
        return [_move_refs(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _move_refs(value, root) for name, value in schema.items()}
    target = moved.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = (root + target[2:]).rstrip("/")
    return moved


def required_calls_parser(functions: Functions) -> OutputParser:
    """Return a parser for an output that is a list of calls."""
    return FormatParser(_REQUIRED_CALLS, None, functions)


class NamedCallParser:
    """The output is the arguments of one function."""

    in_reasoning = False

    def __init__(self, name: str) -> None:
        self._name = name
        self.ids: ResponseIds = RANDOM_IDS
        self.on_malformed_call = ignore_malformed_call  # never called: a schema holds the output to the arguments

    def start(self, prompt_end: str) -> None:
        """Do nothing: a schema holds the output to the arguments."""

    def push(self, text: str) -> list[Piece]:
        """Add output."""
        name, self._name = self._name, ""
        return [ToolCall(0, name, text, new_call_id(self.ids))] if name else [ToolCall(0, "", text)]

    def finish(self) -> list[Piece]:
        """Return the rest."""
        return []
