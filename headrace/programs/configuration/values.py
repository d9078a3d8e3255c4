# SPDX-License-Identifier: Apache-2.0
"""One value held against its key: from the file, with the line of everything, or from a text of the environment.

Called by `files` and `environment`. What does not fit is answered with what would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from headrace.models.config.scalars import Misfit, nearest, shown
from headrace.models.config.trees import Block, Items, Node, Scalar, SyntaxFault
from headrace.models.config.yaml_syntax import parse_yaml
from headrace.programs.configuration.keys import Key

Report = Callable[[int, str, str], None]
"""Takes the line, the path of the key, and what is wrong."""

_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_LONG = 400
"""More digits than any number has."""


def from_text(key: Key, text: str) -> Any:
    """The value in a text; raises `Misfit`."""
    if key.kind in ("rows", "tree") or (key.many and text.lstrip().startswith("[")):
        return _from_document(key, text)
    if key.many:
        return tuple(_scalar(key, each.strip()) for each in text.split(",") if each.strip())
    return _scalar(key, text)


def from_node(key: Key, node: Node, path: str, report: Report) -> Any:
    """The value in a file. What is wrong is reported, all of it; then the value means nothing."""
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
    """A value of the right type that is in its range and among the choices."""
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
    """A tree as plain data. Names that are there twice are reported."""
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
    # One value alone is a list of one.
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
    """What a scalar of the file says. YAML has made numbers and truths of some texts."""
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
