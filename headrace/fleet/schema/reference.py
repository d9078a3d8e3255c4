# SPDX-License-Identifier: Apache-2.0
"""Rows of the reference page: each field of a kind, what it takes, its default and what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.fleet.schema.fields import Field, Kind


@dataclass(frozen=True)
class Row:
    """One field as the page shows it."""

    path: str
    """`spec.engine.minReplicas`; `[]` after a list, `{}` after a mapping with names of the user's own."""
    takes: str
    default: str
    required: bool
    says: str
    field: Field


def rows(kind: Kind) -> list[Row]:
    """Every field of the spec, in the order of the table."""
    return list(_rows(kind.spec, "spec"))


def status_rows(kind: Kind) -> list[Row]:
    """The same of the status."""
    return [] if kind.status is None else list(_rows(kind.status, "status"))


def _rows(field: Field, path: str) -> Iterator[Row]:
    default = "" if field.default is None else str(field.default)
    yield Row(path, field.takes, default, field.required, field.says, field)
    for each in field.fields:
        yield from _rows(each, f"{path}.{each.name}")
    if field.item is not None:
        yield from _rows(field.item, path + ("[]" if field.type == "list" else "{}"))
