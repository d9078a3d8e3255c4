# SPDX-License-Identifier: Apache-2.0
"""The CustomResourceDefinition of each kind, made of its table.

Called by `scripts/generate_crds.py` and by `headrace operator manifests`. Structural, so that the API server prunes nothing
and defaults what the tables default: every mapping keeps fields that are unknown, pod specs above all. Small enough for
`kubectl apply`, which writes the whole of it into an annotation again.
"""

from __future__ import annotations

from typing import Any

from headrace.fleet.names import GROUP, VERSION
from headrace.fleet.schema.fields import INT32, Field, Kind
from headrace.fleet.schema.kinds import KINDS, find_kind
from headrace.fleet.words import Document

KEEP = "x-kubernetes-preserve-unknown-fields"


def crd(kind: str) -> Document:
    """The definition of the kind of that name."""
    table = find_kind(kind)
    if table is None:
        raise KeyError(kind)
    return _definition(table)


def crds() -> dict[str, Document]:
    """All definitions, by the name of the file they go into."""
    return {f"{GROUP}_{kind.plural}.yaml": _definition(kind) for kind in KINDS}


def _definition(kind: Kind) -> Document:
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
            {"name": each.name, "type": each.type, "jsonPath": each.path, **({"priority": 1} if each.wide else {})}
            for each in kind.columns
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
        "spec": schema(kind.spec),
    }
    if kind.longest_name < 253:
        name = {"type": "string", "maxLength": kind.longest_name, "pattern": f"^{kind.named}$"}
        properties["metadata"]["properties"] = {"name": name}
    if kind.status is not None:
        properties["status"] = schema(kind.status)
    return {"type": "object", "description": kind.says, "properties": properties}


def schema(field: Field) -> dict[str, Any]:
    """The OpenAPI schema of one field."""
    made: dict[str, Any] = {"description": field.says} if field.says else {}
    if field.type == "record":
        made |= _record(field)
    elif field.type == "list" and field.item is not None:
        made |= {"type": "array", "items": schema(field.item)}
    elif field.type == "map" and field.item is not None:
        made |= {"type": "object", "additionalProperties": schema(field.item)}
    elif field.type == "any":
        made[KEEP] = True
    elif field.type in ("int-or-string", "quantity"):
        made |= {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    elif field.type == "integer":
        made |= {"type": "integer", "format": "int64" if (field.most or 0) > INT32 else "int32"}
    else:
        made["type"] = field.type
    return made | _limits(field)


def _record(field: Field) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", KEEP: True}
    rows = [each for each in field.fields if not field.ours or each.required]
    if rows:
        made["properties"] = {each.name: schema(each) for each in rows}
    required = [each.name for each in rows if each.required]
    if required:
        made["required"] = required
    return made


def _limits(field: Field) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if field.choices:
        made["enum"] = list(field.choices)
    if field.least is not None:
        made["minimum"] = int(field.least)
    # JSON has no larger ones to compare with.
    if field.most is not None and field.most <= INT32:
        made["maximum"] = int(field.most)
    if field.pattern:
        made["pattern"] = f"^({field.pattern})$"
    if field.longest is not None:
        made["maxLength"] = field.longest
    if field.default is not None:
        made["default"] = field.default
    return made
