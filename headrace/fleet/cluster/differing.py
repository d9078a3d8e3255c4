# SPDX-License-Identifier: Apache-2.0
"""Whether a live object is as we want it. Pure; called before every apply, so that nothing is sent in vain.

Two questions: does the live object have all that we want, and is all that we want, and nothing else, ours? The second is
answered by the fields that the API server has noted as ours: what somebody edits becomes theirs. API servers write some
values in their own way (`1000m` becomes `1`, `false` disappears); a way that is not known here costs one apply, which does
nothing, and is remembered by the caller.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from headrace.fleet.cluster.api import MANAGER
from headrace.fleet.words import Document, items, part, text

_KEYS = ("name", "containerPort", "port", "mountPath", "devicePath", "type", "ip", "topologyKey", "key", "uid")
"""What tells the items of a list apart, wherever there is such a field."""
_AMOUNTS = frozenset({"resources", "sizeLimit", "divisor", "averageValue"})
"""Fields that have amounts below them. Elsewhere `8k` and `8000` are two texts."""
_UNITS = {"n": "1e-9", "u": "1e-6", "m": "1e-3", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15"}
_UNITS |= {f"{each}i": str(1024**power) for power, each in enumerate(("K", "M", "G", "T", "P", "E"), 1)} | {"E": "1e18"}


def differs(wanted: Document, live: Document) -> bool:
    """Whether an apply of `wanted` would change `live`."""
    body = {name: value for name, value in wanted.items() if name not in ("apiVersion", "kind")}
    owned = _owned(live)
    if owned is None or not has(live, body):
        return True
    return next(_unwanted(owned, body), None) is not None or next(_lost(owned, body), None) is not None


def digest(document: Document) -> str:
    """Of all that a user or a controller may write into an object, but its status and what the server counts."""
    metadata = part(document, "metadata")
    kept = {name: metadata.get(name) for name in ("labels", "annotations", "ownerReferences", "finalizers", "uid")}
    body = {name: value for name, value in document.items() if name not in ("metadata", "status")}
    told = json.dumps([kept, body], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()


def has(live: Any, wanted: Any, *, amounts: bool = False) -> bool:
    """Whether the live value has all of the wanted one. What is empty, false or zero may also be absent.

    amounts: below here `1000m` is `1`.
    """
    if live is None:
        return _empty(wanted)
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            has(live.get(name), value, amounts=amounts or name in _AMOUNTS) for name, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return isinstance(live, list) and _has_all(live, wanted, amounts)
    return _same(live, wanted, amounts)


def _has_all(live: Sequence[Any], wanted: Sequence[Any], amounts: bool) -> bool:
    keyed = wanted and all(isinstance(each, Mapping) for each in (*wanted, *live))
    key = next((name for name in _KEYS if _tells_apart(name, wanted)), None) if keyed else None
    if key is None:
        pairs = zip(live, wanted, strict=False)
        return len(live) == len(wanted) and all(has(one, other, amounts=amounts) for one, other in pairs)
    found = {each.get(key): each for each in live}
    return all(has(found.get(each[key]), each, amounts=amounts) for each in wanted)


def _tells_apart(name: str, wanted: Sequence[Any]) -> bool:
    values = [each.get(name) for each in wanted]
    return all(isinstance(each, str | int) for each in values) and len(set(values)) == len(values)


def _same(live: Any, wanted: Any, amounts: bool) -> bool:
    if live == wanted and isinstance(live, bool) == isinstance(wanted, bool):
        return True
    if not amounts or isinstance(live, Mapping | list | bool) or isinstance(wanted, bool):
        return False
    first, second = quantity(live), quantity(wanted)
    return first is not None and first == second


def quantity(value: Any) -> Decimal | None:
    """The number of `500m`, `1Gi` or 2."""
    said = str(value)
    unit = next((each for each in (said[-2:], said[-1:]) if each in _UNITS), "")
    try:
        number = Decimal(said[: len(said) - len(unit)]) * Decimal(_UNITS.get(unit, "1"))
    except (ArithmeticError, ValueError):
        return None
    return number if number.is_finite() else None


def _empty(wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return all(_empty(value) for value in wanted.values())
    return wanted is None or wanted is False or wanted in ("", 0, [], ())


def _owned(live: Document) -> Document | None:
    for each in items(live, "metadata", "managedFields"):
        if text(each, "manager") == MANAGER and text(each, "operation") == "Apply":
            return part(each, "fieldsV1")
    return None


def _lost(owned: Document, wanted: Any) -> Iterator[str]:
    """Fields that we want and that somebody else has written since, if any."""
    for name, value in wanted.items() if isinstance(wanted, Mapping) else ():
        if _empty(value) or name in ("name", "namespace", "apiVersion", "kind"):
            continue  # empty ones are not kept, and names are nobody's
        below = owned.get(f"f:{name}")
        if below is None:
            yield name
        elif isinstance(value, Mapping) and below:
            yield from _lost(below, value)
        elif any(step.startswith("k:") for step in below):
            for step, item in below.items():
                if step.startswith("k:"):
                    yield from _lost(item, _item(value, json.loads(step[2:])))


def _unwanted(owned: Document, wanted: Any) -> Iterator[str]:
    """Fields that are noted as ours and that we do not want, if any."""
    for step, below in owned.items():
        kind, _, name = step.partition(":")
        if kind == "f":
            if not isinstance(wanted, Mapping) or wanted.get(name) is None:
                # An empty mapping that we sent is noted, and what was sent as null is not.
                yield name
            elif below:
                yield from _unwanted(below, wanted[name])
        elif kind == "k":
            item = _item(wanted, json.loads(name))
            if item is None:
                yield name
            else:
                yield from _unwanted(below, item)
        elif kind == "v" and (not isinstance(wanted, list | tuple) or json.loads(name) not in wanted):
            yield name


def _item(wanted: Any, key: Mapping[str, Any]) -> Any:
    for each in wanted if isinstance(wanted, list | tuple) else ():
        if isinstance(each, Mapping) and all(each.get(name, value) == value for name, value in key.items()):
            return each
    return None
