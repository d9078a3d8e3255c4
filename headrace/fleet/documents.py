# SPDX-License-Identifier: Apache-2.0
"""YAML files as documents, and back. Called by `headrace explain` and `apply`, and for the files we ship.

Each document remembers where its fields were written, so that a problem can be told with its file and line. A file from
anybody may be read: sizes, depths and what aliases stand for are limited, and no tag makes an object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headrace.fleet.words import Document, Problem
from headrace.fleet.yaml_values import Place, YamlFault, documents_in

MAX_FILE_BYTES = 8 << 20
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Source:
    """A document and where it was written."""

    document: Document
    path: str = ""
    line: int = 1
    lines: Mapping[Place, int] = field(default_factory=dict, repr=False)

    def line_of(self, name: str) -> int:
        """The line of a field, `spec.engine.containers[0].image`; of the nearest above it that is there, if it is not."""
        places = [()] if not name else _places(name)
        for place in sorted(places, key=len, reverse=True):
            if place in self.lines:
                return self.lines[place]
        return self.line

    def place(self, problem: Problem) -> str:
        """`isvc.yaml:12`, for the problem's message."""
        return f"{self.path}:{self.line_of(problem.field)}" if self.path else f"line {self.line_of(problem.field)}"


@dataclass(frozen=True)
class Read:
    """What was in some files."""

    sources: list[Source]
    problems: list[Problem]
    """Of files that could not be read or are not YAML; their field is the place, `isvc.yaml:12`."""

    @property
    def documents(self) -> list[Document]:
        """The documents alone."""
        return [each.document for each in self.sources]


def read(paths: Iterable[Path]) -> Read:
    """All documents of some files, and of all YAML and JSON files below some folders, in the order of their names."""
    sources: list[Source] = []
    problems: list[Problem] = []
    for path in paths:
        if path.is_dir():
            files = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
        else:
            files = [path]
        for each in files:
            found = _read_file(each)
            sources += found.sources
            problems += found.problems
    return Read(sources, problems)


def parse(text: str, path: str = "") -> Read:
    """The documents in a text. The items of a `List` count as documents of their own; empty documents do not count."""
    sources: list[Source] = []
    try:
        for value, lines in documents_in(text):
            sources += _sources(value, lines, path)
    except YamlFault as fault:
        place = f"{path}:{fault.line}" if path else f"line {fault.line}"
        return Read(sources, [Problem(place, fault.message, fault.fix)])
    return Read(sources, [])


def write(documents: Iterable[Document]) -> str:
    """The documents as YAML that says the same to every reader of it."""
    return yaml.dump_all(
        [_plain(each) for each in documents],
        Dumper=_Dumper,
        sort_keys=False,
        width=120,
        allow_unicode=True,
        explicit_start=False,
    )


def _read_file(path: Path) -> Read:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return Read([], [Problem(str(path), "there is no such file", "check the path")])
    except OSError as error:
        said = error.strerror or "an error of the system"
        return Read([], [Problem(str(path), f"cannot be read: {said}", "check its permissions")])
    if len(content) > MAX_FILE_BYTES:
        return Read([], [Problem(str(path), f"is larger than {MAX_FILE_BYTES >> 20} MiB", "split it")])
    try:
        return parse(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError:
        return Read([], [Problem(str(path), "is not text in UTF-8", "save it as UTF-8")])


def _sources(value: Any, lines: Mapping[Place, int], path: str) -> list[Source]:
    if value is None:
        return []
    line = lines.get((), 1)
    if not isinstance(value, Mapping):
        raise YamlFault(line, "a document is a mapping", "begin with apiVersion, kind, metadata, spec")
    if value.get("kind") != "List" or not isinstance(value.get("items"), list):
        return [Source(value, path, line, lines)]
    found: list[Source] = []
    for index, item in enumerate(value["items"]):
        start: Place = ("items", index)
        below = {place[2:]: each for place, each in lines.items() if place[:2] == start}
        found += _sources(item, below, path)
    return found


def _places(name: str) -> list[Place]:
    """Every prefix of a field's path as a place, with numbers in brackets both as an index and as a name."""
    places: list[Place] = [()]
    for dotted, bracketed in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", name):
        last = max(places, key=len)
        places.append((*last, int(bracketed) if bracketed.isdigit() and len(bracketed) < 10 else bracketed or dotted))
    return places


def _plain(value: Any) -> Any:
    """Dicts and lists, whatever mappings and sequences they were."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_DOUBTFUL = re.compile(r"[-+.]?[0-9].*|[yYnN]|~|null|.*: .*", re.DOTALL)
"""Texts that some reader of YAML takes for a number, a truth or nothing: Go's has other rules than Python's."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    lines = text.split("\n")
    if len(lines) > 1 and all(each.isprintable() and each == each.rstrip() for each in lines) and text.strip():
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    # Some of what is not printable ends a line for YAML, and is folded unless it is escaped.
    style = '"' if _DOUBTFUL.fullmatch(text) or not text.isprintable() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
