# SPDX-License-Identifier: Apache-2.0
"""Select the accelerator class of a component: the one it names, else one of the runtime's by a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.fleet.documents import ClusterFacts, Problem
from headrace.fleet.names import ACCELERATOR_CLASS
from headrace.fleet.selection.model_match import at_least, parse_gigabytes, parse_quantity
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_list,
    get_mapping,
    get_str,
    name_of,
)


@dataclass(frozen=True)
class AcceleratorChoice:
    """The accelerator class of a component, or none, and the reason."""

    accelerator: Document | None = None
    name: str = ""
    reason: str = ""
    rejected: tuple[tuple[str, str], ...] = ()
    problem: Problem | None = None


def choose_accelerator(
    service: Document, runtime: Document | None, component: str, facts: ClusterFacts
) -> AcceleratorChoice:
    """Choose the accelerator class of an engine or a decoder."""
    classes = get_list(runtime, "spec", "acceleratorRequirements", "acceleratorClasses")
    listed = list(dict.fromkeys(name for name in classes if isinstance(name, str) and name))
    if not listed:
        return AcceleratorChoice(reason="the runtime lists no accelerator classes")
    upstream = facts.settings.upstream_selection
    place, name = _named(service, component, upstream)
    if name:
        accelerator = facts.accelerator(name)
        if accelerator is None:
            problem = Problem(place, f"there is no AcceleratorClass {name}", "create it first, or correct the name")
            return AcceleratorChoice(name=name, reason="it is named, but does not exist", problem=problem)
        return AcceleratorChoice(accelerator, name, f"{place} names it")
    place, selector = _selector(service, component, "policy")
    policy = get_str(selector, "policy")
    if not policy:
        return AcceleratorChoice(reason="neither a class nor a policy is named")
    return _by_policy(policy, listed, _constraints(service, component, upstream), place, facts)


def _named(service: Document, component: str, upstream: bool) -> tuple[str, str]:
    place, selector = _selector(service, component, "acceleratorClass")
    name = get_str(selector, "acceleratorClass")
    if name or upstream:
        return f"{place}.acceleratorClass", name
    # OME filters runtimes by this annotation, and then does not use its class.
    return f"metadata.annotations[{ACCELERATOR_CLASS}]", annotations_of(service).get(ACCELERATOR_CLASS, "")


def _selector(service: Document, component: str, field: str) -> tuple[str, Document]:
    """Return the component's selector if it sets a field, else the service's."""
    component_selector = get_mapping(service, "spec", component, "acceleratorOverride")
    if component_selector.get(field):
        return f"spec.{component}.acceleratorOverride", component_selector
    return "spec.acceleratorSelector", get_mapping(service, "spec", "acceleratorSelector")


def _constraints(service: Document, component: str, upstream: bool) -> Document:
    """Return the constraints of a class. OME reads only those of the service, even if the component has its own."""
    of_service = get_mapping(service, "spec", "acceleratorSelector", "constraints")
    return of_service if upstream else get_mapping(_selector(service, component, "constraints")[1], "constraints")


def _by_policy(
    policy: str, listed: list[str], constraints: Document, place: str, facts: ClusterFacts
) -> AcceleratorChoice:
    upstream = facts.settings.upstream_selection
    candidates: list[Document] = []
    rejected: list[tuple[str, str]] = []
    for name in listed:
        accelerator = facts.accelerator(name)
        reason = "there is no such AcceleratorClass" if accelerator is None else ""
        if accelerator is not None:
            reason = next(_violations(accelerator, constraints, upstream), "")
        if reason:
            rejected.append((name, reason))
        elif accelerator is not None:
            candidates.append(accelerator)
    if not candidates:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        message = f"none of the runtime's accelerator classes satisfies the constraints ({reasons})"
        problem = None if upstream else Problem(f"{place}.constraints", message, "loosen them, or name a class")
        return AcceleratorChoice(reason=message, rejected=tuple(rejected), problem=problem)
    chosen_class, reason = apply_policy(policy, candidates, constraints, upstream=upstream)
    if chosen_class is None:
        return AcceleratorChoice(reason=reason, rejected=tuple(rejected))
    rejected += [
        (name_of(candidate), f"by {policy} {name_of(chosen_class)} is taken")
        for candidate in candidates
        if candidate is not chosen_class
    ]
    return AcceleratorChoice(chosen_class, name_of(chosen_class), reason, tuple(rejected))


def _violations(candidate: Document, constraints: Document, upstream: bool) -> Iterator[str]:
    spec, name = get_mapping(candidate, "spec"), name_of(candidate)
    if name in get_list(constraints, "excludedClasses"):
        yield "it is excluded"
    families = [family.lower() for family in get_list(constraints, "architectureFamilies") if isinstance(family, str)]
    vendor, family = get_str(spec, "vendor").lower(), get_str(spec, "family").lower()
    if families and not {family, f"{vendor}-{family}"} & set(families):
        yield f"its family {family or 'is unknown and'} is not among {', '.join(families)}"
    yield from _memory_violations(get_mapping(spec, "capabilities"), constraints, upstream)
    features = {feature.lower() for feature in get_list(spec, "capabilities", "features") if isinstance(feature, str)}
    for required in get_list(constraints, "requiredFeatures"):
        if isinstance(required, str) and required.lower() not in features:
            yield f"it lacks the feature {required}"
    minimum, have = get_str(constraints, "minArchitectureVersion"), get_str(spec, "capabilities", "computeCapability")
    if minimum and not have:
        yield "its computeCapability is not known"
    elif minimum and not at_least(have, minimum, upstream=upstream):
        yield f"its compute capability {have} is below {minimum}"


def _memory_violations(capabilities: Document, constraints: Document, upstream: bool) -> Iterator[str]:
    minimum, maximum = parse_quantity(constraints.get("minMemory")), parse_quantity(constraints.get("maxMemory"))
    if minimum is None and maximum is None:
        return
    have = parse_gigabytes(capabilities.get("memoryGB"), upstream=upstream)
    if have is None:
        yield "its memory is not known"
        return
    # Rounded down to whole gigabytes, as in OME: 79.6 GB does not satisfy 80.
    if minimum is not None and int(have) < minimum:
        yield f"its memory of {have:g} GB is below {minimum:g}"
    if maximum is not None and int(have) > maximum:
        yield f"its memory of {have:g} GB is above {maximum:g}"


BEST_FIT, CHEAPEST, MOST_CAPABLE, FIRST_AVAILABLE = "BestFit", "Cheapest", "MostCapable", "FirstAvailable"
_PERFORMANCE_FIELDS = {
    "fp32": "fp32Tflops",
    "fp16": "fp16Tflops",
    "int8": "int8Tops",
    "fp8": "int8Tops",
    "int4": "int4Tops",
}
_COST_TIERS = {"low": 1.0, "medium": 2.0, "high": 3.0}
_FALLBACK = 0.5
"""Factor of the score for each preferred precision that an accelerator lacks."""


def apply_policy(
    policy: str, classes: Sequence[Document], constraints: Document, *, upstream: bool
) -> tuple[Document | None, str]:
    """Return the class that a policy chooses, and the reason."""
    if len(classes) == 1:
        return classes[0], "it alone satisfies the constraints"
    if policy == BEST_FIT:
        scores = [_best_fit_score(candidate, constraints, upstream) for candidate in classes]
        return classes[scores.index(max(scores))], f"{BEST_FIT}: its score of {max(scores):.2f} is the highest"
    if policy == MOST_CAPABLE:
        scores = _capability_scores(classes, constraints, upstream)
        return classes[scores.index(max(scores))], f"{MOST_CAPABLE}: its score of {max(scores):.2f} is the highest"
    if policy == CHEAPEST:
        return _cheapest(classes, upstream)
    return classes[0], f"{FIRST_AVAILABLE}: the first in the runtime's list"


def _memory_size(candidate: Document, upstream: bool) -> float | None:
    return parse_gigabytes(get_mapping(candidate, "spec", "capabilities").get("memoryGB"), upstream=upstream)


def _tflops(candidate: Document, precision: str) -> float:
    field = _PERFORMANCE_FIELDS.get(precision.lower(), "")
    return parse_quantity(get_mapping(candidate, "spec", "capabilities", "performance").get(field)) or 0.0


def _precisions(constraints: Document) -> list[str]:
    return [
        precision.lower() for precision in get_list(constraints, "preferredPrecisions") if isinstance(precision, str)
    ]


def _best_fit_score(candidate: Document, constraints: Document, upstream: bool) -> float:
    """Score: 0.7 for memory that is close to what is needed, 0.3 for performance."""
    needed = parse_quantity(constraints.get("minMemory"))
    have = _memory_size(candidate, upstream)
    memory = 1.0
    if needed:
        memory = needed / have if have and have >= needed else 0.0
    return 0.7 * memory + 0.3 * _performance_score(candidate, constraints)


def _performance_score(candidate: Document, constraints: Document) -> float:
    needed = parse_quantity(constraints.get("minComputePerformanceTFLOPS")) or 0.0
    precisions = _precisions(constraints)
    if not precisions:
        return _ratio(max(_tflops(candidate, precision) for precision in _PERFORMANCE_FIELDS), needed)
    left = 1.0
    # fp16 is the last resort: every accelerator has it.
    for precision in [*precisions, *(["fp16"] if "fp16" not in precisions else [])]:
        tflops = _tflops(candidate, precision)
        if tflops > 0:
            return _ratio(tflops, needed) * left
        left *= _FALLBACK
    return 0.0


def _ratio(have: float, needed: float) -> float:
    if have <= 0:
        return 0.0
    return min(1.0, have / needed) if needed else 1.0


def _capability_scores(classes: Sequence[Document], constraints: Document, upstream: bool) -> list[float]:
    """Scores: 0.5 for memory, 0.3 for its bandwidth, 0.2 for performance, each relative to the maximum."""
    precisions = _precisions(constraints) or ["fp16"]
    rows = [
        (
            _memory_size(candidate, upstream) or 0.0,
            parse_quantity(get_mapping(candidate, "spec", "capabilities").get("memoryBandwidthGBps")) or 0.0,
            next((tflops for tflops in (_tflops(candidate, name) for name in precisions) if tflops > 0), 0.0),
        )
        for candidate in classes
    ]
    maxima = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    return [0.5 * row[0] / maxima[0] + 0.3 * row[1] / maxima[1] + 0.2 * row[2] / maxima[2] for row in rows]


def _cheapest(classes: Sequence[Document], upstream: bool) -> tuple[Document | None, str]:
    """Choose by price per hour (spot first), else per token, else by tier. OME compares prices with tiers; we do not."""
    priced = [(price, number) for number, candidate in enumerate(classes) if (price := _price(candidate)) is not None]
    if not priced:
        if upstream:
            return None, f"{CHEAPEST}: no class has a price"
        return classes[0], f"{CHEAPEST}: no class has a price, so the first in the runtime's list"
    ((kind, value), number) = min(priced, key=lambda item: (item[0][1] if upstream else item[0], item[1]))
    unit = ("an hour", "for a million tokens", "by its tier")[kind]
    return classes[number], f"{CHEAPEST}: {value:g} {unit}"


def _price(candidate: Document) -> tuple[int, float] | None:
    cost = get_mapping(candidate, "spec", "cost")
    for kind, field in ((0, "spotPerHour"), (0, "perHour"), (1, "perMillionTokens")):
        value = parse_quantity(cost.get(field))
        if value is not None:
            return kind, value
    tier = get_str(cost, "tier").lower()
    return (2, _COST_TIERS.get(tier, _COST_TIERS["medium"])) if tier else None
