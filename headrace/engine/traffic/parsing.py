# SPDX-License-Identifier: Apache-2.0
"""Splits as trees of plain values: the body of the admin API and the `traffic` section of the configuration file.

    weights: {v1: 0.9, v2: 0.1}
    sticky: {header: x-user-id}
    shadows: {v3: 1.0}
    rollback: {error_rate: 0.05, p99_ms: 200}
    baseline: v1

Called by `api.admin` and by the configuration. What the values mean is checked by `checking`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches

from headrace.core.errors import InvalidArgument
from headrace.engine.traffic.settings import Rollback, Split, StickyBy

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def parse_split(tree: object, where: str = "split") -> Split:
    """A split of plain values. Raises `InvalidArgument` that names the key (`where` is in front) and what to write."""
    known = _object(tree, where, tuple(field.name for field in fields(Split)))
    if "weights" not in known:
        raise InvalidArgument(f"{where} has no weights; write for example weights: {{1: 0.9, 2: 0.1}}")
    usual = Split({})
    return Split(
        weights=_shares(known["weights"], f"{where}.weights"),
        sticky=_sticky(known.get("sticky"), f"{where}.sticky"),
        shadows=_shares(known.get("shadows") or {}, f"{where}.shadows"),
        tolerance=_number(known.get("tolerance", usual.tolerance), f"{where}.tolerance"),
        baseline=_version(known.get("baseline") or "", f"{where}.baseline"),
        rollback=_rollback(known.get("rollback"), f"{where}.rollback"),
    )


def split_tree(split: Split) -> dict[str, object]:
    """A split as `parse_split` reads it, without what is as usual."""
    made: dict[str, object] = {"weights": dict(split.weights)}
    sticky = {name: text for name in ("header", "cookie", "field") if (text := getattr(split.sticky, name))}
    if sticky:
        made["sticky"] = sticky
    if split.shadows:
        made["shadows"] = dict(split.shadows)
        made["tolerance"] = split.tolerance
    if split.baseline:
        made["baseline"] = split.baseline
    if split.rollback is not None:
        made["rollback"] = {field.name: getattr(split.rollback, field.name) for field in fields(Rollback)}
    return made


def _sticky(tree: object, where: str) -> StickyBy:
    if tree is None:
        return StickyBy()
    known = _object(tree, where, ("header", "cookie", "field"))
    for name, value in known.items():
        if not isinstance(value, str):
            raise InvalidArgument(f"{where}.{name} is {_shown(value)}; write the name of a {name}")
        if value and name != "field" and _HEADER.fullmatch(value) is None:
            raise InvalidArgument(
                f"{where}.{name} is {_shown(value)}; the name of a {name} has letters, digits and '-'"
            )
    return StickyBy(**{name: str(value) for name, value in known.items()})


def _rollback(tree: object, where: str) -> Rollback | None:
    if tree is None:
        return None
    known = _object(tree, where, tuple(field.name for field in fields(Rollback)))
    usual = Rollback()
    least = known.get("least_requests", usual.least_requests)
    if isinstance(least, bool) or not isinstance(least, int):
        raise InvalidArgument(f"{where}.least_requests is {_shown(least)}; write a whole number such as 50")
    return Rollback(
        error_rate=_number(known.get("error_rate", usual.error_rate), f"{where}.error_rate"),
        p99_ms=_number(known.get("p99_ms", usual.p99_ms), f"{where}.p99_ms"),
        least_requests=least,
        window_seconds=_number(known.get("window_seconds", usual.window_seconds), f"{where}.window_seconds"),
    )


def _shares(tree: object, where: str) -> dict[str, float]:
    if not isinstance(tree, Mapping):
        raise InvalidArgument(
            f"{where} is {_shown(tree)}; write versions with their shares, such as {{1: 0.9, 2: 0.1}}"
        )
    made: dict[str, float] = {}
    for key, value in tree.items():
        version = _version(key, where)
        if not version or version in made:
            raise InvalidArgument(f"{where} names version {_shown(key)} {'twice' if version else 'without a name'}")
        made[version] = _number(value, f"{where}.{version}")
    return made


def _version(value: object, where: str) -> str:
    # YAML reads 1 as a number and 1.2 as another; people mean what they wrote.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidArgument(f"{where} names version {_shown(value)}; write a number or a label")
    return str(value)


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"{where} is {_shown(value)}; write a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(f"{where} is too large a number") from None


def _object(tree: object, where: str, names: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(tree, Mapping):
        raise InvalidArgument(f"{where} is {_shown(tree)}; write an object with {', '.join(names)}")
    for key in tree:
        if key not in names:
            near = get_close_matches(str(key), names, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"it may have {', '.join(names)}"
            raise InvalidArgument(f"{where} has no key {_shown(key)}; {hint}")
    return tree


def _shown(value: object) -> str:
    return ascii(value)[:64]
