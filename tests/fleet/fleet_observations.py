# SPDX-License-Identifier: Apache-2.0
"""What a controller would see of a planned service: live objects and pods, ready or not."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from fleet_cluster import MODELS, RUNTIMES

from headrace.fleet.documents import ClusterFacts, FleetSettings, cluster_facts
from headrace.fleet.planning import Plan, plan
from headrace.fleet.planning.context import REVISION_LABEL, live_key
from headrace.fleet.status.conditions import Observed
from headrace.fleet.status.service_status import build_status
from headrace.fleet.yaml_documents import parse

NOON = datetime(2024, 1, 15, 12, tzinfo=UTC)


def facts(**settings: Any) -> ClusterFacts:
    documents = [*parse(MODELS).documents, *parse(RUNTIMES).documents]
    return cluster_facts(documents, FleetSettings(**settings))


def service(
    spec: dict[str, Any], *, generation: int = 1, name: str = "llama-chat", **annotations: str
) -> dict[str, Any]:
    return {
        "apiVersion": "ome.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": name,
            "namespace": "default",
            "generation": generation,
            "uid": "u-1",
            "annotations": {
                label.replace("__", "/").replace("ome_io", "ome.io"): text for label, text in annotations.items()
            },
        },
        "spec": spec,
    }


LLAMA: dict[str, Any] = {"model": {"name": "llama-3-70b-instruct"}, "engine": {"minReplicas": 1, "maxReplicas": 3}}
ROUTED = {**LLAMA, "router": {}}


def condition(kind: str, truth: bool | None, reason: str = "", message: str = "") -> dict[str, Any]:
    output = "Unknown" if truth is None else str(truth)
    return {"type": kind, "status": output, "reason": reason, "message": message}


def live(planned: Mapping[str, Any], *, up: bool = True, replicas: int = 1) -> dict[str, Any]:
    """A planned object as the API server has it some time later."""
    created: dict[str, Any] = copy.deepcopy(dict(planned))
    created["metadata"]["generation"] = 1
    if created["kind"] in ("Deployment", "LeaderWorkerSet"):
        created["spec"]["replicas"] = replicas
        count = replicas if up else 0
        reason = "MinimumReplicasAvailable" if up else "MinimumReplicasUnavailable"
        created["status"] = {
            "observedGeneration": 1,
            "replicas": replicas,
            "updatedReplicas": replicas,
            "readyReplicas": count,
            "availableReplicas": count,
            "conditions": [condition("Available", up, reason, "" if up else "no minimum availability")],
        }
    elif created["kind"] == "RayCluster":
        created["status"] = {"state": "ready"} if up else {"state": "failed", "reason": "no head"}
    elif created["kind"] == "HTTPRoute":
        created["status"] = {
            "parents": [{"conditions": [condition("Accepted", up, "NoMatchingParent", "no such listener")]}]
        }
    elif created["apiVersion"].startswith("serving.knative.dev"):
        name = created["metadata"]["name"]
        created["status"] = {
            "url": f"http://{name}.default.example.com",
            "address": {"url": f"http://{name}.default.svc.cluster.local"},
            "latestCreatedRevisionName": f"{name}-00001",
            "latestReadyRevisionName": f"{name}-00001" if up else "",
            "traffic": [{"revisionName": f"{name}-00001", "percent": 100, "latestRevision": True}] if up else [],
            "conditions": [condition(kind, up) for kind in ("Ready", "RoutesReady", "ConfigurationsReady")],
        }
    return created


def observe(made: Plan, *, down: Iterable[str] = (), pods: Iterable[dict[str, Any]] = (), **more: Any) -> Observed:
    """All that was planned, live; objects in `down`, by name or as `Kind/name`, are not up."""
    bad = set(down)
    objects = []
    for manifest in made.objects:
        name = manifest["metadata"]["name"]
        objects.append(live(manifest, up=not bad & {name, f"{manifest['kind']}/{name}"}, **more))
    return Observed(tuple(objects), tuple(pods))


def pod(name: str, component: str = "engine", *, ready: bool = False, age: int = 0, **rest: Any) -> dict[str, Any]:
    """A pod; `rest` is its status, `labels` are more labels."""
    labels = {"ome.io/inferenceservice": "llama-chat", "component": component, "app": f"llama-chat-{component}"}
    labels |= rest.pop("labels", {})
    born = (NOON - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    document = {"phase": "Running", "conditions": [condition("Ready", ready)], **rest}
    return {"metadata": {"name": name, "labels": labels, "creationTimestamp": born}, "status": document}


def crashing(name: str, *, message: str = "no GPU", code: int = 1, **rest: Any) -> dict[str, Any]:
    """A pod whose container ends, again and again."""
    ended = {"exitCode": code, "reason": "Error", "message": message, "finishedAt": "2024-01-15T11:59:00Z"}
    container = {
        "name": "ome-container",
        "ready": False,
        "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}},
        "lastState": {"terminated": ended},
    }
    return pod(name, containerStatuses=[container], **rest)


def revision(made: Plan, component: str = "engine") -> dict[str, str]:
    """The label of the pods that the plan asks for."""
    return {REVISION_LABEL: made.rollouts[component].latest}


def by_key(objects: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {live_key(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in objects}


def condition_of(found: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """One condition of a status."""
    [one] = [condition for condition in found["conditions"] if condition["type"] == kind]
    return dict(one)


def status_of(
    asked: dict[str, Any],
    observed: Observed | None = None,
    *,
    now: datetime = NOON,
    cluster: ClusterFacts | None = None,
) -> dict[str, Any]:
    """The status of a service, everything being up by default."""
    planned = plan(asked, cluster or facts())
    return dict(build_status(asked, planned, observe(planned) if observed is None else observed, now))
