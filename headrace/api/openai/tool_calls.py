# SPDX-License-Identifier: Apache-2.0
"""Tool calls: the `tools` and `tool_choice` of a request, and parsers that find calls in a model's output.

A model that may call a tool writes the call in its own format, which a `OutputParser` finds while the text is
streamed: text goes out at once, and text that may start a call is buffered. A model that must call a tool is held to a
JSON schema.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from typing import Any

import orjson

from headrace.api.openai.fields import Fields
from headrace.api.openai.output_parser import OutputParser, Piece, ToolCall
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.errors import FailedPrecondition
from headrace.core.generation import OutputFormat

TOOL_FORMAT = "tool_format"
"""A model's parameter: the format in which it writes calls."""

_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
_TOOL_BYTES = 1024 * 1024
_CALLS = 16
"""Maximum calls in one response with `tool_choice: required`."""
_ANYTHING: Mapping[str, Any] = {"type": "object"}


_MARKS = re.compile(r'["\\{}\[\]]')
_WHITE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools for the template, the output format that `tool_choice` requires, and the parser of the output."""

    definitions: tuple[Mapping[str, Any], ...] = ()
    output_format: OutputFormat | None = None
    parser: Callable[[], OutputParser] | None = None
    """Creates a parser for each choice; None if the output is plain text."""
    format_source: str = ""
    """The member of the request that `output_format` comes from."""


NO_TOOLS = Tools()


def parse_tools(fields: Fields, settings: OpenAiSettings, parameters: Mapping[str, str]) -> Tools:
    """Parse `tools` and `tool_choice`; `parameters` are the model's."""
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
        return NO_TOOLS
    if choice == "auto":
        return Tools(tools, None, _parser_factory(parameters, frozenset(names)))
    if not tools:
        raise fields.error("tool_choice", "requires a call, but there are no 'tools'")
    if choice == "required":
        most = _CALLS if fields.boolean("parallel_tool_calls", True) else 1
        return Tools(tools, OutputFormat("json_schema", _required_schema(names, most)), RequiredCallsParser, "tools")
    name = _chosen_name(choice)
    if name is None:
        raise fields.error(
            "tool_choice", "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': NAME}}"
        )
    if name not in names:
        raise fields.error("tool_choice", f"{name[:128]!a} is not one of the tools")
    schema = names[name].get("parameters") or _ANYTHING
    number = list(names).index(name)
    field = f"tools[{number}].function.parameters"
    return Tools(tools, OutputFormat("json_schema", schema), lambda: NamedCallParser(name), field)


def _chosen_name(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _parser_factory(parameters: Mapping[str, str], names: frozenset[str]) -> Callable[[], OutputParser]:
    kind = parameters.get(TOOL_FORMAT, "") or "hermes"
    parser = TOOL_CALL_PARSERS.get(kind)
    if parser is None:
        known = ", ".join(sorted(TOOL_CALL_PARSERS))
        raise FailedPrecondition(f"the model's parameter '{TOOL_FORMAT}' is {kind[:64]!a}; it can be one of: {known}")
    return lambda: parser(names)


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


def _required_schema(functions: Mapping[str, Mapping[str, Any]], most: int) -> dict[str, Any]:
    """Return the schema of a list of calls: `[{"name": ..., "arguments": {...}}]`."""
    items, shared = [], {}
    for number, (name, function) in enumerate(functions.items()):
        arguments: Any = function.get("parameters") or _ANYTHING
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


class _CallNumbers:
    """Numbers the calls of a choice and gives them ids."""

    def __init__(self) -> None:
        self.count = 0

    def call(self, name: str, arguments: str) -> ToolCall:
        """Return the next call."""
        call = ToolCall(self.count, name, arguments, f"call_{secrets.token_hex(12)}")
        self.count += 1
        return call


class NamedCallParser:
    """The output is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> list[Piece]:
        """Add output."""
        name, self._name = self._name, ""
        return [_CallNumbers().call(name, text)] if name else [ToolCall(0, "", text)]

    def finish(self) -> list[Piece]:
        """Return the rest."""
        return []


class RequiredCallsParser:
    """The output is a list of `{"name", "arguments"}`. A truncated call becomes text."""

    def __init__(self) -> None:
        self._calls = _CallNumbers()
        self._buffer = ""
        self._scanner: JsonScanner | None = None

    def push(self, text: str) -> list[Piece]:
        """Add output."""
        pieces: list[Piece] = []
        self._buffer += text
        while True:
            if self._scanner is None:
                begin = self._buffer.find("{")
                if begin < 0:
                    return pieces
                self._buffer = self._buffer[begin:]
                self._scanner = JsonScanner()
            end = self._scanner.end_in(self._buffer)
            if end < 0:
                return pieces
            call = _call_of(_parse_json(self._buffer[:end]), None)
            pieces.append(self._calls.call(*call) if call else self._buffer[:end])
            self._buffer = self._buffer[end:]
            self._scanner = None

    def finish(self) -> list[Piece]:
        """Return the rest."""
        buffer, self._buffer = self._buffer, ""
        return [buffer] if self._scanner is not None and buffer else []


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and many more."""

    _begin, _end = "<tool_call>", "</tool_call>"

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._calls = _CallNumbers()
        self._buffer = ""
        self._marked = ""
        """The opening marker of the current call; "" outside a call."""

    def push(self, text: str) -> list[Piece]:
        """Add output."""
        pieces: list[Piece] = []
        buffer = self._buffer + text
        while buffer:
            if self._marked:
                inside, found, rest = buffer.partition(self._end)
                if not found:
                    break
                pieces += self._close_call(inside, self._end)
                buffer = rest
                continue
            text, found, rest = buffer.partition(self._begin)
            # White space before a call is part of the call.
            shown = len(text.rstrip()) if found else self._possible_call_start(buffer)
            pieces += [buffer[:shown]] if shown else []
            if not found:
                buffer = buffer[shown:]
                break
            self._marked = buffer[shown : len(text)] + found
            buffer = rest
        self._buffer = buffer
        return pieces

    def finish(self) -> list[Piece]:
        """Return the rest. Some models omit the closing tag of the last call."""
        buffer, self._buffer = self._buffer, ""
        if self._marked:
            return self._close_call(buffer, "")
        return [buffer] if buffer and not (self._calls.count and buffer.isspace()) else []

    def _possible_call_start(self, text: str) -> int:
        """Return where text starts that may become a call."""
        bracket = text.rfind("<", max(0, len(text) - len(self._begin)))
        end = bracket if bracket >= 0 and self._begin.startswith(text[bracket:]) else len(text)
        return len(text[:end].rstrip())

    def _close_call(self, inside: str, closing: str) -> list[Piece]:
        marked, self._marked = self._marked, ""
        call = _call_of(_parse_json(inside), self._names)
        return [self._calls.call(*call) if call else marked + inside + closing]


class LlamaParser:
    """`{"name": ..., "parameters": {...}}`, or several separated by `;`: Llama 3."""

    _tag = "<|python_tag|>"
    _opening = re.compile(r"\s*(?:\{\s*(?:\"(?:name|type|function|parameters|arguments)\"|\"[a-z]*\Z|\Z)|\Z)")

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._calls = _CallNumbers()
        self._buffer = ""
        self._plain = False
        self._tagged = False
        self._scanner: JsonScanner | None = None

    def push(self, text: str) -> list[Piece]:
        """Add output."""
        if self._plain:
            return [text] if text else []
        self._buffer += text
        if self._scanner is None and not self._tagged and self._tag.startswith(self._buffer.lstrip()[: len(self._tag)]):
            stripped = self._buffer.lstrip()
            if len(stripped) < len(self._tag):
                return []
            self._buffer, self._tagged = stripped[len(self._tag) :], True
        return self._objects()

    def _objects(self) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            if self._scanner is None:
                if self._calls.count:
                    self._buffer = self._buffer.lstrip("; \t\r\n")
                if not self._opening.match(self._buffer):
                    return [*pieces, *self._to_plain()]
                if "{" not in self._buffer:
                    return pieces
                self._buffer = self._buffer[self._buffer.index("{") :]
                self._scanner = JsonScanner()
            elif not self._opening.match(self._buffer):
                return [*pieces, *self._to_plain()]
            end = self._scanner.end_in(self._buffer)
            if end < 0:
                return pieces
            call = _call_of(_parse_json(self._buffer[:end]), self._names)
            if call is None:
                return [*pieces, *self._to_plain()]
            pieces.append(self._calls.call(*call))
            self._buffer, self._scanner = self._buffer[end:], None

    def _to_plain(self) -> list[Piece]:
        self._plain = True
        buffer, self._buffer = self._buffer, ""
        return [buffer] if buffer else []

    def finish(self) -> list[Piece]:
        """Return the rest."""
        buffer, self._buffer = self._buffer, ""
        return [buffer] if buffer and not (self._calls.count and buffer.isspace()) else []


class MistralParser:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name{...}`; calls come last.

    The marker is a special token that may be missing in the text; then the list must be the whole output.
    """

    _marker = "[TOOL_CALLS]"
    _opening = re.compile(r"\s*(?:\[\s*(?:\{\s*(?:\"(?:name|arguments|id)\"|\"[a-z]*\Z|\Z)|\Z)|\Z)")
    _named = re.compile(r"\s*([A-Za-z0-9_.:\-]{1,128})\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._calls = _CallNumbers()
        self._buffer = ""
        self._marked = False
        self._first = True

    def push(self, text: str) -> list[Piece]:
        """Add output."""
        self._buffer += text
        if self._marked:
            return []
        at = self._buffer.find(self._marker)
        if at >= 0:
            self._marked = True
            before, self._buffer = self._buffer[:at], self._buffer[at:]
            return [before] if before else []
        if self._first and self._opening.match(self._buffer):
            return []
        keep = next(
            (size for size in range(len(self._marker) - 1, 0, -1) if self._buffer.endswith(self._marker[:size])), 0
        )
        shown, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        self._first = self._first and not shown
        return [shown] if shown else []

    def finish(self) -> list[Piece]:
        """Return the rest."""
        buffer, self._buffer = self._buffer, ""
        parts = [part for part in buffer.split(self._marker) if part.strip()] if self._marked else [buffer]
        calls: list[tuple[str, str]] = []
        for part in parts if self._marked or self._first else []:
            calls_of_part = self._parse_part(part)
            if calls_of_part is None:
                return [buffer] if buffer else []
            calls += calls_of_part
        if not calls:
            return [buffer] if buffer else []
        return [self._calls.call(*call) for call in calls]

    def _parse_part(self, part: str) -> list[tuple[str, str]] | None:
        named = self._named.match(part)
        values: list[Any] | None
        if named is not None:
            values = parse_json_values(part[named.end() :])
            if values is None or len(values) != 1 or named[1] not in self._names:
                return None
            return [(named[1], _json(values[0]))]
        values = _parse_json(part)
        if not isinstance(values, list) or not values:
            return None
        calls = [_call_of(value, self._names) for value in values]
        return [call for call in calls if call is not None] if all(calls) else None


TOOL_CALL_PARSERS: dict[str, Callable[[frozenset[str]], OutputParser]] = {
    "hermes": HermesParser,
    "llama3": LlamaParser,
    "mistral": MistralParser,
}


def _parse_json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _json(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _call_of(value: Any, names: frozenset[str] | None) -> tuple[str, str] | None:
    """Return the name and arguments of a call; None if the value is not a call of one of the tools."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    if not isinstance(name, str) or (names is not None and name not in names):
        return None
    arguments = value.get("arguments")
    if arguments is None:
        arguments = value.get("parameters")
    try:
        return name, "{}" if arguments is None else _json(arguments)
    except orjson.JSONEncodeError:  # nested too deeply for orjson
        return None


class JsonScanner:
    """Finds the end of a JSON object or list at the start of a growing text, reading every character once."""

    def __init__(self) -> None:
        self._position = 0
        self._depth = 0
        self._in_string = False

    def end_in(self, text: str) -> int:
        """Return the index after the value; -1 while it is incomplete. `text` must be the earlier text, or longer."""
        at = self._position
        while True:
            mark = _MARKS.search(text, at)
            if mark is None:
                self._position = max(at, len(text))
                return -1
            at = mark.end()
            sign = mark.group()
            if self._in_string:
                if sign == "\\":
                    at += 1
                elif sign == '"':
                    self._in_string = False
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._position = at
                    return at


def parse_json_values(text: str) -> list[Any] | None:
    """Return the JSON values of a text; None if it contains anything else."""
    decoder = JSONDecoder()
    values = []
    rest = text.strip(_WHITE)
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (JSONDecodeError, RecursionError):
            return None
        values.append(value)
        rest = rest[end:].lstrip(_WHITE)
    return values
