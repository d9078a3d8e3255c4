# SPDX-License-Identifier: Apache-2.0
"""Pods as templates of Deployments, groups and Knative: probes, protocols and labels that merging does not know of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.fleet.merging import Component
from headrace.fleet.names import MAIN_CONTAINER, ROUTER_CONTAINER
from headrace.fleet.planning.site import Object
from headrace.fleet.words import Document, Problem, items, text

DEFAULT_PORT = 8080
_PROMETHEUS = "prometheus.io/"


def template(pod: Document, labels: Mapping[str, str], annotations: Mapping[str, str], serves: bool = True) -> Object:
    """A pod template of a pod spec. One that does not serve has no port to be probed."""
    metadata: Object = {"labels": dict(labels)}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"metadata": metadata, "spec": completed(pod, serves)}


def completed(pod: Document, serves: bool = True) -> Object:
    """The pod spec with a protocol on every port and a readiness probe on the main container."""
    changed = dict(pod)
    for kind in ("containers", "initContainers"):
        if kind in pod:
            probed = serves and kind == "containers"
            changed[kind] = [_completed(each, probed) for each in items(pod, kind) if isinstance(each, Mapping)]
    return changed


def main_container(pod: Document) -> Document:
    """The one that serves: `ome-container` or `router`, else the first."""
    containers = items(pod, "containers")
    for each in containers:
        if text(each, "name") in (MAIN_CONTAINER, ROUTER_CONTAINER):
            found: Document = each
            return found
    return containers[0] if containers else {}


def without_prometheus(annotations: Mapping[str, str]) -> dict[str, str]:
    """For workers of a group, which have nothing to scrape."""
    return {name: value for name, value in annotations.items() if not name.startswith(_PROMETHEUS)}


def pod_problems(component: Component) -> Iterator[Problem]:
    """What the API server would refuse."""
    for place, pod in (("", component.pod), ("leader.", component.leader), ("worker.", component.worker)):
        if pod is None or (not place and component.leader is not None):
            continue
        where = f"spec.{component.name}.{place}"
        containers = items(pod, "containers")
        if not containers:
            said = f"neither the runtime nor the service says what the {component.name} runs"
            yield Problem(f"{where}runner", said, "name a runtime that does, or write an image and a command in runner")
        for each in containers:
            if not text(each, "image"):
                main = text(each, "name") in ("", MAIN_CONTAINER, ROUTER_CONTAINER)
                field = "runner.image" if main else f"containers[{text(each, 'name')}].image"
                said = "no image is given, neither by the runtime nor by the service"
                yield Problem(where + field, said, "write an image, or name a runtime that has one")


def _completed(container: Any, probed: bool) -> Object:
    changed = dict(container)
    ports = [each for each in items(container, "ports") if isinstance(each, Mapping)]
    if ports:
        # Part of the key by which ports are merged: older API servers refuse to apply one without it.
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
