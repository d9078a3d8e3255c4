# SPDX-License-Identifier: Apache-2.0
"""Rules of a runtime: its own, and that no two runtimes are equally right for the same model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.fleet.admission.scaling import component_problems
from headrace.fleet.names import MULTI_NODE, RAW
from headrace.fleet.words import (
    ClusterFacts,
    Document,
    Problem,
    items,
    kind_of,
    name_of,
    namespace_of,
    part,
    text,
    whole,
)

_FACTORS = {"M": 1e6, "B": 1e9, "T": 1e12}


def runtime_problems(runtime: Document, facts: ClusterFacts) -> list[Problem]:
    """What is wrong with a runtime. One that is disabled may be anything: nobody takes it."""
    spec = part(runtime, "spec")
    if spec.get("disabled") is True:
        return []
    return [
        *_size_range(part(spec, "modelSizeRange")),
        *_workers(spec),
        *_classes(items(spec, "acceleratorRequirements", "acceleratorClasses"), facts),
        *_priorities(items(spec, "supportedModelFormats")),
        *_rivals(runtime, facts),
        *component_problems("spec.engineConfig", part(spec, "engineConfig")),
        *component_problems("spec.decoderConfig", part(spec, "decoderConfig")),
        *component_problems("spec.routerConfig", part(spec, "routerConfig")),
    ]


def _size_range(span: Document) -> Iterator[Problem]:
    least, most = _parameters(text(span, "min")), _parameters(text(span, "max"))
    if least is not None and most is not None and least > most:
        said = f"{span['min']} is above max, {span['max']}"
        yield Problem("spec.modelSizeRange.min", said, "lower min or raise max")


def _parameters(size: str) -> float | None:
    try:
        return float(size[:-1]) * _FACTORS[size[-1]]
    except (ValueError, KeyError, IndexError):
        return None


def _workers(spec: Document) -> Iterator[Problem]:
    forced = {
        text(variable, "value")
        for container in items(spec, "containers")
        for variable in items(container, "env")
        if text(variable, "name") == "DEPLOYMENT_MODE"
    }
    size = whole(spec, "workers", "size")
    if "workers" in spec and (size is None or size <= 0):
        yield Problem("spec.workers.size", "there has to be a worker at least", "write 1 or more, or remove workers")
    if MULTI_NODE in forced and "workers" not in spec:
        said = f"a container says DEPLOYMENT_MODE={MULTI_NODE}, and there are no workers"
        yield Problem("spec.workers", said, "add workers.size, or use engineConfig.worker")
    if RAW in forced and "workers" in spec:
        said = f"a container says DEPLOYMENT_MODE={RAW}, which has no workers"
        yield Problem("spec.workers", said, "remove workers")


def _classes(names: list[Any], facts: ClusterFacts) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if isinstance(name, str) and facts.accelerator(name) is None:
            place = f"spec.acceleratorRequirements.acceleratorClasses[{index}]"
            yield Problem(place, f"there is no AcceleratorClass {name[:80]}", "create it first, or correct the name")


def _priorities(formats: list[Any]) -> Iterator[Problem]:
    seen: dict[str, Any] = {}
    for index, each in enumerate(formats):
        name, priority = text(each, "name"), part(each).get("priority")
        if not name or priority is None:
            continue
        if seen.setdefault(name, priority) != priority:
            said = f"the format {name[:63]} has the priorities {seen[name]} and {priority}"
            place = f"spec.supportedModelFormats[{index}].priority"
            yield Problem(place, said, "give a format one priority")


def _rivals(runtime: Document, facts: ClusterFacts) -> Iterator[Problem]:
    """Runtimes that are chosen for the same models with the same right: which one is taken would be chance."""
    me = (kind_of(runtime), namespace_of(runtime), name_of(runtime))
    index = facts.derived(_by_claim)
    for number, claim in _claims(runtime):
        for rival in index.get(claim, ()):
            if rival != me:
                said = f"the runtime {rival[2]} is chosen for the same format, size and protocol with the same priority"
                place = f"spec.supportedModelFormats[{number}]"
                yield Problem(place, said, "give one of them another priority or size range, or set autoSelect: false")
                return


def _by_claim(facts: ClusterFacts) -> dict[Any, list[tuple[str, str, str]]]:
    index: dict[Any, list[tuple[str, str, str]]] = {}
    for runtime in facts.runtimes:
        if part(runtime, "spec").get("disabled") is True:
            continue
        for _, claim in _claims(runtime):
            index.setdefault(claim, []).append((kind_of(runtime), namespace_of(runtime), name_of(runtime)))
    return index


def _claims(runtime: Document) -> Iterator[tuple[int, Any]]:
    """What a runtime is chosen for, a claim for each format and protocol; equal claims are rivals."""
    spec = part(runtime, "spec")
    scope = (kind_of(runtime), namespace_of(runtime))
    span = (text(spec, "modelSizeRange", "min"), text(spec, "modelSizeRange", "max"))
    for number, each in enumerate(items(spec, "supportedModelFormats")):
        if part(each).get("autoSelect") is not True:
            continue
        wanted = tuple(
            text(each, *path)
            for path in (
                ("name",),
                ("version",),
                ("modelFormat", "name"),
                ("modelFormat", "version"),
                ("modelFramework", "name"),
                ("modelFramework", "version"),
                ("modelArchitecture",),
                ("quantization",),
                ("diffusionPipeline", "className"),
            )
        )
        for protocol in {each for each in items(spec, "protocolVersions") if isinstance(each, str)}:
            yield number, (scope, protocol, wanted, span, whole(each, "priority") or 1)
