# SPDX-License-Identifier: Apache-2.0
"""Rules of an InferenceService: references, components, annotations, labels and autoscaling."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from headrace.core.names import nearest
from headrace.fleet.admission.inference_pools import pool_annotation_problems
from headrace.fleet.documents import ClusterFacts, Problem, namespace_of
from headrace.fleet.merging.latency_targets import FIRST_TOKEN, NEXT_TOKEN, PERCENTILE, service_targets
from headrace.fleet.names import (
    ACCELERATOR_CLASS,
    AUTOSCALER_CLASS,
    AUTOSCALER_METRICS,
    COMPONENTS,
    DEPLOYMENT_MODE,
    INGRESS_DISABLE_CREATION,
    INGRESS_DISABLE_ISTIO,
    INGRESS_URL_SCHEME,
    KEDA_OPERATOR,
    KEDA_SERVER_ADDRESS,
    KEDA_THRESHOLD,
    LONGEST_LABEL,
    MODES,
    SERVICE_TYPE,
    SLO,
    TARGET_UTILIZATION,
    VIRTUAL,
)
from headrace.fleet.rollouts.policy import rollout_problems
from headrace.fleet.schema.kinds.components import OPERATORS
from headrace.fleet.schema.kinds.components import SLO as SLO_FIELD
from headrace.fleet.schema.validation import validate_field
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_int,
    get_list,
    get_mapping,
    get_str,
)

_ALLOWED_VALUES = {
    DEPLOYMENT_MODE: MODES,
    SERVICE_TYPE: ("ClusterIP", "NodePort", "LoadBalancer"),
    INGRESS_URL_SCHEME: ("http", "https"),
    INGRESS_DISABLE_CREATION: ("true", "false"),
    INGRESS_DISABLE_ISTIO: ("true", "false"),
}
"""Allowed values of annotations."""

STRATEGIES = ("round_robin", "random", "power_of_two", "cache_aware", "round-robin", "p2c", "least", "weighted")
"""Strategies of SGLang's router and of ours."""
_DURATION = re.compile(r"[0-9]+(\.[0-9]+)?(ms|s|m|h)?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
ROUTER_KEYS = ("routing_strategy", "health_check_interval")


def service_problems(service: Document, facts: ClusterFacts) -> list[Problem]:
    """Return the problems of a service that has its defaults."""
    return [
        *_components(service),
        *_references(service, facts),
        *_accelerators(service, facts),
        *_annotations(service),
        *scaling_problems(service),
        *latency_problems(service),
        *pool_annotation_problems(service),
        *rollout_problems(service),
        *_containers(service),
        *_router(get_mapping(service, "spec", "router", "config")),
        *label_problems(service),
    ]


def _components(service: Document) -> Iterator[Problem]:
    spec = get_mapping(service, "spec")
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
    if get_mapping(spec, "predictor"):
        fix = "move what it says to spec.engine, spec.model and spec.runtime, and remove it"
        yield Problem("spec.predictor", "has no effect beside spec.engine or spec.model", fix)


def _references(service: Document, facts: ClusterFacts) -> Iterator[Problem]:
    spec, namespace = get_mapping(service, "spec"), namespace_of(service)
    if annotations_of(service).get(DEPLOYMENT_MODE) == VIRTUAL:
        return
    name, kind = get_str(spec, "model", "name"), get_str(spec, "model", "kind")
    runtime = get_str(spec, "runtime", "name")
    if name:
        yield from _model(name, kind, namespace, facts)
    elif not runtime and "engine" in spec and not _runs_alone(get_mapping(spec, "engine")):
        fix = "add spec.model, or spec.runtime, or an image in spec.engine.runner"
        yield Problem("spec.model", "is missing, and there is no runtime or image to run instead", fix)
    if runtime:
        live = facts.runtime(namespace, runtime, get_str(spec, "runtime", "kind"))
        if live is None:
            fix = "create it first, correct the name, or leave spec.runtime out to have one chosen"
            yield Problem("spec.runtime.name", _missing("runtime", "ServingRuntime", runtime, namespace), fix)
        elif get_mapping(live, "spec").get("disabled") is True:
            yield Problem("spec.runtime.name", f"the runtime {runtime} is disabled", "enable it, or name another")
    yield from _weights(get_list(spec, "model", "fineTunedWeights"), facts)


def _model(name: str, kind: str, namespace: str, facts: ClusterFacts) -> Iterator[Problem]:
    live = facts.model(namespace, name, kind)
    if live is not None:
        if get_mapping(live, "spec").get("disabled") is True:
            yield Problem("spec.model.name", f"the model {name} is disabled", "enable it, or name another")
    elif kind == "BaseModel" and facts.model("", name) is not None:
        value = f"there is no BaseModel {name} in namespace {namespace}, but a ClusterBaseModel"
        yield Problem("spec.model.kind", value, "write kind: ClusterBaseModel")
    else:
        value = _missing("model", "BaseModel", name, namespace)
        yield Problem("spec.model.name", value, "create it first, or correct the name")


def _missing(noun: str, kind: str, name: str, namespace: str) -> str:
    return f"there is no {noun} {name}: neither a {kind} in namespace {namespace} nor a Cluster{kind}"


def _weights(weights: list[object], facts: ClusterFacts) -> Iterator[Problem]:
    place = "spec.model.fineTunedWeights"
    if len(weights) > 1:
        yield Problem(
            place, f"has {len(weights)} weights, but only one is supported", "keep one, or create a service for each"
        )
    for index, name in enumerate(weights):
        if not isinstance(name, str):
            continue
        live = facts.weight(name)
        if live is None:
            message = f"there is no FineTunedWeight {name}"
            yield Problem(f"{place}[{index}]", message, "create it first, or correct the name")
        elif get_mapping(live, "spec").get("disabled") is True:
            yield Problem(f"{place}[{index}]", f"the FineTunedWeight {name} is disabled", "enable it, or name another")


def _runs_alone(engine: Document) -> bool:
    """Whether the engine has its own images and needs no runtime."""
    if get_str(engine, "runner", "image"):
        return True
    return bool(get_str(engine, "leader", "runner", "image") and get_str(engine, "worker", "runner", "image"))


def _accelerators(service: Document, facts: ClusterFacts) -> Iterator[Problem]:
    spec = get_mapping(service, "spec")
    named = [(f"metadata.annotations[{ACCELERATOR_CLASS}]", annotations_of(service).get(ACCELERATOR_CLASS, ""))]
    selectors = [("spec.acceleratorSelector", get_mapping(spec, "acceleratorSelector"))]
    selectors += [
        (f"spec.{name}.acceleratorOverride", get_mapping(spec, name, "acceleratorOverride"))
        for name in ("engine", "decoder")
    ]
    for place, selector in selectors:
        named.append((f"{place}.acceleratorClass", get_str(selector, "acceleratorClass")))
        minimum, maximum = get_int(selector, "constraints", "minMemory"), get_int(selector, "constraints", "maxMemory")
        if minimum is not None and maximum is not None and minimum > maximum:
            message = f"{minimum} is above maxMemory, {maximum}"
            yield Problem(f"{place}.constraints.minMemory", message, "lower minMemory or raise maxMemory")
    for place, name in named:
        if name and facts.accelerator(name) is None:
            have = (
                ", ".join(sorted(get_str(accelerator, "metadata", "name") for accelerator in facts.accelerators)[:8])
                or "none"
            )
            message = f"there is no AcceleratorClass {name}"
            yield Problem(place, message, f"create it first, or name one that is there ({have})")


def _annotations(service: Document) -> Iterator[Problem]:
    for path in (("metadata",), *(("spec", name) for name in COMPONENTS)):
        for name, words in _ALLOWED_VALUES.items():
            value = get_mapping(service, *path, "annotations").get(name)
            if isinstance(value, str) and value not in words:
                message = f"takes one of {', '.join(words)}, not {value[:40]!a}"
                yield Problem(f"{'.'.join(path)}.annotations[{name}]", message, f"write one of {', '.join(words)}")


def _containers(service: Document) -> Iterator[Problem]:
    for component in COMPONENTS:
        for pod in ((), ("leader",), ("worker",)):
            path = ("spec", component, *pod)
            seen: set[str] = set()
            for index, container in enumerate(get_list(service, *path, "containers")):
                name = get_str(container, "name")
                if name and name in seen:
                    place = f"{'.'.join(path)}.containers[{index}].name"
                    yield Problem(place, f"two containers are named {name[:63]}", "give each its own name")
                seen.add(name)


def _router(config: Document) -> Iterator[Problem]:
    strategy = config.get("routing_strategy")
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        message = f"takes one of {', '.join(STRATEGIES)}, not {strategy[:40]!a}"
        yield Problem("spec.router.config[routing_strategy]", message, f"write one of {', '.join(STRATEGIES)}")
    interval = config.get("health_check_interval")
    if isinstance(interval, str) and _DURATION.fullmatch(interval) is None:
        message = f"takes a time such as 30s, not {interval[:40]!a}"
        yield Problem("spec.router.config[health_check_interval]", message, "write seconds, 30s, or minutes, 1m")
    for name in config:
        place = f"spec.router.config[{str(name)[:80]}]"
        if not isinstance(name, str) or _VARIABLE.fullmatch(name) is None:
            message = "is not a valid name of an environment variable, which it becomes"
            yield Problem(place, message, "use letters, digits, '_', '-' and '.', not beginning with a digit")
        elif name not in ROUTER_KEYS:
            closest = nearest(name, ROUTER_KEYS, 0.8)
            if closest:
                yield Problem(place, f"is not {closest}, and would have no effect", f"did you mean {closest}?")


_KEY_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_KEY_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"|[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def label_problems(service: Document) -> Iterator[Problem]:
    """Yield problems of the labels and annotations of a service, which the API server would reject on its objects."""
    for path in (("metadata",), *(("spec", name) for name in COMPONENTS)):
        place = ".".join(path)
        for name, value in get_mapping(service, *path, "labels").items():
            yield from _key_problems(f"{place}.labels[{str(name)[:80]}]", name)
            if isinstance(value, str) and _LABEL_VALUE.fullmatch(value) is None:
                message = f"{value[:40]!a} is not the value of a label"
                fix = f"use at most {LONGEST_LABEL} letters, digits, '-', '_' and '.', with a letter or digit at both ends"
                yield Problem(f"{place}.labels[{str(name)[:80]}]", message, fix)
        for name in get_mapping(service, *path, "annotations"):
            yield from _key_problems(f"{place}.annotations[{str(name)[:80]}]", name)


def _key_problems(place: str, name: object) -> Iterator[Problem]:
    if not isinstance(name, str):
        return
    prefix, slash, last = name.rpartition("/")
    if _KEY_NAME.fullmatch(last) is None or (slash and _KEY_PREFIX.fullmatch(prefix) is None):
        fix = f"write name or domain/name, with at most {LONGEST_LABEL} letters, digits, '-', '_' and '.' in the name"
        yield Problem(place, f"{name[:40]!a} is not a name that Kubernetes takes here", fix)


AUTOSCALER_CLASSES = ("hpa", "keda", "external")
METRICS = ("cpu", "memory")
AUTH_MODES = ("basic", "tls", "bearer", "custom")


def scaling_problems(service: Document) -> Iterator[Problem]:
    """Yield problems of the autoscaling of a service."""
    yield from _scaling_annotations(annotations_of(service))
    if AUTOSCALER_CLASS in annotations_of(service):
        for name in COMPONENTS:
            if get_mapping(service, "spec", name, "autoscaler"):
                message = f"conflicts with the annotation {AUTOSCALER_CLASS}"
                yield Problem(f"spec.{name}.autoscaler", message, "remove the annotation")
    yield from keda_problems("spec.kedaConfig", get_mapping(service, "spec", "kedaConfig"))
    for name in COMPONENTS:
        yield from component_problems(f"spec.{name}", get_mapping(service, "spec", name))


def component_problems(place: str, component: Document) -> Iterator[Problem]:
    """Yield problems of the scaling of one component, of a service or a runtime."""
    minimum, maximum = get_int(component, "minReplicas"), get_int(component, "maxReplicas")
    if minimum is not None and maximum is not None and minimum > maximum:
        yield Problem(
            f"{place}.minReplicas",
            f"{minimum} is above maxReplicas, {maximum}",
            "lower minReplicas or raise maxReplicas",
        )
    if component.get("minAvailable") is not None and component.get("maxUnavailable") is not None:
        message = "a disruption budget has minAvailable or maxUnavailable, not both"
        yield Problem(f"{place}.minAvailable", message, "remove one of them")
    strategy = get_mapping(component, "deploymentStrategy")
    if get_str(strategy, "type") == "Recreate" and get_mapping(strategy, "rollingUpdate"):
        message = "is only valid with type: RollingUpdate"
        yield Problem(f"{place}.deploymentStrategy.rollingUpdate", message, "remove it, or write type: RollingUpdate")
    rolling = get_mapping(strategy, "rollingUpdate")
    if rolling.get("maxSurge") in (0, "0%") and rolling.get("maxUnavailable") in (0, "0%"):
        message = "with both at 0 no pod can ever be replaced"
        yield Problem(f"{place}.deploymentStrategy.rollingUpdate", message, "raise maxSurge or maxUnavailable")
    yield from keda_problems(f"{place}.kedaConfig", get_mapping(component, "kedaConfig"))
    if get_mapping(component, "autoscaler"):
        yield from _autoscaler_problems(f"{place}.autoscaler", get_mapping(component, "autoscaler"), minimum)


def _autoscaler_problems(place: str, autoscaler: Document, min_replicas: int | None) -> Iterator[Problem]:
    autoscaler_class = get_str(autoscaler, "class")
    keda = get_mapping(autoscaler, "keda")
    if autoscaler_class == "KEDA" and not get_list(keda, "triggers"):
        yield Problem(f"{place}.keda.triggers", "is missing, and class is KEDA", "write at least one trigger")
    if autoscaler_class == "None" and min_replicas == 0:
        yield Problem(f"{place}.class", "None keeps minReplicas, which is 0", "raise minReplicas, or write KEDA")
    idle = get_int(keda, "idleReplicaCount")
    if idle is not None and idle >= (1 if min_replicas is None else min_replicas):
        yield Problem(f"{place}.keda.idleReplicaCount", f"{idle} is not below minReplicas", "lower it")
    for index, metric in enumerate(get_list(autoscaler, "hpa", "metrics")):
        source = get_str(metric, "type")
        if not source:
            yield Problem(
                f"{place}.hpa.metrics[{index}].type", "is missing", "write Resource, Pods, Object or External"
            )
        elif not get_mapping(metric, source[0].lower() + source[1:]):
            field = source[0].lower() + source[1:]
            yield Problem(
                f"{place}.hpa.metrics[{index}].{field}", f"is missing, and type is {source}", f"write {field}"
            )


def keda_problems(place: str, keda: Document) -> Iterator[Problem]:
    """Yield problems of a KedaConfig."""
    modes = get_str(keda, "authModes")
    if modes:
        for mode in modes.split(","):
            if mode.strip() not in AUTH_MODES:
                message = f"has {mode.strip()[:40]!a}, which is not an authentication mode"
                yield Problem(f"{place}.authModes", message, f"write a comma list of {', '.join(AUTH_MODES)}")
                break


def latency_problems(service: Document) -> Iterator[Problem]:
    """Yield problems of the latency targets of a service."""
    spec, place = get_mapping(service, "spec"), "spec.slo"
    if SLO in annotations_of(service):
        place = f"metadata.annotations[{SLO}]"
        fix = f'write JSON such as {{"{FIRST_TOKEN}": 1000, "{NEXT_TOKEN}": 40}}'
        if spec.get("slo") is not None:
            yield Problem(place, "says the same as spec.slo", "remove one of them")
        try:
            common = service_targets(service)
        except ValueError:
            yield Problem(place, "is not JSON", fix)
            return
        yield from validate_field(SLO_FIELD, common, place)
    sections = {
        place: service_targets(service),
        **{f"spec.{name}.slo": get_mapping(spec, name).get("slo") for name in COMPONENTS},
    }
    if not any(section is not None for section in sections.values()):
        return
    for place, section in sections.items():
        if isinstance(section, Mapping) and section.keys() <= {PERCENTILE}:
            yield Problem(place, "has no target", f"write {FIRST_TOKEN}, {NEXT_TOKEN} or both")
    for name in COMPONENTS:
        component = get_mapping(spec, name)
        for other in ("scaleMetric", "scaleTarget", "autoscaler"):
            if name in spec and component.get(other) is not None:
                message = "conflicts with slo: both define how to scale"
                yield Problem(f"spec.{name}.{other}", message, f"remove {other}, or slo")
    if get_str(spec, "kedaConfig", "customPromQuery"):
        yield Problem(
            "spec.kedaConfig.customPromQuery", "conflicts with slo: both define how to scale", "remove it, or slo"
        )


def _scaling_annotations(annotations: dict[str, str]) -> Iterator[Problem]:
    autoscaler_class = annotations.get(AUTOSCALER_CLASS, "hpa")
    if autoscaler_class not in AUTOSCALER_CLASSES:
        yield _not_allowed(AUTOSCALER_CLASS, autoscaler_class, AUTOSCALER_CLASSES)
    metrics = annotations.get(AUTOSCALER_METRICS)
    if metrics is not None and autoscaler_class == "hpa" and metrics not in METRICS:
        yield _not_allowed(AUTOSCALER_METRICS, metrics, METRICS)
    share = annotations.get(TARGET_UTILIZATION)
    if share is not None and not (re.fullmatch(r"[0-9]{1,3}", share) and 1 <= int(share) <= 100):
        message = f"takes a whole number from 1 to 100, not {share[:40]!a}"
        yield Problem(f"metadata.annotations[{TARGET_UTILIZATION}]", message, 'write percent in quotes, "80"')
    operator = annotations.get(KEDA_OPERATOR)
    if operator is not None and operator not in OPERATORS:
        yield _not_allowed(KEDA_OPERATOR, operator, OPERATORS)
    threshold = annotations.get(KEDA_THRESHOLD)
    if threshold is not None and not _is_number(threshold):
        message = f"takes a number in quotes, not {threshold[:40]!a}"
        yield Problem(f"metadata.annotations[{KEDA_THRESHOLD}]", message, 'write a number such as "10" or "0.5"')
    address = annotations.get(KEDA_SERVER_ADDRESS)
    if address is not None and re.fullmatch(r"https?://[^\s/]+.*", address) is None:
        message = f"takes a URL, not {address[:40]!a}"
        yield Problem(f"metadata.annotations[{KEDA_SERVER_ADDRESS}]", message, "write http://host:port")


def _not_allowed(name: str, value: str, words: tuple[str, ...]) -> Problem:
    message = f"takes one of {', '.join(words)}, not {value[:40]!a}"
    return Problem(f"metadata.annotations[{name}]", message, f"write one of {', '.join(words)}")


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False
