# SPDX-License-Identifier: Apache-2.0
"""Pods as Kubernetes shows them: phases, what comes first, what has ended for good. Nothing runs."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.fleet.local.sight import (
    ContainerState,
    Role,
    Seen,
    State,
    all_ready,
    phase_of,
    pod_shown,
    roles_of,
    terminated,
)
from headrace.fleet.local.states import state_read
from headrace.fleet.status.pods import state_of

DONE = {"exitCode": 0, "reason": "Completed"}
FAILED = {"exitCode": 2, "reason": "Error"}
UP = ContainerState(started_at="2026-11-16T00:00:00Z", started=True, ready=True)


def seen(role: Role, state: ContainerState, name: str = "ome-container") -> Seen:
    return Seen({"name": name, "image": "i"}, role, state)


def test_who_is_always_restarted_stays_beside_the_others() -> None:
    spec = {
        "initContainers": [{"name": "a"}, {"name": "b", "restartPolicy": "Always"}],
        "containers": [{"name": "c"}],
    }
    assert [(each["name"], role) for each, role in roles_of(spec)] == [("a", "init"), ("b", "sidecar"), ("c", "main")]


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
    both = [seen("init", init, "first"), seen("main", main)]
    assert phase_of(both) == phase and all_ready(both) is ready


def test_a_pod_waits_for_what_comes_first() -> None:
    first = seen("init", ContainerState(started_at="2026-11-16T00:00:00Z"), "first")
    shown = pod_shown({"metadata": {"name": "p"}}, State(placed=True), [first, seen("main", ContainerState())], "node")
    assert shown["spec"]["nodeName"] == "node"
    status: Any = shown["status"]
    assert {each["type"]: each["status"] for each in status["conditions"]} == {
        "PodScheduled": "True",
        "Initialized": "False",
        "ContainersReady": "False",
        "Ready": "False",
    }
    assert status["containerStatuses"][0]["state"]["waiting"]["reason"] == "PodInitializing"
    assert state_of(shown).message == "container first is running"


def test_how_a_container_ended_in_kubernetes_words() -> None:
    assert terminated(-9, "a", "b", "", "OOMKilled") == {
        "exitCode": 137,
        "reason": "OOMKilled",
        "startedAt": "a",
        "finishedAt": "b",
        "signal": 9,
    }
    assert terminated(None, "", "", "x")["reason"] == "ContainerStatusUnknown"


def test_a_state_of_another_version_is_read_as_far_as_it_is_known() -> None:
    found = state_read(ContainerState(), {"restarts": 3, "ready": "yes", "unheard": 1})
    assert found.restarts == 3 and found.ready is False
