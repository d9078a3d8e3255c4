# SPDX-License-Identifier: Apache-2.0
"""The defaults of a table put into a document, as the API server does it with our CRD.

Called by `admission`, so that a document out of a file is what the same document out of a cluster is. Fields that are null
go, unless they are nobody's business here. Parts that stay as they are, are shared with the document given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.fleet.schema.fields import Field
from headrace.fleet.schema.kinds import find_kind
from headrace.fleet.words import Document


def defaulted(document: Document) -> Document:
    """The document with every default that its table has. One of a kind that is not ours comes back as it is."""
    kind = find_kind(document["kind"]) if isinstance(document.get("kind"), str) else None
    if kind is None:
        return document
    spec = _filled(kind.spec, {} if document.get("spec") is None else document["spec"])
    return document if spec is document.get("spec") else {**document, "spec": spec}


def _filled(field: Field, value: Any) -> Any:
    if field.type == "record" and isinstance(value, Mapping):
        return _record(field, value)
    if field.item is None or field.item.type not in ("record", "list", "map"):
        return value
    if field.type == "list" and isinstance(value, list | tuple):
        items = [_filled(field.item, each) for each in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if field.type == "map" and isinstance(value, Mapping):
        named = {name: _filled(field.item, each) for name, each in value.items()}
        return value if all(named[name] is each for name, each in value.items()) else named
    return value


def _record(field: Field, value: Mapping[str, Any]) -> Mapping[str, Any]:
    changed: dict[str, Any] = {}
    gone: list[str] = []
    for each in field.fields:
        given = value.get(each.name)
        if given is not None:
            new = _filled(each, given)
            if new is not given:
                changed[each.name] = new
        elif each.default is not None:
            changed[each.name] = each.default
        elif each.name in value:
            gone.append(each.name)
    if not changed and not gone:
        return value
    return {name: each for name, each in {**value, **changed}.items() if name not in gone}
