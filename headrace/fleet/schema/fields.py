# SPDX-License-Identifier: Apache-2.0
"""The schema of a field and of a kind, and functions to write tables of fields.

The tables in `kinds` are made of these; `validation` and `crds` walk them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Type = Literal["string", "integer", "number", "boolean", "record", "list", "map", "any", "int-or-string", "quantity"]

INT32 = 2**31 - 1
INT64 = 2**63 - 1

NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
"""Names of objects: DNS names."""
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""Names of containers: DNS labels."""
PERCENT = r"([0-9]{1,2}|100)%"
QUANTITY = r"\+?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)([KMGTPE]i|[munkMGTPE]|[eE][+-]?[0-9]+)?"
"""Kubernetes quantities: `500m`, `8Gi`, `1e3`."""


@dataclass(frozen=True)
class Field:
    """The schema of a field. `item` is the schema of the values of a list or a map; it has no name."""

    name: str
    type: Type
    description: str = ""
    """For the CRD and the reference page."""
    fields: tuple[Field, ...] = ()
    """Fields of a record. A record without any takes every field."""
    open: bool = False
    """Kubernetes has more fields for this record than the table; only the API server knows them all."""
    unchecked: tuple[str, ...] = ()
    """Names of further fields of a record, which only the API server checks."""
    item: Field | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    pattern: str = ""
    """Must match the whole string. Written for both Python and RE2."""
    example: str = ""
    """A string that matches."""
    max_length: int | None = None
    default: Any = None
    required: bool = False
    own_checks: bool = False
    """Its fields are not in the CRD: with all fields of every pod it would be too large to apply."""

    def __getitem__(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    @property
    def takes(self) -> str:
        """`a whole number from 0 to 100`, for messages and the reference page."""
        if self.choices:
            return "one of " + ", ".join(choice or '""' for choice in self.choices)
        if self.type == "string" and self.example:
            return f"a string such as {self.example}"
        if self.type in ("integer", "number"):
            return ("a whole number" if self.type == "integer" else "a number") + self._range
        return _TAKES[self.type]

    @property
    def _range(self) -> str:
        if self.minimum is not None and self.maximum is not None and self.maximum not in (INT32, INT64):
            return f" from {self.minimum:g} to {self.maximum:g}"
        return "" if self.minimum is None else f", {self.minimum:g} or more"


_TAKES: dict[Type, str] = {
    "string": "a string",
    "boolean": "true or false",
    "record": "a mapping",
    "list": "a list",
    "map": "a mapping",
    "any": "anything",
    "int-or-string": 'a whole number, 0 or more, or a percentage such as "25%"',
    "quantity": 'a quantity such as 2, "500m" or "8Gi"',
}


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`."""

    name: str
    path: str
    type: Literal["string", "integer", "date", "boolean"] = "string"
    wide: bool = False
    """Only with `-o wide`."""


@dataclass(frozen=True)
class Kind:
    """A custom resource."""

    name: str
    plural: str
    namespaced: bool
    description: str
    spec: Field
    status: Field | None = None
    """None: the kind has no status."""
    short: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    name_pattern: str = NAME
    """Pattern of its names."""
    max_name_length: int = 253


def string(name: str, description: str = "", **limits: Any) -> Field:
    """Return a string field."""
    return Field(name, "string", description, **limits)


def choice(name: str, description: str, *choices: str, **limits: Any) -> Field:
    """Return a field with one of some strings."""
    return Field(name, "string", description, choices=choices, **limits)


def reference(name: str, description: str, **limits: Any) -> Field:
    """Return a field with the name of another object."""
    return Field(name, "string", description, pattern=NAME, example="llama-3-70b", max_length=253, **limits)


def integer(name: str, description: str = "", minimum: int | None = None, maximum: int = INT32, **limits: Any) -> Field:
    """Return an integer field."""
    return Field(name, "integer", description, minimum=minimum, maximum=maximum, **limits)


def number(name: str, description: str = "", **limits: Any) -> Field:
    """Return a number field."""
    return Field(name, "number", description, **limits)


def boolean(name: str, description: str = "", **limits: Any) -> Field:
    """Return a boolean field."""
    return Field(name, "boolean", description, **limits)


def record(name: str, description: str, *fields: Field, **limits: Any) -> Field:
    """Return a field with named fields."""
    return Field(name, "record", description, fields=fields, **limits)


def list_of(name: str, description: str, item: Field, **limits: Any) -> Field:
    """Return a list field."""
    return Field(name, "list", description, item=item, **limits)


def strings(name: str, description: str = "", **limits: Any) -> Field:
    """Return a list of strings."""
    return Field(name, "list", description, item=string(""), **limits)


def mapping(name: str, description: str = "", item: Field | None = None, **limits: Any) -> Field:
    """Return a mapping with arbitrary keys; its values are strings by default."""
    return Field(name, "map", description, item=item or string(""), **limits)


def any_value(name: str, description: str = "", **limits: Any) -> Field:
    """Return a field with any JSON value, which is not validated."""
    return Field(name, "any", description, **limits)


def quantity(name: str, description: str = "", **limits: Any) -> Field:
    """Return a field with a Kubernetes quantity."""
    return Field(name, "quantity", description, minimum=0, pattern=QUANTITY, **limits)


def int_or_percent(name: str, description: str = "", **limits: Any) -> Field:
    """Return a field with a number of pods or a percentage."""
    return Field(name, "int-or-string", description, minimum=0, maximum=INT32, pattern=PERCENT, **limits)


def rename_field(row: Field, name: str, description: str | None = None) -> Field:
    """Return a copy of a field with another name."""
    return replace(row, name=name, description=row.description if description is None else description)
