# SPDX-License-Identifier: Apache-2.0
"""Read tool calls in the syntaxes that models write them in: JSON, a name and JSON, tags, Python, and gpt-oss' messages.

A reader is a generator. It takes text from an `OutputBuffer`, yields when it needs more, passes calls on as they come, and
raises `NotACall` where the text is none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.api.openai.output_buffer import Markers, OutputBuffer, find_markers, is_json


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`{"name": ..., "arguments": {...}}`, or a list of them."""

    ends: tuple[str, ...] = ()
    separators: str = ","
    """Characters that may stand between calls."""


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """A name, a marker, and the arguments as JSON."""

    before_name: tuple[str, ...] = ()
    """Markers that may come before a name."""
    after_name: tuple[str, ...] = ()
    """Markers of which one comes after a name. "{" is the beginning of the arguments itself."""
    before_arguments: tuple[str, ...] = ()
    """Markers of which one may come before the arguments."""
    call_end: tuple[str, ...] = ()
    """Markers that may come after the arguments, in this order."""
    ends: tuple[str, ...] = ()
    id_marker: str = ""
    """Comes between the name and an id of the call."""
    name_is_id: bool = False
    """The name has the form `functions.NAME:INDEX`, which is the call's id as well."""


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """A name, and the arguments one by one between tags."""

    before_name: str
    after_name: tuple[str, ...]
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    call_end: str
    ends: tuple[str, ...] = ()
    strips_newlines: bool = False
    """Whether a value stands on lines of its own."""


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """`[name(key=value), name()]`, as in Python."""

    ends: tuple[str, ...] = ()


Syntax = JsonCalls | NamedCalls | TaggedCalls | PythonCalls


_WHITE = " \t\r\n"
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("function", "type", "id", "tool_call_id")
_KNOWN_KEYS = (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS)
_NAME_CHARACTERS = 200
_SPECIAL_TOKEN = re.compile(r"<[|｜][^|｜]*[|｜]>")
_BRACKETS = re.compile(r'["\\{}\[\]]')
_PRIMITIVE_END = re.compile(r"[,}\]\s]")
_PYTHON_MARKS = re.compile(r"[\"'\\()\[\]{}]")
_PYTHON_CALL = re.compile(r"([A-Za-z_][\w.\-]*)\s*\(")
_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.\-]*\s*")
_PYTHON_CHARACTERS = 32 * 1024
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
_HARMONY_MESSAGE = "<|message|>"
_HARMONY_CLOSING = ("<|end|>", "<|call|>", "<|return|>")
_HARMONY_HEADS = ("<|start|>", "<|channel|>", _HARMONY_MESSAGE, "assistant", "to=", "<|constrain|>")


def markers_of(syntax: Syntax) -> tuple[str, ...]:
    """Return the markers of a syntax, the parts of composite ones too."""
    markers: list[str] = [*syntax.ends]
    if isinstance(syntax, NamedCalls):
        markers += [*syntax.before_name, *syntax.after_name, *syntax.call_end, syntax.id_marker]
    elif isinstance(syntax, TaggedCalls):
        markers += [syntax.before_name, *syntax.after_name, syntax.before_key, syntax.after_key]
        markers += [syntax.before_value, syntax.after_value, syntax.call_end]
    parts = [part for marker in markers for part in _SPECIAL_TOKEN.findall(marker)]
    return tuple(filter(None, (*markers, *parts)))


class NotACall(Exception):
    """Raised for a text that is not a tool call."""


class Cut(Exception):
    """The output ends in the middle of a call."""


Steps = Generator[None, None, None]
"""A reader of calls: it yields when it needs more text."""


HARMONY_MARKERS = (*_HARMONY_CLOSING, _HARMONY_MESSAGE, "<|start|>", "<|channel|>", "<|constrain|>")
_HARMONY_ENDS = Markers((*_HARMONY_CLOSING, "<|start|>", "<|channel|>"))

# Readers of calls. They take text from the parser's buffer, raise `NotACall`, and yield when they need more text.


def read_calls(parser: OutputBuffer, syntax: Syntax, alternative: Syntax | None, marker: str) -> Steps:
    """Read the calls behind a marker; "" if there was none. `alternative` is for calls that begin with "[" or "{"."""
    if alternative is not None:
        yield from _skip_white(parser)
        syntax = alternative if parser.buffer[0] in "[{" else syntax
    if isinstance(syntax, JsonCalls):
        yield from _read_json_calls(parser, syntax, strict=not marker)
    elif isinstance(syntax, NamedCalls):
        yield from _read_named_calls(parser, syntax)
    elif isinstance(syntax, TaggedCalls):
        yield from _read_tagged_calls(parser, syntax, marker)
    else:
        yield from _read_python_calls(parser, syntax)


def _more(parser: OutputBuffer) -> Steps:
    if parser.final:
        raise Cut
    yield


def _skip_white(parser: OutputBuffer) -> Steps:
    """Take white space; there is text behind it then."""
    while True:
        parser.take(len(parser.buffer) - len(parser.buffer.lstrip(_WHITE)))
        if parser.buffer:
            return
        yield from _more(parser)


def _take_one_of(parser: OutputBuffer, markers: Iterable[str]) -> Generator[None, None, str]:
    """Take one of the markers, if the text begins with one; return it, or ""."""
    while True:
        for marker in markers:
            if parser.buffer.startswith(marker):
                return parser.take(len(marker))
        if not any(marker.startswith(parser.buffer) for marker in markers):
            return ""
        yield from _more(parser)


def _take_until(parser: OutputBuffer, markers: Markers, most: int) -> Generator[None, None, tuple[str, str]]:
    """Take the text before the first of the markers; return it and the marker, which is not taken."""
    while True:
        place = markers.find(parser.buffer)
        if place is not None:
            marker = parser.buffer[place[0] : place[1]]
            return parser.take(place[0]), marker
        if len(parser.buffer) > most:
            raise NotACall
        yield from _more(parser)


def _read_json_calls(parser: OutputBuffer, syntax: JsonCalls, *, strict: bool) -> Steps:
    """Read `{...}` or `[{...}, ...]`. `strict`: nothing says that these are calls, so they must look like calls only."""
    in_list = False
    count = 0
    while True:
        yield from _skip_white(parser)
        sign = parser.buffer[0]
        if sign == "{":
            if count:
                parser.end_call()
            yield from _read_json_call(parser, strict=strict)
            count += 1
        elif sign == "[" and not in_list and not count:
            parser.take(1)
            in_list = True
        elif count and sign in syntax.separators:
            parser.take(1)
        elif sign == "]" and in_list and count:
            parser.take(1)
            in_list = False
        elif count and not in_list:
            yield from _take_one_of(parser, syntax.ends)
            return
        else:
            raise NotACall


def _read_json_call(parser: OutputBuffer, *, strict: bool) -> Steps:
    parser.take(1)
    depth, name = 1, ""
    arguments: str | None = None
    passed_on = False
    while depth:
        yield from _skip_white(parser)
        sign = parser.buffer[0]
        if sign in ",}":
            depth -= sign == "}"
            parser.take(1)
            continue
        key = yield from _take_json_string(parser, _KNOWN_KEYS if strict else ())
        yield from _skip_white(parser)
        if parser.take(1) != ":":
            raise NotACall
        yield from _skip_white(parser)
        sign = parser.buffer[0]
        if key in _NAME_KEYS and not name:
            name = yield from _take_json_string(parser)
            if name not in parser.functions:
                raise NotACall
            if arguments is not None:
                parser.begin_call(name, arguments)
                passed_on = True
        elif key in _ARGUMENT_KEYS and not passed_on and arguments is None:
            if sign in "{[" and name:
                parser.begin_call(name)
                passed_on = True
                yield from _take_json_value(parser, parser.add_arguments)
                parser.end_arguments()
            else:
                arguments = yield from _take_arguments(parser)
                if not is_json(arguments):
                    raise NotACall
                if name:
                    parser.begin_call(name, arguments)
                    passed_on = True
        elif key == "function" and sign == "{":
            parser.take(1)
            depth += 1
        elif strict and key not in _KNOWN_KEYS:
            raise NotACall
        elif sign == '"':
            yield from _take_json_string(parser)
        else:
            yield from _take_json_value(parser, _ignore)
    if not passed_on:
        if not name:
            raise NotACall
        parser.begin_call(name, "{}")


def _ignore(_text: str) -> None:
    pass


def _take_arguments(parser: OutputBuffer) -> Generator[None, None, str]:
    """Take arguments as a whole: JSON, or a string that has JSON."""
    if parser.buffer[0] == '"':
        text = yield from _take_json_string(parser)
        return text if text.strip() else "{}"
    parts: list[str] = []
    yield from _take_json_value(parser, parts.append)
    text = "".join(parts)
    return "{}" if text == "null" else text


def _take_json_string(parser: OutputBuffer, known: tuple[str, ...] = ()) -> Generator[None, None, str]:
    """Take a JSON string. With `known`, it must be one of these, which is checked as it comes."""
    if parser.buffer[0] != '"':
        raise NotACall
    at = 1
    while True:
        quote, backslash = parser.buffer.find('"', at), parser.buffer.find("\\", at)
        if 0 <= backslash < quote or (quote < 0 <= backslash and backslash + 1 < len(parser.buffer)):
            at = backslash + 2
            continue
        if quote >= 0:
            if known and parser.buffer[1:quote] not in known:
                raise NotACall  # before it is taken, as when it comes in pieces
            try:
                text: str = orjson.loads(parser.take(quote + 1))
            except orjson.JSONDecodeError:
                raise NotACall from None
            return text
        if known and not any(name.startswith(parser.buffer[1:]) for name in known):
            raise NotACall
        at = backslash if backslash >= 0 else len(parser.buffer)
        yield from _more(parser)


def _take_json_value(parser: OutputBuffer, add: Callable[[str], None]) -> Steps:
    """Take a JSON value that is not a string, and pass it on as it comes."""
    if parser.buffer[0] not in "{[":
        while (end := _PRIMITIVE_END.search(parser.buffer)) is None:
            yield from _more(parser)
        if not end.start():
            raise NotACall
        add(parser.take(end.start()))
        return
    depth, in_string, escaped = 0, False, 0
    while True:
        at, text = escaped, parser.buffer
        escaped = 0
        while (mark := _BRACKETS.search(text, at)) is not None:
            at, sign = mark.end(), mark.group()
            if in_string:
                at += sign == "\\"
                in_string = sign != '"'
            elif sign == '"':
                in_string = True
            elif sign in "{[":
                depth += 1
            elif sign in "}]":
                depth -= 1
                if not depth:
                    add(parser.take(at))
                    return
        escaped = max(0, at - len(text))
        add(parser.take(len(text)))
        yield from _more(parser)


def _read_named_calls(parser: OutputBuffer, syntax: NamedCalls) -> Steps:
    markers = find_markers(*syntax.after_name, *filter(None, (syntax.id_marker,)))
    count = 0
    while True:
        if count:
            yield from _skip_white(parser)
            if (yield from _take_one_of(parser, syntax.ends)) or not syntax.before_name:
                return
            parser.end_call()
        yield from _skip_white(parser)
        if syntax.before_name and not (yield from _take_one_of(parser, syntax.before_name)):
            if count:
                return
            raise NotACall
        name, marker = yield from _take_until(parser, markers, _NAME_CHARACTERS)
        name, call_id = name.strip(), ""
        if marker == syntax.id_marker:
            parser.take(len(marker))
            call_id, marker = yield from _take_until(parser, markers, _NAME_CHARACTERS)
        if marker != "{":
            parser.take(len(marker))
        if syntax.name_is_id:
            call_id, name = name, name.removeprefix("functions.")
            name = name.rpartition(":")[0] or name
        if name not in parser.functions:
            raise NotACall
        yield from _skip_white(parser)
        if syntax.before_arguments and (yield from _take_one_of(parser, syntax.before_arguments)):
            yield from _skip_white(parser)
        if parser.buffer[0] != "{":
            raise NotACall
        parser.begin_call(name, "", call_id.strip())
        yield from _take_json_value(parser, parser.add_arguments)
        parser.end_arguments()
        for marker in syntax.call_end:
            yield from _skip_white(parser)
            yield from _take_one_of(parser, (marker,))
        count += 1


def _read_tagged_calls(parser: OutputBuffer, syntax: TaggedCalls, opening: str) -> Steps:
    after_name, after_key = find_markers(*syntax.after_name), find_markers(syntax.after_key)
    count = 0
    while True:
        if count:
            yield from _skip_white(parser)
            if (yield from _take_one_of(parser, syntax.ends)) or not syntax.before_name:
                return
            parser.end_call()
        yield from _skip_white(parser)
        is_open = not syntax.before_name or (not count and opening == syntax.before_name)
        if not is_open and not (yield from _take_one_of(parser, (syntax.before_name,))):
            if count:
                return
            raise NotACall
        name, marker = yield from _take_until(parser, after_name, _NAME_CHARACTERS)
        name = name.strip()
        if marker not in (syntax.before_key, syntax.call_end):
            parser.take(len(marker))
        if name not in parser.functions:
            raise NotACall
        parser.begin_call(name)
        properties = parser.functions[name].get("properties")
        separator = "{"
        while True:
            yield from _skip_white(parser)
            marker = yield from _take_one_of(parser, (syntax.before_key, syntax.call_end))
            if marker != syntax.before_key:
                break  # the end, or something else: what comes then is text
            key, _ = yield from _take_until(parser, after_key, _NAME_CHARACTERS)
            parser.take(len(syntax.after_key))
            parser.add_arguments(f"{separator}{orjson.dumps(key.strip()).decode()}:")
            separator = ","
            schema = properties.get(key.strip()) if isinstance(properties, Mapping) else None
            yield from _take_tagged_value(parser, syntax, is_text=_is_text(schema))
        parser.add_arguments("{}" if separator == "{" else "}")
        count += 1


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _take_tagged_value(parser: OutputBuffer, syntax: TaggedCalls, *, is_text: bool) -> Steps:
    """Take the value of an argument: as it comes if the schema says that it is text, else JSON or, failing that, text."""
    if syntax.before_value:
        yield from _skip_white(parser)
        yield from _take_one_of(parser, (syntax.before_value,))
    ending = find_markers(syntax.after_value, *(("\n" + syntax.after_value,) if syntax.strips_newlines else ()))
    if syntax.strips_newlines:
        yield from _take_one_of(parser, ("\n",))
    parts: list[str] = []
    if is_text:
        parser.add_arguments('"')
    while True:
        place = ending.find(parser.buffer)
        text = parser.take(ending.held_from(parser.buffer) if place is None else place[0])
        if not is_text:
            parts.append(text)
        elif text:
            parser.add_arguments(_escaped(text))
        if place is not None:
            break
        if parser.final and parts:
            parser.add_arguments("".join(parts))  # cut off: what there is
        yield from _more(parser)
    parser.take(place[1] - place[0])
    parser.add_arguments('"' if is_text else _json_of("".join(parts)))


def _escaped(text: str) -> str:
    return orjson.dumps(text).decode()[1:-1]


def _json_of(text: str) -> str:
    stripped = text.strip()
    try:
        orjson.loads(stripped)
    except orjson.JSONDecodeError:
        return orjson.dumps(text).decode()
    return stripped


def _read_python_calls(parser: OutputBuffer, syntax: PythonCalls) -> Steps:
    yield from _skip_white(parser)
    if parser.take(1) != "[":
        raise NotACall
    count = 0
    while True:
        yield from _skip_white(parser)
        if count and parser.buffer[0] == ",":
            parser.take(1)
        elif count and parser.buffer[0] == "]":
            parser.take(1)
            yield from _skip_white(parser)
            yield from _take_one_of(parser, syntax.ends)
            return
        else:
            if count:
                parser.end_call()
            yield from _read_python_call(parser)
            count += 1


def _read_python_call(parser: OutputBuffer) -> Steps:
    while (head := _PYTHON_CALL.match(parser.buffer)) is None:
        if not _PYTHON_NAME.fullmatch(parser.buffer):
            raise NotACall
        yield from _more(parser)
    name = head[1]
    if name not in parser.functions:
        raise NotACall
    at, depth, quote = head.end(), 1, ""
    while depth:
        mark = _PYTHON_MARKS.search(parser.buffer, at)
        if mark is None or (mark.group() == "\\" and mark.end() == len(parser.buffer)):
            at = len(parser.buffer) if mark is None else mark.start()
            if at > _PYTHON_CHARACTERS:
                raise NotACall
            yield from _more(parser)
            continue
        at, sign = mark.end(), mark.group()
        if sign == "\\":
            at += bool(quote)
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            depth += 1 if sign in "([{" else -1
    parser.begin_call(name, _python_arguments(parser.buffer[head.end() - 1 : at]))
    parser.take(at)


def _python_arguments(text: str) -> str:
    """Return the arguments of `(key=value, ...)` as JSON."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise NotACall
        arguments = {keyword.arg: _python_value(keyword.value) for keyword in call.keywords}
        return orjson.dumps(arguments).decode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, orjson.JSONEncodeError):
        raise NotACall from None


def _python_value(node: ast.expr) -> Any:
    """Return the value of a literal. Models also write JSON's names for constants."""
    if isinstance(node, ast.Name) and node.id in _JSON_CONSTANTS:
        return _JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_python_value(key) if key is not None else None for key in node.keys]
        return {str(key): _python_value(value) for key, value in zip(keys, node.values, strict=True)}
    return ast.literal_eval(node)


def read_harmony(parser: OutputBuffer) -> Steps:
    """Read messages of the form `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT<|message|>TEXT<|end|>`."""
    parser.is_certain = True  # headers are never text
    while True:
        channel, recipient = yield from _take_harmony_header(parser)
        name = recipient.removeprefix("functions.")
        is_call, is_empty = name in parser.functions, True
        parser.in_reasoning = channel == "analysis"
        if is_call:
            parser.begin_call(name)
        while True:
            place = _HARMONY_ENDS.find(parser.buffer)
            end = len(parser.buffer) if parser.final else _HARMONY_ENDS.held_from(parser.buffer)
            text = parser.take(end if place is None else place[0])
            is_empty = is_empty and not text
            if is_call:
                parser.add_arguments(text)
            else:
                parser.add_plain(text, reasoning=parser.in_reasoning)
            if place is not None:
                break
            yield from _more(parser)
        parser.in_reasoning = False
        if is_call and is_empty:
            parser.add_arguments("{}")
        parser.end_arguments()
        yield from _take_one_of(parser, _HARMONY_CLOSING)


def _take_harmony_header(parser: OutputBuffer) -> Generator[None, None, tuple[str, str]]:
    """Take what comes before a message; return its channel and recipient. Text without a header has none."""
    while True:
        text = parser.buffer.lstrip()
        if text and not any(text.startswith(head) or head.startswith(text) for head in _HARMONY_HEADS):
            return "", ""
        header, found, _ = text.partition(_HARMONY_MESSAGE)
        if found:
            break
        if len(text) > 2 * _NAME_CHARACTERS:
            return "", ""
        yield from _more(parser)
    parser.take(parser.buffer.index(_HARMONY_MESSAGE) + len(_HARMONY_MESSAGE))
    before, _, behind = header.replace("<|constrain|>", " ").partition("<|channel|>")
    words = [*before.split(), *behind.split()]
    recipient = next((word.removeprefix("to=") for word in words if word.startswith("to=")), "")
    return (behind.split() or [""])[0], recipient
