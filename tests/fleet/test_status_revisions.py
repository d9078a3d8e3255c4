# SPDX-License-Identifier: Apache-2.0
"""Revisions: their numbers, their traffic, and which was rolled out last."""

from __future__ import annotations

from typing import Any

import pytest
from fleet_observations import (
    LLAMA,
    NOON,
    by_key,
    condition_of,
    crashing,
    facts,
    live,
    observe,
    pod,
    revision,
    service,
    status_of,
)

from headrace.fleet.planning import plan
from headrace.fleet.planning.context import REVISION_LABEL
from headrace.fleet.status.components import Share, planned_revisions, rolled_out_revisions
from headrace.fleet.status.conditions import Observed
from headrace.fleet.status.service_status import build_status

A, B = "llama-chat-engine-00001", "llama-chat-engine-00002"


def share(name: str, percent: int, latest: bool = True) -> dict[str, Any]:
    return {"revisionName": name, "percent": percent, "latestRevision": latest}


@pytest.mark.parametrize(
    ("created", "ready", "traffic", "before", "after"),
    [
        pytest.param("a", "a", [share("a", 100)], ("", ""), ("a", ""), id="first"),
        pytest.param("b", "a", [share("a", 100)], ("a", ""), ("a", ""), id="the new one is not ready"),
        pytest.param("b", "b", [share("b", 10), share("a", 90, False)], ("a", ""), ("a", ""), id="canary"),
        pytest.param("b", "b", [share("b", 100)], ("a", ""), ("b", "a"), id="promoted"),
        pytest.param("b", "b", [share("b", 100)], ("b", "a"), ("b", "a"), id="settled"),
        pytest.param("b", "b", [share("b", 0), share("b", 100, False)], ("b", "a"), ("a", "a"), id="taken back"),
        pytest.param("b", "", [], ("b", "a"), ("b", "a"), id="nothing is ready"),
    ],
)
def test_which_revision_was_rolled_out(
    created: str, ready: str, traffic: list[dict[str, Any]], before: tuple[str, str], after: tuple[str, str]
) -> None:
    old = {"latestRolledoutRevision": before[0], "previousRolledoutRevision": before[1]}
    assert rolled_out_revisions(created, ready, traffic, old) == after


def engine_of(asked: dict[str, Any], changed: dict[str, Any], seen: tuple[dict[str, Any], ...]) -> Any:
    """One reconcile: plan by what is there, apply, and look at it when it is up."""
    asked["spec"] = {**LLAMA, "engine": {**LLAMA["engine"], **changed}}
    planned = plan(asked, facts(), by_key(seen))
    assert planned.problems == []
    objects = tuple(live(manifest) for manifest in planned.objects)
    asked["status"] = build_status(asked, planned, Observed(objects), NOON)
    return asked["status"]["components"]["engine"], objects


def test_a_canary_from_its_first_request_to_its_promotion() -> None:
    document = service(LLAMA)
    first, seen = engine_of(document, {}, ())
    assert first["traffic"] == [share(A, 100)] and first["latestRolledoutRevision"] == A
    new = {"runner": {"image": "vllm/vllm-openai:v0.10.0"}, "canaryTrafficPercent": 10}
    begun, seen = engine_of(document, new, seen)
    assert begun["latestCreatedRevision"] == B and begun["latestRolledoutRevision"] == A
    assert begun["traffic"] == [share(B, 0), {**share(A, 100, False), "tag": "prev"}]
    split, seen = engine_of(document, new, seen)
    assert split["traffic"] == [share(B, 10), {**share(A, 90, False), "tag": "prev"}]
    assert split["latestReadyRevision"] == B and split["latestRolledoutRevision"] == A
    for _ in range(3):
        done, seen = engine_of(document, {**new, "canaryTrafficPercent": 100}, seen)
    assert done["traffic"] == [share(B, 100)]
    assert (done["latestRolledoutRevision"], done["previousRolledoutRevision"]) == (B, A)


def test_a_rolled_back_canary_has_its_old_number_again() -> None:
    document = service(LLAMA)
    seen: tuple[dict[str, Any], ...] = ()
    _, seen = engine_of(document, {}, seen)
    new = {"runner": {"image": "vllm/vllm-openai:v0.10.0"}, "canaryTrafficPercent": 10}
    for _ in range(2):
        _, seen = engine_of(document, new, seen)
    back, seen = engine_of(document, {}, seen)
    assert back["traffic"] == [share(A, 100)] and back["latestCreatedRevision"] == A
    assert [revision["name"] for revision in back["revisions"]] == [A, B]


def test_a_failing_canary_is_reported_and_does_not_affect_the_service() -> None:
    document = service(LLAMA)
    _, seen = engine_of(document, {}, ())
    document["spec"] = {**LLAMA, "engine": {"canaryTrafficPercent": 10, "runner": {"image": "broken"}}}
    planned = plan(document, facts(), by_key(seen))
    old = pod("old", ready=True, age=99, labels={REVISION_LABEL: planned.rollouts["engine"].stable})
    new = crashing("new", labels={**revision(planned), "app": "llama-chat-engine-canary"})
    observed = observe(planned, down=["llama-chat-engine-canary"], pods=[old, new])
    status = build_status(document, planned, observed, NOON)
    assert condition_of(status, "Ready")["status"] == "True"
    latest = condition_of(status, "LatestDeploymentReady")
    assert (latest["status"], latest["reason"]) == ("False", "CrashLoopBackOff") and "pod new:" in latest["message"]
    model = status["modelStatus"]
    assert model["modelRevisionStates"] == {"activeModelState": "Loaded", "targetModelState": "FailedToLoad"}
    assert model["transitionStatus"] == "BlockedByFailedLoad" and model["lastFailureInfo"]["modelRevisionName"] == B


def test_an_edit_that_makes_no_new_pods_makes_no_revision() -> None:
    document = service(LLAMA)
    first, seen = engine_of(document, {}, ())
    more, seen = engine_of(document, {"maxReplicas": 9}, seen)
    assert more["revisions"] == first["revisions"]


def test_old_revisions_are_forgotten_and_numbers_continue() -> None:
    document: dict[str, Any] = {}
    for number in range(1, 31):
        digest = f"d{number}"
        document = planned_revisions("x-engine", [Share(digest, 100, latest=True)], {digest}, {digest}, document)
    assert (
        document["latestRolledoutRevision"] == "x-engine-00030"
        and document["previousRolledoutRevision"] == "x-engine-00029"
    )
    assert len(document["revisions"]) == 10


def test_the_label_is_that_of_the_plan() -> None:
    document = service(LLAMA)
    planned = plan(document, facts())
    [engine] = [manifest for manifest in planned.objects if manifest["kind"] == "Deployment"]
    assert engine["metadata"]["labels"][REVISION_LABEL] == planned.rollouts["engine"].latest
    assert status_of(document)["components"]["engine"]["revisions"] == [
        {"name": A, "digest": planned.rollouts["engine"].latest}
    ]
