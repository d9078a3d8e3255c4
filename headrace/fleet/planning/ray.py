# SPDX-License-Identifier: Apache-2.0
"""MultiNodeRayVLLM: RayClusters, each a group that serves, and the Service before their heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.fleet.merging import Component
from headrace.fleet.names import APP_LABEL, trunc63
from headrace.fleet.planning.groups import HEAD, NODE_TYPE, leader_pod
from headrace.fleet.planning.pods import template, without_prometheus
from headrace.fleet.planning.services import component_service
from headrace.fleet.planning.site import REVISION_LABEL, Object, Site, app_labels, full_name, shortened
from headrace.fleet.words import Document, items, part

RAY_CLUSTER = ("ray.io/v1", "RayCluster")
_LONGEST = 45
"""KubeRay hangs its own endings on the name of a cluster."""
_PORTS = (("dashboard", 8265), ("client", 10001), ("gcs", 6379))
_OWN_COMMANDS = {"ray.io/overwrite-container-cmd": "true"}
"""Containers run what their template says; what KubeRay would run is in a variable."""
_START = ["/bin/bash", "-c", "ulimit -n 65536; $KUBERAY_GEN_RAY_START_CMD"]
_STOP = {"exec": {"command": ["/bin/sh", "-c", "ray stop"]}}


def heads_of(name: str) -> dict[str, str]:
    """The selector of a component's heads."""
    return {APP_LABEL: trunc63(name), NODE_TYPE: HEAD}


def ray_objects(site: Site, component: Component, revision: str) -> list[Object]:
    """As many clusters as the component has replicas at least: KubeRay has none that scales groups."""
    name = full_name(site, component)
    base = shortened(name, _LONGEST)
    objects = [
        site.made(
            RAY_CLUSTER,
            f"{base}-{index}",
            {**component.labels, REVISION_LABEL: revision},
            {**component.annotations, **_OWN_COMMANDS},
            spec=_cluster(component, name, revision),
        )
        for index in range(max(1, component.extension.min_replicas))
    ]
    return [*objects, component_service(site, component, name, heads_of(name), leader_pod(component), _PORTS)]


def _cluster(component: Component, name: str, revision: str) -> Object:
    labels = {**app_labels(component, name), REVISION_LABEL: revision}
    workers = max(1, component.worker_size)
    # The label `ray.io/node-type` is KubeRay's own to set.
    head = template(_stopped(leader_pod(component)), labels, component.annotations)
    pod = component.worker if component.worker is not None else leader_pod(component)
    worker = template(_started(_stopped(pod)), labels, without_prometheus(component.annotations), serves=False)
    return {
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": head},  # noqa: S104  in its pod
        "workerGroupSpecs": [
            {
                "groupName": "wg",
                "replicas": workers,
                "minReplicas": workers,
                "maxReplicas": workers,
                "rayStartParams": {},
                "template": worker,
            }
        ],
    }


def _stopped(pod: Document) -> Document:
    """The pod, whose first container leaves its cluster in order."""
    return _first(pod, lambda each: {**each, "lifecycle": {"preStop": _STOP, **part(each, "lifecycle")}})


def _started(pod: Document) -> Document:
    """The pod with KubeRay's command, which joins it to the cluster, in place of its own."""

    def changed(container: Mapping[str, Any]) -> Object:
        return {**{key: value for key, value in container.items() if key != "args"}, "command": _START}

    return _first(pod, changed)


def _first(pod: Document, change: Any) -> Document:
    containers = items(pod, "containers")
    return {**pod, "containers": [change(containers[0]), *containers[1:]]} if containers else pod
