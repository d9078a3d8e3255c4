# SPDX-License-Identifier: Apache-2.0
"""Plans of services whose rollouts go by steps: the share follows from the status, and one look after another."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from plan_cases import facts, live, names, one, service

from headrace.fleet.documents import ClusterFacts
from headrace.fleet.planning import Plan, ScaleUp, plan
from headrace.fleet.planning.context import live_key
from headrace.fleet.planning.revisions import revision_of
from headrace.fleet.rollouts.controller import advance_rollouts, is_in_progress
from headrace.fleet.rollouts.policy import parse_policy
from headrace.fleet.rollouts.revision_stats import RequestStats, RouterStats
from headrace.fleet.rollouts.state import RolloutState, state_to_json
from headrace.fleet.status.conditions import Observed
from headrace.fleet.status.service_status import build_status
from headrace.platforms.kubernetes_client.objects import Document, annotations_of

NOW = datetime(2026, 1, 15, 10, 30, tzinfo=UTC)
STEPS = {"ome_io__rollout_steps": "10,40", "ome_io__rollout_step_seconds": "60"}


def asked(image: str, told: Document | None = None, **annotations: str) -> dict[str, Any]:
    engine = {"minReplicas": 2, "maxReplicas": 4, "runner": {"name": "ome-container", "image": image}}
    document = service({"engine": engine}, **(STEPS | annotations))
    document["metadata"]["generation"] = 1
    return document if told is None else {**document, "status": told}


def at(document: dict[str, Any], made: Plan, phase: str, step: int = 0) -> dict[str, Any]:
    """The service with a rollout of what it asks for now."""
    state = RolloutState(revision_of(made.components["engine"]), phase, step, NOW)  # type: ignore[arg-type]
    rollout = state_to_json(state, parse_policy(annotations_of(document)))
    return {**document, "status": {"components": {"engine": {"latestRolledoutRevision": "r1", "rollout": rollout}}}}


def weights(made: Plan) -> list[str]:
    """The shares of both revisions, as the front has them."""
    config = json.loads(one(made, "ConfigMap", "chat-front")["data"]["router.yaml"])
    return [backend.partition(",weight=")[2] for backend in config["backends"]]


def test_the_share_is_that_of_the_step() -> None:
    first = plan(asked("engine:1"), facts())
    assert first.rollouts["engine"].state == "single"
    begun = plan(asked("engine:2"), facts(), live(first))
    there = live(begun)
    roll = plan(asked("engine:2"), facts(), there).rollouts["engine"]
    assert (roll.state, roll.percent, roll.settled) == ("canary", 10, True)
    second = plan(at(asked("engine:2"), begun, "Stepping", 1), facts(), there)
    assert second.counted == {"engine"}
    assert weights(second) == [f"60,revision={roll.stable}", f"40,revision={roll.latest}"]
    back = plan(at(asked("engine:2"), begun, "RolledBack"), facts(), there)
    assert weights(back) == [f"100,revision={roll.stable}"]
    assert one(back, "Deployment", "chat-engine-canary")["spec"]["replicas"] == 0
    promoted = plan(at(asked("engine:2"), begun, "Promoted", 1), facts(), there)
    assert promoted.rollouts["engine"].state == "promoting"


def test_a_rolled_back_revision_stays_so_without_its_steps_and_the_next_one_has_pods() -> None:
    first = plan(asked("engine:1"), facts())
    begun = plan(asked("engine:2"), facts(), live(first))
    back = at(asked("engine:2"), begun, "RolledBack")
    there = live(plan(back, facts(), live(begun)))
    bare = {**back, "metadata": {**back["metadata"], "annotations": {}}}
    assert weights(plan(bare, facts(), there)) == [f"100,revision={begun.rollouts['engine'].stable}"]
    spec = {**bare["spec"], "engine": {**bare["spec"]["engine"], "canaryTrafficPercent": 100}}
    assert plan({**bare, "spec": spec}, facts(), there).rollouts["engine"].state == "promoting"
    # Its workload is at zero, which no autoscaler changes.
    newer = plan({**asked("engine:3"), "status": back["status"]}, facts(), there)
    assert newer.scale_ups == [ScaleUp("apps/v1", "Deployment", "chat-engine-canary", 1)]
    assert newer.rollouts["engine"].requested_percent == 10


def test_rollout_annotations_do_not_reach_pods() -> None:
    calm, paused = (plan(asked("engine:1", **more), facts()) for more in ({}, {"ome_io__rollout_paused": "true"}))
    assert calm.objects == paused.objects
    assert "rollout" not in json.dumps(one(calm, "Deployment", "chat-engine"))


def test_with_a_gateway_requests_are_not_counted() -> None:
    cluster = facts(disable_ingress_creation=False, enable_gateway_api=True, ingress_gateway="infra/public")
    begun = plan(asked("engine:2"), cluster, live(plan(asked("engine:1"), cluster)))
    assert begun.counted == frozenset() and "Deployment/chat-front" not in names(begun)


def test_a_ray_cluster_has_no_steps() -> None:
    planned = plan(
        service({"engine": {"minReplicas": 1}}, "chat", "groups", **STEPS, ome_io__deploymentMode="MultiNodeRayVLLM"),
        facts(),
    )
    assert any("one revision at a time" in str(problem) for problem in planned.problems)


class FakeController:
    """A controller of one service that has no cluster: what was planned is live and ready at the next look."""

    def __init__(self, document: dict[str, Any], cluster: ClusterFacts | None = None) -> None:
        self.document = document
        self.facts = cluster or facts()
        self.live: dict[str, dict[str, Any]] = {}
        self.seconds = 0.0
        self.notes: list[str] = []
        self.counts: dict[str, RequestStats] = {}

    def reconcile(self, seconds: float = 0.0) -> Plan:
        self.seconds += seconds
        now = NOW + timedelta(seconds=self.seconds)
        planned = plan(self.document, self.facts, self.live)
        assert not planned.problems, planned.problems
        stats = RouterStats({("front", name): item for name, item in self.counts.items()}, (0.1,), ("front",))
        moved, notes = advance_rollouts(self.document, planned, stats, now)
        self.notes += [note.message for note in notes]
        self.live = self.lived(planned)
        pods: tuple[Document, ...] = ()
        after = build_status(moved, planned, Observed(tuple(self.live.values()), pods), now)
        self.document = {**self.document, "status": json.loads(json.dumps(after))}
        return planned

    def lived(self, made: Plan) -> dict[str, dict[str, Any]]:
        """What was planned, as a cluster has it when all is up."""
        up = [{"type": "Available", "status": "True"}]
        return {
            name: {**item, "status": {**item["status"], "readyReplicas": item["spec"]["replicas"], "conditions": up}}
            for name, item in live(made).items()
        }

    def edit(self, document: dict[str, Any]) -> None:
        self.document = {**document, "status": self.document["status"]}

    def condition(self, kind: str) -> dict[str, Any]:
        conditions: list[dict[str, Any]] = self.document["status"]["conditions"]
        return next(condition for condition in conditions if condition["type"] == kind)


def started() -> tuple[FakeController, str]:
    """At the first step of a second revision."""
    looks = FakeController(asked("engine:1"))
    looks.reconcile()
    looks.reconcile()
    assert "rollout" not in looks.document["status"]["components"]["engine"] and not is_in_progress(looks.document)
    looks.edit(asked("engine:2"))
    for _ in range(4):
        created = looks.reconcile()
    assert looks.condition("EngineRolloutReady")["reason"] == "Stepping" and is_in_progress(looks.document)
    return looks, created.rollouts["engine"].latest


def test_observations_promote() -> None:
    looks, new = started()
    assert looks.condition("LatestDeploymentReady")["status"] == "Unknown"
    assert looks.condition("LatestDeploymentReady")["message"].endswith("step 10 %: 0 requests, 0.0 % errors")
    for requests in (60, 120):
        looks.counts[new] = RequestStats(requests)
        looks.reconcile(61)
        looks.reconcile()
    assert looks.notes[1:] == [
        "engine: step 10 %: 60 requests, 0.0 % errors; 40 % now",
        "engine: promoted: step 40 %: 60 requests, 0.0 % errors",
    ]
    looks.reconcile()
    created = looks.reconcile()
    assert created.rollouts["engine"].state == "single" and "Deployment/chat-engine-canary" not in names(created)
    assert (
        looks.condition("EngineRolloutReady")["status"] == looks.condition("LatestDeploymentReady")["status"] == "True"
    )
    before = looks.document
    looks.reconcile(1000)
    assert looks.document == before


def test_observations_roll_back_and_a_new_edit_starts_again() -> None:
    looks, new = started()
    looks.counts[new] = RequestStats(30, 5)
    looks.reconcile(1)
    created = looks.reconcile(1)
    assert weights(created) == [f"100,revision={created.rollouts['engine'].stable}"]
    assert looks.notes[-1] == "engine: rolled back: 16.7 % errors of 30 requests at 10 %, 1 % allowed"
    for kind in ("EngineRolloutReady", "LatestDeploymentReady"):
        assert (looks.condition(kind)["status"], looks.condition(kind)["reason"]) == ("False", "RolledBack")
    looks.edit(asked("engine:3"))
    looks.reconcile(1)
    assert looks.document["status"]["components"]["engine"]["rollout"]["phase"] == "Waiting"
    looks.edit(asked("engine:1"))
    looks.reconcile(1)
    assert "rollout" not in looks.document["status"]["components"]["engine"]
    assert not any(condition["type"] == "EngineRolloutReady" for condition in looks.document["status"]["conditions"])


# Knative

SERVERLESS = {"ome_io__deploymentMode": "Serverless"}


class FakeKnativeController(FakeController):
    """The same, with what Knative would tell of its Service."""

    ready = True

    def lived(self, made: Plan) -> dict[str, dict[str, Any]]:
        ksvc = one(made, "ksvc", "chat-engine")
        before = self.live.get(live_key("Service", "chat-engine"), {}).get("status", {})
        created = f"rev-{ksvc['spec']['template']['spec']['containers'][0]['image']}"
        document = {
            "latestCreatedRevisionName": created,
            "latestReadyRevisionName": created if self.ready else before["latestReadyRevisionName"],
            "traffic": [{"revisionName": created, **target} for target in ksvc["spec"]["traffic"]],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        return {**super().lived(made), live_key("Service", "chat-engine"): {**ksvc, "status": document}}

    @property
    def traffic(self) -> list[tuple[int, str]]:
        traffic = self.live[live_key("Service", "chat-engine")]["spec"]["traffic"]
        return [(target["percent"], target.get("revisionName", "")) for target in traffic]


def knative() -> FakeKnativeController:
    looks = FakeKnativeController(asked("engine:1", **SERVERLESS))
    for _ in range(3):
        looks.reconcile()
    assert looks.traffic == [(100, "")]
    looks.edit(asked("engine:2", **SERVERLESS))
    return looks


def test_knative_advances_by_time() -> None:
    looks = knative()
    looks.ready = False
    looks.reconcile()
    assert looks.traffic == [(10, ""), (90, "rev-engine:1")]
    looks.reconcile(500)
    assert looks.document["status"]["components"]["engine"]["rollout"]["phase"] == "Waiting"
    looks.ready = True
    looks.reconcile()
    looks.reconcile()
    looks.reconcile()
    assert "errors are not counted here" in looks.condition("EngineRolloutReady")["message"]
    looks.reconcile(61)
    looks.reconcile()
    assert looks.traffic == [(40, ""), (60, "rev-engine:1")]
    looks.reconcile(61)
    looks.reconcile()
    assert looks.traffic == [(100, "")]
    assert looks.notes[-1].startswith("engine: promoted: step 40 %: errors are not counted here")


def test_knative_is_rolled_back_by_hand_and_continues_without_observations() -> None:
    looks = knative()
    looks.reconcile()
    # Killed before the status was told: what is live says that it is on trial.
    looks.document["status"]["components"]["engine"].pop("rollout", None)
    looks.reconcile()
    assert looks.traffic == [(10, ""), (90, "rev-engine:1")]
    looks.reconcile()
    looks.edit(asked("engine:2", ome_io__rollout_command="undo t1", **SERVERLESS))
    looks.reconcile()
    looks.reconcile()
    assert looks.traffic == [(0, ""), (100, "rev-engine:1")]
    assert looks.document["status"]["components"]["engine"]["latestRolledoutRevision"] == "rev-engine:1"


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_knative_with_the_steps_of_a_service_that_runs(seconds: float) -> None:
    bare = asked("engine:1", **SERVERLESS)
    annotations = {name: value for name, value in annotations_of(bare).items() if "rollout" not in name}
    looks = FakeKnativeController({**bare, "metadata": {**bare["metadata"], "annotations": annotations}})
    for _ in range(3):
        looks.reconcile()
    looks.edit(bare)
    looks.reconcile(seconds)
    looks.reconcile(seconds)
    assert looks.traffic == [(100, "")] and not is_in_progress(looks.document)
