# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' strategic merge over plain documents: what a service says laid over what its runtime says.

Called by `components`. Mappings merge, lists that `tables` knows merge by key, all else is replaced. A null says nothing.
The order of a merged list is Kubernetes' too: what the patch names keeps the patch's order, what only the base has keeps
the base's, and what is new stands before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from headrace.fleet.merging.tables import PLAIN, Key, Table, is_mapping
from headrace.fleet.words import Document

DIRECTIVE = "$patch"
"""`replace` in a mapping takes nothing of the base; `delete` in an item of a keyed list takes the item out."""


def merged(base: Document, patch: Document, table: Table = PLAIN) -> dict[str, Any]:
    """The patch laid over the base. Neither is changed; parts of both are shared with the result."""
    if patch.get(DIRECTIVE) == "replace":
        return {name: _plain(value) for name, value in patch.items() if value is not None and name != DIRECTIVE}
    if table.alternatives or table.alternatives_but:
        excluded = table.excluded(patch)
        made = {name: value for name, value in base.items() if not excluded(name)}
    else:
        made = dict(base)
    for name, value in patch.items():
        if value is None or name == DIRECTIVE:
            continue
        have = made.get(name)
        if is_mapping(value) and is_mapping(have):
            made[name] = merged(have, value, table.maps.get(name, PLAIN))  # type: ignore[arg-type]
        elif name in table.lists and isinstance(value, list) and isinstance(have, list):
            made[name] = merged_list(have, value, *table.lists[name])
        else:
            made[name] = _plain(value)
    return made


def merged_list(base: Sequence[Any], patch: Sequence[Any], key: Key, table: Table) -> list[Any]:
    """A keyed list laid over another."""
    places: dict[Hashable, int] = {}
    for place, item in enumerate(base):
        name = _key(item, key)
        if name is not None:
            places.setdefault(name, place)
    ours, taken, gone = _laid_over(base, patch, key, table, places)
    left = [(place, item) for place, item in enumerate(base) if place not in taken and _key(item, key) not in gone]
    return _woven(left, ours)


def _laid_over(
    base: Sequence[Any], patch: Sequence[Any], key: Key, table: Table, places: dict[Hashable, int]
) -> tuple[list[tuple[int | None, Any]], set[int], set[Hashable]]:
    """The patch's items, merged with the base's, each with its place in the base if it has one."""
    ours: list[tuple[int | None, Any]] = []
    seen: dict[Hashable, int] = {}
    taken: set[int] = set()
    gone: set[Hashable] = set()
    for item in patch:
        name = _key(item, key)
        if name is None:
            # Of no key, so of no other: `schema.check` has said so. Kept once, or a second merge would double it.
            place = next((number for number, other in enumerate(base) if number not in taken and other == item), None)
            if place is not None:
                taken.add(place)
            ours.append((place, item))
            continue
        if item.get(DIRECTIVE) == "delete":
            gone.add(name)
            continue
        if name in seen:
            place, before = ours[seen[name]]
            ours[seen[name]] = (place, merged(before, item, table))
            continue
        place = places.get(name)
        seen[name] = len(ours)
        if place is None:
            ours.append((None, _plain(item)))
        else:
            taken.add(place)
            ours.append((place, merged(base[place], item, table)))
    return ours, taken, gone


def _woven(left: list[tuple[int, Any]], ours: list[tuple[int | None, Any]]) -> list[Any]:
    """Both lists in one: an item of the base goes in before the first of the patch's that stood after it."""
    made: list[Any] = []
    rest = iter(left)
    waiting = next(rest, None)
    for place, item in ours:
        while waiting is not None and place is not None and waiting[0] < place:
            made.append(waiting[1])
            waiting = next(rest, None)
        made.append(item)
    while waiting is not None:
        made.append(waiting[1])
        waiting = next(rest, None)
    return made


def _plain(value: Any) -> Any:
    """A value that meets no base, without directives."""
    return merged({}, value) if is_mapping(value) and DIRECTIVE in value else value


def _key(item: Any, key: Key) -> Hashable:
    return key(item) if is_mapping(item) else None
