# SPDX-License-Identifier: Apache-2.0
"""MultiNode: a LeaderWorkerSet and the Service before its leaders; a second of each in a canary."""

from __future__ import annotations

from headrace.fleet.merging import Component
from headrace.fleet.names import APP_LABEL, lws_name, trunc63
from headrace.fleet.planning.pods import template, without_prometheus
from headrace.fleet.planning.raw import canary_name, canary_replicas
from headrace.fleet.planning.revisions import SHARE, Rollout
from headrace.fleet.planning.scaling import Scaler
from headrace.fleet.planning.services import component_service
from headrace.fleet.planning.site import REVISION_LABEL, Object, Site, app_labels, full_name
from headrace.fleet.words import Document, part

GROUPS = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
NODE_TYPE = "ray.io/node-type"
HEAD = "head"


def leaders_of(name: str) -> dict[str, str]:
    """The selector of a component's leaders, and of nobody else's."""
    return {APP_LABEL: trunc63(name), WORKER_INDEX: "0"}


def leader_pod(component: Component) -> Document:
    """The pod that answers requests."""
    return component.leader if component.leader is not None else component.pod


def group_objects(site: Site, component: Component, scaler: Scaler, roll: Rollout, found: bool) -> list[Object]:
    """The objects of a component but its autoscaler. `found`: a router finds its leaders by their labels."""
    name, pod = full_name(site, component), leader_pod(component)
    # Somebody who scales must not be undone; where nobody does, the number is what the service says.
    replicas = component.extension.min_replicas if scaler == "none" else None
    objects = [
        _groups(site, component, name, roll.stable, replicas, roll.kept),
        component_service(site, component, name, leaders_of(name), pod),
    ]
    if roll.two:
        second, share = canary_name(name), roll.percent
        count = canary_replicas(site, component, "none", roll, found)
        objects += [
            _groups(site, component, second, roll.latest, count, None, share),
            component_service(site, component, second, leaders_of(second), pod),
        ]
    return objects


def _groups(
    site: Site,
    component: Component,
    name: str,
    revision: str,
    replicas: int | None,
    kept: Document | None = None,
    share: int | None = None,
) -> Object:
    spec: Object = {
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 1},
        },
        "leaderWorkerTemplate": dict(part(kept, "spec", "leaderWorkerTemplate"))
        if kept
        else _template(component, name, revision),
    }
    if replicas is not None:
        spec["replicas"] = replicas
    annotations = component.annotations if share is None else {**component.annotations, SHARE: str(share)}
    labels = {**component.labels, REVISION_LABEL: revision}
    return site.made(GROUPS, lws_name(name), labels, annotations, spec=spec)


def _template(component: Component, name: str, revision: str) -> Object:
    leader = {**app_labels(component, name), REVISION_LABEL: revision, NODE_TYPE: HEAD}
    worker = {**component.labels, REVISION_LABEL: revision}
    # A group of one has no workers, but its kind demands a template for them.
    pod = component.worker if component.worker is not None else leader_pod(component)
    return {
        "size": component.worker_size + 1,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": template(leader_pod(component), leader, component.annotations),
        "workerTemplate": template(pod, worker, without_prometheus(component.annotations), serves=False),
    }
