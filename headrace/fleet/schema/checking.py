# SPDX-License-Identifier: Apache-2.0
"""A document held against the table of its kind.

Called by `admission` and by who reads documents. Looks at one field at a time; says of each that does not fit what would.
Never raises, whatever the document is. Null means absent, as it does for the API server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from headrace.fleet.names import API_VERSION
from headrace.fleet.schema.fields import Field, Kind, mapping, record, text
from headrace.fleet.schema.kinds import KINDS, find_kind
from headrace.fleet.words import Document, Problem

MOST = 100
"""After so many, nobody reads on."""

METADATA = record(
    "metadata",
    "",
    text("name"),
    text("generateName"),
    text("namespace"),
    mapping("labels"),
    mapping("annotations"),
)


def check(document: Any) -> list[Problem]:
    """What is wrong with the metadata and the spec of a document of ours; at most `MOST`."""
    if not isinstance(document, Mapping):
        return [
            Problem(
                "", f"a document is a mapping, not {_shown(document)}", "begin with apiVersion, kind, metadata, spec"
            )
        ]
    found = _Found()
    kind = _kind(document, found)
    if kind is not None:
        _metadata(document.get("metadata"), kind, found)
        _field(kind.spec, _or_empty(document.get("spec")), "spec", found)
    return found.problems


def check_status(document: Document) -> list[Problem]:
    """What is wrong with the status of a document: whether the API server will take what we are about to write."""
    found = _Found()
    kind = find_kind(document["kind"]) if isinstance(document.get("kind"), str) else None
    if kind is not None and kind.status is not None:
        _field(kind.status, _or_empty(document.get("status")), "status", found)
    return found.problems


def doubts(document: Any) -> list[Problem]:
    """Fields that no table has and that are spelt almost like one that is there. Kept, and worth a warning."""
    found = _Found()
    kind = (
        find_kind(document["kind"]) if isinstance(document, Mapping) and isinstance(document.get("kind"), str) else None
    )
    if kind is not None:
        _strange(kind.spec, document.get("spec"), "spec", found)
    return found.problems


class _Found:
    """Problems, as many as anybody reads."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, path: str, message: str, fix: str) -> None:
        if len(self.problems) < MOST:
            self.problems.append(Problem(path, message, fix))

    @property
    def full(self) -> bool:
        return len(self.problems) >= MOST


def _kind(document: Document, found: _Found) -> Kind | None:
    version, name = document.get("apiVersion"), document.get("kind")
    if version != API_VERSION:
        said = "is missing" if version is None else f"takes {API_VERSION}, not {_shown(version)}"
        found.add("apiVersion", said, f"write apiVersion: {API_VERSION}")
    kind = find_kind(name) if isinstance(name, str) else None
    if kind is None:
        names = [each.name for each in KINDS]
        said = "is missing" if name is None else f"{_shown(name)} is not a kind of {API_VERSION}"
        found.add("kind", said, _meant(name, names) or f"write one of {', '.join(names)}")
    return kind


def _metadata(value: Any, kind: Kind, found: _Found) -> None:
    value = _or_empty(value)
    _field(METADATA, value, "metadata", found)
    if not isinstance(value, Mapping):
        return
    name = value.get("name")
    if not name and not value.get("generateName"):
        found.add("metadata.name", "is missing", f"give the {kind.name} a name")
    elif isinstance(name, str) and name:
        if len(name) > kind.longest_name:
            said = f"has {len(name)} characters, and {kind.longest_name} is the most"
            found.add("metadata.name", said, f"shorten the name of the {kind.name} by {len(name) - kind.longest_name}")
        if re.fullmatch(kind.named, name) is None:
            first = "a letter" if kind.named.startswith("[a-z](") else "a letter or digit"
            said = f"{_shown(name)} is not a name that Kubernetes takes here"
            found.add("metadata.name", said, f"use small letters, digits and '-', beginning with {first}")


def _field(field: Field, value: Any, path: str, found: _Found) -> None:
    if found.full:
        return
    if field.type == "record":
        _record(field, value, path, found)
    elif field.type == "list" and field.item is not None:
        if not isinstance(value, list | tuple):
            found.add(path, f"takes a list, not {_shown(value)}", "write a line with '- ' in front for each item")
            return
        for index, each in enumerate(value):
            _field(field.item, each, f"{path}[{index}]", found)
    elif field.type == "map" and field.item is not None:
        if not isinstance(value, Mapping):
            found.add(path, f"takes a mapping, not {_shown(value)}", "write lines like 'name: value'")
            return
        for name, each in value.items():
            place = f"{path}[{_key(name)}]"
            if not isinstance(name, str):
                found.add(place, f"has {_shown(name)} for a name", f'write "{_shown(name)}" in quotes')
            _field(field.item, each, place, found)
    elif field.type != "any":
        _scalar(field, value, path, found)


def _record(field: Field, value: Any, path: str, found: _Found) -> None:
    if not isinstance(value, Mapping):
        known = ", ".join(each.name for each in field.fields[:4])
        found.add(
            path,
            f"takes a mapping, not {_shown(value)}",
            f"write fields such as {known}" if known else "write a mapping",
        )
        return
    for each in field.fields:
        given = value.get(each.name)
        if given is not None:
            _field(each, given, f"{path}.{each.name}", found)
        elif each.required:
            found.add(f"{path}.{each.name}", "is missing", f"write {each.takes}")


def _scalar(field: Field, value: Any, path: str, found: _Found) -> None:
    said = _misfit(field, value)
    if said:
        fix = _meant(value, list(field.choices)) or _quoting(field, value) or f"write {field.takes}"
        found.add(path, said, fix)


def _misfit(field: Field, value: Any) -> str:
    """Why a value is not what the field takes; "" if it is."""
    wrong = f"takes {field.takes}, not {_shown(value)}"
    if field.type == "boolean":
        return "" if isinstance(value, bool) else wrong
    if field.type == "string" or isinstance(value, str):
        return _misfit_text(field, value, wrong)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and not (field.type == "number" and isinstance(value, float) and math.isfinite(value)):
        return wrong
    if (field.least is not None and value < field.least) or (field.most is not None and value > field.most):
        return wrong
    return ""


def _misfit_text(field: Field, value: Any, wrong: str) -> str:
    if not isinstance(value, str) or field.type in ("integer", "number"):
        return wrong
    if field.choices and value not in field.choices:
        return wrong
    if field.longest is not None and len(value) > field.longest:
        return f"has {len(value)} characters, and {field.longest} is the most"
    if field.pattern and re.fullmatch(field.pattern, value) is None:
        return wrong
    return ""


def _quoting(field: Field, value: Any) -> str:
    """The fix for a text that YAML took for something else, and the other way round."""
    if field.type in ("string", "quantity") and isinstance(value, bool | int | float) and not field.choices:
        written = str(value).lower() if isinstance(value, bool) else str(value)
        if not field.pattern or re.fullmatch(field.pattern, written):
            return f'write "{written[:40]}" in quotes'
    if field.type == "boolean" and isinstance(value, str) and value.lower() in ("true", "false"):
        return f"write {value.lower()} without quotes"
    digits = field.type == "integer" and isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value)
    return f"write {int(value)} without quotes" if digits and not _misfit(field, int(value)) else ""


def _strange(field: Field, value: Any, path: str, found: _Found) -> None:
    if field.type in ("list", "map") and field.item is not None and isinstance(value, list | tuple | Mapping):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, each in pairs:
            _strange(field.item, each, f"{path}[{_key(name)}]", found)
    if field.type != "record" or not isinstance(value, Mapping) or not field.fields or found.full:
        return
    known = {each.name: each for each in field.fields}
    for name, each in value.items():
        if name in known:
            _strange(known[name], each, f"{path}.{name}", found)
        elif isinstance(name, str):
            near = _meant(name, [other for other in known if other not in value], 0.85)
            if near:
                found.add(f"{path}.{_key(name)}", "is not a field that is known here, and does nothing", near)


def _meant(value: Any, known: list[str], close: float = 0.6) -> str:
    if not isinstance(value, str) or not known:
        return ""
    by_small = {each.lower(): each for each in known}
    near = get_close_matches(value[:64].lower(), list(by_small), 1, close)
    return f"did you mean {by_small[near[0]]}?" if near and near[0] else ""


def _or_empty(value: Any) -> Any:
    return {} if value is None else value


def _key(name: Any) -> str:
    # Shown in a path: a line break or a thousand characters in it would hide the rest.
    return "".join(c if c.isprintable() else "?" for c in str(name)[:80])


def _shown(value: Any) -> str:
    """A value, short enough to be part of a message."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of that size"
    written = ascii(value[:41]) if isinstance(value, str) else str(value)
    return written if len(written) <= 60 else written[:57] + "..."
