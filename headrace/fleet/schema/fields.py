# SPDX-License-Identifier: Apache-2.0
"""One row of a table: a field, what it takes and what it is for; and a kind, which is a table with a name.

The tables in `kinds` are made of these. `checking`, `defaulting`, `crds` and `reference` walk them; nothing else knows
what a field takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Type = Literal["string", "integer", "number", "boolean", "record", "list", "map", "any", "int-or-string", "quantity"]

INT32 = 2**31 - 1
INT64 = 2**63 - 1

NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
"""Names of objects, as DNS has them."""
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""Names of containers, as labels of DNS."""
PERCENT = r"([0-9]{1,2}|100)%"
QUANTITY = r"\+?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)([KMGTPE]i|[munkMGTPE]|[eE][+-]?[0-9]+)?"
"""Kubernetes' own: `500m`, `8Gi`, `1e3`."""


@dataclass(frozen=True)
class Field:
    """What one field takes. Of a list or a map, `item` is what each of its values takes; it has no name."""

    name: str
    type: Type
    says: str = ""
    """For people: the CRD's description and the reference page."""
    fields: tuple[Field, ...] = ()
    """Of a record. Others may be there as well, and are kept."""
    item: Field | None = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    pattern: str = ""
    """The whole text has to match. Written for both Python and RE2."""
    example: str = ""
    """What a text that matches looks like."""
    longest: int | None = None
    default: Any = None
    required: bool = False
    ours: bool = False
    """Its fields are checked by us alone: a CRD that said them all again for every pod would be too large to apply."""

    def __getitem__(self, name: str) -> Field:
        return next(each for each in self.fields if each.name == name)

    @property
    def takes(self) -> str:
        """`a whole number from 0 to 100`: for messages and the reference page."""
        if self.choices:
            return "one of " + ", ".join(each or '""' for each in self.choices)
        if self.type == "string" and self.example:
            return f"a text such as {self.example}"
        if self.type in ("integer", "number"):
            return ("a whole number" if self.type == "integer" else "a number") + self._range
        return _TAKES[self.type]

    @property
    def _range(self) -> str:
        if self.least is not None and self.most is not None and self.most not in (INT32, INT64):
            return f" from {self.least:g} to {self.most:g}"
        return "" if self.least is None else f", {self.least:g} or more"


_TAKES: dict[Type, str] = {
    "string": "a text",
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
    """A resource of ours."""

    name: str
    plural: str
    namespaced: bool
    says: str
    spec: Field
    status: Field | None = None
    """None: the kind has no status."""
    short: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    named: str = NAME
    """What its names match."""
    longest_name: int = 253


def text(name: str, says: str = "", **limits: Any) -> Field:
    """A string."""
    return Field(name, "string", says, **limits)


def choice(name: str, says: str, *choices: str, **limits: Any) -> Field:
    """One of a few strings."""
    return Field(name, "string", says, choices=choices, **limits)


def reference(name: str, says: str, **limits: Any) -> Field:
    """The name of another object."""
    return Field(name, "string", says, pattern=NAME, example="llama-3-70b", longest=253, **limits)


def whole(name: str, says: str = "", least: int | None = None, most: int = INT32, **limits: Any) -> Field:
    """An integer."""
    return Field(name, "integer", says, least=least, most=most, **limits)


def number(name: str, says: str = "", **limits: Any) -> Field:
    """A number that may have a fraction."""
    return Field(name, "number", says, **limits)


def truth(name: str, says: str = "", **limits: Any) -> Field:
    """A boolean."""
    return Field(name, "boolean", says, **limits)


def record(name: str, says: str, *fields: Field, **limits: Any) -> Field:
    """A mapping with known names."""
    return Field(name, "record", says, fields=fields, **limits)


def many(name: str, says: str, item: Field, **limits: Any) -> Field:
    """A list."""
    return Field(name, "list", says, item=item, **limits)


def texts(name: str, says: str = "", **limits: Any) -> Field:
    """A list of strings."""
    return Field(name, "list", says, item=text(""), **limits)


def mapping(name: str, says: str = "", item: Field | None = None, **limits: Any) -> Field:
    """A mapping whose names the user makes up; to strings unless told."""
    return Field(name, "map", says, item=item or text(""), **limits)


def anything(name: str, says: str = "", **limits: Any) -> Field:
    """Whatever JSON can say: somebody else checks it."""
    return Field(name, "any", says, **limits)


def quantity(name: str, says: str = "", **limits: Any) -> Field:
    """An amount as Kubernetes writes it."""
    return Field(name, "quantity", says, least=0, pattern=QUANTITY, **limits)


def share(name: str, says: str = "", **limits: Any) -> Field:
    """A number of pods, or a percentage of them."""
    return Field(name, "int-or-string", says, least=0, most=INT32, pattern=PERCENT, **limits)


def renamed(row: Field, name: str, says: str | None = None) -> Field:
    """The same under another name."""
    return replace(row, name=name, says=row.says if says is None else says)
