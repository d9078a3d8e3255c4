# SPDX-License-Identifier: Apache-2.0
"""Services: of a component, by the ports of its pods, and the one named after the InferenceService."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.fleet.merging import Component
from headrace.fleet.names import (
    EXTERNAL_SERVICE,
    INJECT_FINE_TUNED_ADAPTER,
    INJECT_MODEL_INIT,
    INJECT_SERVING_SIDECAR,
    LOAD_BALANCER_IP,
    SERVICE_TYPE,
    trunc63,
)
from headrace.fleet.planning.pods import DEFAULT_PORT, main_container
from headrace.fleet.planning.site import Object, Site
from headrace.fleet.words import Document, items, text, whole

SERVICE = ("v1", "Service")
HTTP = 80
_POD_ONLY = ("prometheus.io/", "k8s.grafana.com/", "loki", "networking.gke.io/", "rdma.ome.io/")
_POD_ONLY_KEYS = (INJECT_MODEL_INIT, INJECT_FINE_TUNED_ADAPTER, INJECT_SERVING_SIDECAR)
_CLOUDS = ("service.beta.kubernetes.io/", "cloud.google.com/", "service.kubernetes.io/")


def ports_of(pod: Document) -> list[Object]:
    """Ports of a Service before these pods: those of the container that serves, or 8080."""
    container = main_container(pod)
    found: list[Object] = []
    taken: set[str] = set()
    for each in items(container, "ports"):
        number = whole(each, "containerPort")
        if number is None:
            continue
        protocol = text(each, "protocol") or "TCP"
        name = text(each, "name") or f"port-{number}"
        name = name if name not in taken else f"{name}-{number}-{protocol.lower()}"
        taken.add(name)
        found.append({"name": name, "port": number, "protocol": protocol, "targetPort": number})
    if found:
        return found
    name = text(container, "name") or "http"
    return [{"name": name, "port": DEFAULT_PORT, "protocol": "TCP", "targetPort": DEFAULT_PORT}]


def port_of(pod: Document) -> int:
    """The port that requests go to: the first."""
    port: int = ports_of(pod)[0]["port"]
    return port


def component_service(
    site: Site,
    component: Component,
    name: str,
    selector: Mapping[str, str],
    pod: Document,
    more: tuple[tuple[str, int], ...] = (),
) -> Object:
    """The Service of a component's pods. `more`: ports that are no container's, named."""
    ports = ports_of(pod)
    numbers = {each["port"] for each in ports}
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
    return site.made(
        SERVICE,
        trunc63(name),
        component.labels,
        annotations,
        spec={**_kind(component.annotations), "selector": dict(selector), "ports": ports},
    )


def external_service(site: Site, selector: Mapping[str, str], port: int, target: int) -> Object:
    """The way in: a Service named after the InferenceService."""
    annotations = {name: value for name, value in site.annotations.items() if name.startswith(_CLOUDS)}
    return site.made(
        SERVICE,
        trunc63(site.name),
        site.own_labels(EXTERNAL_SERVICE),
        annotations,
        spec={
            **_kind(site.annotations),
            "selector": dict(selector),
            "ports": [{"name": "http", "port": port, "protocol": "TCP", "targetPort": target}],
        },
    )


def alias_service(site: Site, host: str) -> Object:
    """A Service that is another name for a host."""
    spec = {"type": "ExternalName", "externalName": host, "sessionAffinity": "None"}
    return site.made(SERVICE, trunc63(site.name), site.own_labels(EXTERNAL_SERVICE), spec=spec)


def _kind(annotations: Mapping[str, str]) -> Object:
    kind = annotations.get(SERVICE_TYPE) or "ClusterIP"
    address = annotations.get(LOAD_BALANCER_IP)
    return {"type": kind, **({"loadBalancerIP": address} if kind == "LoadBalancer" and address else {})}
