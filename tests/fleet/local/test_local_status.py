# SPDX-License-Identifier: Apache-2.0
"""The status of a service here is the document that the operator writes for the same service on Kubernetes.

Here it really runs. There, FakeKubernetes shows the objects and pods as an API server and a kubelet would.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from local_site import LocalSite, runtime, service

from headrace.fleet.planning import plan
from headrace.fleet.planning.site import live_key
from headrace.fleet.status import Observed, status
from headrace.fleet.words import ClusterFacts, Document, FleetSettings, cluster_facts, items, kind_of, name_of

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

NOW = datetime(2026, 11, 16, tzinfo=UTC)
READY = {"state": {"running": {}}, "ready": True}
BACK_OFF = "back-off 10s restarting failed container=ome-container pod=x"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    made = LocalSite(tmp_path_factory.mktemp("status"), 26_100)
    made.up()
    made.apply(made.model, runtime())
    yield made
    made.close()


def fixed(name: str, **engine: Any) -> dict[str, Any]:
    """With one replica always: what scales tells of itself in the service here, and in an object of its own there."""
    return service(name, maxReplicas=1, **engine)


class FakeKubernetes:
    """One service on a cluster whose node has room for all, or for none."""

    def __init__(self, wanted: Document, model: Document) -> None:
        self.service: dict[str, Any] = {**wanted, "metadata": {**wanted["metadata"], "generation": 1, "uid": "u"}}
        ready = {**model, "status": {"state": "Ready"}}
        self._facts: ClusterFacts = cluster_facts([runtime(), ready], FleetSettings(node_pinning="none"))

    def step(self, container: Document | None, *, unschedulable: str = "") -> Document:
        """The status that the operator writes when the pod's container is like this."""
        planned = plan(self.service, self._facts, {})
        ready = bool(container and container.get("ready"))
        objects = [self._live(each, ready) for each in planned.objects]
        planned = plan(self.service, self._facts, {live_key(kind_of(each), name_of(each)): each for each in objects})
        (workload,) = (each for each in objects if kind_of(each) == "Deployment")
        pod = {
            "metadata": {
                "name": f"{name_of(workload)}-abc",
                "labels": workload["spec"]["template"]["metadata"]["labels"],
            },
            "status": self._pod_status(container, unschedulable),
        }
        told = status(self.service, planned, Observed(tuple(objects), (pod,)), NOW)
        self.service = {**self.service, "status": told}
        return told

    def _live(self, planned: Document, ready: bool) -> dict[str, Any]:
        made = {**planned, "metadata": {**planned["metadata"], "generation": 1, "uid": "u"}}
        if kind_of(planned) == "Deployment":
            word = "MinimumReplicasAvailable" if ready else "MinimumReplicasUnavailable"
            verb = "has" if ready else "does not have"
            available = {
                "type": "Available",
                "status": str(ready),
                "reason": word,
                "message": f"Deployment {verb} minimum availability.",
            }
            count = {"readyReplicas": 1, "availableReplicas": 1} if ready else {"unavailableReplicas": 1}
            made["status"] = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, **count}
            made["status"]["conditions"] = [available, {"type": "Progressing", "status": "True"}]
        return made

    def _pod_status(self, container: Document | None, unschedulable: str) -> dict[str, Any]:
        if container is None:
            said = {"reason": "Unschedulable", "message": unschedulable}
            return {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", **said}]}
        truth = str(bool(container.get("ready")))
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": truth},
        ]
        told = {"name": "ome-container", "restartCount": 0, "lastState": {}, **container}
        return {"phase": "Running", "conditions": conditions, "containerStatuses": [told]}


def compared(told: Any) -> Any:
    """Without what differs from one place to another: times, addresses, names of pods, and words of a kubelet."""
    if isinstance(told, dict):
        left_out = ("lastTransitionTime", "time", "location", "message", "url")
        made = {name: compared(value) for name, value in told.items() if name not in left_out}
        return {name: value for name, value in made.items() if value != {}}
    if isinstance(told, list):
        return [compared(each) for each in told]
    return told


def messages(told: Document) -> dict[str, str]:
    """By condition, without names of pods."""
    found = {each["type"]: each.get("message", "") for each in items(told, "conditions")}
    return {kind: re.sub(r"pod \S+:", "pod x:", said) for kind, said in found.items()}


def assert_same(site: LocalSite, name: str, there: Document) -> Document:
    """Once what is here has come to rest: its router, say, may be on its way."""
    ends = time.monotonic() + 60
    while compared(here := site.get(name).get("status", {})) != compared(there) and time.monotonic() < ends:
        time.sleep(0.05)
    assert compared(here) == compared(there)
    return here


def test_a_service_that_is_ready(site: LocalSite) -> None:
    site.apply(fixed("same"))
    site.ready("same")
    there = FakeKubernetes(fixed("same"), site.model)
    there.step({"state": {"waiting": {"reason": "ContainerCreating"}}, "ready": False})
    told = there.step(READY)
    assert messages(assert_same(site, "same", told)) == messages(told)
    site.delete("same")


def test_one_that_crashes(site: LocalSite) -> None:
    wanted = fixed("ill", runner={"name": "ome-container", "args": ["--text=crash"]})
    site.apply(wanted)
    there = FakeKubernetes(wanted, site.model)
    ended = {"exitCode": 1, "reason": "Error", "message": "this one crashes at its start\n", "finishedAt": ""}
    waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": BACK_OFF}}, "ready": False}
    told = there.step({**waiting, "lastState": {"terminated": ended}})
    assert messages(assert_same(site, "ill", told)) == messages(told)
    site.delete("ill")


def test_one_that_does_not_fit(site: LocalSite) -> None:
    asked = {"nvidia.com/gpu": "64"}
    wanted = fixed("large", runner={"name": "ome-container", "resources": {"limits": asked, "requests": asked}})
    site.apply(wanted)
    there = FakeKubernetes(wanted, site.model)
    told = there.step(None, unschedulable="0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    assert "it asks for 64 GPU(s)" in messages(assert_same(site, "large", told))["EngineReady"]
    site.delete("large")
