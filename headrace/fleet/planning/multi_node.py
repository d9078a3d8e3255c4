# SPDX-License-Identifier: Apache-2.0
"""MultiNode and MultiNodeRayVLLM: LeaderWorkerSets or RayClusters, and the Services in front of their leaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.fleet.merging import Component
from headrace.fleet.names import APP_LABEL, lws_name, trunc63
from headrace.fleet.planning.autoscalers import Scaler
from headrace.fleet.planning.context import REVISION_LABEL, Object, PlanContext, app_labels, full_name, shorten_name
from headrace.fleet.planning.pod_defaults import serving_pod
from headrace.fleet.planning.pod_templates import pod_template, without_prometheus
from headrace.fleet.planning.raw_deployment import canary_name, canary_replicas, component_service
from headrace.fleet.planning.revisions import SHARE, Rollout
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping

LEADER_WORKER_SET = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
NODE_TYPE = "ray.io/node-type"
HEAD = "head"


def leader_selector(name: str) -> dict[str, str]:
    """Return the selector of a component's leaders."""
    return {APP_LABEL: trunc63(name), WORKER_INDEX: "0"}


def leader_pod(component: Component) -> Document:
    """Return the pod spec of the leader, which serves."""
    return component.leader if component.leader is not None else component.pod


def lws_objects(
    context: PlanContext, component: Component, scaler: Scaler, rollout: Rollout, discovered: bool
) -> list[Object]:
    """Return the objects of a component without its autoscaler. `discovered`: a router finds leaders by their labels."""
    name, pod = full_name(context, component), leader_pod(component)
    # With an autoscaler the replicas are not set; without one they are those of the service.
    replicas = component.extension.min_replicas if scaler == "none" else None
    objects = [
        _leader_worker_set(context, component, name, rollout.stable, replicas, rollout.kept),
        component_service(context, component, name, leader_selector(name), pod),
    ]
    if rollout.two:
        canary, share = canary_name(name), rollout.percent
        count = canary_replicas(context, component, "none", rollout, discovered)
        objects += [
            _leader_worker_set(context, component, canary, rollout.latest, count, None, share),
            component_service(context, component, canary, leader_selector(canary), pod),
        ]
    return objects


def _leader_worker_set(
    context: PlanContext,
    component: Component,
    name: str,
    revision: str,
    replicas: int | None,
    live: Document | None = None,
    share: int | None = None,
) -> Object:
    spec: Object = {
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 1},
        },
        "leaderWorkerTemplate": dict(get_mapping(live, "spec", "leaderWorkerTemplate"))
        if live
        else _template(context, component, name, revision),
    }
    if replicas is not None:
        spec["replicas"] = replicas
    annotations = component.annotations if share is None else {**component.annotations, SHARE: str(share)}
    labels = {**component.labels, REVISION_LABEL: revision}
    return context.new_object(LEADER_WORKER_SET, lws_name(name), labels, annotations, spec=spec)


def _template(context: PlanContext, component: Component, name: str, revision: str) -> Object:
    leader = {**app_labels(component, name), REVISION_LABEL: revision, NODE_TYPE: HEAD}
    worker = {**component.labels, REVISION_LABEL: revision}
    # A group of one has no workers, but the kind requires a worker template.
    pod = component.worker if component.worker is not None else leader_pod(component)
    return {
        "size": component.worker_size + 1,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": pod_template(
            serving_pod(context, component, leader_pod(component)), leader, component.annotations
        ),
        # A request needs the workers until its end, so they wait as long as their leader.
        "workerTemplate": pod_template(
            serving_pod(context, component, pod), worker, without_prometheus(component.annotations), serves=False
        ),
    }


RAY_CLUSTER = ("ray.io/v1", "RayCluster")
_MAX_NAME = 45
"""KubeRay appends its own suffixes to the name of a cluster."""
_PORTS = (("dashboard", 8265), ("client", 10001), ("gcs", 6379))
_OWN_COMMANDS = {"ray.io/overwrite-container-cmd": "true"}
"""Containers run the command of their template; KubeRay puts its own command in a variable."""
_START = ["/bin/bash", "-c", "ulimit -n 65536; $KUBERAY_GEN_RAY_START_CMD"]


def head_selector(name: str) -> dict[str, str]:
    """Return the selector of a component's Ray heads."""
    return {APP_LABEL: trunc63(name), NODE_TYPE: HEAD}


def ray_objects(context: PlanContext, component: Component, revision: str) -> list[Object]:
    """Return one RayCluster per minimum replica, and their Service: KubeRay cannot scale groups."""
    name = full_name(context, component)
    base = shorten_name(name, _MAX_NAME)
    objects = [
        context.new_object(
            RAY_CLUSTER,
            f"{base}-{index}",
            {**component.labels, REVISION_LABEL: revision},
            {**component.annotations, **_OWN_COMMANDS},
            spec=_ray_cluster_spec(context, component, name, revision),
        )
        for index in range(max(1, component.extension.min_replicas))
    ]
    return [*objects, component_service(context, component, name, head_selector(name), leader_pod(component), _PORTS)]


def _ray_cluster_spec(context: PlanContext, component: Component, name: str, revision: str) -> Object:
    labels = {**app_labels(component, name), REVISION_LABEL: revision}
    workers = max(1, component.worker_size)
    # KubeRay sets the label `ray.io/node-type` itself.
    head = pod_template(_ray_pod(context, component, leader_pod(component)), labels, component.annotations)
    pod = component.worker if component.worker is not None else leader_pod(component)
    worker = pod_template(
        _with_ray_start(_ray_pod(context, component, pod)),
        labels,
        without_prometheus(component.annotations),
        serves=False,
    )
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


def _ray_pod(context: PlanContext, component: Component, pod: Document) -> Document:
    """Return the pod with its defaults and a preStop hook that waits and then leaves the Ray cluster."""
    command = f"sleep {context.facts.settings.pre_stop_seconds}; ray stop"
    stop = {"exec": {"command": ["/bin/sh", "-c", command]}}
    with_hook = _change_first_container(
        pod, lambda main: {**main, "lifecycle": {"preStop": stop, **get_mapping(main, "lifecycle")}}
    )
    return serving_pod(context, component, with_hook)


def _with_ray_start(pod: Document) -> Document:
    """Return the pod with KubeRay's command, which joins the Ray cluster, instead of its own."""

    def changed(container: Mapping[str, Any]) -> Object:
        return {**{key: value for key, value in container.items() if key != "args"}, "command": _START}

    return _change_first_container(pod, changed)


def _change_first_container(pod: Document, change: Any) -> Document:
    containers = get_list(pod, "containers")
    return {**pod, "containers": [change(containers[0]), *containers[1:]]} if containers else pod
