# SPDX-License-Identifier: Apache-2.0
"""The accelerator class of a component: the one that is named, else one of the runtime's by a policy.

Called by merging, which puts what a class says into the pods. A runtime that lists no classes has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.fleet.names import ACCELERATOR_CLASS
from headrace.fleet.selection.measures import at_least, gigabytes, quantity
from headrace.fleet.selection.policies import best
from headrace.fleet.words import ClusterFacts, Document, Problem, annotations_of, items, name_of, part, text


@dataclass(frozen=True)
class Choice:
    """The accelerator class of a component, or none, and why."""

    accelerator: Document | None = None
    name: str = ""
    reason: str = ""
    rejected: tuple[tuple[str, str], ...] = ()
    problem: Problem | None = None


def choose(service: Document, runtime: Document | None, component: str, facts: ClusterFacts) -> Choice:
    """The class that an engine or a decoder runs on."""
    classes = items(runtime, "spec", "acceleratorRequirements", "acceleratorClasses")
    listed = [each for each in dict.fromkeys(each for each in classes if isinstance(each, str)) if each]
    if not listed:
        return Choice(reason="the runtime lists no accelerator classes")
    upstream = facts.settings.upstream_selection
    place, name = _named(service, component, upstream)
    if name:
        found = facts.accelerator(name)
        if found is None:
            problem = Problem(place, f"there is no AcceleratorClass {name}", "create it first, or correct the name")
            return Choice(name=name, reason="it is named, and not there", problem=problem)
        return Choice(found, name, f"{place} names it")
    place, selector = _selector(service, component, "policy")
    policy = text(selector, "policy")
    if not policy:
        return Choice(reason="neither a class nor a policy is named")
    return _by_policy(policy, listed, _constraints(service, component, upstream), place, facts)


def _named(service: Document, component: str, upstream: bool) -> tuple[str, str]:
    place, selector = _selector(service, component, "acceleratorClass")
    name = text(selector, "acceleratorClass")
    if name or upstream:
        return f"{place}.acceleratorClass", name
    # OME asks runtimes for the class of this annotation and then does not use it.
    return f"metadata.annotations[{ACCELERATOR_CLASS}]", annotations_of(service).get(ACCELERATOR_CLASS, "")


def _selector(service: Document, component: str, field: str) -> tuple[str, Document]:
    """The component's selector if it says something of a field, else the service's."""
    own = part(service, "spec", component, "acceleratorOverride")
    if own.get(field):
        return f"spec.{component}.acceleratorOverride", own
    return "spec.acceleratorSelector", part(service, "spec", "acceleratorSelector")


def _constraints(service: Document, component: str, upstream: bool) -> Document:
    """What a class must satisfy. OME reads the service's alone, also where the component has its own."""
    of_service = part(service, "spec", "acceleratorSelector", "constraints")
    return of_service if upstream else part(_selector(service, component, "constraints")[1], "constraints")


def _by_policy(policy: str, listed: list[str], constraints: Document, place: str, facts: ClusterFacts) -> Choice:
    upstream = facts.settings.upstream_selection
    candidates: list[Document] = []
    rejected: list[tuple[str, str]] = []
    for name in listed:
        found = facts.accelerator(name)
        reason = "there is no such AcceleratorClass" if found is None else ""
        if found is not None:
            reason = next(_failings(found, constraints, upstream), "")
        if reason:
            rejected.append((name, reason))
        elif found is not None:
            candidates.append(found)
    if not candidates:
        told = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        said = f"none of the runtime's accelerator classes satisfies the constraints ({told})"
        problem = None if upstream else Problem(f"{place}.constraints", said, "loosen them, or name a class")
        return Choice(reason=said, rejected=tuple(rejected), problem=problem)
    taken, reason = best(policy, candidates, constraints, upstream=upstream)
    if taken is None:
        return Choice(reason=reason, rejected=tuple(rejected))
    rejected += [(name_of(each), f"by {policy} {name_of(taken)} is taken") for each in candidates if each is not taken]
    return Choice(taken, name_of(taken), reason, tuple(rejected))


def _failings(candidate: Document, constraints: Document, upstream: bool) -> Iterator[str]:
    spec, name = part(candidate, "spec"), name_of(candidate)
    if name in items(constraints, "excludedClasses"):
        yield "it is excluded"
    families = [each.lower() for each in items(constraints, "architectureFamilies") if isinstance(each, str)]
    vendor, family = text(spec, "vendor").lower(), text(spec, "family").lower()
    if families and not {family, f"{vendor}-{family}"} & set(families):
        yield f"its family {family or 'is unknown and'} is not among {', '.join(families)}"
    yield from _memory(part(spec, "capabilities"), constraints, upstream)
    features = {each.lower() for each in items(spec, "capabilities", "features") if isinstance(each, str)}
    for each in items(constraints, "requiredFeatures"):
        if isinstance(each, str) and each.lower() not in features:
            yield f"it lacks the feature {each}"
    least, have = text(constraints, "minArchitectureVersion"), text(spec, "capabilities", "computeCapability")
    if least and not have:
        yield "its computeCapability is not known"
    elif least and not at_least(have, least, upstream=upstream):
        yield f"its compute capability {have} is below {least}"


def _memory(capabilities: Document, constraints: Document, upstream: bool) -> Iterator[str]:
    least, most = quantity(constraints.get("minMemory")), quantity(constraints.get("maxMemory"))
    if least is None and most is None:
        return
    have = gigabytes(capabilities.get("memoryGB"), upstream=upstream)
    if have is None:
        yield "its memory is not known"
        return
    # Whole gigabytes: a class that says 79.6 GB is one of 80 to nobody, and one of 79 to OME.
    if least is not None and int(have) < least:
        yield f"its memory of {have:g} GB is below {least:g}"
    if most is not None and int(have) > most:
        yield f"its memory of {have:g} GB is above {most:g}"
