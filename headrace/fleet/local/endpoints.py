# SPDX-License-Identifier: Apache-2.0
"""Endpoints: which Services of an InferenceService need a router here, and which pods are behind each. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from headrace.fleet.local.container_command import selected_components
from headrace.fleet.local.object_store import WORKLOADS, Service
from headrace.fleet.local.pod import Pod
from headrace.fleet.local.service_proxy import Backend, Routers
from headrace.fleet.names import APP_LABEL, COMPONENT_LABEL, component_name, trunc63
from headrace.fleet.planning.context import CLUSTER_DOMAIN, REVISION_LABEL
from headrace.fleet.planning.front_router import FRONT
from headrace.fleet.status.conditions import of_kinds
from headrace.platforms.kubernetes_client.objects import (
    Document,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
    name_of,
)


def entry_service(name: str, objects: Sequence[Document]) -> str:
    """Return the Service for requests from outside: that of the service's own name, else of its router or engine."""
    names = {name_of(service) for service in of_kinds(objects, "Service")}
    candidates = map(trunc63, (name, component_name(name, "router"), component_name(name, "engine")))
    return next((candidate for candidate in candidates if candidate in names), "")


def proxied_services(key: Service, objects: Sequence[Document]) -> list[str]:
    """Return the Services that need a router: the entry, and those that pods of this service refer to."""
    entry = entry_service(key[1], objects)
    workloads = [document for document in objects if kind_of(document) in WORKLOADS and not is_front(document)]
    specs = [get_mapping(workload, "spec") for workload in workloads]
    text = json.dumps(specs, default=str)
    components = {component for spec in specs for component in _selected_components(spec)}
    selected = {trunc63(component_name(key[1], component)) for component in components}
    names = [name_of(service) for service in of_kinds(objects, "Service")]
    return [name for name in names if name == entry or name in selected or f"{name}.{key[0]}.{CLUSTER_DOMAIN}" in text]


def _selected_components(spec: Document) -> set[str]:
    """Return the components whose pods a router of ours selects by labels."""
    containers = get_list(spec, "template", "spec", "containers")
    return selected_components(
        [
            str(arg)
            for container in containers
            for arg in (*get_list(container, "command"), *get_list(container, "args"))
        ]
    )


def is_front(workload: Document) -> bool:
    """Whether it is the front router, which splits traffic and scales from zero: the entry router does that here."""
    return labels_of(workload).get(COMPONENT_LABEL) == FRONT


def service_backends(
    key: Service, name: str, objects: Sequence[Document], pods: Sequence[Pod]
) -> tuple[list[Backend], bool]:
    """Return the ready pods behind a Service, and whether their weights are traffic shares to keep exactly."""
    services = {name_of(service): service for service in of_kinds(objects, "Service")}
    if name not in services:
        return [], False
    shares = [_parse_backend(text) for text in _front_config(key, name, objects).get("backends", [])]
    if not shares:
        return _ready_backends(services[name], pods, 100.0), False
    backends: list[Backend] = []
    for target, weight in shares:
        if target in services and weight > 0:
            backends += _ready_backends(services[target], pods, float(weight))
    return backends, len(shares) > 1


def component_urls(key: Service, planned: Mapping[str, str], routers: Routers, url: str) -> dict[str, str]:
    """Return the URLs of components: the service's own URL for the entry, else that of their router."""
    entry = "router" if "router" in planned else "engine"
    urls = {entry: url} if url and entry in planned else {}
    for component in planned:
        router = routers.get(key[0], trunc63(component_name(key[1], component)))
        if router is not None and router.url:
            urls[component] = router.url
    return urls


def activation_config(key: Service, name: str, objects: Sequence[Document]) -> Document | None:
    """Return the activation configuration of the front router of a Service, if it has one."""
    activation = _front_config(key, name, objects).get("activation")
    return activation if isinstance(activation, dict) else None


def measures_streams(key: Service, name: str, objects: Sequence[Document]) -> bool:
    """Whether the front router of a Service measures the latency of streams, for an autoscaler."""
    return _front_config(key, name, objects).get("measure_streams") is True


def _front_config(key: Service, name: str, objects: Sequence[Document]) -> Document:
    """Return the configuration of the front router of a Service; empty if it has none."""
    front = f"{key[1]}-{FRONT}"
    service = next((service for service in of_kinds(objects, "Service") if name_of(service) == name), {})
    if get_mapping(service, "spec", "selector").get(APP_LABEL) != trunc63(front):
        return {}
    for document in objects:
        if kind_of(document) == "ConfigMap" and name_of(document) == front:
            for content in get_mapping(document, "data").values():
                config: Document = json.loads(content)
                return config
    return {}


def _parse_backend(text: str) -> tuple[str, int]:
    """Parse `http://digits-engine.default.svc.cluster.local:8080,weight=90,revision=1f0c` into host and weight."""
    url, _, options = text.partition(",weight=")
    weight = options.partition(",")[0]
    host = url.partition("://")[2].partition(".")[0]
    return host, int(weight) if weight.isdecimal() else 100


def _ready_backends(service: Document, pods: Sequence[Pod], weight: float) -> list[Backend]:
    selector = get_mapping(service, "spec", "selector")
    selected = [
        pod
        for pod in pods
        if pod.is_ready and all(labels_of(pod.record.document).get(name) == value for name, value in selector.items())
    ]
    service_port: Document = next(iter(get_list(service, "spec", "ports")), {})
    ports = [(pod, _target_port(pod, service_port)) for pod in selected]
    return [
        Backend(port, weight / len(selected), labels_of(pod.record.document).get(REVISION_LABEL, ""))
        for pod, port in ports
        if port
    ]


def _target_port(pod: Pod, service_port: Document) -> int | None:
    target = service_port.get("targetPort")
    number = target if isinstance(target, int) else get_int(service_port, "port")
    if isinstance(target, str):
        for container in get_list(pod.record.document, "spec", "containers"):
            for port in get_list(container, "ports"):
                if get_str(port, "name") == target:
                    number = get_int(port, "containerPort")
    return pod.port(number) if number else None
