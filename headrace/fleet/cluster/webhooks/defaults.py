# SPDX-License-Identifier: Apache-2.0
"""Defaults that follow what they were derived from. Pure; called for an edit, before its defaults are filled in.

A default that was written into a document looks like a wish from then on: a service that got `maxReplicas: 3` and then asks
for five at least would be refused for a number that its user never wrote, and one that gets a decoder would stay in the mode
it had without. So a derived value that the edit leaves alone, and that is what would be derived anyway, is derived anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.fleet.admission import defaulted
from headrace.fleet.names import COMPONENTS, DEPLOYMENT_MODE, DEPRECATION_WARNING, LAST_APPLIED
from headrace.fleet.words import ClusterFacts, Document, annotations_of, part

_Path = tuple[str, ...]
_DERIVED: tuple[_Path, ...] = (
    ("metadata", "annotations", DEPLOYMENT_MODE),
    *(("spec", name, field) for name in COMPONENTS for field in ("minReplicas", "maxReplicas")),
)
_MIGRATED: tuple[_Path, ...] = (("spec", "engine"), ("spec", "model"), ("spec", "runtime"))


def loosened(service: Document, before: Document, facts: ClusterFacts) -> Document:
    """The service without the derived values that it has from the time before the edit."""
    wanted = _written(service)
    if "predictor" in part(service, "spec") and DEPRECATION_WARNING in annotations_of(before):
        # It was turned into these before; they would only stand in the way of the same again.
        gone = [each for each in _MIGRATED if _same(service, before, each) and _value(wanted, each) is None]
        for path in gone:
            service = _without(service, path)
    gone = [
        path
        for path in _DERIVED
        if _same(service, before, path)
        and _value(wanted, path) is None
        and _value(defaulted(_without(before, path), facts), path) == _value(before, path)
    ]
    for path in gone:
        service = _without(service, path)
    return service


def _same(service: Document, before: Document, path: _Path) -> bool:
    return _value(service, path) is not None and _value(service, path) == _value(before, path)


def _written(service: Document) -> Document:
    """What `kubectl apply` was given, if it was that: what stands there is a wish, whatever its value."""
    try:
        found = msgspec.json.decode(annotations_of(service).get(LAST_APPLIED, "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _value(document: Document, path: _Path) -> Any:
    return part(document, *path[:-1]).get(path[-1])


def _without(document: Document, path: _Path) -> Document:
    name, rest = path[0], path[1:]
    if name not in document:
        return document
    if not rest:
        return {other: value for other, value in document.items() if other != name}
    below = document[name]
    return {**document, name: _without(below, rest)} if isinstance(below, Mapping) else document
