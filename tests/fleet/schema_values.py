# SPDX-License-Identifier: Apache-2.0
"""Values that fit a row of a table and values that do not, and documents around them: made of the table itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.fleet.schema.fields import Field, Kind

Steps = tuple[str, ...]
"""The way to a row: names of fields, `[]` into a list, `{}` into a mapping."""

KEY = "example.com/key"


def sample(field: Field, *, full: bool = False) -> Any:
    """A value that fits: with every field, or with those that are required."""
    if field.type == "record":
        return {
            child_field.name: sample(child_field, full=full)
            for child_field in field.fields
            if full or child_field.required
        }
    if field.type == "list" and field.item is not None:
        return [sample(field.item, full=full)]
    if field.type == "map" and field.item is not None:
        return {KEY: sample(field.item, full=full)}
    if field.type == "string":
        return field.choices[-1] if field.choices else field.example.strip('"') or "text"
    if field.type in ("integer", "number", "int-or-string"):
        return int(field.minimum if field.minimum is not None else 1)
    return {"quantity": "8Gi", "boolean": True, "any": {"any": [1]}}[field.type]


def wrong(field: Field) -> Iterator[Any]:
    """Values that do not fit: of every other type, and out of the range."""
    mapping, items = {"a": 1}, [1]
    if field.type == "any":
        return
    if field.type in ("record", "map"):
        yield from ("text", 3, True, items)
        return
    if field.type == "list":
        yield from ("text", 3, True, mapping)
        return
    yield from (mapping, items)
    if field.type != "boolean":
        yield True
    if field.type == "string":
        yield from (7, 0.5)
    if field.type == "boolean":
        yield from ("true", 1)
    if field.type in ("integer", "number"):
        yield from ("3", "many")
    if field.type == "integer":
        yield 1.5
    if field.type in ("int-or-string", "quantity"):
        yield from ("many", "", -1, 0.5)
    if field.choices:
        yield "Nonsense"
    if field.pattern and field.type == "string":
        yield ""
    if field.max_length is not None:
        yield "a" * (field.max_length + 1)
    if field.minimum is not None:
        yield int(field.minimum) - 1
    if field.maximum is not None:
        yield int(field.maximum) + 1


def ways(field: Field, steps: Steps = ()) -> Iterator[tuple[Steps, Field, bool]]:
    """Every row below a field, the way to it, and whether only we check it."""
    for child_field in field.fields:
        yield from _ways(child_field, (*steps, child_field.name), field.own_checks and not child_field.required)
    if field.item is not None:
        yield from _ways(field.item, (*steps, "[]" if field.type == "list" else "{}"), False)


def _ways(field: Field, steps: Steps, ours: bool) -> Iterator[tuple[Steps, Field, bool]]:
    yield steps, field, ours
    for below, item, own in ways(field, steps):
        yield below, item, own or ours


def put(field: Field, steps: Steps, value: Any) -> Any:
    """A value of the field that has `value` at the end of the way, and on the way what is required."""
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    if step in ("[]", "{}") and field.item is not None:
        inner = put(field.item, rest, value)
        return [inner] if step == "[]" else {KEY: inner}
    return {**sample(field), step: put(field[step], rest, value)}


def path(steps: Steps, root: str = "spec") -> str:
    """The way as problems name it."""
    return root + "".join({"[]": "[0]", "{}": f"[{KEY}]"}.get(step, f".{step}") for step in steps)


def whole_document(kind: Kind, spec: Any, name: str = "sample") -> dict[str, Any]:
    return {"apiVersion": "ome.io/v1beta1", "kind": kind.name, "metadata": {"name": name}, "spec": spec}
