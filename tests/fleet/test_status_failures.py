# SPDX-License-Identifier: Apache-2.0
"""Services that cannot be made: the status says what to change, and what ran before stays."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from fleet_observations import LLAMA, NOON, condition_of, facts, observe, pod, revision, service, status_of

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
    result = facts()
    return ClusterFacts(runtimes=(*result.runtimes, DEAD), models=(*result.models, STRANGE, OFF))


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
    document = service(spec, generation=4)
    result = status_of(document, Observed(), cluster=cluster())
    ready = condition_of(result, "Ready")
    assert (ready["status"], ready["reason"], ready["observedGeneration"]) == ("False", reason, 4)
    assert ready["message"].startswith("spec.") and "; " in ready["message"]
    model = result["modelStatus"]
    assert model["transitionStatus"] == "InvalidSpec" and model["lastFailureInfo"]["reason"] == failure
    assert model["lastFailureInfo"]["message"] == ready["message"]
    assert model["modelRevisionStates"] == {"activeModelState": "Pending", "targetModelState": "FailedToLoad"}
    assert result["observedGeneration"] == 4
    assert schema.validate_status({**document, "status": result}) == []


def test_the_previous_revision_stays_in_the_status() -> None:
    document = service(LLAMA)
    planned = plan(document, facts())
    observed = observe(planned, pods=[pod("a", ready=True, labels=revision(planned))])
    document["status"] = before = status_of(document, observed)
    document["spec"] = {**LLAMA, "model": {"name": "nowhere"}}
    result = status_of(document, now=NOON + timedelta(hours=1))
    assert result["url"] == before["url"] and result["components"] == before["components"]
    assert (
        condition_of(result, "EngineReady")["status"] == "True" and condition_of(result, "Ready")["status"] == "False"
    )
    assert result["modelStatus"]["modelRevisionStates"]["activeModelState"] == "Loaded"
    assert result["modelStatus"]["modelCopies"] == {"failedCopies": 0, "totalCopies": 1}
    document["status"] = result
    assert status_of(document, now=NOON + timedelta(hours=2)) == result


def test_an_error_that_is_not_the_users_leaves_the_model_alone() -> None:
    document = service(LLAMA)
    document["status"] = before = status_of(document)
    problem = Problem("", "the API server does not answer", "nothing: it is tried again")
    result = problem_status(document, [problem], NOON, reason="ReconcileError")
    assert (
        condition_of(result, "Ready")["reason"] == "ReconcileError" and result["modelStatus"] == before["modelStatus"]
    )


def test_many_problems_are_counted() -> None:
    problems = [Problem(f"spec.{number}", "is wrong", "change it") for number in range(9)]
    message = condition_of(problem_status(service(LLAMA), problems, NOON), "Ready")["message"]
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
    said = status_of(service({**ENGINE, "model": {"name": "new"}, **spec}), Observed(), cluster=there)
    ready = condition_of(said, "Ready")
    assert ready["reason"] == "BaseModelNotReady" and words in ready["message"], ready
    assert "architecture mismatch" not in ready["message"] and "has no architecture" not in ready["message"]
    assert said["modelStatus"]["lastFailureInfo"]["reason"] == "BaseModelNotReady"
