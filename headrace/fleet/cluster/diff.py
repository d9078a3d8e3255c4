# SPDX-License-Identifier: Apache-2.0
"""Diff a live object with the wanted one before a server-side apply, so that no needless apply is sent.

Two checks: the live object contains all wanted values, and our managed fields are exactly the wanted ones (a field that
someone edits moves to their managedFields). API servers normalize some values (`1000m` becomes `1`, `false` disappears); a
normalization that is not known here costs one apply without effect, which the caller remembers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from headrace.platforms.kubernetes_client.api import FIELD_MANAGER
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str

_ITEM_KEYS = ("name", "containerPort", "port", "mountPath", "devicePath", "type", "ip", "topologyKey", "key", "uid")
"""Fields that identify the items of a list, in this order."""
_QUANTITY_FIELDS = frozenset({"resources", "sizeLimit", "divisor", "averageValue"})
"""Fields with quantities below them. Elsewhere `8k` and `8000` are different strings."""
_UNITS = {"n": "1e-9", "u": "1e-6", "m": "1e-3", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15"}
_UNITS |= {f"{name}i": str(1024**power) for power, name in enumerate(("K", "M", "G", "T", "P", "E"), 1)} | {"E": "1e18"}


def differs(desired: Document, live: Document) -> bool:
    """Whether an apply of `desired` would change `live`."""
    body = {name: value for name, value in desired.items() if name not in ("apiVersion", "kind")}
    owned = _managed_fields(live)
    if owned is None or not contains(live, body):
        return True
    return next(_unwanted_fields(owned, body), None) is not None or next(_lost_fields(owned, body), None) is not None


def digest(document: Document) -> str:
    """Return a digest of an object without its status and the fields that the API server sets."""
    metadata = get_mapping(document, "metadata")
    kept = {name: metadata.get(name) for name in ("labels", "annotations", "ownerReferences", "finalizers", "uid")}
    body = {name: value for name, value in document.items() if name not in ("metadata", "status")}
    content = json.dumps([kept, body], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def contains(live: Any, desired: Any, *, quantities: bool = False) -> bool:
    """Whether the live value contains the wanted one. Empty, false and zero values may be absent.

    quantities: `1000m` equals `1`.
    """
    if live is None:
        return _is_empty(desired)
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            contains(live.get(name), value, quantities=quantities or name in _QUANTITY_FIELDS)
            for name, value in desired.items()
        )
    if isinstance(desired, list | tuple):
        return isinstance(live, list) and _contains_items(live, desired, quantities)
    return _same(live, desired, quantities)


def _contains_items(live: Sequence[Any], desired: Sequence[Any], quantities: bool) -> bool:
    keyed = desired and all(isinstance(item, Mapping) for item in (*desired, *live))
    key = next((name for name in _ITEM_KEYS if _is_unique(name, desired)), None) if keyed else None
    if key is None:
        pairs = zip(live, desired, strict=False)
        return len(live) == len(desired) and all(
            contains(live_item, desired_item, quantities=quantities) for live_item, desired_item in pairs
        )
    items = {item.get(key): item for item in live}
    return all(contains(items.get(item[key]), item, quantities=quantities) for item in desired)


def _is_unique(name: str, desired: Sequence[Any]) -> bool:
    values = [item.get(name) for item in desired]
    return all(isinstance(value, str | int) for value in values) and len(set(values)) == len(values)


def _same(live: Any, desired: Any, quantities: bool) -> bool:
    if live == desired and isinstance(live, bool) == isinstance(desired, bool):
        return True
    if not quantities or isinstance(live, Mapping | list | bool) or isinstance(desired, bool):
        return False
    first, second = quantity(live), quantity(desired)
    return first is not None and first == second


def quantity(value: Any) -> Decimal | None:
    """Return the number of a Kubernetes quantity such as `500m`, `1Gi` or 2."""
    text = str(value)
    unit = next((suffix for suffix in (text[-2:], text[-1:]) if suffix in _UNITS), "")
    try:
        number = Decimal(text[: len(text) - len(unit)]) * Decimal(_UNITS.get(unit, "1"))
    except (ArithmeticError, ValueError):
        return None
    return number if number.is_finite() else None


def _is_empty(desired: Any) -> bool:
    if isinstance(desired, Mapping):
        return all(_is_empty(value) for value in desired.values())
    return desired is None or desired is False or desired in ("", 0, [], ())


def _managed_fields(live: Document) -> Document | None:
    for entry in get_list(live, "metadata", "managedFields"):
        ours = get_str(entry, "manager") == FIELD_MANAGER and get_str(entry, "operation") == "Apply"
        if ours and not get_str(entry, "subresource"):
            return get_mapping(entry, "fieldsV1")
    return None


def _lost_fields(owned: Document, desired: Any) -> Iterator[str]:
    """Yield wanted fields that another manager has taken over."""
    for name, value in desired.items() if isinstance(desired, Mapping) else ():
        if _is_empty(value) or name in ("name", "namespace", "apiVersion", "kind"):
            continue  # empty fields are not stored, and names have no manager
        below = owned.get(f"f:{name}")
        if below is None:
            yield name
        elif isinstance(value, Mapping) and below:
            yield from _lost_fields(below, value)
        elif any(step.startswith("k:") for step in below):
            for step, item in below.items():
                # An item without fields is owned as a whole: current API servers write owner references so.
                if step.startswith("k:") and item:
                    yield from _lost_fields(item, _item(value, json.loads(step[2:])))


def _unwanted_fields(owned: Document, desired: Any) -> Iterator[str]:
    """Yield managed fields that are no longer wanted."""
    for step, below in owned.items():
        kind, _, name = step.partition(":")
        if kind == "f":
            if not isinstance(desired, Mapping) or desired.get(name) is None:
                # An empty mapping that was sent is managed; a null is not.
                yield name
            elif below:
                yield from _unwanted_fields(below, desired[name])
        elif kind == "k":
            item = _item(desired, json.loads(name))
            if item is None:
                yield name
            else:
                yield from _unwanted_fields(below, item)
        elif kind == "v" and (not isinstance(desired, list | tuple) or json.loads(name) not in desired):
            yield name


def _item(desired: Any, key: Mapping[str, Any]) -> Any:
    for item in desired if isinstance(desired, list | tuple) else ():
        if isinstance(item, Mapping) and all(item.get(name, value) == value for name, value in key.items()):
            return item
    return None
