# SPDX-License-Identifier: Apache-2.0
"""Validate a document against the table of its kind, and fill in the table's defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from headrace.core.names import nearest
from headrace.fleet.documents import Problem
from headrace.fleet.names import API_VERSION
from headrace.fleet.schema.fields import Field, Kind, mapping, record, string
from headrace.fleet.schema.kinds import KINDS, find_kind
from headrace.platforms.kubernetes_client.objects import Document

MAX_PROBLEMS = 100
"""Maximum number of reported problems."""

# Kinds and fields of OME 1.3 that Headrace does not have, and what to write instead. See decision 0020.
_COMPONENT_FIELDS = {
    "autoscalerPolicyRef": "write the policy's settings into autoscaler, beside it",
    "lifecycle": "remove it: pods are replaced as deploymentStrategy says, and containers restart by themselves",
    "servicePortAppProtocols": "remove it",
    "topologyKey": "write affinity or topologySpreadConstraints",
}
OME_ONLY_FIELDS = {
    "spec.rollout": "write canaryTrafficPercent, or the annotations ome.io/rollout-steps: see headrace rollout --help",
    "spec.traffic": "write the routing strategy into spec.router.config",
    "spec.scalingPolicy": "remove it: each component scales by its own autoscaler",
    "spec.model.overlays": "write spec.model.fineTunedWeights",
    "spec.topologyKey": _COMPONENT_FIELDS["topologyKey"],
    **{
        f"spec.{part}.{name}": fix
        for part in ("engine", "decoder", "router")
        for name, fix in _COMPONENT_FIELDS.items()
    },
}
"""Paths of fields, and the next step."""
OME_ONLY_KINDS = {
    "AutoscalerPolicy": "write its settings into the autoscaler of each component that refers to it",
    "RolloutPolicy": "write the annotations ome.io/rollout-steps of each service: see headrace rollout --help",
    "InferenceReplica": "leave it out: OME makes it from an InferenceService",
    "AcceleratorQuota": "write a ResourceQuota",
}

METADATA = record(
    "metadata",
    "",
    string("name"),
    string("generateName"),
    string("namespace"),
    mapping("labels"),
    mapping("annotations"),
)


def validate(document: Any) -> list[Problem]:
    """Validate the metadata and the spec of a document; return at most `MAX_PROBLEMS` problems."""
    if not isinstance(document, Mapping):
        return [
            Problem(
                "", f"a document is a mapping, not {_show(document)}", "begin with apiVersion, kind, metadata, spec"
            )
        ]
    problems = _Problems()
    kind = _check_kind(document, problems)
    if kind is not None:
        _check_metadata(document.get("metadata"), kind, problems)
        _check_field(kind.spec, _mapping_or_empty(document.get("spec")), "spec", problems)
        _unknown_fields(kind.spec, document.get("spec"), "spec", problems, in_open_records=False)
    return problems.problems


def validate_field(field: Field, value: Any, path: str) -> list[Problem]:
    """Validate a value against the table of a field, for a value outside a document, such as an annotation."""
    problems = _Problems()
    _check_field(field, value, path, problems)
    _unknown_fields(field, value, path, problems, in_open_records=False)
    return problems.problems


def validate_status(document: Document) -> list[Problem]:
    """Validate the status of a document before it is written."""
    problems = _Problems()
    kind = find_kind(document["kind"]) if isinstance(document.get("kind"), str) else None
    if kind is not None and kind.status is not None:
        _check_field(kind.status, _mapping_or_empty(document.get("status")), "status", problems)
    return problems.problems


def warnings(document: Any) -> list[Problem]:
    """Return warnings about fields of Kubernetes' own records that are unknown here and close to a known field.

    Unknown fields elsewhere are problems: see `validate`.
    """
    problems = _Problems()
    kind = (
        find_kind(document["kind"]) if isinstance(document, Mapping) and isinstance(document.get("kind"), str) else None
    )
    if kind is not None:
        _unknown_fields(kind.spec, document.get("spec"), "spec", problems, in_open_records=True)
    return problems.problems


class _Problems:
    """A list of problems with a limit."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, path: str, message: str, fix: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(path, message, fix))

    @property
    def full(self) -> bool:
        return len(self.problems) >= MAX_PROBLEMS


def _check_kind(document: Document, problems: _Problems) -> Kind | None:
    version, name = document.get("apiVersion"), document.get("kind")
    if version != API_VERSION:
        message = "is missing" if version is None else f"takes {API_VERSION}, not {_show(version)}"
        problems.add("apiVersion", message, f"write apiVersion: {API_VERSION}")
    kind = find_kind(name) if isinstance(name, str) else None
    if kind is None:
        names = [known.name for known in KINDS]
        message = "is missing" if name is None else f"{_show(name)} is not a kind of {API_VERSION}"
        if isinstance(name, str) and name in OME_ONLY_KINDS:
            message = f"{name} is a kind of OME that Headrace does not have"
        fix = OME_ONLY_KINDS.get(name, "") if isinstance(name, str) else ""
        problems.add("kind", message, fix or _suggestion(name, names) or f"write one of {', '.join(names)}")
    return kind


def _check_metadata(value: Any, kind: Kind, problems: _Problems) -> None:
    value = _mapping_or_empty(value)
    _check_field(METADATA, value, "metadata", problems)
    if not isinstance(value, Mapping):
        return
    name = value.get("name")
    if not name and not value.get("generateName"):
        problems.add("metadata.name", "is missing", f"give the {kind.name} a name")
    elif isinstance(name, str) and name:
        if len(name) > kind.max_name_length:
            message = f"has {len(name)} characters, and {kind.max_name_length} is the maximum"
            problems.add(
                "metadata.name", message, f"shorten the name of the {kind.name} by {len(name) - kind.max_name_length}"
            )
        if re.fullmatch(kind.name_pattern, name) is None:
            first = "a letter" if kind.name_pattern.startswith("[a-z](") else "a letter or digit"
            message = f"{_show(name)} is not a name that Kubernetes takes here"
            problems.add("metadata.name", message, f"use small letters, digits and '-', beginning with {first}")


def _check_field(field: Field, value: Any, path: str, problems: _Problems) -> None:
    if problems.full:
        return
    if field.type == "record":
        _check_record(field, value, path, problems)
    elif field.type == "list" and field.item is not None:
        if not isinstance(value, list | tuple):
            problems.add(path, f"takes a list, not {_show(value)}", "write a line with '- ' in front for each item")
            return
        for index, item in enumerate(value):
            _check_field(field.item, item, f"{path}[{index}]", problems)
    elif field.type == "map" and field.item is not None:
        if not isinstance(value, Mapping):
            problems.add(path, f"takes a mapping, not {_show(value)}", "write lines like 'name: value'")
            return
        for name, item in value.items():
            place = f"{path}[{_show_key(name)}]"
            if not isinstance(name, str):
                problems.add(place, f"has {_show(name)} for a name", f'write "{_show(name)}" in quotes')
            _check_field(field.item, item, place, problems)
    elif field.type != "any":
        _check_scalar(field, value, path, problems)


def _check_record(field: Field, value: Any, path: str, problems: _Problems) -> None:
    if not isinstance(value, Mapping):
        known = ", ".join(row.name for row in field.fields[:4])
        problems.add(
            path,
            f"takes a mapping, not {_show(value)}",
            f"write fields such as {known}" if known else "write a mapping",
        )
        return
    for row in field.fields:
        field_value = value.get(row.name)
        if field_value is not None:
            _check_field(row, field_value, f"{path}.{row.name}", problems)
        elif row.required:
            problems.add(f"{path}.{row.name}", "is missing", f"write {row.takes}")


def _check_scalar(field: Field, value: Any, path: str, problems: _Problems) -> None:
    message = _mismatch(field, value)
    if message:
        fix = _suggestion(value, list(field.choices)) or _quoting_fix(field, value) or f"write {field.takes}"
        problems.add(path, message, fix)


def _mismatch(field: Field, value: Any) -> str:
    """Return why a value does not match a field; "" if it does."""
    wrong = f"takes {field.takes}, not {_show(value)}"
    if field.type == "boolean":
        return "" if isinstance(value, bool) else wrong
    if field.type == "string" or isinstance(value, str):
        return _string_mismatch(field, value, wrong)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer and not (field.type == "number" and isinstance(value, float) and math.isfinite(value)):
        return wrong
    if (field.minimum is not None and value < field.minimum) or (field.maximum is not None and value > field.maximum):
        return wrong
    return ""


def _string_mismatch(field: Field, value: Any, wrong: str) -> str:
    if not isinstance(value, str) or field.type in ("integer", "number"):
        return wrong
    if field.choices and value not in field.choices:
        return wrong
    if field.max_length is not None and len(value) > field.max_length:
        return f"has {len(value)} characters, and {field.max_length} is the maximum"
    if field.pattern and re.fullmatch(field.pattern, value) is None:
        return wrong
    return ""


def _quoting_fix(field: Field, value: Any) -> str:
    """Return the fix for a value that needs quotes in YAML, or has needless ones."""
    if field.type in ("string", "quantity") and isinstance(value, bool | int | float) and not field.choices:
        written = str(value).lower() if isinstance(value, bool) else str(value)
        if not field.pattern or re.fullmatch(field.pattern, written):
            return f'write "{written[:40]}" in quotes'
    if field.type == "boolean" and isinstance(value, str) and value.lower() in ("true", "false"):
        return f"write {value.lower()} without quotes"
    digits = field.type == "integer" and isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value)
    return f"write {int(value)} without quotes" if digits and not _mismatch(field, int(value)) else ""


def _unknown_fields(field: Field, value: Any, path: str, problems: _Problems, *, in_open_records: bool) -> None:
    """Add the unknown fields: with `in_open_records`, the likely misspelt ones of open records, else those of the others."""
    if field.type in ("list", "map") and field.item is not None and isinstance(value, list | tuple | Mapping):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, pair in pairs:
            _unknown_fields(field.item, pair, f"{path}[{_show_key(name)}]", problems, in_open_records=in_open_records)
    if field.type != "record" or not isinstance(value, Mapping) or not field.fields or problems.full:
        return
    known = {row.name: row for row in field.fields}
    for name, item in value.items():
        if name in known:
            _unknown_fields(known[name], item, f"{path}.{name}", problems, in_open_records=in_open_records)
        elif field.open is in_open_records and name not in field.unchecked:
            # The suggested field may exist already: defaults are filled in before a document is validated.
            names = [other for other in (*known, *field.unchecked) if not field.open or other not in value]
            closest = _suggestion(name, names, 0.85 if field.open else 0.6)
            place = f"{path}.{_show_key(name)}"
            fix = OME_ONLY_FIELDS.get(f"{path}.{name}", "")
            if fix:
                problems.add(place, "is a field of OME that Headrace does not have", fix)
            elif closest or not field.open:
                problems.add(place, "is not a known field", closest or "correct its name, or remove it")


def _suggestion(value: Any, known: list[str], close: float = 0.6) -> str:
    if not isinstance(value, str) or not known:
        return ""
    closest = nearest(value, known, close)
    return f"did you mean {closest}?" if closest else ""


def _mapping_or_empty(value: Any) -> Any:
    return {} if value is None else value


def _show_key(name: Any) -> str:
    # For a path: without line breaks, and short.
    return "".join(c if c.isprintable() else "?" for c in str(name)[:80])


def _show(value: Any) -> str:
    """Return a value, short enough for a message."""
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


def with_defaults(document: Document) -> Document:
    """Return the document with the defaults of its kind's table. Documents of other kinds are returned unchanged."""
    kind = find_kind(document["kind"]) if isinstance(document.get("kind"), str) else None
    if kind is None:
        return document
    spec = _fill(kind.spec, {} if document.get("spec") is None else document["spec"])
    return document if spec is document.get("spec") else {**document, "spec": spec}


def _fill(field: Field, value: Any) -> Any:
    if field.type == "record" and isinstance(value, Mapping):
        return _default_record(field, value)
    if field.item is None or field.item.type not in ("record", "list", "map"):
        return value
    if field.type == "list" and isinstance(value, list | tuple):
        items = [_fill(field.item, item) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if field.type == "map" and isinstance(value, Mapping):
        values = {name: _fill(field.item, item) for name, item in value.items()}
        return value if all(values[name] is item for name, item in value.items()) else values
    return value


def _default_record(field: Field, value: Mapping[str, Any]) -> Mapping[str, Any]:
    changed: dict[str, Any] = {}
    removed: list[str] = []
    for row in field.fields:
        field_value = value.get(row.name)
        if field_value is not None:
            new = _fill(row, field_value)
            if new is not field_value:
                changed[row.name] = new
        elif row.default is not None:
            changed[row.name] = row.default
        elif row.name in value:
            removed.append(row.name)
    if not changed and not removed:
        return value
    return {name: item for name, item in {**value, **changed}.items() if name not in removed}
