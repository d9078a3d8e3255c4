# SPDX-License-Identifier: Apache-2.0
"""Read configuration values from a YAML file and from INFERENCE_ environment variables, and check them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.models.config.problems import Problem
from headrace.models.config.schema_check import Misfit, nearest, shown
from headrace.models.config.syntax import MAX_BYTES, Block, Entry, Items, Node, Scalar, SyntaxFault, parse_yaml
from headrace.programs.configuration.keys import ENVIRONMENT, OPTIONS, PREFIX, Key

Report = Callable[[int, str, str], None]
"""Called with the line, the key's path, and the mistake."""

_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_LONG = 400
"""More digits than any number has."""


def from_text(key: Key, text: str) -> Any:
    """Parse the value in a text; raises `Misfit`."""
    if key.kind in ("rows", "tree") or (key.many and text.lstrip().startswith("[")):
        return _from_document(key, text)
    if key.many:
        return tuple(_scalar(key, each.strip()) for each in text.split(",") if each.strip())
    return _scalar(key, text)


def from_node(key: Key, node: Node, path: str, report: Report) -> Any:
    """Parse the value in a file. All mistakes are reported; then the value is meaningless."""
    try:
        if key.kind == "rows":
            return _rows(key, node, path, report)
        if key.kind == "tree":
            if not isinstance(node, Block):
                raise Misfit(f"takes {key.takes}")
            return plain(node, path, report)
        if key.many:
            return _many(key, node)
        if not isinstance(node, Scalar):
            raise Misfit(f"takes {key.takes}, not a {'list' if isinstance(node, Items) else 'mapping'}")
        return _written(key, node)
    except Misfit as misfit:
        report(node.line, path, misfit.text)
        return None


def checked(key: Key, value: Any) -> Any:
    """Check that a value has the right type, range and choice."""
    if key.pattern and isinstance(value, str) and not re.fullmatch(key.pattern, value):
        raise Misfit(f"takes {key.takes}, not '{shown(value)}'")
    if key.choices and isinstance(value, str):
        if value.lower() not in key.choices:
            near = nearest(value.lower(), list(key.choices))
            raise Misfit(f"takes {key.takes}, not '{shown(value)}'" + (f"; did you mean {near}?" if near else ""))
        return value.lower()
    if isinstance(value, int | float) and not isinstance(value, bool) and not key.least <= value <= key.most:
        raise Misfit(f"takes {key.takes}, not {shown(str(value))}")
    return value


def plain(node: Node, path: str, report: Report) -> Any:
    """Return a tree as plain data. Repeated names are reported."""
    if isinstance(node, Scalar):
        return _plain_scalar(node)
    if isinstance(node, Items):
        return [plain(each, f"{path}[{index}]", report) for index, each in enumerate(node.items)]
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for entry in node.entries:
        if entry.name in lines:
            report(entry.line, f"{path}.{entry.name}", f"is there twice, first in line {lines[entry.name]}; remove one")
        lines.setdefault(entry.name, entry.line)
        values[entry.name] = plain(entry.value, f"{path}.{entry.name}", report)
    return values


def _plain_scalar(scalar: Scalar) -> Any:
    if scalar.kind == "null":
        return None
    if scalar.kind == "bool":
        return scalar.text == "true"
    if scalar.kind == "number":
        number = float(scalar.text)
        return int(scalar.text) if re.fullmatch(r"-?[0-9]+", scalar.text) else number
    return scalar.text


def _from_document(key: Key, text: str) -> Any:
    problems: list[str] = []
    try:
        (entry,) = parse_yaml(f"value: {text}").entries
    except (SyntaxFault, ValueError):
        raise Misfit(f"takes {key.takes} as JSON") from None
    value = from_node(key, entry.value, "", lambda _, place, said: problems.append(f"{place} {said}".strip()))
    if problems:
        raise Misfit("; ".join(problems[:5]))
    return value


def _many(key: Key, node: Node) -> tuple[Any, ...]:
    # A single value is a list of one.
    nodes = node.items if isinstance(node, Items) else [node]
    values = []
    for each in nodes:
        if not isinstance(each, Scalar) or each.kind == "null":
            raise Misfit(f"takes {key.takes if key.kind == 'text' else 'a list of numbers'}")
        values.append(_written(key, each))
    return tuple(values)


def _rows(key: Key, node: Node, path: str, report: Report) -> tuple[dict[str, Any], ...]:
    if not isinstance(node, Items):
        raise Misfit("takes a list: write a line with '- ' in front for each")
    rows = []
    fields = {field.path: field for field in key.fields}
    for index, item in enumerate(node.items):
        place = f"{path}[{index}]"
        if not isinstance(item, Block):
            report(item.line, place, f"takes a mapping with {', '.join(fields)}")
            continue
        row = {field.path: field.default for field in key.fields}
        seen: set[str] = set()
        for entry in item.entries:
            field = fields.get(entry.name)
            if field is None:
                near = nearest(entry.name, list(fields))
                advice = f"did you mean {near}?" if near else f"there are {', '.join(fields)}"
                report(entry.line, f"{place}.{shown(entry.name)}", f"is not known: {advice}")
            elif entry.name in seen:
                report(entry.line, f"{place}.{entry.name}", "is there twice; remove one")
            else:
                row[entry.name] = from_node(field, entry.value, f"{place}.{entry.name}", report)
            seen.add(entry.name)
        first = key.fields[0].path
        if row[first] is None and first not in seen:
            report(item.line, place, f"needs {first}")
        rows.append(row)
    return tuple(rows)


def _written(key: Key, scalar: Scalar) -> Any:
    """Return the value of a scalar in the file. YAML has converted some texts to numbers and booleans."""
    if key.kind == "text" and scalar.kind != "text":
        if scalar.kind != "number" or not re.fullmatch(r"-?[0-9]+", scalar.text):
            raise Misfit(f"takes a text, and YAML reads {shown(scalar.text)} here: write it in quotes")
        return checked(key, scalar.text)
    if key.kind in ("whole", "number") and scalar.kind == "bool":
        raise Misfit(f"takes {key.takes}, not {scalar.text}")
    if key.kind == "truth" and scalar.kind == "number":
        raise Misfit(f"takes {key.takes}, not {shown(scalar.text)}")
    return _scalar(key, scalar.text)


def _scalar(key: Key, text: str) -> Any:
    if key.kind == "truth":
        if text.strip().lower() not in _TRUTHS:
            raise Misfit(f"takes {key.takes}, not '{shown(text)}'")
        return _TRUTHS[text.strip().lower()]
    if key.kind in ("whole", "number"):
        number = _number(text.strip(), whole=key.kind == "whole")
        if number is None:
            raise Misfit(f"takes {key.takes}, not '{shown(text)}'")
        return checked(key, number)
    if "\0" in text:
        raise Misfit("has a character that no text here can have")
    return checked(key, text)


def _number(text: str, *, whole: bool) -> int | float | None:
    if len(text) > _LONG:
        return None
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


CONFIG = f"{PREFIX}CONFIG"
"""Names the file."""


@dataclass(slots=True)
class EnvironmentValues:
    """The values of the environment."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Value and variable, by the key's path."""
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_environment(environment: Mapping[str, str], keys: Sequence[Key]) -> EnvironmentValues:
    """Read the environment. An unknown variable may belong to another program: it is a warning, not a mistake."""
    found = EnvironmentValues()
    known = {variable: key for key in keys for variable in key.variables}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable == CONFIG or not text:
            continue
        key = known.get(variable)
        if key is None:
            found.warnings.append(_unknown(variable, list(known)))
            continue
        before = found.values.get(key.path)
        try:
            value = from_text(key, text)
        except Misfit as misfit:
            found.problems.append(Problem(ENVIRONMENT, None, variable, misfit.text))
            continue
        if before is not None and before[0] != value:
            said = f"says something else than {before[1]}, and both mean {key.path}: keep one"
            found.problems.append(Problem(ENVIRONMENT, None, variable, said))
        found.values[key.path] = (value, variable)
    return found


def _unknown(variable: str, known: list[str]) -> str:
    # Without the common prefix, which would make any two look alike.
    near = nearest(variable.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in (*known, CONFIG)])
    advice = f"did you mean {PREFIX}{near}?" if near else "'headrace config show' lists what can be set"
    return f"the environment's {shown(ascii(variable)[1:-1])} is not known: {advice}"


@dataclass(slots=True)
class FileValues:
    """The values of a file."""

    path: str
    values: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """Value and line, by the key's path."""
    problems: list[Problem] = field(default_factory=list)


def read_file(path: str, keys: Sequence[Key]) -> FileValues:
    """Read a file and collect its mistakes; nothing is raised."""
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
        """Read one level of the file."""
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
            return  # Left out.
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
    """Return some names for a message."""
    shown_names = ", ".join(shown(name) for name in names[:12])
    return shown_names if len(names) <= 12 else f"{shown_names} and others"
