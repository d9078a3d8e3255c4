# SPDX-License-Identifier: Apache-2.0
"""The status of a service here is the document that the operator writes for the same service on Kubernetes.

Here it runs on a simulated machine. There, FakeKubernetes shows the objects and pods as an API server and a kubelet would.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from local_site import runtime, service
from simulated_fleet import SimulatedFleet

from headrace.fleet.documents import ClusterFacts, FleetSettings, cluster_facts
from headrace.fleet.planning import plan
from headrace.fleet.planning.context import live_key
from headrace.fleet.status.conditions import Observed
from headrace.fleet.status.service_status import build_status
from headrace.platforms.kubernetes_client.objects import Document, get_list, kind_of, name_of

NOW = datetime(2026, 11, 16, tzinfo=UTC)
READY = {"state": {"running": {}}, "ready": True}
CREATING = {"state": {"waiting": {"reason": "ContainerCreating"}}, "ready": False}
BACK_OFF = "back-off 10s restarting failed container=ome-container pod=x"
WORKLOADS = ("Deployment", "LeaderWorkerSet")
LOOKS = 8
"""Of the operator, until nothing more comes of them."""


def fixed(name: str, **engine: Any) -> dict[str, Any]:
    """With one replica always: what scales tells of itself in the service here, and in an object of its own there."""
    return service(name, maxReplicas=1, **engine)


class FakeKubernetes:
    """One service on a cluster: what the operator plans is made, and its pods are as the test says."""

    def __init__(self, model: Document, *runtimes: Document) -> None:
        ready = {**model, "status": {"state": "Ready"}}
        created = cluster_facts([*(runtimes or [runtime()]), ready], FleetSettings(node_pinning="none"))
        self._facts: ClusterFacts = replace(created, capabilities=frozenset({"lws"}))
        self._live: dict[str, Document] = {}
        self.service: dict[str, Any] = {}

    def apply(self, wanted: Document) -> FakeKubernetes:
        generation = self.service.get("metadata", {}).get("generation", 0) + 1
        metadata = {**wanted["metadata"], "generation": generation, "uid": "u"}
        self.service = {**wanted, "metadata": metadata, "status": self.service.get("status", {})}
        return self

    def settled(self) -> Document:
        """The status when all that was planned is up."""
        self.report_status(CREATING)
        for _ in range(LOOKS):
            reported = self.report_status(READY)
        return reported

    def report_status(self, container: Document | None, *, unschedulable: str = "") -> Document:
        """The status that the operator writes when the main container of all pods is like this."""
        ready = bool(container and container.get("ready"))
        for _ in range(2):
            planned = plan(self.service, self._facts, self._live)
            for rise in planned.scale_ups:
                asleep = self._live[live_key(rise.kind, rise.name)]
                self._live[live_key(rise.kind, rise.name)] = {
                    **asleep,
                    "spec": {**asleep["spec"], "replicas": rise.replicas},
                }
            created = [self._made(manifest, planned.objects, ready) for manifest in planned.objects]
            self._live = {live_key(kind_of(item), name_of(item)): item for item in created}
        status_of_pods = self._pod_status(container, unschedulable)
        pods = [
            {"metadata": {"name": f"{name_of(workload)}-abc-{number}", "labels": labels}, "status": status_of_pods}
            for workload in self._live.values()
            for number, labels in enumerate(_labels_of_pods(workload))
        ]
        status = build_status(self.service, planned, Observed(tuple(self._live.values()), tuple(pods)), NOW)
        self.service = {**self.service, "status": status}
        return status

    def _made(self, planned: Document, beside: Sequence[Document], ready: bool) -> dict[str, Any]:
        before = self._live.get(live_key(kind_of(planned), name_of(planned)), {})
        document = {**planned, "metadata": {**planned["metadata"], "uid": "u"}}
        if kind_of(planned) in WORKLOADS:
            known = before.get("spec", {}).get("replicas")
            replicas = known if known == 0 else max(known or 1, _least(planned, beside))
            document["spec"] = {"replicas": replicas, **planned["spec"]}
        generation = before.get("metadata", {}).get("generation", 0) + (before.get("spec") != document.get("spec"))
        document["metadata"]["generation"] = generation
        if kind_of(planned) in WORKLOADS:
            document["status"] = _workload_status(kind_of(planned), document["spec"]["replicas"], generation, ready)
        return document

    def _pod_status(self, container: Document | None, unschedulable: str) -> dict[str, Any]:
        if container is None:
            claims = {"reason": "Unschedulable", "message": unschedulable}
            return {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", **claims}]}
        truth = str(bool(container.get("ready")))
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": truth},
        ]
        document = {"name": "ome-container", "restartCount": 0, "lastState": {}, **container}
        return {"phase": "Running", "conditions": conditions, "containerStatuses": [document]}


def _least(workload: Document, objects: Sequence[Document]) -> int:
    """Which its autoscaler lets it have: one leaves alone what is at zero."""
    scalers = (manifest["spec"] for manifest in objects if kind_of(manifest) == "HorizontalPodAutoscaler")
    results = (scaler["minReplicas"] for scaler in scalers if scaler["scaleTargetRef"]["name"] == name_of(workload))
    return int(next(results, 1))


def _workload_status(kind: str, replicas: int, generation: int, ready: bool) -> dict[str, Any]:
    up = ready or not replicas
    condition = {
        "type": "Available",
        "status": str(up),
        "reason": "MinimumReplicasAvailable" if up else "MinimumReplicasUnavailable",
        "message": f"{kind} {'has' if up else 'does not have'} minimum availability.",
    }
    there = replicas if ready else 0
    return {
        "observedGeneration": generation,
        "replicas": replicas,
        "updatedReplicas": replicas,
        "readyReplicas": there,
        **({"availableReplicas": there, "unavailableReplicas": replicas - there} if kind == "Deployment" else {}),
        "conditions": [condition, {"type": "Progressing", "status": "True"}],
    }


def _labels_of_pods(workload: Document) -> list[dict[str, str]]:
    """Of every pod that a controller of Kubernetes would make for a workload."""
    spec = workload.get("spec", {})
    if kind_of(workload) == "Deployment":
        return [spec["template"]["metadata"]["labels"]] * spec["replicas"]
    if kind_of(workload) != "LeaderWorkerSet":
        return []
    group, place = spec["leaderWorkerTemplate"], "leaderworkerset.sigs.k8s.io"
    templates = [group["leaderTemplate"], *[group["workerTemplate"]] * (group["size"] - 1)]
    return [
        {**template["metadata"]["labels"], f"{place}/name": name_of(workload), f"{place}/worker-index": str(index)}
        for _ in range(spec["replicas"])
        for index, template in enumerate(templates)
    ]


def compared(told: Any) -> Any:
    """Without what differs from one place to another: times, addresses, names of pods, and words of a kubelet."""
    if isinstance(told, dict):
        created = {name: compared(value) for name, value in told.items() if name not in ("time", "location", "message")}
        there = {name: "there" for name in ("url", "lastTransitionTime") if name in created}
        return {name: value for name, value in (created | there).items() if value != {}}
    if isinstance(told, list):
        return [compared(item) for item in told]
    return told


def messages(told: Document) -> dict[str, str]:
    """By condition, without names of pods."""
    results = {condition["type"]: condition.get("message", "") for condition in get_list(told, "conditions")}
    return {kind: re.sub(r"pod \S+:", "pod x:", said) for kind, said in results.items()}


async def assert_same(fleet: SimulatedFleet, name: str, there: Document) -> Document:
    """Once what is here has come to rest: its router, say, may be on its way."""

    async def same() -> Document:
        here: Document = (await fleet.get(name)).get("status", {})
        assert compared(here) == compared(there)
        return here

    result: Document = await fleet.until(same)
    return result


async def test_a_service_that_is_ready(fleet: SimulatedFleet) -> None:
    await fleet.apply(fixed("same"))
    await fleet.ready("same")
    reported = FakeKubernetes(fleet.model).apply(fixed("same")).settled()
    assert messages(await assert_same(fleet, "same", reported)) == messages(reported)


async def test_one_that_crashes(fleet: SimulatedFleet) -> None:
    wanted = fixed("ill", runner={"name": "ome-container", "args": ["--text=crash"]})
    await fleet.apply(wanted)
    ended = {"exitCode": 1, "reason": "Error", "message": "this one crashes at its start\n", "finishedAt": ""}
    waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": BACK_OFF}}, "ready": False}
    reported = FakeKubernetes(fleet.model).apply(wanted).report_status({**waiting, "lastState": {"terminated": ended}})
    assert messages(await assert_same(fleet, "ill", reported)) == messages(reported)


async def test_one_that_does_not_fit(fleet: SimulatedFleet) -> None:
    body = {"nvidia.com/gpu": "64"}
    wanted = fixed("large", runner={"name": "ome-container", "resources": {"limits": body, "requests": body}})
    await fleet.apply(wanted)
    there = FakeKubernetes(fleet.model).apply(wanted)
    reported = there.report_status(None, unschedulable="0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    assert "it requests 64 GPU(s)" in messages(await assert_same(fleet, "large", reported))["EngineReady"]


async def test_a_canary_its_undoing_and_its_promotion(fleet: SimulatedFleet) -> None:
    newer = {"name": "ome-container", "args": ["--port=8080", "--text=canary"]}
    there = FakeKubernetes(fleet.model)
    for percent in (None, 25, 0, 50, 100):
        share: dict[str, Any] = {} if percent is None else {"canaryTrafficPercent": percent, "runner": newer}
        wanted = service("birds", minReplicas=2, maxReplicas=2, **share)
        await fleet.apply(wanted)
        reported = there.apply(wanted).settled()
        assert messages(await assert_same(fleet, "birds", reported)) == messages(reported), percent


async def test_a_group_of_processes(fleet: SimulatedFleet) -> None:
    group = runtime("status-group")
    runner = group["spec"]["engineConfig"].pop("runner")
    group["spec"]["engineConfig"] |= {"leader": {"runner": runner}, "worker": {"size": 1, "runner": runner}}
    wanted = service("many", "status-group", maxReplicas=1, worker={"size": 1})
    await fleet.apply(group, wanted)
    reported = FakeKubernetes(fleet.model, group).apply(wanted).settled()
    assert messages(await assert_same(fleet, "many", reported)) == messages(reported)


async def test_a_router_before_its_engines(fleet: SimulatedFleet) -> None:
    wanted = fixed("routed")
    wanted["spec"]["router"] = {"minReplicas": 1, "maxReplicas": 1, "config": {"routing_strategy": "round_robin"}}
    await fleet.apply(wanted)
    reported = FakeKubernetes(fleet.model).apply(wanted).settled()
    assert messages(await assert_same(fleet, "routed", reported)) == messages(reported)
