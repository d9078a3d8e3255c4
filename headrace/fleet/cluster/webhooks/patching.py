# SPDX-License-Identifier: Apache-2.0
"""The JSON Patch (RFC 6902) that makes one document of another. Pure. Lists are replaced as a whole: webhooks' are short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headrace.fleet.words import Document


def patch(before: Document, after: Document) -> list[dict[str, Any]]:
    """The changes, in the order of the documents; none if both say the same."""
    return list(_changes("", before, after))


def _changes(path: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in before:
        if name not in after:
            yield {"op": "remove", "path": f"{path}/{_escaped(name)}"}
    for name, value in after.items():
        place = f"{path}/{_escaped(name)}"
        if name not in before:
            yield {"op": "add", "path": place, "value": value}
            continue
        old = before[name]
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            yield from _changes(place, old, value)
        elif old is not value and msgspec.json.encode(old) != msgspec.json.encode(value):  # 1 is not true
            yield {"op": "replace", "path": place, "value": value}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
