# SPDX-License-Identifier: Apache-2.0
"""Services that cannot be made: the status says what to change, and what ran before stays."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from fleet_sight import LLAMA, NOON, facts, look, pod, revision, service, sight, told

from headrace.fleet import schema
from headrace.fleet.documents import ClusterFacts, Problem
from headrace.fleet.planning import plan
from headrace.fleet.status.conditions import Observed
from headrace.fleet.status.service_status import problem_status

ENGINE: dict[str, Any] = {"engine": {}}
STRANGE = {
    "kind": "ClusterBaseModel",
    "metadata": {"name": "strange"},
    "spec": {"modelFormat": {"name": "scroll"}, "modelArchitecture": "Papyrus"},
}
OFF = {"kind": "ClusterBaseModel", "metadata": {"name": "off"}, "spec": {"disabled": True}}
DEAD = {"kind": "ClusterServingRuntime", "metadata": {"name": "dead"}, "spec": {"disabled": True}}


def cluster() -> ClusterFacts:
    found = facts()
    return ClusterFacts(runtimes=(*found.runtimes, DEAD), models=(*found.models, STRANGE, OFF))


@pytest.mark.parametrize(
    ("spec", "reason", "failure"),
    [
        ({**ENGINE, "model": {"name": "nowhere"}}, "BaseModelNotFound", "BaseModelNotFound"),
        ({**ENGINE, "model": {"name": "off"}}, "BaseModelNotReady", "BaseModelNotReady"),
        ({**ENGINE, "model": {"name": "strange"}}, "NoSupportingRuntime", "NoSupportingRuntime"),
        ({**LLAMA, "runtime": {"name": "nowhere"}}, "RuntimeNotRecognized", "RuntimeNotRecognized"),
        ({**LLAMA, "runtime": {"name": "dead"}}, "RuntimeDisabled", "RuntimeDisabled"),
        ({**LLAMA, "runtime": {"name": "deepseek-pairs"}}, "NoSupportingRuntime", "NoSupportingRuntime"),
        ({**LLAMA, "engine": {"minReplicas": 5, "maxReplicas": 2}}, "InvalidSpec", "InvalidPredictorSpec"),
        ({"model": {"name": "deepseek-r1"}, "decoder": {}}, "InvalidSpec", "InvalidPredictorSpec"),
    ],
)
def test_each_error_has_its_reason(spec: dict[str, Any], reason: str, failure: str) -> None:
    asked = service(spec, generation=4)
    found = look(asked, Observed(), cluster=cluster())
    ready = told(found, "Ready")
    assert (ready["status"], ready["reason"], ready["observedGeneration"]) == ("False", reason, 4)
    assert ready["message"].startswith("spec.") and "; " in ready["message"]
    model = found["modelStatus"]
    assert model["transitionStatus"] == "InvalidSpec" and model["lastFailureInfo"]["reason"] == failure
    assert model["lastFailureInfo"]["message"] == ready["message"]
    assert model["modelRevisionStates"] == {"activeModelState": "Pending", "targetModelState": "FailedToLoad"}
    assert found["observedGeneration"] == 4
    assert schema.validate_status({**asked, "status": found}) == []


def test_what_ran_before_stays_told() -> None:
    asked = service(LLAMA)
    made = plan(asked, facts())
    observed = sight(made, pods=[pod("a", ready=True, labels=revision(made))])
    asked["status"] = before = look(asked, observed)
    asked["spec"] = {**LLAMA, "model": {"name": "nowhere"}}
    found = look(asked, now=NOON + timedelta(hours=1))
    assert found["url"] == before["url"] and found["components"] == before["components"]
    assert told(found, "EngineReady")["status"] == "True" and told(found, "Ready")["status"] == "False"
    assert found["modelStatus"]["modelRevisionStates"]["activeModelState"] == "Loaded"
    assert found["modelStatus"]["modelCopies"] == {"failedCopies": 0, "totalCopies": 1}
    asked["status"] = found
    assert look(asked, now=NOON + timedelta(hours=2)) == found


def test_an_error_that_is_not_the_users_leaves_the_model_alone() -> None:
    asked = service(LLAMA)
    asked["status"] = before = look(asked)
    problem = Problem("", "the API server does not answer", "nothing: it is tried again")
    found = problem_status(asked, [problem], NOON, reason="ReconcileError")
    assert told(found, "Ready")["reason"] == "ReconcileError" and found["modelStatus"] == before["modelStatus"]


def test_many_problems_are_counted() -> None:
    problems = [Problem(f"spec.{number}", "is wrong", "change it") for number in range(9)]
    message = told(problem_status(service(LLAMA), problems, NOON), "Ready")["message"]
    assert "spec.4: is wrong" in message and "spec.5" not in message and message.endswith("and 4 more")


@pytest.mark.parametrize("spec", [{}, {"runtime": {"name": "vllm-text-generation"}}])
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {"state": "Failed", "nodesFailed": ["n1"], "message": "n1: hf://org/new: 403: accept its licence"},
            "the download of the model new failed on n1: hf://org/new: 403: accept its licence",
        ),
        ({"state": "Failed"}, "the download of the model new failed"),
        ({"state": "In_Transit"}, "the model new is being downloaded"),
    ],
)
def test_a_model_that_is_not_there_says_so_instead_of_having_no_architecture(
    status: dict[str, Any], words: str, spec: dict[str, Any]
) -> None:
    new = {"kind": "ClusterBaseModel", "metadata": {"name": "new"}, "spec": {}, "status": status}
    found = facts()
    there = ClusterFacts(runtimes=found.runtimes, models=(*found.models, new))
    said = look(service({**ENGINE, "model": {"name": "new"}, **spec}), Observed(), cluster=there)
    ready = told(said, "Ready")
    assert ready["reason"] == "BaseModelNotReady" and words in ready["message"], ready
    assert "architecture mismatch" not in ready["message"] and "has no architecture" not in ready["message"]
    assert said["modelStatus"]["lastFailureInfo"]["reason"] == "BaseModelNotReady"
