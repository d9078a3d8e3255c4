# SPDX-License-Identifier: Apache-2.0
"""What the API server tells, as our words; and what it refuses, as errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, ResourceExhausted, Unavailable
from headrace.platforms.contract import PlatformStatus
from headrace.platforms.kubernetes.api_client import refusal_error, unreachable_error
from headrace.platforms.kubernetes.status import newest_pod, service_status

WORKLOAD: dict[str, Any] = {"metadata": {"name": "tao-job-x"}, "spec": {"parallelism": 1}, "status": {}}


def pod(phase: str = "Running", state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    containers = [{"state": state, "restartCount": status.pop("restarts", 0), "lastState": status.pop("last", None)}]
    metadata = {"name": "p", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {
        "metadata": metadata,
        "status": {"phase": phase, "containerStatuses": containers if state else None, **status},
    }


def job(condition: str, **told: str) -> dict[str, Any]:
    return {**WORKLOAD, "status": {"conditions": [{"type": condition, "status": "True", **told}]}}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def phases(observed: PlatformStatus) -> tuple[str, str, int | None]:
    return observed.phase, observed.pod_phase, observed.exit_code


def test_a_missing_workload_is_gone() -> None:
    assert service_status(None, []) == PlatformStatus("gone")


def test_a_running_pod_runs_whether_it_is_ready_or_not() -> None:
    running = pod("Running", {"running": {}}, conditions=[{"type": "Ready", "status": "False"}])
    assert service_status(WORKLOAD, [running]) == PlatformStatus("running", "p", "Running")


@pytest.mark.parametrize(
    ("workload", "pods", "expected", "told"),
    [
        (job("Complete"), [pod("Succeeded", ended(0))], ("ended", "Succeeded", 0), "ended"),
        (job("Failed"), [pod("Failed", ended(3))], ("ended", "Failed", 3), "code 3"),
        (job("Failed"), [pod("Failed", ended(137))], ("ended", "Failed", 137), "signal 9"),
        (job("Failed"), [pod("Failed", ended(137, "OOMKilled"))], ("ended", "Failed", 137), "OOMKilled"),
        (job("Failed", reason="DeadlineExceeded", message="too long"), [], ("ended", "Failed", None), "too long"),
        (WORKLOAD, [pod("Failed", ended(1))], ("ended", "Failed", 1), "code 1"),
        (WORKLOAD, [pod("Failed", None, reason="Evicted", message="disk")], ("ended", "Failed", None), "Evicted: disk"),
        (WORKLOAD, [], ("starting", "Pending", None), "not created yet"),
        ({**WORKLOAD, "spec": {"parallelism": 0}}, [], ("starting", "Pending", None), "interrupted"),
        ({**WORKLOAD, "spec": {"replicas": 0}}, [], ("starting", "Pending", None), "interrupted"),
        (WORKLOAD, [pod("Pending")], ("starting", "Pending", None), "waits for a node"),
        (WORKLOAD, [pod("Pending", waiting("ContainerCreating"))], ("starting", "Pending", None), "pulled"),
        (
            WORKLOAD,
            [pod("Pending", waiting("ErrImagePull", "eof"))],
            ("starting", "Pending", None),
            "ErrImagePull: eof",
        ),
        (WORKLOAD, [pod("Pending", waiting("ImagePullBackOff"))], ("ended", "Failed", None), "pull secret"),
        (WORKLOAD, [pod("Pending", waiting("InvalidImageName"))], ("ended", "Failed", None), "InvalidImageName"),
        (
            WORKLOAD,
            [pod("Pending", waiting("CreateContainerConfigError"))],
            ("ended", "Failed", None),
            "cannot be created",
        ),
        (
            WORKLOAD,
            [pod("Running", waiting("CrashLoopBackOff"), restarts=1, last=ended(2))],
            ("starting", "Pending", 2),
            "again and again",
        ),
        (
            WORKLOAD,
            [pod("Running", waiting("CrashLoopBackOff"), restarts=2, last=ended(137, "OOMKilled"))],
            ("ended", "Failed", 137),
            "OOMKilled",
        ),
        (WORKLOAD, [pod("Running", ended(1))], ("starting", "Pending", 1), "code 1"),
        (WORKLOAD, [pod("Unknown", None, reason="NodeLost")], ("running", "Unknown", None), "NodeLost"),
    ],
)
def test_each_state_has_its_name_and_its_reason(
    workload: dict[str, Any], pods: list[dict[str, Any]], expected: tuple[str, str, int | None], told: str
) -> None:
    observed = service_status(workload, pods)
    assert phases(observed) == expected and told in observed.reason, observed


def test_a_pod_without_a_node_states_the_reason() -> None:
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    observed = service_status(WORKLOAD, [pod("Pending", conditions=[condition])])
    assert observed.phase == "starting" and "no node has that many free GPUs" in observed.reason
    assert message in observed.reason


def test_what_is_on_its_way_out_is_terminating() -> None:
    leaving = {**WORKLOAD, "metadata": {"name": "tao-job-x", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert phases(service_status(leaving, [])) == ("ended", "Terminating", None)
    assert phases(service_status(leaving, [pod("Running", {"running": {}})])) == ("running", "Terminating", None)
    assert phases(service_status(None, [pod("Running", {"running": {}})])) == ("running", "Terminating", None)


def test_without_a_pod_the_events_of_the_controllers_are_reported() -> None:
    assert service_status(WORKLOAD, [], "FailedCreate: exceeded quota").reason == "FailedCreate: exceeded quota"


def test_the_newest_pod_that_stays_counts() -> None:
    old, new, leaving = pod(), pod(), pod()
    new["metadata"] = {"name": "new", "creationTimestamp": "2026-02-01T00:00:00Z"}
    leaving["metadata"] = {"name": "l", "creationTimestamp": "2026-03-01T00:00:00Z", "deletionTimestamp": "x"}
    assert newest_pod([new, leaving, old]) is new and newest_pod([]) is None


FORBIDDEN = 'jobs.batch is forbidden: User "nobody" cannot create resource "jobs" in API group "batch"'
QUOTA = 'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'
SECURITY = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'
WEBHOOK = 'admission webhook "policy.example.org" denied the request: images come from our registry'


@pytest.mark.parametrize(
    ("code", "reason", "message", "kind", "told"),
    [
        (401, "Unauthorized", "Unauthorized", FailedPrecondition, "log in"),
        (403, "Forbidden", FORBIDDEN, FailedPrecondition, "get the role"),
        (403, "Forbidden", QUOTA, ResourceExhausted, "quota"),
        (403, "Forbidden", SECURITY, FailedPrecondition, "a policy of the cluster"),
        (400, "BadRequest", WEBHOOK, FailedPrecondition, "come from our registry"),
        (404, "NotFound", 'namespaces "x" not found', FailedPrecondition, "no such namespace"),
        (409, "Conflict", "the object has been modified", Unavailable, "try again"),
        (413, "", "request too large", InvalidArgument, "shorten"),
        (422, "Invalid", 'Job.batch "x" is invalid: spec', InvalidArgument, "rejects it"),
        (429, "TooManyRequests", "slow down", Unavailable, "overloaded"),
        (500, "InternalError", "etcd", Unavailable, "try again later"),
        (0, "", "", Unavailable, "failed"),
    ],
)
def test_each_refusal_gives_advice(code: int, reason: str, message: str, kind: type[HeadraceError], told: str) -> None:
    created = refusal_error(code, reason, message, "making the Job x")
    assert type(created) is kind and told in created.message and created.message.startswith("making the Job x: ")


def test_a_refusal_is_short_however_long_the_answer() -> None:
    assert len(refusal_error(500, "", "<html>\n" * 10_000, "making").message) < 700


def test_no_answer_names_the_server() -> None:
    created = unreachable_error("https://10.0.0.1:6443", "making", "ConnectError")
    assert isinstance(created, Unavailable) and "https://10.0.0.1:6443" in created.message
