# SPDX-License-Identifier: Apache-2.0
"""Settings of traffic splits: parse them from the configuration file or the admin API, and check them.

    weights: {v1: 0.9, v2: 0.1}
    sticky: {header: x-user-id}
    shadows: {v3: 1.0}
    rollback: {error_rate: 0.05, p99_ms: 200}
    baseline: v1

Every error message says what to write instead. `splits` checks whether the versions exist.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from headrace.core.errors import InvalidArgument
from headrace.core.names import nearest


@dataclass(frozen=True, slots=True)
class StickyBy:
    """Sources of the sticky key; the first one that a request has is used. Without a key the choice is random."""

    header: str = ""
    cookie: str = ""
    field: str = ""
    """Field in the body of `/predict`, or a parameter in other protocols."""


@dataclass(frozen=True, slots=True)
class RollbackRules:
    """When a version is rolled back automatically. Rates and times are those of the last `window_seconds`."""

    error_rate: float = 0.0
    """Maximum errors per request (0: unlimited)."""
    p99_ms: float = 0.0
    """Maximum 99th percentile of the latency (0: unlimited)."""
    least_requests: int = 50
    """Minimum number of requests before a version is judged."""
    window_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class SplitSettings:
    """How the versions of one model share its traffic. Versions are numbers or labels."""

    weights: Mapping[str, float]
    """Shares of the traffic; they sum to 1 (or to 100, as percentages)."""
    sticky: StickyBy = field(default_factory=StickyBy)
    shadows: Mapping[str, float] = field(default_factory=dict)
    """Versions that get copies of this share of the requests; their responses are compared and never returned."""
    tolerance: float = 1e-5
    """Relative and absolute tolerance for numbers of two responses that agree."""
    baseline: str = ""
    """The version that gets the traffic of a rolled-back version; "" for the one with the largest weight."""
    rollback: RollbackRules | None = None


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """All splits, by model."""

    splits: Mapping[str, SplitSettings] = field(default_factory=dict)


_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def parse_split(tree: object, where: str = "split") -> SplitSettings:
    """Parse a split; raise `InvalidArgument` with the key (after the prefix `where`) and what to write instead."""
    members = _object(tree, where, tuple(field.name for field in fields(SplitSettings)))
    if "weights" not in members:
        raise InvalidArgument(f"{where} has no weights; write for example weights: {{1: 0.9, 2: 0.1}}")
    default = SplitSettings({})
    return SplitSettings(
        weights=_shares(members["weights"], f"{where}.weights"),
        sticky=_sticky(members.get("sticky"), f"{where}.sticky"),
        shadows=_shares(members.get("shadows") or {}, f"{where}.shadows"),
        tolerance=_number(members.get("tolerance", default.tolerance), f"{where}.tolerance"),
        baseline=_version(members.get("baseline") or "", f"{where}.baseline"),
        rollback=_rollback(members.get("rollback"), f"{where}.rollback"),
    )


def split_tree(split: SplitSettings) -> dict[str, object]:
    """Return a split as `parse_split` reads it, without default values."""
    tree: dict[str, object] = {"weights": dict(split.weights)}
    sticky = {name: text for name in ("header", "cookie", "field") if (text := getattr(split.sticky, name))}
    if sticky:
        tree["sticky"] = sticky
    if split.shadows:
        tree["shadows"] = dict(split.shadows)
        tree["tolerance"] = split.tolerance
    if split.baseline:
        tree["baseline"] = split.baseline
    if split.rollback is not None:
        tree["rollback"] = {field.name: getattr(split.rollback, field.name) for field in fields(RollbackRules)}
    return tree


def _sticky(tree: object, where: str) -> StickyBy:
    if tree is None:
        return StickyBy()
    members = _object(tree, where, ("header", "cookie", "field"))
    for name, value in members.items():
        if not isinstance(value, str):
            raise InvalidArgument(f"{where}.{name} is {_shown(value)}; write the name of a {name}")
        if value and name != "field" and _HEADER.fullmatch(value) is None:
            raise InvalidArgument(
                f"{where}.{name} is {_shown(value)}; the name of a {name} has letters, digits and '-'"
            )
    return StickyBy(**{name: str(value) for name, value in members.items()})


def _rollback(tree: object, where: str) -> RollbackRules | None:
    if tree is None:
        return None
    members = _object(tree, where, tuple(field.name for field in fields(RollbackRules)))
    default = RollbackRules()
    least = members.get("least_requests", default.least_requests)
    if isinstance(least, bool) or not isinstance(least, int):
        raise InvalidArgument(f"{where}.least_requests is {_shown(least)}; write a whole number such as 50")
    return RollbackRules(
        error_rate=_number(members.get("error_rate", default.error_rate), f"{where}.error_rate"),
        p99_ms=_number(members.get("p99_ms", default.p99_ms), f"{where}.p99_ms"),
        least_requests=least,
        window_seconds=_number(members.get("window_seconds", default.window_seconds), f"{where}.window_seconds"),
    )


def _shares(tree: object, where: str) -> dict[str, float]:
    if not isinstance(tree, Mapping):
        raise InvalidArgument(
            f"{where} is {_shown(tree)}; write versions with their shares, such as {{1: 0.9, 2: 0.1}}"
        )
    shares: dict[str, float] = {}
    for key, value in tree.items():
        version = _version(key, where)
        if not version or version in shares:
            raise InvalidArgument(f"{where} names version {_shown(key)} {'twice' if version else 'without a name'}")
        shares[version] = _number(value, f"{where}.{version}")
    return shares


def _version(value: object, where: str) -> str:
    # YAML parses 1 and 1.2 as numbers, but users mean the text.
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
            near = nearest(str(key), names)
            hint = f"did you mean '{near}'?" if near else f"it may have {', '.join(names)}"
            raise InvalidArgument(f"{where} has no key {_shown(key)}; {hint}")
    return tree


def _shown(value: object) -> str:
    return ascii(value)[:64]


_CLOSE_ENOUGH = 1e-6


def check_split(model: str, split: SplitSettings) -> None:
    """Raise if a split is invalid, whatever versions exist."""
    where = f"the split of model '{model}'"
    shares_of(model, split.weights)
    for version, share in split.shadows.items():
        if not (math.isfinite(share) and 0 < share <= 1):
            raise InvalidArgument(
                f"{where}: the share of shadow '{version}' is {share:g}; write a number over 0 and up to 1, such as 0.25 "
                "for a quarter of the requests"
            )
        if version in split.weights:
            raise InvalidArgument(
                f"{where}: version '{version}' is a shadow and has a weight too; a shadow's answers are never returned, so "
                "take it out of one of the two"
            )
    if split.baseline and split.baseline not in split.weights:
        raise InvalidArgument(
            f"{where}: the baseline '{split.baseline}' has no weight; use one of {_listed(split.weights)}"
        )
    if not (math.isfinite(split.tolerance) and split.tolerance >= 0):
        raise InvalidArgument(f"{where}: tolerance is {split.tolerance:g}; write 0 or more, such as 1e-5")
    if split.rollback is not None:
        _check_rollback(where, split.rollback)


def shares_of(model: str, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights as shares that sum to 1; raise if they are invalid."""
    where = f"the split of model '{model}'"
    if not weights:
        raise InvalidArgument(f"{where} has no weights; write for example 1=0.9 2=0.1")
    for version, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise InvalidArgument(
                f"{where}: the weight of version '{version}' is {weight:g}; write a number of 0 or more"
            )
    total = math.fsum(weights.values())
    for expected in (1.0, 100.0):
        if abs(total - expected) <= _CLOSE_ENOUGH * expected:
            return {version: weight / total for version, weight in weights.items()}
    raise InvalidArgument(
        f"{where}: the weights {_listed(weights)} sum to {total:.9g}; write shares that sum to 1, or percentages that sum "
        "to 100"
    )


def baseline_of(split: SplitSettings) -> str:
    """Return the baseline: as configured, or the version with the largest weight (of equals, the first)."""
    return split.baseline or max(split.weights, key=lambda version: split.weights[version])


def _check_rollback(where: str, rules: RollbackRules) -> None:
    if not (math.isfinite(rules.error_rate) and 0 <= rules.error_rate < 1):
        raise InvalidArgument(
            f"{where}: rollback.error_rate is {rules.error_rate:g}; write errors per request, such as 0.05, or 0 for never"
        )
    if not (math.isfinite(rules.p99_ms) and rules.p99_ms >= 0):
        raise InvalidArgument(f"{where}: rollback.p99_ms is {rules.p99_ms:g}; write milliseconds, or 0 for never")
    if rules.least_requests < 1:
        raise InvalidArgument(f"{where}: rollback.least_requests is {rules.least_requests}; write 1 or more")
    if not (math.isfinite(rules.window_seconds) and rules.window_seconds > 0):
        raise InvalidArgument(f"{where}: rollback.window_seconds is {rules.window_seconds:g}; write more than 0")
    if not rules.error_rate and not rules.p99_ms:
        raise InvalidArgument(
            f"{where}: rollback has neither error_rate nor p99_ms and would never happen; write one of them, or leave "
            "rollback out"
        )


def _listed(weights: Mapping[str, float]) -> str:
    return " ".join(f"{version}={weight:g}" for version, weight in weights.items())
