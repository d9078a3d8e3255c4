# SPDX-License-Identifier: Apache-2.0
"""YAML as values of JSON, each with its line, as kubectl reads it: no dates, numbers with exponents, no name twice.

Called by `documents`. Built from the parser's events, so that nothing is built that is too deep or stands for too much.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

Place = tuple[str | int, ...]
"""Where a value is: `("spec", "engine", "containers", 0, "image")`."""

MAX_DEPTH = 64
MAX_VALUES = 500_000
"""Of one text, with what aliases stand for counted each time."""

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE|yes|Yes|YES|on|On|ON")
_FALSE = re.compile(r"false|False|FALSE|no|No|NO|off|Off|OFF")
_WHOLE = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|[1-9][0-9_]*|0)")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_ENDLESS = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_ADVICE = {
    "mapping values are not allowed": "remove a ':' from this line, or indent the line before it rightly",
    "character that cannot start any token": "indent with spaces, and put texts that begin with @, ` or % in quotes",
    "quoted scalar": "close the quote",
    "',' or ']'": "add the ',' or ']' that is missing",
    "',' or '}'": "add the ',' or '}' that is missing",
    "expected ':'": "add the ':' after the name",
    "expected key": "indent the lines of one mapping alike",
    "block end": "indent the lines of one mapping alike",
    "undefined alias": "define the anchor before its alias",
}


class YamlFault(Exception):
    """The text is not YAML, or is YAML that JSON cannot say."""

    def __init__(self, line: int, message: str, fix: str) -> None:
        super().__init__(message)
        self.line, self.message, self.fix = line, message, fix


def documents_in(text: str) -> Iterator[tuple[Any, dict[Place, int]]]:
    """Each document of a text and the line of everything in it; raises `YamlFault` at the first that is wrong."""
    # libyaml is ten times as quick, and not everywhere.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    reader = _Reader(yaml.parse(text, Loader=loader))
    try:
        yield from reader.documents()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = f"{error.context} {error.problem}"
        advice = next((fix for words, fix in _ADVICE.items() if words in said), "compare it with the lines around it")
        raise YamlFault(1 if mark is None else mark.line + 1, "this is not YAML", advice) from None
    except (yaml.YAMLError, ValueError):
        raise YamlFault(1, "the text has characters that YAML does not allow", "remove control characters") from None


class _Reader:
    """One text, from events to values."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._left = MAX_VALUES

    def documents(self) -> Iterator[tuple[Any, dict[Place, int]]]:
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors = {}
                lines: dict[Place, int] = {}
                value = self._value(next(self._events), (), lines)
                yield value, lines

    def _value(self, event: Any, place: Place, lines: dict[Place, int]) -> Any:
        line = event.start_mark.line + 1
        lines.setdefault(place, line)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, line)
        self._spend(1, line)
        if len(place) > MAX_DEPTH:
            raise YamlFault(line, f"more than {MAX_DEPTH} levels lie in each other here", "make it flatter")
        before = self._left
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event, line)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._items(place, lines)
        else:
            value = self._mapping(place, lines)
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, before - self._left + 1)
        return value

    def _alias(self, event: Any, line: int) -> Any:
        if event.anchor not in self._anchors:
            raise YamlFault(line, f"*{str(event.anchor)[:40]} is not defined", "define the anchor before its alias")
        value, size = self._anchors[event.anchor]
        self._spend(size, line)
        return value

    def _spend(self, count: int, line: int) -> None:
        self._left -= count
        if self._left < 0:
            raise YamlFault(line, f"the text has more than {MAX_VALUES} values", "split it, or use fewer aliases")

    def _items(self, place: Place, lines: dict[Place, int]) -> list[Any]:
        items: list[Any] = []
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._value(event, (*place, len(items)), lines))
        return items

    def _mapping(self, place: Place, lines: dict[Place, int]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            line = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise YamlFault(line, "a name is missing before this value", "write 'name: value'")
            name = _name(event, line)
            if name == "<<" and event.implicit[0]:
                self._merge(merged, self._value(next(self._events), (*place, name), lines), line)
                continue
            if name in mapping:
                first = lines[*place, name]
                raise YamlFault(line, f"{name[:40]} is there twice, first in line {first}", "remove one of them")
            lines[*place, name] = line
            mapping[name] = self._value(next(self._events), (*place, name), lines)
        return {**merged, **mapping} if merged else mapping

    def _merge(self, merged: dict[str, Any], value: Any, line: int) -> None:
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict):
                raise YamlFault(line, "<< takes a mapping", "give it the alias of a mapping")
            for name, inner in each.items():
                merged.setdefault(name, inner)


def _name(event: Any, line: int) -> str:
    """A name in JSON is a text, whatever YAML takes it for."""
    value = _scalar(event, line)
    if isinstance(value, bool):
        return "true" if value else "false"
    text: str = event.value
    return text


def _scalar(event: Any, line: int) -> Any:
    text: str = event.value
    tag = event.tag.removeprefix(_TAG) if event.tag is not None else ""
    if tag in ("str", "!") or (not tag and not event.implicit[0]):
        return text
    if tag not in ("", "int", "float", "bool", "null"):
        raise YamlFault(line, f"the tag {event.tag[:40]} is not taken here", "write the value without a tag")
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _ENDLESS.fullmatch(text):
        raise YamlFault(line, f"{text} is a number that JSON does not have", "write it in quotes if it is a text")
    if len(text) <= 400 and _WHOLE.fullmatch(text):
        return _whole(text.replace("_", ""))
    if len(text) <= 400 and _NUMBER.fullmatch(text):
        number = float(text.replace("_", ""))
        return number if abs(number) != float("inf") else text
    return text


def _whole(text: str) -> int:
    digits = text.lstrip("+-")
    base = 8 if digits.startswith("0") and digits.isdigit() and len(digits) > 1 else 0
    number = int(digits, base)
    return -number if text.startswith("-") else number
