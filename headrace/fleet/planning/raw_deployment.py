# SPDX-License-Identifier: Apache-2.0
"""RawDeployment: a Deployment, its Service and its PodDisruptionBudget; a second set for a canary."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from headrace.fleet.merging import Component
from headrace.fleet.names import (
    APP_LABEL,
    ENABLE_TAG_ROUTING,
    EXTERNAL_SERVICE,
    INJECT_FINE_TUNED_ADAPTER,
    INJECT_MODEL_INIT,
    INJECT_SERVING_SIDECAR,
    LOAD_BALANCER_IP,
    SERVICE_TYPE,
    trunc63,
)
from headrace.fleet.planning.autoscalers import Scaler, horizontal_pod_autoscaler
from headrace.fleet.planning.context import CANARY_SUFFIX, REVISION_LABEL, Object, PlanContext, app_labels, full_name
from headrace.fleet.planning.pod_defaults import serving_pod
from headrace.fleet.planning.pod_templates import DEFAULT_PORT, main_container, pod_template
from headrace.fleet.planning.revisions import SHARE, Rollout
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_list, get_mapping, get_str

DEPLOYMENT = ("apps/v1", "Deployment")
DISRUPTION_BUDGET = ("policy/v1", "PodDisruptionBudget")
_STRATEGY = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}


def raw_objects(
    context: PlanContext, component: Component, scaler: Scaler, rollout: Rollout, discovered: bool
) -> list[Object]:
    """Return the objects of a component without its autoscaler. `discovered`: a router finds its pods by their labels."""
    name = full_name(context, component)
    fixed = component.extension.min_replicas if scaler == "none" else None
    objects = [
        deployment(context, component, name, rollout.stable, rollout.kept, fixed),
        component_service(context, component, name, {APP_LABEL: trunc63(name)}, component.pod),
        _disruption_budget(context, component, name),
    ]
    if rollout.two:
        canary = canary_name(name)
        replicas = canary_replicas(context, component, scaler, rollout, discovered)
        objects += [
            deployment(context, component, canary, rollout.latest, None, replicas, rollout.percent),
            component_service(context, component, canary, {APP_LABEL: trunc63(canary)}, component.pod),
        ]
        if replicas is None:
            extension = component.extension
            limits = _scaled_count(extension.min_replicas, rollout), _scaled_count(extension.max_replicas, rollout)
            objects.append(horizontal_pod_autoscaler(context, component, canary, (*DEPLOYMENT, canary), *limits))
    return objects


def canary_name(name: str) -> str:
    """Return the name of the canary's workload."""
    return f"{name}-{CANARY_SUFFIX}"


def deployment(
    context: PlanContext,
    component: Component,
    name: str,
    revision: str,
    live: Document | None = None,
    replicas: int | None = None,
    share: int | None = None,
) -> Object:
    """Return a Deployment. Without `replicas` they are not set, which keeps autoscaling. `live`: keep its pods."""
    labels = {**app_labels(component, name), REVISION_LABEL: revision}
    pods = (
        live_template(live)
        if live
        else pod_template(serving_pod(context, component, component.pod), labels, component.annotations)
    )
    spec: Object = {
        "selector": {"matchLabels": {APP_LABEL: trunc63(name)}},
        "strategy": dict(component.extension.deployment_strategy) or _STRATEGY,
        "revisionHistoryLimit": 10,
        "progressDeadlineSeconds": 600,
        "template": pods,
    }
    if replicas is not None:
        spec["replicas"] = replicas
    annotations = component.annotations if share is None else {**component.annotations, SHARE: str(share)}
    return context.new_object(DEPLOYMENT, name, {**component.labels, REVISION_LABEL: revision}, annotations, spec=spec)


def live_template(live: Document) -> Object:
    """Return the pod template of a live Deployment."""
    template = get_mapping(live, "spec", "template")
    metadata = {name: value for name, value in get_mapping(template, "metadata").items() if value is not None}
    return {**template, "metadata": metadata}


def canary_replicas(
    context: PlanContext, component: Component, scaler: Scaler, rollout: Rollout, discovered: bool
) -> int | None:
    """Return the replicas of a canary; None if a HorizontalPodAutoscaler sets them.

    If a router finds pods by their labels, their number determines the share of the canary.
    """
    if rollout.held is not None:
        return rollout.held
    share = _canary_share(rollout)
    if share <= 0:
        tagged = context.annotations.get(ENABLE_TAG_ROUTING) == "true"
        return 1 if tagged and not discovered else 0
    if scaler == "hpa" and not discovered:
        return None
    stable = get_int(rollout.kept, "spec", "replicas") if rollout.kept else None
    stable = max(1, component.extension.min_replicas) if stable is None else max(1, stable)
    desired = ceil(stable * share / (100 - share)) if share < 100 else stable
    return max(1, min(desired, max(component.extension.max_replicas, 1)))


def _canary_share(rollout: Rollout) -> int:
    requested = rollout.requested_percent
    return requested if rollout.state == "canary" and requested is not None else rollout.percent


def _scaled_count(count: int, rollout: Rollout) -> int:
    return max(1, ceil(count * _canary_share(rollout) / 100))


def _disruption_budget(context: PlanContext, component: Component, name: str) -> Object:
    extension = component.extension
    spec: Object = {"selector": {"matchLabels": {APP_LABEL: trunc63(name)}}}
    if extension.min_available is not None:
        spec["minAvailable"] = extension.min_available
    else:
        spec["maxUnavailable"] = 1 if extension.max_unavailable is None else extension.max_unavailable
    return context.new_object(DISRUPTION_BUDGET, name, component.labels, component.annotations, spec=spec)


SERVICE = ("v1", "Service")
HTTP_PORT = 80
_POD_ONLY = ("prometheus.io/", "k8s.grafana.com/", "loki", "networking.gke.io/", "rdma.ome.io/")
_POD_ONLY_KEYS = (INJECT_MODEL_INIT, INJECT_FINE_TUNED_ADAPTER, INJECT_SERVING_SIDECAR)
_CLOUDS = ("service.beta.kubernetes.io/", "cloud.google.com/", "service.kubernetes.io/")


def service_ports(pod: Document) -> list[Object]:
    """Return the Service ports of pods: those of the main container, or 8080."""
    container = main_container(pod)
    ports: list[Object] = []
    used_names: set[str] = set()
    for port in get_list(container, "ports"):
        number = get_int(port, "containerPort")
        if number is None:
            continue
        protocol = get_str(port, "protocol") or "TCP"
        name = get_str(port, "name") or f"port-{number}"
        name = name if name not in used_names else f"{name}-{number}-{protocol.lower()}"
        used_names.add(name)
        ports.append({"name": name, "port": number, "protocol": protocol, "targetPort": number})
    if ports:
        return ports
    name = get_str(container, "name") or "http"
    return [{"name": name, "port": DEFAULT_PORT, "protocol": "TCP", "targetPort": DEFAULT_PORT}]


def main_port(pod: Document) -> int:
    """Return the first Service port, which gets the requests."""
    port: int = service_ports(pod)[0]["port"]
    return port


def component_service(
    context: PlanContext,
    component: Component,
    name: str,
    selector: Mapping[str, str],
    pod: Document,
    more: tuple[tuple[str, int], ...] = (),
) -> Object:
    """Return the Service of a component's pods. `more`: additional ports with names."""
    ports = service_ports(pod)
    numbers = {port["port"] for port in ports}
    ports += [
        {"name": label, "port": number, "protocol": "TCP", "targetPort": number}
        for label, number in more
        if number not in numbers
    ]
    annotations = {
        label: value
        for label, value in component.annotations.items()
        if not label.startswith(_POD_ONLY) and label not in _POD_ONLY_KEYS
    }
    return context.new_object(
        SERVICE,
        trunc63(name),
        component.labels,
        annotations,
        spec={**_service_type(component.annotations), "selector": dict(selector), "ports": ports},
    )


def external_service(context: PlanContext, selector: Mapping[str, str], port: int, target: int) -> Object:
    """Return the Service named after the InferenceService, its entry point."""
    annotations = {name: value for name, value in context.annotations.items() if name.startswith(_CLOUDS)}
    return context.new_object(
        SERVICE,
        trunc63(context.name),
        context.own_labels(EXTERNAL_SERVICE),
        annotations,
        spec={
            **_service_type(context.annotations),
            "selector": dict(selector),
            "ports": [{"name": "http", "port": port, "protocol": "TCP", "targetPort": target}],
        },
    )


def alias_service(context: PlanContext, host: str) -> Object:
    """Return a Service of type ExternalName."""
    spec = {"type": "ExternalName", "externalName": host, "sessionAffinity": "None"}
    return context.new_object(SERVICE, trunc63(context.name), context.own_labels(EXTERNAL_SERVICE), spec=spec)


def _service_type(annotations: Mapping[str, str]) -> Object:
    kind = annotations.get(SERVICE_TYPE) or "ClusterIP"
    address = annotations.get(LOAD_BALANCER_IP)
    return {"type": kind, **({"loadBalancerIP": address} if kind == "LoadBalancer" and address else {})}
