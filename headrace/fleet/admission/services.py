# SPDX-License-Identifier: Apache-2.0
"""Rules of an InferenceService: what it names must be there, and its parts must go together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from headrace.fleet.admission.labels import label_problems
from headrace.fleet.admission.scaling import scaling_problems
from headrace.fleet.names import (
    ACCELERATOR_CLASS,
    COMPONENTS,
    DEPLOYMENT_MODE,
    INGRESS_DISABLE_CREATION,
    INGRESS_DISABLE_ISTIO,
    INGRESS_URL_SCHEME,
    MODES,
    SERVICE_TYPE,
    VIRTUAL,
)
from headrace.fleet.rollouts.policy import rollout_problems
from headrace.fleet.words import ClusterFacts, Document, Problem, annotations_of, items, namespace_of, part, text, whole

_TAKEN = {
    DEPLOYMENT_MODE: MODES,
    SERVICE_TYPE: ("ClusterIP", "NodePort", "LoadBalancer"),
    INGRESS_URL_SCHEME: ("http", "https"),
    INGRESS_DISABLE_CREATION: ("true", "false"),
    INGRESS_DISABLE_ISTIO: ("true", "false"),
}
"""Annotations that take one of a few words."""

STRATEGIES = ("round_robin", "random", "power_of_two", "cache_aware", "round-robin", "p2c", "least", "weighted")
"""Of SGLang's router and of ours."""
_DURATION = re.compile(r"[0-9]+(\.[0-9]+)?(ms|s|m|h)?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
ROUTER_KEYS = ("routing_strategy", "health_check_interval")


def service_problems(service: Document, facts: ClusterFacts) -> list[Problem]:
    """What is wrong with a service whose defaults are in."""
    return [
        *_components(service),
        *_references(service, facts),
        *_accelerators(service, facts),
        *_annotations(service),
        *scaling_problems(service),
        *rollout_problems(service),
        *_containers(service),
        *_router(part(service, "spec", "router", "config")),
        *label_problems(service),
    ]


def _components(service: Document) -> Iterator[Problem]:
    spec = part(service, "spec")
    if annotations_of(service).get(DEPLOYMENT_MODE) == VIRTUAL:
        return
    if "engine" not in spec:
        if "decoder" in spec:
            yield Problem(
                "spec.decoder", "a decoder needs an engine for its prefill", "add spec.engine, if only 'engine: {}'"
            )
        else:
            yield Problem(
                "spec.engine", "is missing, so nothing would be served", "add spec.engine, if only 'engine: {}'"
            )
    if part(spec, "predictor"):
        fix = "move what it says to spec.engine, spec.model and spec.runtime, and remove it"
        yield Problem("spec.predictor", "does nothing beside spec.engine or spec.model", fix)


def _references(service: Document, facts: ClusterFacts) -> Iterator[Problem]:
    spec, namespace = part(service, "spec"), namespace_of(service)
    if annotations_of(service).get(DEPLOYMENT_MODE) == VIRTUAL:
        return
    name, kind = text(spec, "model", "name"), text(spec, "model", "kind")
    runtime = text(spec, "runtime", "name")
    if name:
        yield from _model(name, kind, namespace, facts)
    elif not runtime and "engine" in spec and not _runs_alone(part(spec, "engine")):
        fix = "add spec.model, or spec.runtime, or an image in spec.engine.runner"
        yield Problem("spec.model", "is missing, and nothing else says what to run", fix)
    if runtime:
        found = facts.runtime(namespace, runtime, text(spec, "runtime", "kind"))
        if found is None:
            fix = "create it first, correct the name, or leave spec.runtime out to have one chosen"
            yield Problem("spec.runtime.name", _absent("runtime", "ServingRuntime", runtime, namespace), fix)
        elif part(found, "spec").get("disabled") is True:
            yield Problem("spec.runtime.name", f"the runtime {runtime} is disabled", "enable it, or name another")
    yield from _weights(items(spec, "model", "fineTunedWeights"), facts)


def _model(name: str, kind: str, namespace: str, facts: ClusterFacts) -> Iterator[Problem]:
    found = facts.model(namespace, name, kind)
    if found is not None:
        if part(found, "spec").get("disabled") is True:
            yield Problem("spec.model.name", f"the model {name} is disabled", "enable it, or name another")
    elif kind == "BaseModel" and facts.model("", name) is not None:
        said = f"there is no BaseModel {name} in namespace {namespace}, but a ClusterBaseModel"
        yield Problem("spec.model.kind", said, "write kind: ClusterBaseModel")
    else:
        said = _absent("model", "BaseModel", name, namespace)
        yield Problem("spec.model.name", said, "create it first, or correct the name")


def _absent(what: str, kind: str, name: str, namespace: str) -> str:
    return f"there is no {what} {name}: neither a {kind} in namespace {namespace} nor a Cluster{kind}"


def _weights(weights: list[object], facts: ClusterFacts) -> Iterator[Problem]:
    place = "spec.model.fineTunedWeights"
    if len(weights) > 1:
        yield Problem(place, f"has {len(weights)} weights, and one is the most", "keep one, or make a service for each")
    for index, name in enumerate(weights):
        if not isinstance(name, str):
            continue
        found = facts.weight(name)
        if found is None:
            said = f"there is no FineTunedWeight {name}"
            yield Problem(f"{place}[{index}]", said, "create it first, or correct the name")
        elif part(found, "spec").get("disabled") is True:
            yield Problem(f"{place}[{index}]", f"the FineTunedWeight {name} is disabled", "enable it, or name another")


def _runs_alone(engine: Document) -> bool:
    """Whether the engine says which image to run, so that no runtime is needed."""
    if text(engine, "runner", "image"):
        return True
    return bool(text(engine, "leader", "runner", "image") and text(engine, "worker", "runner", "image"))


def _accelerators(service: Document, facts: ClusterFacts) -> Iterator[Problem]:
    spec = part(service, "spec")
    named = [(f"metadata.annotations[{ACCELERATOR_CLASS}]", annotations_of(service).get(ACCELERATOR_CLASS, ""))]
    selectors = [("spec.acceleratorSelector", part(spec, "acceleratorSelector"))]
    selectors += [
        (f"spec.{name}.acceleratorOverride", part(spec, name, "acceleratorOverride")) for name in ("engine", "decoder")
    ]
    for place, selector in selectors:
        named.append((f"{place}.acceleratorClass", text(selector, "acceleratorClass")))
        least, most = whole(selector, "constraints", "minMemory"), whole(selector, "constraints", "maxMemory")
        if least is not None and most is not None and least > most:
            said = f"{least} is above maxMemory, {most}"
            yield Problem(f"{place}.constraints.minMemory", said, "lower minMemory or raise maxMemory")
    for place, name in named:
        if name and facts.accelerator(name) is None:
            have = ", ".join(sorted(text(each, "metadata", "name") for each in facts.accelerators)[:8]) or "none"
            said = f"there is no AcceleratorClass {name}"
            yield Problem(place, said, f"create it first, or name one that is there ({have})")


def _annotations(service: Document) -> Iterator[Problem]:
    for path in (("metadata",), *(("spec", name) for name in COMPONENTS)):
        for name, words in _TAKEN.items():
            value = part(service, *path, "annotations").get(name)
            if isinstance(value, str) and value not in words:
                said = f"takes one of {', '.join(words)}, not {value[:40]!a}"
                yield Problem(f"{'.'.join(path)}.annotations[{name}]", said, f"write one of {', '.join(words)}")


def _containers(service: Document) -> Iterator[Problem]:
    for component in COMPONENTS:
        for pod in ((), ("leader",), ("worker",)):
            path = ("spec", component, *pod)
            seen: set[str] = set()
            for index, each in enumerate(items(service, *path, "containers")):
                name = text(each, "name")
                if name and name in seen:
                    place = f"{'.'.join(path)}.containers[{index}].name"
                    yield Problem(place, f"two containers are named {name[:63]}", "give each its own name")
                seen.add(name)


def _router(config: Document) -> Iterator[Problem]:
    strategy = config.get("routing_strategy")
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        said = f"takes one of {', '.join(STRATEGIES)}, not {strategy[:40]!a}"
        yield Problem("spec.router.config[routing_strategy]", said, f"write one of {', '.join(STRATEGIES)}")
    interval = config.get("health_check_interval")
    if isinstance(interval, str) and _DURATION.fullmatch(interval) is None:
        said = f"takes a time such as 30s, not {interval[:40]!a}"
        yield Problem("spec.router.config[health_check_interval]", said, "write seconds, 30s, or minutes, 1m")
    for name in config:
        place = f"spec.router.config[{str(name)[:80]}]"
        if not isinstance(name, str) or _VARIABLE.fullmatch(name) is None:
            said = "becomes an environment variable, and none can be named so"
            yield Problem(place, said, "use letters, digits, '_', '-' and '.', not beginning with a digit")
        elif name not in ROUTER_KEYS:
            near = get_close_matches(name.lower(), ROUTER_KEYS, 1, 0.8)
            if near:
                yield Problem(place, f"is not {near[0]}, and would do nothing", f"did you mean {near[0]}?")
