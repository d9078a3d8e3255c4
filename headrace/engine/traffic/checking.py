# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a split, in words that say what to write instead. Whether its versions exist, `traffic` looks up."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.core.errors import InvalidArgument
from headrace.engine.traffic.settings import Rollback, Split

_CLOSE_ENOUGH = 1e-6


def check_split(model: str, split: Split) -> None:
    """Raise for a split that no set of versions could make right."""
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
    """The weights as shares that sum to 1, or what is wrong with them."""
    where = f"the split of model '{model}'"
    if not weights:
        raise InvalidArgument(f"{where} has no weights; write for example 1=0.9 2=0.1")
    for version, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise InvalidArgument(
                f"{where}: the weight of version '{version}' is {weight:g}; write a number of 0 or more"
            )
    whole = math.fsum(weights.values())
    for expected in (1.0, 100.0):
        if abs(whole - expected) <= _CLOSE_ENOUGH * expected:
            return {version: weight / whole for version, weight in weights.items()}
    raise InvalidArgument(
        f"{where}: the weights {_listed(weights)} sum to {whole:.9g}; write shares that sum to 1, or percentages that sum "
        "to 100"
    )


def baseline_of(split: Split) -> str:
    """The version that stands in for others: as the split says, or the one of the largest weight (of equals, the first)."""
    return split.baseline or max(split.weights, key=lambda version: split.weights[version])


def _check_rollback(where: str, rules: Rollback) -> None:
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
