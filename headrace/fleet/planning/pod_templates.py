# SPDX-License-Identifier: Apache-2.0
"""Pod templates of Deployments, LeaderWorkerSets and Knative Services, with default probes and protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.fleet.documents import Problem
from headrace.fleet.merging import Component
from headrace.fleet.names import MAIN_CONTAINER, ROUTER_CONTAINER
from headrace.fleet.planning.context import Object
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_str

DEFAULT_PORT = 8080
_PROMETHEUS = "prometheus.io/"


def pod_template(
    pod: Document, labels: Mapping[str, str], annotations: Mapping[str, str], serves: bool = True
) -> Object:
    """Return a pod template. Pods that do not serve get no readiness probe."""
    metadata: Object = {"labels": dict(labels)}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"metadata": metadata, "spec": complete_pod(pod, serves)}


def complete_pod(pod: Document, serves: bool = True) -> Object:
    """Add a protocol to every port, and a readiness probe to the main container."""
    changed = dict(pod)
    for kind in ("containers", "initContainers"):
        if kind in pod:
            probed = serves and kind == "containers"
            changed[kind] = [
                _complete_container(container, probed)
                for container in get_list(pod, kind)
                if isinstance(container, Mapping)
            ]
    return changed


def main_container(pod: Document) -> Document:
    """Return the container that serves: `ome-container` or `router`, else the first."""
    containers = get_list(pod, "containers")
    for container in containers:
        if get_str(container, "name") in (MAIN_CONTAINER, ROUTER_CONTAINER):
            main: Document = container
            return main
    return containers[0] if containers else {}


def without_prometheus(annotations: Mapping[str, str]) -> dict[str, str]:
    """Remove the Prometheus annotations, for workers of a group, which have no metrics."""
    return {name: value for name, value in annotations.items() if not name.startswith(_PROMETHEUS)}


def pod_problems(component: Component) -> Iterator[Problem]:
    """Yield the problems of pods that the API server would refuse."""
    for prefix, pod in (("", component.pod), ("leader.", component.leader), ("worker.", component.worker)):
        if pod is None or (not prefix and component.leader is not None):
            continue
        path = f"spec.{component.name}.{prefix}"
        containers = get_list(pod, "containers")
        if not containers:
            message = f"neither the runtime nor the service says what the {component.name} runs"
            yield Problem(
                f"{path}runner", message, "name a runtime that does, or write an image and a command in runner"
            )
        for container in containers:
            if not get_str(container, "image"):
                main = get_str(container, "name") in ("", MAIN_CONTAINER, ROUTER_CONTAINER)
                field = "runner.image" if main else f"containers[{get_str(container, 'name')}].image"
                message = "no image is given, neither by the runtime nor by the service"
                yield Problem(path + field, message, "write an image, or name a runtime that has one")


def _complete_container(container: Any, probed: bool) -> Object:
    changed = dict(container)
    ports = [port for port in get_list(container, "ports") if isinstance(port, Mapping)]
    if ports:
        # The protocol is part of the merge key of ports: older API servers refuse to apply one without it.
        changed["ports"] = [{"protocol": "TCP", **port} for port in ports]
    if probed and changed.get("name") == MAIN_CONTAINER and not changed.get("readinessProbe"):
        port = ports[0].get("containerPort", DEFAULT_PORT) if ports else DEFAULT_PORT
        changed["readinessProbe"] = {
            "tcpSocket": {"port": port},
            "timeoutSeconds": 1,
            "periodSeconds": 10,
            "successThreshold": 1,
            "failureThreshold": 3,
        }
    return changed
