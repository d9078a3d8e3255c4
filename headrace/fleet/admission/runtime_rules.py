# SPDX-License-Identifier: Apache-2.0
"""Rules of a runtime, and conflicts between runtimes that match the same models equally."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.fleet.admission.service_rules import component_problems
from headrace.fleet.documents import ClusterFacts, Problem, namespace_of
from headrace.fleet.names import MULTI_NODE, RAW
from headrace.platforms.kubernetes_client.objects import (
    Document,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    name_of,
)

_FACTORS = {"M": 1e6, "B": 1e9, "T": 1e12}


def runtime_problems(runtime: Document, facts: ClusterFacts) -> list[Problem]:
    """Return the problems of a runtime; none for a disabled one, which is never selected."""
    spec = get_mapping(runtime, "spec")
    if spec.get("disabled") is True:
        return []
    return [
        *_size_range(get_mapping(spec, "modelSizeRange")),
        *_workers(spec),
        *_classes(get_list(spec, "acceleratorRequirements", "acceleratorClasses"), facts),
        *_priorities(get_list(spec, "supportedModelFormats")),
        *_conflicts(runtime, facts),
        *component_problems("spec.engineConfig", get_mapping(spec, "engineConfig")),
        *component_problems("spec.decoderConfig", get_mapping(spec, "decoderConfig")),
        *component_problems("spec.routerConfig", get_mapping(spec, "routerConfig")),
    ]


def _size_range(span: Document) -> Iterator[Problem]:
    minimum, maximum = _parameters(get_str(span, "min")), _parameters(get_str(span, "max"))
    if minimum is not None and maximum is not None and minimum > maximum:
        message = f"{span['min']} is above max, {span['max']}"
        yield Problem("spec.modelSizeRange.min", message, "lower min or raise max")


def _parameters(size: str) -> float | None:
    try:
        return float(size[:-1]) * _FACTORS[size[-1]]
    except (ValueError, KeyError, IndexError):
        return None


def _workers(spec: Document) -> Iterator[Problem]:
    forced = {
        get_str(variable, "value")
        for container in get_list(spec, "containers")
        for variable in get_list(container, "env")
        if get_str(variable, "name") == "DEPLOYMENT_MODE"
    }
    size = get_int(spec, "workers", "size")
    if "workers" in spec and (size is None or size <= 0):
        yield Problem("spec.workers.size", "there must be at least one worker", "write 1 or more, or remove workers")
    if MULTI_NODE in forced and "workers" not in spec:
        message = f"a container says DEPLOYMENT_MODE={MULTI_NODE}, and there are no workers"
        yield Problem("spec.workers", message, "add workers.size, or use engineConfig.worker")
    if RAW in forced and "workers" in spec:
        message = f"a container says DEPLOYMENT_MODE={RAW}, which has no workers"
        yield Problem("spec.workers", message, "remove workers")


def _classes(names: list[Any], facts: ClusterFacts) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if isinstance(name, str) and facts.accelerator(name) is None:
            place = f"spec.acceleratorRequirements.acceleratorClasses[{index}]"
            yield Problem(place, f"there is no AcceleratorClass {name[:80]}", "create it first, or correct the name")


def _priorities(formats: list[Any]) -> Iterator[Problem]:
    seen: dict[str, Any] = {}
    for index, model_format in enumerate(formats):
        name, priority = get_str(model_format, "name"), get_mapping(model_format).get("priority")
        if not name or priority is None:
            continue
        if seen.setdefault(name, priority) != priority:
            message = f"the format {name[:63]} has the priorities {seen[name]} and {priority}"
            place = f"spec.supportedModelFormats[{index}].priority"
            yield Problem(place, message, "give a format one priority")


def _conflicts(runtime: Document, facts: ClusterFacts) -> Iterator[Problem]:
    """Find runtimes that match the same models with the same priority: the choice would be arbitrary."""
    me = (kind_of(runtime), namespace_of(runtime), name_of(runtime))
    index = facts.derived(_index_claims)
    for number, claim in _claims(runtime):
        for rival in index.get(claim, ()):
            if rival != me:
                message = (
                    f"the runtime {rival[2]} is chosen for the same format, size and protocol with the same priority"
                )
                place = f"spec.supportedModelFormats[{number}]"
                yield Problem(
                    place, message, "give one of them another priority or size range, or set autoSelect: false"
                )
                return


def _index_claims(facts: ClusterFacts) -> dict[Any, list[tuple[str, str, str]]]:
    index: dict[Any, list[tuple[str, str, str]]] = {}
    for runtime in facts.runtimes:
        if get_mapping(runtime, "spec").get("disabled") is True:
            continue
        for _, claim in _claims(runtime):
            index.setdefault(claim, []).append((kind_of(runtime), namespace_of(runtime), name_of(runtime)))
    return index


def _claims(runtime: Document) -> Iterator[tuple[int, Any]]:
    """Yield what a runtime matches, one claim for each format and protocol; equal claims conflict."""
    spec = get_mapping(runtime, "spec")
    scope = (kind_of(runtime), namespace_of(runtime))
    span = (get_str(spec, "modelSizeRange", "min"), get_str(spec, "modelSizeRange", "max"))
    for number, model_format in enumerate(get_list(spec, "supportedModelFormats")):
        if get_mapping(model_format).get("autoSelect") is not True:
            continue
        versions = tuple(
            get_str(model_format, *path)
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
        for protocol in {version for version in get_list(spec, "protocolVersions") if isinstance(version, str)}:
            yield number, (scope, protocol, versions, span, get_int(model_format, "priority") or 1)
