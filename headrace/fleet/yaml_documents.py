# SPDX-License-Identifier: Apache-2.0
"""Read YAML files as documents, and write documents as YAML.

The parser keeps the line of every field, so that a problem can name its file and line. Files may come from anyone: size,
depth and alias expansion are limited, and YAML tags create no objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headrace.fleet.documents import Problem
from headrace.platforms.kubernetes_client.objects import Document

MAX_FILE_BYTES = 8 << 20
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Source:
    """A document and its location in a file."""

    document: Document
    path: str = ""
    line: int = 1
    lines: Mapping[FieldPath, int] = field(default_factory=dict, repr=False)

    def line_of(self, name: str) -> int:
        """Return the line of a field such as `spec.engine.containers[0].image`, or of its nearest existing parent."""
        places = [()] if not name else _field_paths(name)
        for place in sorted(places, key=len, reverse=True):
            if place in self.lines:
                return self.lines[place]
        return self.line

    def place(self, problem: Problem) -> str:
        """Return the location of a problem: `isvc.yaml:12`."""
        return f"{self.path}:{self.line_of(problem.field)}" if self.path else f"line {self.line_of(problem.field)}"


@dataclass(frozen=True)
class ParsedFiles:
    """The documents of some files."""

    sources: list[Source]
    problems: list[Problem]
    """Problems of files that cannot be read or are not YAML; their field is the location, `isvc.yaml:12`."""

    @property
    def documents(self) -> list[Document]:
        """The documents without their locations."""
        return [source.document for source in self.sources]


def read(paths: Iterable[Path]) -> ParsedFiles:
    """Read all documents of files, and of the YAML and JSON files below folders, ordered by name."""
    sources: list[Source] = []
    problems: list[Problem] = []
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        else:
            files = [path]
        for file in files:
            parsed = _read_file(file)
            sources += parsed.sources
            problems += parsed.problems
    return ParsedFiles(sources, problems)


def parse(text: str, path: str = "") -> ParsedFiles:
    """Parse the documents of a text. The items of a `List` become documents; empty documents are skipped."""
    sources: list[Source] = []
    try:
        for value, lines in parse_yaml(text):
            sources += _split_list(value, lines, path)
    except YamlError as fault:
        place = f"{path}:{fault.line}" if path else f"line {fault.line}"
        return ParsedFiles(sources, [Problem(place, fault.message, fault.fix)])
    return ParsedFiles(sources, [])


def write(documents: Iterable[Document]) -> str:
    """Write documents as YAML that every YAML parser reads alike."""
    return yaml.dump_all(
        [_to_plain(document) for document in documents],
        Dumper=_Dumper,
        sort_keys=False,
        width=120,
        allow_unicode=True,
        explicit_start=False,
    )


def _read_file(path: Path) -> ParsedFiles:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return ParsedFiles([], [Problem(str(path), "there is no such file", "check the path")])
    except OSError as error:
        value = error.strerror or "an error of the system"
        return ParsedFiles([], [Problem(str(path), f"cannot be read: {value}", "check its permissions")])
    if len(content) > MAX_FILE_BYTES:
        return ParsedFiles([], [Problem(str(path), f"is larger than {MAX_FILE_BYTES >> 20} MiB", "split it")])
    try:
        return parse(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError:
        return ParsedFiles([], [Problem(str(path), "is not text in UTF-8", "save it as UTF-8")])


def _split_list(value: Any, lines: Mapping[FieldPath, int], path: str) -> list[Source]:
    if value is None:
        return []
    line = lines.get((), 1)
    if not isinstance(value, Mapping):
        raise YamlError(line, "a document is a mapping", "begin with apiVersion, kind, metadata, spec")
    if value.get("kind") != "List" or not isinstance(value.get("items"), list):
        return [Source(value, path, line, lines)]
    sources: list[Source] = []
    for index, item in enumerate(value["items"]):
        start: FieldPath = ("items", index)
        below = {place[2:]: line for place, line in lines.items() if place[:2] == start}
        sources += _split_list(item, below, path)
    return sources


def _field_paths(name: str) -> list[FieldPath]:
    """Return every prefix of a field's path, with numbers in brackets as indexes."""
    places: list[FieldPath] = [()]
    for dotted, bracketed in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", name):
        last = max(places, key=len)
        places.append((*last, int(bracketed) if bracketed.isdigit() and len(bracketed) < 10 else bracketed or dotted))
    return places


def _to_plain(value: Any) -> Any:
    """Convert mappings and sequences to dicts and lists."""
    if isinstance(value, Mapping):
        return {name: _to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_AMBIGUOUS = re.compile(r"[-+.]?[0-9].*|[yYnN]|~|null|.*: .*", re.DOTALL)
"""Strings that some YAML parser reads as a number, a boolean or null: Go's rules differ from Python's."""


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    lines = text.split("\n")
    if len(lines) > 1 and all(line.isprintable() and line == line.rstrip() for line in lines) and text.strip():
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    # Some unprintable characters end a line in YAML, and are folded unless escaped.
    style = '"' if _AMBIGUOUS.fullmatch(text) or not text.isprintable() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)


FieldPath = tuple[str | int, ...]
"""Path of a value: `("spec", "engine", "containers", 0, "image")`."""

MAX_DEPTH = 64
MAX_VALUES = 500_000
"""Maximum number of values in a text; aliases count with their expansion."""

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE|yes|Yes|YES|on|On|ON")
_FALSE = re.compile(r"false|False|FALSE|no|No|NO|off|Off|OFF")
_INT = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|[1-9][0-9_]*|0)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_ADVICE = {
    "mapping values are not allowed": "remove a ':' from this line, or fix the indentation of the line before it",
    "character that cannot start any token": "indent with spaces, and quote strings that begin with @, ` or %",
    "quoted scalar": "close the quote",
    "',' or ']'": "add the ',' or ']' that is missing",
    "',' or '}'": "add the ',' or '}' that is missing",
    "expected ':'": "add the ':' after the name",
    "expected key": "indent the lines of one mapping alike",
    "block end": "indent the lines of one mapping alike",
    "undefined alias": "define the anchor before its alias",
}


class YamlError(Exception):
    """The text is not YAML, or has values that JSON does not have."""

    def __init__(self, line: int, message: str, fix: str) -> None:
        super().__init__(message)
        self.line, self.message, self.fix = line, message, fix


def parse_yaml(text: str) -> Iterator[tuple[Any, dict[FieldPath, int]]]:
    """Each document of a text and the line of everything in it; raises `YamlFault` at the first that is wrong."""
    # libyaml is ten times as quick, and not everywhere.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    reader = _Parser(yaml.parse(text, Loader=loader))
    try:
        yield from reader.documents()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"{error.context} {error.problem}"
        advice = next(
            (fix for words, fix in _ADVICE.items() if words in message), "compare it with the lines around it"
        )
        raise YamlError(1 if mark is None else mark.line + 1, "this is not YAML", advice) from None
    except (yaml.YAMLError, ValueError):
        raise YamlError(1, "the text has characters that YAML does not allow", "remove control characters") from None


class _Parser:
    """Builds values from the parser's events, and stops at the limits."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._left = MAX_VALUES

    def documents(self) -> Iterator[tuple[Any, dict[FieldPath, int]]]:
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors = {}
                lines: dict[FieldPath, int] = {}
                value = self._value(next(self._events), (), lines)
                yield value, lines

    def _value(self, event: Any, place: FieldPath, lines: dict[FieldPath, int]) -> Any:
        line = event.start_mark.line + 1
        lines.setdefault(place, line)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, line)
        self._spend(1, line)
        if len(place) > MAX_DEPTH:
            raise YamlError(line, f"more than {MAX_DEPTH} levels are nested here", "make it flatter")
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
            raise YamlError(line, f"*{str(event.anchor)[:40]} is not defined", "define the anchor before its alias")
        value, size = self._anchors[event.anchor]
        self._spend(size, line)
        return value

    def _spend(self, count: int, line: int) -> None:
        self._left -= count
        if self._left < 0:
            raise YamlError(line, f"the text has more than {MAX_VALUES} values", "split it, or use fewer aliases")

    def _items(self, place: FieldPath, lines: dict[FieldPath, int]) -> list[Any]:
        items: list[Any] = []
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._value(event, (*place, len(items)), lines))
        return items

    def _mapping(self, place: FieldPath, lines: dict[FieldPath, int]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            line = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise YamlError(line, "a name is missing before this value", "write 'name: value'")
            name = _name(event, line)
            if name == "<<" and event.implicit[0]:
                self._merge(merged, self._value(next(self._events), (*place, name), lines), line)
                continue
            if name in mapping:
                first = lines[*place, name]
                raise YamlError(line, f"{name[:40]} is a duplicate of line {first}", "remove one of them")
            lines[*place, name] = line
            mapping[name] = self._value(next(self._events), (*place, name), lines)
        return {**merged, **mapping} if merged else mapping

    def _merge(self, merged: dict[str, Any], value: Any, line: int) -> None:
        for mapping in value if isinstance(value, list) else [value]:
            if not isinstance(mapping, dict):
                raise YamlError(line, "<< takes a mapping", "give it the alias of a mapping")
            for name, inner in mapping.items():
                merged.setdefault(name, inner)


def _name(event: Any, line: int) -> str:
    """Return a key as a string, whatever its type in YAML."""
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
        raise YamlError(line, f"the tag {event.tag[:40]} is not supported", "write the value without a tag")
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _NOT_FINITE.fullmatch(text):
        raise YamlError(line, f"{text} is not a JSON number", "write it in quotes if it is a string")
    if len(text) <= 400 and _INT.fullmatch(text):
        return _parse_int(text.replace("_", ""))
    if len(text) <= 400 and _FLOAT.fullmatch(text):
        number = float(text.replace("_", ""))
        return number if abs(number) != float("inf") else text
    return text


def _parse_int(text: str) -> int:
    digits = text.lstrip("+-")
    base = 8 if digits.startswith("0") and digits.isdigit() and len(digits) > 1 else 0
    number = int(digits, base)
    return -number if text.startswith("-") else number
