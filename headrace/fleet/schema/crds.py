# SPDX-License-Identifier: Apache-2.0
"""The CustomResourceDefinition of each kind, and the rows of its reference page, generated from its table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.fleet.names import GROUP, VERSION
from headrace.fleet.schema.fields import INT32, Field, Kind
from headrace.fleet.schema.kinds import KINDS, find_kind
from headrace.platforms.kubernetes_client.objects import Document

PRESERVE_UNKNOWN = "x-kubernetes-preserve-unknown-fields"


def crd(kind: str) -> Document:
    """Return the CRD of a kind."""
    table = find_kind(kind)
    if table is None:
        raise KeyError(kind)
    return _crd_of(table)


def crds() -> dict[str, Document]:
    """Return all CRDs, by their file name."""
    return {f"{GROUP}_{kind.plural}.yaml": _crd_of(kind) for kind in KINDS}


def _crd_of(kind: Kind) -> Document:
    names: dict[str, Any] = {
        "kind": kind.name,
        "listKind": f"{kind.name}List",
        "plural": kind.plural,
        "singular": kind.name.lower(),
    }
    if kind.short:
        names["shortNames"] = list(kind.short)
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema_of(kind)},
        "additionalPrinterColumns": [
            {
                "name": column.name,
                "type": column.type,
                "jsonPath": column.path,
                **({"priority": 1} if column.wide else {}),
            }
            for column in kind.columns
        ],
    }
    if kind.status is not None:
        version["subresources"] = {"status": {}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "versions": [version],
        },
    }


def _schema_of(kind: Kind) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": field_schema(kind.spec),
    }
    if kind.max_name_length < 253:
        name = {"type": "string", "maxLength": kind.max_name_length, "pattern": f"^{kind.name_pattern}$"}
        properties["metadata"]["properties"] = {"name": name}
    if kind.status is not None:
        properties["status"] = field_schema(kind.status)
    return {"type": "object", "description": kind.description, "properties": properties}


def field_schema(field: Field) -> dict[str, Any]:
    """Return the OpenAPI schema of a field."""
    schema: dict[str, Any] = {"description": field.description} if field.description else {}
    if field.type == "record":
        schema |= _record_schema(field)
    elif field.type == "list" and field.item is not None:
        schema |= {"type": "array", "items": field_schema(field.item)}
    elif field.type == "map" and field.item is not None:
        schema |= {"type": "object", "additionalProperties": field_schema(field.item)}
    elif field.type == "any":
        schema[PRESERVE_UNKNOWN] = True
    elif field.type in ("int-or-string", "quantity"):
        schema |= {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    elif field.type == "integer":
        schema |= {"type": "integer", "format": "int64" if (field.maximum or 0) > INT32 else "int32"}
    else:
        schema["type"] = field.type
    return schema | _limits(field)


def _record_schema(field: Field) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", PRESERVE_UNKNOWN: True}
    fields = [row for row in field.fields if not field.own_checks or row.required]
    if fields:
        schema["properties"] = {row.name: field_schema(row) for row in fields}
    required = [row.name for row in fields if row.required]
    if required:
        schema["required"] = required
    return schema


def _limits(field: Field) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if field.choices:
        schema["enum"] = list(field.choices)
    if field.minimum is not None:
        schema["minimum"] = int(field.minimum)
    # Larger limits have no exact JSON number.
    if field.maximum is not None and field.maximum <= INT32:
        schema["maximum"] = int(field.maximum)
    if field.pattern:
        schema["pattern"] = f"^({field.pattern})$"
    if field.max_length is not None:
        schema["maxLength"] = field.max_length
    if field.default is not None:
        schema["default"] = field.default
    return schema


@dataclass(frozen=True)
class Row:
    """One field of the reference page."""

    path: str
    """`spec.engine.minReplicas`; `[]` after a list, `{}` after a mapping with arbitrary keys."""
    takes: str
    default: str
    required: bool
    description: str
    field: Field


def spec_rows(kind: Kind) -> list[Row]:
    """Return every field of the spec, in the order of the table."""
    return list(_rows(kind.spec, "spec"))


def status_rows(kind: Kind) -> list[Row]:
    """Return every field of the status, in the order of the table."""
    return [] if kind.status is None else list(_rows(kind.status, "status"))


def _rows(field: Field, path: str) -> Iterator[Row]:
    default = "" if field.default is None else str(field.default)
    yield Row(path, field.takes, default, field.required, field.description, field)
    for row in field.fields:
        yield from _rows(row, f"{path}.{row.name}")
    if field.item is not None:
        yield from _rows(field.item, path + ("[]" if field.type == "list" else "{}"))
