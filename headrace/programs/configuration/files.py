# SPDX-License-Identifier: Apache-2.0
"""A YAML file as values by key, each with its line, and everything that is wrong with it.

Called by `merging`. Never builds objects from YAML: the tree is made by `modelconfig.yaml_syntax`, which refuses aliases and
bounds depth and size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.models.config.problems import Problem
from headrace.models.config.scalars import nearest, shown
from headrace.models.config.trees import MAX_BYTES, Block, Entry, Scalar, SyntaxFault
from headrace.models.config.yaml_syntax import parse_yaml
from headrace.programs.configuration.keys import Key
from headrace.programs.configuration.table import OPTIONS
from headrace.programs.configuration.values import from_node


@dataclass(slots=True)
class FileValues:
    """What a file says."""

    path: str
    values: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """By the path of the key: value and line."""
    problems: list[Problem] = field(default_factory=list)


def read_file(path: str, keys: Sequence[Key]) -> FileValues:
    """Read it, or say what is wrong with it; nothing is raised."""
    found = FileValues(path)
    text = _text(found)
    if text is None:
        return found
    try:
        tree = parse_yaml(text)
    except SyntaxFault as fault:
        found.problems.append(Problem(path, fault.line, "", fault.text))
        return found
    _Reader(found, keys).section(tree, "")
    return found


def _text(found: FileValues) -> str | None:
    problem: tuple[int | None, str]
    try:
        with Path(found.path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            problem = (None, f"has more than {MAX_BYTES} bytes; no configuration needs that")
        else:
            return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = (content.count(b"\n", 0, error.start) + 1, "is not UTF-8 text here; save the file as UTF-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a name of a file"
        problem = (None, f"cannot be read: {reason}; name a file with --config or INFERENCE_CONFIG")
    found.problems.append(Problem(found.path, problem[0], "", problem[1]))
    return None


class _Reader:
    """Walks over the sections of a tree."""

    def __init__(self, found: FileValues, keys: Sequence[Key]) -> None:
        self._found = found
        self._keys = {key.path: key for key in keys}
        self._by_flag = {key.flag: key for key in keys if key.flag}
        self._sections = {path.rpartition(".")[0] for path in self._keys} - {""}
        self._sections |= {section.rpartition(".")[0] for section in self._sections} - {""}

    def section(self, block: Block, section: str) -> None:
        """One level of the file."""
        lines: dict[str, int] = {}
        for entry in block.entries:
            path = f"{section}.{entry.name}" if section else entry.name
            if section == OPTIONS:
                path = f"{OPTIONS}.{entry.name.replace('_', '-').lower()}"
            if path in lines:
                self._report(entry.line, path, f"is there twice, first in line {lines[path]}; remove one")
            elif section == OPTIONS and path.partition(".")[2] in self._by_flag:
                self._put(self._by_flag[path.partition(".")[2]], entry, path)
            elif path in self._keys:
                self._put(self._keys[path], entry, path)
            elif path in self._sections:
                self._inner(entry, path)
            else:
                self._report(entry.line, path, self._unknown(entry, section))
            lines.setdefault(path, entry.line)

    def _inner(self, entry: Entry, path: str) -> None:
        value = entry.value
        if isinstance(value, Block):
            self.section(value, path)
        elif not (isinstance(value, Scalar) and value.kind == "null"):
            self._report(entry.line, path, "takes a mapping: write its keys below it, indented")

    def _put(self, key: Key, entry: Entry, path: str) -> None:
        if isinstance(entry.value, Scalar) and entry.value.kind == "null":
            return  # left out
        if key.path in self._found.values:
            self._report(entry.line, path, f"says the same as line {self._found.values[key.path][1]}; remove one")
            return
        written = key
        scale = 1
        if key.scale != 1 and path.startswith(f"{OPTIONS}."):
            # An option has its own unit.
            written = Key(path, key.help, "whole", least=0, most=key.most * key.scale)
            scale = key.scale
        value = from_node(written, entry.value, path, self._report)
        if value is not None:
            self._found.values[key.path] = (value / scale if scale != 1 else value, entry.line)

    def _report(self, line: int, path: str, text: str) -> None:
        self._found.problems.append(Problem(self._found.path, line, path[:200], text))

    def _unknown(self, entry: Entry, section: str) -> str:
        name = entry.name
        start = f"{section}." if section else ""
        level = [each for each in (*self._keys, *self._sections) if each.startswith(start)]
        siblings = sorted({each[len(start) :].partition(".")[0] for each in level})
        if section == OPTIONS:
            siblings = sorted({*siblings, *self._by_flag})
        close = nearest(name.lower(), siblings)
        if close:
            return f"is not known: did you mean {close}?"
        for path, key in self._keys.items():
            if name.upper() in key.names or path.rpartition(".")[2] == name:
                return f"is not known here: write it as {path}"
        whole = nearest(name.lower(), [path.rpartition(".")[2] for path in self._keys])
        if whole:
            there = next(path for path in self._keys if path.rpartition(".")[2] == whole)
            return f"is not known: did you mean {there}?"
        return f"is not known: here there are {shown_list(siblings)}"


def shown_list(names: Sequence[str]) -> str:
    """Some names, for a message."""
    shown_names = ", ".join(shown(name) for name in names[:12])
    return shown_names if len(names) <= 12 else f"{shown_names} and others"
