# SPDX-License-Identifier: Apache-2.0
"""The policies by which one accelerator class is taken of several: BestFit, Cheapest, MostCapable, FirstAvailable.

Called by `accelerators` with classes that all satisfy the constraints, in the runtime's order; ties go to the earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.fleet.selection.measures import gigabytes, quantity
from headrace.fleet.words import Document, items, part, text

BEST_FIT, CHEAPEST, MOST_CAPABLE, FIRST_AVAILABLE = "BestFit", "Cheapest", "MostCapable", "FirstAvailable"
_PERFORMANCE = {
    "fp32": "fp32Tflops",
    "fp16": "fp16Tflops",
    "int8": "int8Tops",
    "fp8": "int8Tops",
    "int4": "int4Tops",
}
_TIERS = {"low": 1.0, "medium": 2.0, "high": 3.0}
_FALLBACK = 0.5
"""What is left of a score for each preferred precision that an accelerator has not."""


def best(
    policy: str, classes: Sequence[Document], constraints: Document, *, upstream: bool
) -> tuple[Document | None, str]:
    """The class that a policy takes, and why."""
    if len(classes) == 1:
        return classes[0], "it alone satisfies the constraints"
    if policy == BEST_FIT:
        scores = [_fit(each, constraints, upstream) for each in classes]
        return classes[scores.index(max(scores))], f"{BEST_FIT}: its score of {max(scores):.2f} is the highest"
    if policy == MOST_CAPABLE:
        scores = _capabilities(classes, constraints, upstream)
        return classes[scores.index(max(scores))], f"{MOST_CAPABLE}: its score of {max(scores):.2f} is the highest"
    if policy == CHEAPEST:
        return _cheapest(classes, upstream)
    return classes[0], f"{FIRST_AVAILABLE}: the first in the runtime's list"


def _memory(candidate: Document, upstream: bool) -> float | None:
    return gigabytes(part(candidate, "spec", "capabilities").get("memoryGB"), upstream=upstream)


def _tflops(candidate: Document, precision: str) -> float:
    field = _PERFORMANCE.get(precision.lower(), "")
    return quantity(part(candidate, "spec", "capabilities", "performance").get(field)) or 0.0


def _precisions(constraints: Document) -> list[str]:
    return [each.lower() for each in items(constraints, "preferredPrecisions") if isinstance(each, str)]


def _fit(candidate: Document, constraints: Document, upstream: bool) -> float:
    """0.7 for memory that is not more than needed, 0.3 for speed that is not less."""
    needed = quantity(constraints.get("minMemory"))
    have = _memory(candidate, upstream)
    memory = 1.0
    if needed:
        memory = needed / have if have and have >= needed else 0.0
    return 0.7 * memory + 0.3 * _speed(candidate, constraints)


def _speed(candidate: Document, constraints: Document) -> float:
    needed = quantity(constraints.get("minComputePerformanceTFLOPS")) or 0.0
    precisions = _precisions(constraints)
    if not precisions:
        return _share(max(_tflops(candidate, each) for each in _PERFORMANCE), needed)
    left = 1.0
    # fp16 is what every accelerator has, so it stands behind what is preferred.
    for precision in [*precisions, *(["fp16"] if "fp16" not in precisions else [])]:
        tflops = _tflops(candidate, precision)
        if tflops > 0:
            return _share(tflops, needed) * left
        left *= _FALLBACK
    return 0.0


def _share(have: float, needed: float) -> float:
    if have <= 0:
        return 0.0
    return min(1.0, have / needed) if needed else 1.0


def _capabilities(classes: Sequence[Document], constraints: Document, upstream: bool) -> list[float]:
    """0.5 for memory, 0.3 for its bandwidth, 0.2 for speed, each against the most that there is."""
    precisions = _precisions(constraints) or ["fp16"]
    rows = [
        (
            _memory(each, upstream) or 0.0,
            quantity(part(each, "spec", "capabilities").get("memoryBandwidthGBps")) or 0.0,
            next((tflops for tflops in (_tflops(each, name) for name in precisions) if tflops > 0), 0.0),
        )
        for each in classes
    ]
    most = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    return [0.5 * row[0] / most[0] + 0.3 * row[1] / most[1] + 0.2 * row[2] / most[2] for row in rows]


def _cheapest(classes: Sequence[Document], upstream: bool) -> tuple[Document | None, str]:
    """By the hour (spot first), else by tokens, else by tier. OME compares dollars an hour with tiers; we do not."""
    priced = [(price, number) for number, each in enumerate(classes) if (price := _price(each)) is not None]
    if not priced:
        if upstream:
            return None, f"{CHEAPEST}: no class has a price"
        return classes[0], f"{CHEAPEST}: no class has a price, so the first in the runtime's list"
    ((kind, value), number) = min(priced, key=lambda each: (each[0][1] if upstream else each[0], each[1]))
    unit = ("an hour", "for a million tokens", "by its tier")[kind]
    return classes[number], f"{CHEAPEST}: {value:g} {unit}"


def _price(candidate: Document) -> tuple[int, float] | None:
    cost = part(candidate, "spec", "cost")
    for kind, field in ((0, "spotPerHour"), (0, "perHour"), (1, "perMillionTokens")):
        value = quantity(cost.get(field))
        if value is not None:
            return kind, value
    tier = text(cost, "tier").lower()
    return (2, _TIERS.get(tier, _TIERS["medium"])) if tier else None
