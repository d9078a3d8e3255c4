# SPDX-License-Identifier: Apache-2.0
"""The InferencePool of a service: gateways choose its pods by an endpoint picker, which is our router.

With the annotation `ome.io/inference-pool`, a service has an InferencePool of the pods that answer it, and `headrace router
--epp` beside it, to which gateways of the Gateway API Inference Extension send their questions. The annotation
`ome.io/inference-objectives` adds InferenceObjectives: names with priorities, for requests that have to wait.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.fleet.admission.inference_pools import DEFAULT_PICKER_POLICY, parse_objectives
from headrace.fleet.documents import Problem
from headrace.fleet.names import (
    APP_LABEL,
    DECODER,
    INFERENCE_OBJECTIVES,
    INFERENCE_POOL,
    MULTI_NODE,
    RAW,
    ROUTER,
    trunc63,
)
from headrace.fleet.planning.autoscalers import COUNTS_REQUESTS
from headrace.fleet.planning.context import Object, PlanContext, digest_of
from headrace.fleet.planning.front_router import CONFIG_FILE, CONFIG_MAP, RESTART_DIGEST, router_pod
from headrace.fleet.planning.pod_defaults import with_graceful_stop, with_last_log_lines
from headrace.fleet.planning.raw_deployment import DEPLOYMENT, SERVICE
from headrace.fleet.planning.router_component import SERVICE_ACCOUNT, role_objects

if TYPE_CHECKING:
    from headrace.fleet.planning.component_plan import ComponentPlan

POOL = ("inference.networking.k8s.io/v1", "InferencePool")
OBJECTIVE = ("inference.networking.x-k8s.io/v1alpha2", "InferenceObjective")
POOL_GROUP = "inference.networking.k8s.io"
PICKER = "picker"
PICKER_PORT = 9002
"""The port that the extension expects a picker at."""
OBJECTIVE_HEADER = "x-gateway-inference-objective"
_MAX_OUTSTANDING = 64
"""Requests of a pod at once where there are priorities: more wait at the picker, in their order."""
_PICK_SECONDS = 30
_REQUIREMENTS = {
    INFERENCE_POOL: ("inference-pool", "InferencePool"),
    INFERENCE_OBJECTIVES: ("inference-objective", "InferenceObjective"),
}


def has_pool(context: PlanContext) -> bool:
    """Whether gateways choose the pods of a service. In the local fleet there are none."""
    return INFERENCE_POOL in context.annotations and not context.has(COUNTS_REQUESTS)


def picker_name(context: PlanContext) -> str:
    """Return `llama-chat-picker`."""
    return f"{context.name}-{PICKER}"


def pool_problems(context: PlanContext, parts: Mapping[str, ComponentPlan]) -> Iterator[Problem]:
    """Yield why gateways cannot choose the pods of these components."""
    if not has_pool(context):
        return
    place = f"metadata.annotations[{INFERENCE_POOL}]"
    remove = f"remove the annotation {INFERENCE_POOL}"
    for annotation, (capability, kind) in _REQUIREMENTS.items():
        if annotation in context.annotations and not context.has(capability):
            message = f"needs the kind {kind} of the Gateway API Inference Extension, which this cluster does not have"
            yield Problem(f"metadata.annotations[{annotation}]", message, f"install its CRDs, or remove {annotation}")
    for name in (ROUTER, DECODER):
        if name in parts:
            message = f"spec.{name} has its own way to choose pods"
            yield Problem(place, message, f"remove spec.{name}, or {remove}")
            return
    engine = parts["engine"]
    if engine.mode not in (RAW, MULTI_NODE):
        yield Problem(place, f"pods of the mode {engine.mode} cannot be chosen by a gateway", remove)
    elif engine.component.extension.min_replicas == 0:
        message = "a gateway cannot start the pods of a service that scales to zero"
        yield Problem(place, message, f"write minReplicas: 1 or more, or {remove}")
    elif engine.component.extension.slo:
        message = (
            "requests that a gateway sends itself pass no router that measures their latency, and slo scales by it"
        )
        yield Problem(place, message, f"remove slo, or {remove}")


def pool_objects(context: PlanContext, selector: Mapping[str, str], port: int) -> list[Object]:
    """Return the InferencePool of these pods, its objectives, and the picker. `port`: that of the pods."""
    if not has_pool(context):
        return []
    labels = context.own_labels(PICKER)
    picker = picker_name(context)
    # No group: it is the core one by default, and an API server of 1.20 was seen to turn an empty one into null.
    reference = {"kind": "Service", "name": trunc63(picker), "port": {"number": PICKER_PORT}}
    spec = {
        "selector": {"matchLabels": dict(selector)},
        "targetPorts": [{"number": port}],
        # Without an answer a gateway would send requests to any pod, past priorities and limits.
        "endpointPickerRef": {**reference, "failureMode": "FailClose"},
    }
    priorities = objectives_of(context)
    objects = [context.new_object(POOL, context.name, labels, spec=spec)]
    objects += [
        context.new_object(
            OBJECTIVE,
            f"{context.name}-{name}",
            labels,
            spec={"priority": priority, "poolRef": {"group": POOL_GROUP, "kind": POOL[1], "name": context.name}},
        )
        for name, priority in priorities.items()
    ]
    return [*objects, *_picker_objects(context, selector, port, priorities)]


def objectives_of(context: PlanContext) -> dict[str, int]:
    """Return the priorities of a service's objectives, by their names without that of the service."""
    return parse_objectives(context.annotations.get(INFERENCE_OBJECTIVES, ""))


def _picker_objects(
    context: PlanContext, selector: Mapping[str, str], port: int, priorities: Mapping[str, int]
) -> list[Object]:
    """Return the picker: its configuration, its access to pods, its Deployment and its Service."""
    name, labels = picker_name(context), context.own_labels(PICKER)
    settings = _config(context, selector, port, priorities)
    config = json.dumps(settings, indent=1) + "\n"
    rules: list[Object] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    own = {APP_LABEL: trunc63(name)}
    pod = router_pod(context, name, PICKER_PORT, "grpc", watch=False)
    spec: Object = {
        # One picker: two would each know half of what is in the caches and in the queue.
        "replicas": 1,
        "selector": {"matchLabels": own},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {
            "metadata": {"labels": {**labels, **own}, "annotations": {RESTART_DIGEST: digest_of(config)}},
            "spec": with_last_log_lines(with_graceful_stop(context, pod, _PICK_SECONDS)),
        },
    }
    ports = [
        {"name": "grpc", "port": PICKER_PORT, "targetPort": PICKER_PORT, "protocol": "TCP", "appProtocol": "http2"}
    ]
    return [
        context.new_object(CONFIG_MAP, name, labels, data={CONFIG_FILE: config}),
        context.new_object(SERVICE_ACCOUNT, name, labels),
        *role_objects(context, name, [(context.namespace, name)], labels, rules),
        context.new_object(DEPLOYMENT, name, labels, spec=spec),
        context.new_object(SERVICE, trunc63(name), labels, spec={"selector": own, "ports": ports}),
    ]


def _config(context: PlanContext, selector: Mapping[str, str], port: int, priorities: Mapping[str, int]) -> Object:
    policy = context.annotations[INFERENCE_POOL]
    settings: dict[str, Any] = {
        "host": "0.0.0.0",  # noqa: S104  in its pod
        "port": PICKER_PORT,
        "endpoint_picker": True,
        "policy": DEFAULT_PICKER_POLICY if policy == "true" else policy,
        "grace_seconds": _PICK_SECONDS,
        # Pods that are ready; the failures of requests are seen by the gateway alone.
        "health": {"path": ""},
        "discovery": {
            "pods": ",".join(f"{label}={value}" for label, value in selector.items()),
            "namespace": context.namespace,
            "port": port,
        },
    }
    if priorities:
        settings["max_outstanding"] = _MAX_OUTSTANDING
        settings["fairness"] = {
            "tenant_header": OBJECTIVE_HEADER,
            "priorities": ",".join(f"{context.name}-{name}={priority}" for name, priority in priorities.items()),
        }
    return settings
