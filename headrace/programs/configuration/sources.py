# SPDX-License-Identifier: Apache-2.0
"""Read and check option values: from the command line, INFERENCE_ environment variables and a YAML file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.core.names import nearest
from headrace.models.config.problems import Problem
from headrace.models.config.schema_check import TypeMismatch, shown
from headrace.models.config.syntax import MAX_BYTES, Block, Entry, Items, Node, Scalar, SyntaxFault, parse_yaml
from headrace.programs.configuration.option import BOOLEANS, OPTIONS, PREFIX, Option
from headrace.programs.configuration.option_table import FLAGS, KEYS

ENVIRONMENT = "environment"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
"""Names the file."""

Texts = Mapping[str, str | list[str] | None]
"""Values of the command line, by option; a list for repeatable options."""
Report = Callable[[int, str, str], None]
"""Called with the line, the key, and the mistake."""

_MAX_DIGITS = 400
"""More digits than any number has."""
_INTEGER = re.compile(r"-?[0-9]+")


def parse_scalar(option: Option, text: str) -> Any:
    """Parse one value; raise `TypeMismatch`."""
    if option.type == "bool":
        if text.strip().lower() not in BOOLEANS:
            raise TypeMismatch(f"takes {option.takes}, not '{shown(text)}'")
        return BOOLEANS[text.strip().lower()]
    if option.type in ("int", "float"):
        number = _number(text.strip(), integer=option.type == "int")
        if number is None:
            raise TypeMismatch(f"takes {option.takes}, not '{shown(text)}'")
        if not option.min <= number <= option.max:
            raise TypeMismatch(f"takes {option.takes}, not {shown(str(number))}")
        return number
    if "\0" in text:
        raise TypeMismatch("has a character that no text here can have")
    if option.pattern and not re.fullmatch(option.pattern, text):
        raise TypeMismatch(f"takes {option.takes}, not '{shown(text)}'")
    if option.choices:
        if text.lower() not in option.choices:
            closest = nearest(text, option.choices)
            raise TypeMismatch(
                f"takes {option.takes}, not '{shown(text)}'" + (f"; did you mean {closest}?" if closest else "")
            )
        return text.lower()
    return text


def _number(text: str, *, integer: bool) -> int | float | None:
    if len(text) > _MAX_DIGITS:
        return None
    try:
        value = int(text) if integer else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def parse_text(option: Option, text: str) -> Any:
    """Parse the value of an environment variable; raise `TypeMismatch`."""
    if option.type in ("rows", "tree") or (option.many and text.lstrip().startswith("[")):
        return _parse_document(option, text)
    if option.many:
        return tuple(parse_scalar(option, item.strip()) for item in text.split(",") if item.strip())
    return parse_scalar(option, text)


def _parse_document(option: Option, text: str) -> Any:
    problems: list[str] = []
    try:
        (entry,) = parse_yaml(f"value: {text}").entries
    except (SyntaxFault, ValueError):
        raise TypeMismatch(f"takes {option.takes} as JSON") from None
    value = parse_node(option, entry.value, "", lambda _, key, mistake: problems.append(f"{key} {mistake}".strip()))
    if problems:
        raise TypeMismatch("; ".join(problems[:5]))
    return value


def parse_node(option: Option, node: Node, key: str, report: Report) -> Any:
    """Parse the value in a file. All mistakes are reported; then the value is meaningless."""
    try:
        if option.type == "rows":
            return _parse_rows(option, node, key, report)
        if option.type == "tree":
            if not isinstance(node, Block):
                raise TypeMismatch(f"takes {option.takes}")
            return _parse_tree(node, key, report)
        if option.many:
            return _parse_list(option, node)
        if not isinstance(node, Scalar):
            raise TypeMismatch(f"takes {option.takes}, not a {'list' if isinstance(node, Items) else 'mapping'}")
        return _parse_yaml_scalar(option, node)
    except TypeMismatch as misfit:
        report(node.line, key, misfit.text)
        return None


def _parse_yaml_scalar(option: Option, scalar: Scalar) -> Any:
    """Parse a scalar of the file. YAML has converted some texts to numbers and booleans."""
    if (
        option.type == "str"
        and scalar.kind != "text"
        and not (scalar.kind == "number" and _INTEGER.fullmatch(scalar.text))
    ):
        raise TypeMismatch(f"takes a text, and YAML reads {shown(scalar.text)} here: write it in quotes")
    if option.type in ("int", "float") and scalar.kind == "bool":
        raise TypeMismatch(f"takes {option.takes}, not {scalar.text}")
    if option.type == "bool" and scalar.kind == "number":
        raise TypeMismatch(f"takes {option.takes}, not {shown(scalar.text)}")
    return parse_scalar(option, scalar.text)


def _parse_list(option: Option, node: Node) -> tuple[Any, ...]:
    # A single value is a list of one.
    values = []
    for item in node.items if isinstance(node, Items) else [node]:
        if not isinstance(item, Scalar) or item.kind == "null":
            raise TypeMismatch(f"takes {option.takes if option.type == 'str' else 'a list of numbers'}")
        values.append(_parse_yaml_scalar(option, item))
    return tuple(values)


def _parse_rows(option: Option, node: Node, key: str, report: Report) -> tuple[dict[str, Any], ...]:
    if not isinstance(node, Items):
        raise TypeMismatch("takes a list: write a line with '- ' in front for each")
    rows = []
    fields = {field.key: field for field in option.fields}
    for index, item in enumerate(node.items):
        row_key = f"{key}[{index}]"
        if not isinstance(item, Block):
            report(item.line, row_key, f"takes a mapping with {', '.join(fields)}")
            continue
        row = {field.key: field.default for field in option.fields}
        seen: set[str] = set()
        for entry in item.entries:
            field = fields.get(entry.name)
            if field is None:
                closest = nearest(entry.name, fields)
                advice = f"did you mean {closest}?" if closest else f"there are {', '.join(fields)}"
                report(entry.line, f"{row_key}.{shown(entry.name)}", f"is not known: {advice}")
            elif entry.name in seen:
                report(entry.line, f"{row_key}.{entry.name}", "is there twice; remove one")
            else:
                row[entry.name] = parse_node(field, entry.value, f"{row_key}.{entry.name}", report)
            seen.add(entry.name)
        first = option.fields[0].key
        if row[first] is None and first not in seen:
            report(item.line, row_key, f"needs {first}")
        rows.append(row)
    return tuple(rows)


def _parse_tree(node: Node, key: str, report: Report) -> Any:
    """Return a tree as plain data. Repeated names are reported."""
    if isinstance(node, Scalar):
        return _plain_scalar(node)
    if isinstance(node, Items):
        return [_parse_tree(item, f"{key}[{index}]", report) for index, item in enumerate(node.items)]
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for entry in node.entries:
        if entry.name in lines:
            report(entry.line, f"{key}.{entry.name}", f"is there twice, first in line {lines[entry.name]}; remove one")
        lines.setdefault(entry.name, entry.line)
        values[entry.name] = _parse_tree(entry.value, f"{key}.{entry.name}", report)
    return values


def _plain_scalar(scalar: Scalar) -> Any:
    if scalar.kind == "null":
        return None
    if scalar.kind == "bool":
        return scalar.text == "true"
    if scalar.kind == "number":
        number = float(scalar.text)
        return int(scalar.text) if _INTEGER.fullmatch(scalar.text) else number
    return scalar.text


def read_command_line(texts: Texts) -> dict[str, Any]:
    """Return the values of the command line, by option; an empty text counts as left out. Raise InvalidArgument."""
    values = {}
    for flag, text in texts.items():
        option = FLAGS[flag]
        items = [text] if isinstance(text, str) else text or []
        parsed = tuple(_parse_argument(option, item) for item in items)
        if parsed and (option.many or items[-1]):
            values[flag] = parsed if option.many else parsed[-1]
    return values


def _parse_argument(option: Option, text: str) -> Any:
    written = option.on_command_line()
    try:
        value = parse_scalar(written, text)
    except TypeMismatch:
        raise InvalidArgument(f"--{option.flag} must be {written.takes}, not {text!r}") from None
    return value if option.scale == 1 else value / option.scale


@dataclass(slots=True)
class EnvironmentValues:
    """The values of the environment."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Value and variable, by key."""
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_environment(environment: Mapping[str, str]) -> EnvironmentValues:
    """Read the environment. An unknown variable may belong to another program, so it is a warning and not an error."""
    result = EnvironmentValues()
    known = {variable: option for option in KEYS.values() for variable in option.variables}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or not text:
            continue
        option = known.get(variable)
        if option is None:
            result.warnings.append(_unknown_variable(variable, list(known)))
            continue
        before = result.values.get(option.key)
        try:
            value = parse_text(option, text)
        except TypeMismatch as misfit:
            result.problems.append(Problem(ENVIRONMENT, None, variable, misfit.text))
            continue
        if before is not None and before[0] != value:
            mistake = f"says something else than {before[1]}, and both mean {option.key}: keep one"
            result.problems.append(Problem(ENVIRONMENT, None, variable, mistake))
        result.values[option.key] = (value, variable)
    return result


def _unknown_variable(variable: str, known: list[str]) -> str:
    # Without the common prefix, which would make any two look alike.
    closest = nearest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in (*known, CONFIG_VARIABLE)])
    advice = f"did you mean {PREFIX}{closest}?" if closest else "'headrace config show' lists what can be set"
    return f"the environment's {shown(ascii(variable)[1:-1])} is not known: {advice}"


@dataclass(slots=True)
class FileValues:
    """The values of a file."""

    path: str
    values: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """Value and line, by key."""
    problems: list[Problem] = field(default_factory=list)


def read_file(path: str) -> FileValues:
    """Read a file and collect its mistakes; nothing is raised."""
    result = FileValues(path)
    text = _read_text(result)
    if text is None:
        return result
    try:
        tree = parse_yaml(text)
    except SyntaxFault as fault:
        result.problems.append(Problem(path, fault.line, "", fault.text))
        return result
    _FileReader(result).read_section(tree, "")
    return result


def _read_text(result: FileValues) -> str | None:
    problem: tuple[int | None, str]
    try:
        with Path(result.path).open("rb") as file:
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
    result.problems.append(Problem(result.path, problem[0], "", problem[1]))
    return None


class _FileReader:
    """Reads the sections of a file."""

    def __init__(self, result: FileValues) -> None:
        self._result = result
        self._by_flag = {option.flag: option for option in KEYS.values() if option.flag}
        self._sections = {key.rpartition(".")[0] for key in KEYS} - {""}
        self._sections |= {section.rpartition(".")[0] for section in self._sections} - {""}

    def read_section(self, block: Block, section: str) -> None:
        """Read one level of the file."""
        lines: dict[str, int] = {}
        for entry in block.entries:
            key = f"{section}.{entry.name}" if section else entry.name
            if section == OPTIONS:
                key = f"{OPTIONS}.{entry.name.replace('_', '-').lower()}"
            if key in lines:
                self._report(entry.line, key, f"is there twice, first in line {lines[key]}; remove one")
            elif section == OPTIONS and key.partition(".")[2] in self._by_flag:
                self._read_value(self._by_flag[key.partition(".")[2]], entry, key)
            elif key in KEYS:
                self._read_value(KEYS[key], entry, key)
            elif key in self._sections:
                self._read_subsection(entry, key)
            else:
                self._report(entry.line, key, self._unknown(entry, section))
            lines.setdefault(key, entry.line)

    def _read_subsection(self, entry: Entry, key: str) -> None:
        value = entry.value
        if isinstance(value, Block):
            self.read_section(value, key)
        elif not (isinstance(value, Scalar) and value.kind == "null"):
            self._report(entry.line, key, "takes a mapping: write its keys below it, indented")

    def _read_value(self, option: Option, entry: Entry, key: str) -> None:
        if isinstance(entry.value, Scalar) and entry.value.kind == "null":
            return  # Left out.
        if option.key in self._result.values:
            self._report(entry.line, key, f"says the same as line {self._result.values[option.key][1]}; remove one")
            return
        written = option.on_command_line() if key.startswith(f"{OPTIONS}.") else option
        value = parse_node(written, entry.value, key, self._report)
        if value is not None:
            scale = option.scale // written.scale
            self._result.values[option.key] = (value if scale == 1 else value / scale, entry.line)

    def _report(self, line: int, key: str, mistake: str) -> None:
        self._result.problems.append(Problem(self._result.path, line, key[:200], mistake))

    def _unknown(self, entry: Entry, section: str) -> str:
        name = entry.name
        start = f"{section}." if section else ""
        level = [key for key in (*KEYS, *self._sections) if key.startswith(start)]
        names = sorted({key[len(start) :].partition(".")[0] for key in level})
        if section == OPTIONS:
            names = sorted({*names, *self._by_flag})
        close = nearest(name, names)
        if close:
            return f"is not known: did you mean {close}?"
        for key, option in KEYS.items():
            if name.upper() == option.env or key.rpartition(".")[2] == name:
                return f"is not known here: write it as {key}"
        leaf = nearest(name, [key.rpartition(".")[2] for key in KEYS])
        if leaf:
            elsewhere = next(key for key in KEYS if key.rpartition(".")[2] == leaf)
            return f"is not known: did you mean {elsewhere}?"
        return f"is not known: here there are {_join_names(names)}"


def _join_names(names: Sequence[str]) -> str:
    joined = ", ".join(shown(name) for name in names[:12])
    return joined if len(names) <= 12 else f"{joined} and others"
