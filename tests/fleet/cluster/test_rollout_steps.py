# SPDX-License-Identifier: Apache-2.0
"""Rollouts by steps in a cluster that has no API server: what the reconciler writes, tells and asks, look after look."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from plan_cases import facts, service
from routing import routing

from headrace.fleet.cluster.events import EventRecorder
from headrace.fleet.cluster.reconciler import (
    APPLIED_SECONDS,
    STEP_SECONDS,
    UNCONFIRMED_SECONDS,
    Reconciler,
    RolloutStepper,
)
from headrace.fleet.cluster.resources import child_resource
from headrace.fleet.cluster.view import ClusterView
from headrace.fleet.documents import ClusterFacts
from headrace.fleet.pod_client import router_status
from headrace.platforms.kubernetes_client.api import ApiClient
from headrace.platforms.kubernetes_client.objects import Document, ServedResource
from support.serving import echo_site, serving

KEY = ("default", "chat")
STEPS = {"ome_io__rollout_steps": "10,40", "ome_io__rollout_step_seconds": "60"}


def asked(image: str, **annotations: str) -> dict[str, Any]:
    engine = {"minReplicas": 2, "maxReplicas": 4, "runner": {"name": "ome-container", "image": image}}
    return service({"engine": engine}, **(STEPS | annotations))


class FakeCluster:
    """In place of the API server and of the view: keeps what is written, and all pods are ready at once."""

    def __init__(self, cluster: ClusterFacts | None = None) -> None:
        self.facts = cluster or facts()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.document: dict[str, Any] = {}
        self.events: list[str] = []
        self.looks: list[float] = []
        self.asked: list[str] = []
        self.routers: dict[str, Any] = {}
        """What the front's pods tell, by their addresses."""
        self.stale_version = ""
        """What the front's pods run with, if it is not their ConfigMap's."""
        self.seconds = 0.0
        api = cast("ApiClient", self)
        self.reconciler = Reconciler(
            api,
            cast("ClusterView", self),
            EventRecorder(api, self.now),
            self.now,
            add_after=lambda key, seconds: self.looks.append(seconds),
            stepper=RolloutStepper(self.now, self.ask),
        )

    def now(self) -> datetime:
        return datetime(2026, 1, 15, 10, 30, tzinfo=UTC) + timedelta(seconds=self.seconds)

    async def ask(self, host: str, port: int) -> Any:
        self.asked.append(f"{host}:{port}")
        if self.routers[host] is None:
            return None
        config = json.loads(self.objects["ConfigMap", "chat-front"]["data"]["router.yaml"])
        version = self.stale_version or config["config_version"]
        return {**self.routers[host], "config_version": version}

    def edit(self, document: dict[str, Any]) -> None:
        generation = self.document.get("metadata", {}).get("generation", 0) + 1
        metadata = {**document["metadata"], "generation": generation, "resourceVersion": "1"}
        self.document = {**document, "metadata": metadata, "status": self.document.get("status", {})}

    def look(self, seconds: float = 0.0) -> None:
        self.seconds += seconds
        assert asyncio.run(self.reconciler.reconcile(KEY))

    @property
    def rollout(self) -> dict[str, Any]:
        found: dict[str, Any] = self.document["status"]["components"]["engine"].get("rollout", {})
        return found

    @property
    def shares(self) -> list[int]:
        config = json.loads(self.objects["ConfigMap", "chat-front"]["data"]["router.yaml"])
        return [int(each.partition(",weight=")[2].partition(",")[0]) for each in config["backends"]]

    # The view

    def service(self, key: Any) -> Document:
        return self.document

    def owned(self, document: Document) -> list[dict[str, Any]]:
        return list(self.objects.values())

    def pods(self, document: Document) -> list[dict[str, Any]]:
        return [
            {
                "metadata": {"name": f"front-{host}", "labels": {"component": "front"}},
                "status": {"podIP": host, "conditions": [{"type": "Ready", "status": "True"}]},
            }
            for host in self.routers
            if ("Deployment", "chat-front") in self.objects
        ]

    def activator_for(self, document: Document) -> None:
        return None

    def served(self, resource: Any) -> ServedResource:
        return ServedResource(resource, resource.versions[0])

    def put(self, resource: Any, document: Document) -> None:
        pass

    # The API server

    async def get(self, where: ServedResource, namespace: str, name: str) -> Document | None:
        return self.objects.get((where.resource.kind, name))

    async def apply(self, where: ServedResource, document: dict[str, Any]) -> dict[str, Any]:
        assert child_resource(document) is not None
        key = (document["kind"], document["metadata"]["name"])
        before = self.objects.get(key, {})
        spec = {**document.get("spec", {})}
        count = spec.get("replicas", before.get("spec", {}).get("replicas", 2))
        if document["kind"] == "Deployment":
            spec["replicas"] = count
        made = {**document, **({"spec": spec} if spec else {})}
        made["metadata"] = {**document["metadata"], "uid": "/".join(key), "generation": 1}
        replicas = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), count)
        up = [{"type": "Available", "status": "True"}]
        self.objects[key] = {**made, "status": {"observedGeneration": 1, **replicas, "conditions": up}}
        return made

    async def patch(self, where: ServedResource, namespace: str, name: str, change: Any, part: str = "") -> Document:
        if part == "status":
            self.document = {**self.document, "status": _merged(self.document["status"], change["status"])}
            return self.document
        assert part == "scale"
        self.objects[where.resource.kind, name]["spec"]["replicas"] = change["spec"]["replicas"]
        return {}

    async def delete(self, where: ServedResource, namespace: str, name: str, uid: str) -> None:
        del self.objects[where.resource.kind, name]

    async def create(self, where: ServedResource, namespace: str, event: Any) -> None:
        if event["reason"].startswith("Rollout"):
            self.events.append(event["message"])


def _merged(value: Any, change: Any) -> Any:
    if not isinstance(change, dict):
        return change
    made = dict(value) if isinstance(value, dict) else {}
    for name, each in change.items():
        made[name] = _merged(made.get(name), each)
    return {name: each for name, each in made.items() if each is not None}


def told(**revisions: tuple[int, int]) -> dict[str, Any]:
    counts = {
        name: {"requests": requests, "errors": errors, "seconds": 1.0, "times": [requests, 0]}
        for name, (requests, errors) in revisions.items()
    }
    return {"revisions": {"bounds": [0.1], "counts": counts}}


def begun(cluster: FakeCluster) -> str:
    """Bring a second revision to its first step; its digest."""
    cluster.edit(asked("engine:1"))
    cluster.look()
    cluster.look()
    assert cluster.looks == [] and cluster.asked == []
    cluster.edit(asked("engine:2"))
    for _ in range(4):
        cluster.look(STEP_SECONDS)
    assert cluster.rollout["phase"] == "Stepping" and cluster.shares == [90, 10]
    found: str = cluster.rollout["revision"]
    return found


def test_the_operator_advances_steps_by_the_counts_of_its_fronts() -> None:
    cluster = FakeCluster()
    cluster.routers = {"10.0.0.1": told(), "10.0.0.2": told()}
    new = begun(cluster)
    assert set(cluster.looks) == {STEP_SECONDS} and set(cluster.asked) == {"10.0.0.1:8080", "10.0.0.2:8080"}
    cluster.routers = {"10.0.0.1": told(**{new: (40, 0)}), "10.0.0.2": told(**{new: (30, 0)})}
    cluster.look(STEP_SECONDS)
    assert cluster.rollout["message"] == "step 10 %: 70 requests, 0.0 % errors"
    # What is told brings another look at once, which asks nobody and changes nothing.
    count, before = len(cluster.asked), cluster.document
    cluster.look()
    assert len(cluster.asked) == count and cluster.document == before
    cluster.look(60)
    cluster.look()
    assert cluster.shares == [60, 40]
    # New pods of the front count from zero; one that does not answer is waited for.
    cluster.routers = {"10.0.0.3": told(**{new: (55, 0)}), "10.0.0.4": None}
    cluster.look(61)
    assert (cluster.rollout["step"], cluster.rollout["phase"]) == (2, "Stepping")
    cluster.routers["10.0.0.4"] = told()
    cluster.look(STEP_SECONDS)
    assert cluster.rollout["phase"] == "Promoted"
    for _ in range(3):
        cluster.look()
    assert ("Deployment", "chat-engine-canary") not in cluster.objects
    assert cluster.events == [
        "engine: a new revision gets 10 %, 40 %, then all requests",
        "engine: step 10 %: 70 requests, 0.0 % errors; 40 % now",
        "engine: promoted: step 40 %: 55 requests, 0.0 % errors",
    ]
    looks = len(cluster.looks)
    cluster.look(1000)
    assert len(cluster.looks) == looks


def test_the_operator_takes_a_revision_back_and_another_operator_keeps_it_so() -> None:
    cluster = FakeCluster()
    cluster.routers = {"10.0.0.1": told()}
    new = begun(cluster)
    cluster.routers = {"10.0.0.1": told(**{new: (120, 9)})}
    cluster.look(STEP_SECONDS)
    cluster.look()
    assert cluster.shares == [100] and cluster.rollout["phase"] == "RolledBack"
    # Its pods stay until the front has heard of that.
    assert cluster.objects["Deployment", "chat-engine-canary"]["spec"]["replicas"] == 2
    cluster.stale_version = "before"
    cluster.looks.clear()
    cluster.look()
    cluster.look()
    assert cluster.objects["Deployment", "chat-engine-canary"]["spec"]["replicas"] == 2
    assert cluster.looks == [APPLIED_SECONDS] * 2, "nothing tells the operator that a router has read its ConfigMap"
    cluster.stale_version = ""
    cluster.look()
    assert cluster.objects["Deployment", "chat-engine-canary"]["spec"]["replicas"] == 0
    assert cluster.events[-1] == "engine: rolled back: 7.5 % errors of 120 requests at 10 %, 1 % allowed"
    other = FakeCluster()
    other.objects, other.document, other.routers = cluster.objects, cluster.document, cluster.routers
    other.look()
    assert other.document == cluster.document and other.events == []
    other.edit(asked("engine:3"))
    for _ in range(3):
        other.look(STEP_SECONDS)
    assert other.rollout["phase"] == "Stepping" and other.rollout["revision"] != new
    assert other.objects["Deployment", "chat-engine-canary"]["spec"]["replicas"] == 1


@pytest.mark.parametrize("answers", [True, False])
def test_a_front_that_never_confirms_its_shares_does_not_hold_a_rollout_for_ever(
    answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster()
    cluster.routers = {"10.0.0.1": told()}
    new = begun(cluster)
    cluster.routers = {"10.0.0.1": told(**{new: (120, 9)})}
    cluster.look(STEP_SECONDS)
    if answers:
        cluster.stale_version = "before"
    else:
        cluster.routers = {"10.0.0.1": None}
    cluster.look()
    cluster.look()
    cluster.look(UNCONFIRMED_SECONDS - 1)
    assert cluster.objects["Deployment", "chat-engine-canary"]["spec"]["replicas"] == 2
    assert "has not confirmed its new shares" not in caplog.text
    cluster.look(2)
    assert cluster.objects["Deployment", "chat-engine-canary"]["spec"]["replicas"] == 0
    assert "has not confirmed its new shares within 30 s; the rollout goes on" in caplog.text


def test_with_a_gateway_only_time_counts() -> None:
    cluster = FakeCluster(
        facts(disable_ingress_creation=False, enable_gateway_api=True, ingress_gateway="infra/public")
    )
    cluster.edit(asked("engine:1"))
    cluster.look()
    cluster.edit(asked("engine:2"))
    for _ in range(4):
        cluster.look(STEP_SECONDS)
    assert cluster.rollout["message"] == "step 10 %: errors are not counted here, so only time counts"
    cluster.look(61)
    assert cluster.rollout["step"] == 2
    cluster.look(61)
    assert cluster.rollout["phase"] == "Promoted" and cluster.asked == []


def test_a_router_is_queried_over_http() -> None:
    with serving(echo_site()) as one, routing(f"http://127.0.0.1:{one.port},revision=r1") as router:
        router.get("/hello")
        found = asyncio.run(router_status("127.0.0.1", router.port, 30.0))
    assert found is not None and found["revisions"]["counts"]["r1"]["requests"] == 1
    assert asyncio.run(router_status("127.0.0.1", router.port, 30.0)) is None
