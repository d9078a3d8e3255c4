# SPDX-License-Identifier: Apache-2.0
"""The state of the model, and the real reason when something does not run."""

from __future__ import annotations

from typing import Any

import pytest
from fleet_observations import (
    LLAMA,
    NOON,
    ROUTED,
    condition,
    condition_of,
    crashing,
    facts,
    live,
    observe,
    pod,
    revision,
    service,
)

from headrace.fleet import schema
from headrace.fleet.planning import plan
from headrace.fleet.status.conditions import Observed
from headrace.fleet.status.service_status import build_status
from headrace.fleet.status.workloads import pod_state

DEEPSEEK: dict[str, Any] = {"model": {"name": "deepseek-r1"}}


def status_with_pods(
    pods: list[dict[str, Any]], spec: dict[str, Any] = LLAMA, *, down: tuple[str, ...] = ("llama-chat-engine",)
) -> Any:
    document = service(spec)
    planned = plan(document, facts())
    for pod_document in pods:
        pod_document["metadata"]["labels"] = {**revision(planned), **pod_document["metadata"]["labels"]}
    status = build_status(document, planned, observe(planned, down=down, pods=pods), NOON)
    assert schema.validate_status({**document, "status": status}) == []
    return status


def test_a_container_that_crashes_is_the_reason() -> None:
    result = status_with_pods([crashing("llama-chat-engine-x", message="CUDA out of memory", code=3)])
    engine = condition_of(result, "EngineReady")
    assert (engine["status"], engine["reason"]) == ("False", "CrashLoopBackOff")
    output = "container ome-container ended with exit code 3 (Error): CUDA out of memory"
    assert engine["message"] == f"pod llama-chat-engine-x: {output}"
    assert condition_of(result, "Ready")["reason"] == "CrashLoopBackOff"
    assert result["modelStatus"] == {
        "transitionStatus": "BlockedByFailedLoad",
        "modelRevisionStates": {"activeModelState": "Pending", "targetModelState": "FailedToLoad"},
        "lastFailureInfo": {
            "location": "llama-chat-engine-x",
            "reason": "ModelLoadFailed",
            "message": output,
            "modelRevisionName": "llama-chat-engine-00001",
            "time": "2024-01-15T11:59:00Z",
            "exitCode": 3,
        },
        "modelCopies": {"failedCopies": 1, "totalCopies": 1},
    }


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ('{"level":"ERROR","message":"no memory"}\n{"level":"info","message":"bye"}', "no memory"),
        ("Traceback (most recent call last):\n  ...\nValueError: no such layer\n\n", "ValueError: no such layer"),
        ('ValueError: no such layer\n{"level":"info","message":"bye"}', "ValueError: no such layer"),
        ("7", "7"),
        ('{"level":"info","message":"ready: 1 model(s)"}', ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_log_line_with_the_reason_is_reported(log: str, said: str) -> None:
    message = condition_of(status_with_pods([crashing("a", message=log, code=137)]), "EngineReady")["message"]
    assert message == "pod a: container ome-container ended with exit code 137 (Error)" + (f": {said}" if said else "")


def test_it_has_failed_until_it_is_ready_not_until_it_is_tried_again() -> None:
    again = crashing("a")
    again["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": "2024-01-15T12:00:00Z"}}
    assert status_with_pods([again])["modelStatus"]["transitionStatus"] == "BlockedByFailedLoad"


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    container = {"name": "ome-container", "ready": False, "state": {"waiting": {"reason": reason, "message": message}}}
    return pod("a", containerStatuses=[container])


KILLED = crashing("a", code=137)
KILLED["status"]["containerStatuses"][0]["lastState"]["terminated"]["reason"] = "OOMKilled"
INIT = {"name": "model-init", "state": {"running": {}}}
INIT_FAILED = {"name": "model-init", "state": {"terminated": {"exitCode": 2, "reason": "Error"}}}
STARTING = {"name": "ome-container", "ready": False, "state": {"running": {}}}
DONE = {"name": "ome-container", "ready": False, "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}


@pytest.mark.parametrize(
    ("one", "target", "reason", "failure"),
    [
        (waiting("ImagePullBackOff", "no such image"), "FailedToLoad", "ImagePullBackOff", "RuntimeUnhealthy"),
        (
            waiting("CreateContainerConfigError", "no secret"),
            "FailedToLoad",
            "CreateContainerConfigError",
            "RuntimeUnhealthy",
        ),
        (waiting("ContainerCreating"), "Pending", "ContainerCreating", ""),
        (KILLED, "FailedToLoad", "OOMKilled", "ModelLoadFailed"),
        (pod("a", initContainerStatuses=[INIT]), "Loading", "PodInitializing", ""),
        (pod("a", initContainerStatuses=[INIT_FAILED]), "FailedToLoad", "CrashLoopBackOff", "ModelLoadFailed"),
        (pod("a", containerStatuses=[STARTING]), "Loading", "ContainersNotReady", ""),
        (pod("a", containerStatuses=[DONE]), "Pending", "Pending", ""),
        (
            pod("a", phase="Failed", reason="Evicted", message="low on memory"),
            "FailedToLoad",
            "Evicted",
            "RuntimeUnhealthy",
        ),
        (
            pod("a", phase="Pending", conditions=[condition("PodScheduled", False, "Unschedulable", "0/3 nodes")]),
            "Pending",
            "Unschedulable",
            "",
        ),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_the_status_derived_from_a_pod(one: dict[str, Any], target: str, reason: str, failure: str) -> None:
    result = status_with_pods([one])
    assert result["modelStatus"]["modelRevisionStates"]["targetModelState"] == target
    assert condition_of(result, "EngineReady")["reason"] == reason
    assert result["modelStatus"].get("lastFailureInfo", {}).get("reason", "") == failure
    assert (result["modelStatus"]["transitionStatus"] == "BlockedByFailedLoad") == (target == "FailedToLoad")


def test_a_quota_violation_is_reported_without_a_pod() -> None:
    document = service(LLAMA)
    planned = plan(document, facts())
    objects = [live(manifest, up=False) for manifest in planned.objects]
    [engine] = [manifest for manifest in objects if manifest["kind"] == "Deployment"]
    engine["status"]["conditions"].append(condition("ReplicaFailure", True, "FailedCreate", "exceeded quota: gpus"))
    result = condition_of(build_status(document, planned, Observed(tuple(objects)), NOON), "EngineReady")
    assert (result["status"], result["reason"], result["message"]) == ("False", "FailedCreate", "exceeded quota: gpus")


def test_a_copy_that_fails_beside_one_that_answers_is_counted() -> None:
    result = status_with_pods([pod("good", ready=True, age=9), crashing("bad")], down=())
    model = result["modelStatus"]
    assert model["modelCopies"] == {"failedCopies": 1, "totalCopies": 2}
    assert model["modelRevisionStates"] == {"activeModelState": "Loaded", "targetModelState": "Loaded"}
    assert model["lastFailureInfo"]["location"] == "bad" and condition_of(result, "Ready")["status"] == "True"


def test_the_old_copy_answers_while_the_new_one_loads() -> None:
    document = service(LLAMA)
    planned = plan(document, facts())
    old = pod("old", ready=True, age=99, labels={"ome.io/revision": "before"})
    new = pod("new", containerStatuses=[STARTING], labels=revision(planned))
    observed = observe(planned, pods=[old, new])
    engine = next(manifest for manifest in observed.objects if manifest["kind"] == "Deployment")
    engine["status"] |= {"updatedReplicas": 0}
    model = build_status(document, planned, observed, NOON)["modelStatus"]
    assert model["modelRevisionStates"] == {"activeModelState": "Loaded", "targetModelState": "Loading"}
    assert model["transitionStatus"] == "InProgress"


def test_a_router_loads_no_model_and_terminating_pods_do_not_count() -> None:
    gone = pod("gone", ready=True)
    gone["metadata"]["deletionTimestamp"] = "2024-01-15T11:00:00Z"
    result = status_with_pods([pod("r", "router", ready=True), gone], ROUTED)
    assert result["modelStatus"]["modelRevisionStates"]["activeModelState"] == "Pending"
    assert "modelCopies" not in result["modelStatus"]


def test_the_half_of_a_pair_that_is_least_far_counts() -> None:
    spec = {**DEEPSEEK, "engine": {}, "decoder": {}, "router": {}}
    document = service(spec)
    planned = plan(document, facts())
    pods = [
        pod("e", "engine", ready=True, labels=revision(planned)),
        pod("d", "decoder", containerStatuses=[STARTING], labels=revision(planned, "decoder")),
    ]
    status = build_status(document, planned, observe(planned, down=["llama-chat-decoder"], pods=pods), NOON)
    assert status["modelStatus"]["modelRevisionStates"] == {
        "activeModelState": "Pending",
        "targetModelState": "Loading",
    }
    assert condition_of(status, "DecoderReady")["reason"] == "ContainersNotReady"
    assert condition_of(status, "Ready")["message"].startswith("DecoderReady: pod d:")


def test_of_a_group_of_nodes_the_leader_is_the_copy() -> None:
    document = service({**DEEPSEEK, "engine": {"worker": {"size": 1}}})
    planned = plan(document, facts())
    assert planned.components["engine"].mode == "MultiNode"
    name, index = "leaderworkerset.sigs.k8s.io/name", "leaderworkerset.sigs.k8s.io/worker-index"
    of = {name: "lws-llama-chat-engine", **revision(planned)}
    pods = [pod("g", ready=True, labels={**of, index: "0"}), pod("g-1", ready=True, labels={**of, index: "1"})]
    model = build_status(document, planned, observe(planned, pods=pods), NOON)["modelStatus"]
    assert model["modelCopies"] == {"failedCopies": 0, "totalCopies": 1}
    assert model["modelRevisionStates"] == {"activeModelState": "Loaded", "targetModelState": "Loaded"}
    pods = [pod("g", labels={**of, index: "0"}), crashing("g-1", labels={**of, index: "1"})]
    status = build_status(document, planned, observe(planned, down=["lws-llama-chat-engine"], pods=pods), NOON)
    assert condition_of(status, "EngineReady")["reason"] == "CrashLoopBackOff"
    assert status["modelStatus"]["transitionStatus"] == "BlockedByFailedLoad"


def test_a_model_that_no_node_has_is_reported() -> None:
    cluster = facts()
    [model] = [model for model in cluster.models if model["metadata"]["name"] == "llama-3-70b-instruct"]
    assert isinstance(model, dict)
    document = service(LLAMA)
    for state, transition in (("In_Transit", "InProgress"), ("Failed", "BlockedByFailedLoad")):
        model["status"] = {"state": state, "nodesFailed": ["n1"]}
        planned = plan(document, cluster)
        model_status = build_status(document, planned, observe(planned, down=["llama-chat-engine"]), NOON)[
            "modelStatus"
        ]
        assert model_status["lastFailureInfo"]["reason"] == "BaseModelNotReady"
        assert (
            state in model_status["lastFailureInfo"]["message"] and "n1" in model_status["lastFailureInfo"]["message"]
        )
        assert model_status["transitionStatus"] == transition


def test_a_long_termination_message_is_cut_at_its_beginning() -> None:
    result = status_with_pods([crashing("a", message="x" * 5000 + " the end")])
    message = result["modelStatus"]["lastFailureInfo"]["message"]
    assert len(message) == 1024 and message.endswith("the end")


def lost(**rest: Any) -> dict[str, Any]:
    """A pod of a node that has gone: the node's controller marks it, and all else is what the kubelet said last."""
    ready = {**condition("Ready", False), "lastTransitionTime": "2024-01-15T11:40:00Z"}
    container = {"name": "ome-container", "ready": True, "state": {"running": {"startedAt": "2024-01-15T10:00:00Z"}}}
    made = pod("a", conditions=[ready, condition("ContainersReady", True)], containerStatuses=[container], **rest)
    return {**made, "spec": {"nodeName": "node-7"}}


def test_a_pod_of_a_node_that_is_lost_is_unknown() -> None:
    result = status_with_pods([lost()])
    engine = condition_of(result, "EngineReady")
    assert (engine["status"], engine["reason"]) == ("Unknown", "NodeLost")
    assert engine["message"] == "pod a: Unknown: its node node-7 stopped reporting at 2024-01-15T11:40:00Z"
    state = pod_state({**lost(), "status": {"phase": "Unknown", "reason": "NodeLost"}})
    assert state.message == "Unknown: its node node-7 stopped reporting"
    gated = lost()
    gated["spec"]["readinessGates"] = [{"conditionType": "example.com/healthy"}]
    assert pod_state(gated).reason != "NodeLost"


def test_the_reason_of_a_crash_loop_stays_while_it_runs_ends_and_waits() -> None:
    ended = {"exitCode": 1, "reason": "Error", "message": "no GPU", "finishedAt": "2024-01-15T11:59:00Z"}
    moments = [
        {"restartCount": 0, "state": {"terminated": ended}},
        {"restartCount": 1, "state": {"running": {}}, "lastState": {"terminated": ended}},
        {"restartCount": 1, "state": {"terminated": ended}},
        {"restartCount": 1, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}},
    ]
    result = {
        (state.reason, state.message)
        for moment in moments
        for state in [pod_state(pod("a", containerStatuses=[{"name": "ome-container", "ready": False, **moment}]))]
    }
    assert result == {("CrashLoopBackOff", "container ome-container ended with exit code 1 (Error): no GPU")}


def test_the_last_lines_of_a_program_that_failed_are_in_the_status() -> None:
    lines = [f"line {number}" for number in range(20)]
    info = status_with_pods([crashing("a", message="\n".join([*lines, "", "RuntimeError: no GPU "]))])["modelStatus"][
        "lastFailureInfo"
    ]
    lines_shown = info["message"].splitlines()
    assert lines_shown[0] == "container ome-container ended with exit code 1 (Error): RuntimeError: no GPU"
    assert lines_shown[1:] == [*lines[-7:], "RuntimeError: no GPU"]
    assert condition_of(status_with_pods([crashing("a", message="one\ntwo")]), "EngineReady")["message"].endswith(
        "(Error): two"
    )
