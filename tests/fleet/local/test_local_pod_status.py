# SPDX-License-Identifier: Apache-2.0
"""Pods as Kubernetes shows them: phases, what comes first, what has ended for good. Nothing runs."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.fleet.local.pod_status import (
    ContainerState,
    ContainerStatus,
    PodState,
    Role,
    containers_with_roles,
    is_pod_ready,
    parse_state,
    pod_document,
    pod_phase,
    terminated_state,
)
from headrace.fleet.status.workloads import pod_state

DONE = {"exitCode": 0, "reason": "Completed"}
FAILED = {"exitCode": 2, "reason": "Error"}
UP = ContainerState(started_at="2026-11-16T00:00:00Z", started=True, ready=True)


def container_status(role: Role, state: ContainerState, name: str = "ome-container") -> ContainerStatus:
    return ContainerStatus({"name": name, "image": "i"}, role, state)


def test_who_is_always_restarted_stays_beside_the_others() -> None:
    spec = {
        "initContainers": [{"name": "a"}, {"name": "b", "restartPolicy": "Always"}],
        "containers": [{"name": "c"}],
    }
    assert [(item["name"], role) for item, role in containers_with_roles(spec)] == [
        ("a", "init"),
        ("b", "sidecar"),
        ("c", "main"),
    ]


@pytest.mark.parametrize(
    ("init", "main", "phase", "ready"),
    [
        (ContainerState(), ContainerState(), "Pending", False),
        (ContainerState(ended=DONE), UP, "Running", True),
        (ContainerState(ended=DONE), ContainerState(last=FAILED, reason="CrashLoopBackOff"), "Running", False),
        (ContainerState(last=FAILED), ContainerState(), "Pending", False),
        (ContainerState(ended=FAILED), ContainerState(), "Failed", False),
        (ContainerState(ended=DONE), ContainerState(ended=DONE), "Succeeded", False),
        (ContainerState(ended=DONE), ContainerState(ended=FAILED), "Failed", False),
    ],
)
def test_the_phase_of_a_pod(init: ContainerState, main: ContainerState, phase: str, ready: bool) -> None:
    both = [container_status("init", init, "first"), container_status("main", main)]
    assert pod_phase(both) == phase and is_pod_ready(both) is ready


def test_a_pod_waits_for_its_init_containers() -> None:
    first = container_status("init", ContainerState(started_at="2026-11-16T00:00:00Z"), "first")
    shown = pod_document(
        {"metadata": {"name": "p"}}, PodState(placed=True), [first, container_status("main", ContainerState())], "node"
    )
    assert shown["spec"]["nodeName"] == "node"
    status: Any = shown["status"]
    assert {condition["type"]: condition["status"] for condition in status["conditions"]} == {
        "PodScheduled": "True",
        "Initialized": "False",
        "ContainersReady": "False",
        "Ready": "False",
    }
    assert status["containerStatuses"][0]["state"]["waiting"]["reason"] == "PodInitializing"
    assert pod_state(shown).message == "container first is running"


def test_termination_reasons_in_kubernetes_words() -> None:
    assert terminated_state(-9, "a", "b", "", "OOMKilled") == {
        "exitCode": 137,
        "reason": "OOMKilled",
        "startedAt": "a",
        "finishedAt": "b",
        "signal": 9,
    }
    assert terminated_state(None, "", "", "x")["reason"] == "ContainerStatusUnknown"


def test_a_state_of_another_version_is_read_as_far_as_it_is_known() -> None:
    result = parse_state(ContainerState(), {"restarts": 3, "ready": "yes", "unheard": 1})
    assert result.restarts == 3 and result.ready is False
