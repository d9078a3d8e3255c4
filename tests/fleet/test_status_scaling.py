# SPDX-License-Identifier: Apache-2.0
"""An autoscaler that does not work is a condition of its service."""

from __future__ import annotations

from typing import Any

import pytest
from fleet_observations import LLAMA, NOON, condition, condition_of, facts, observe, service

from headrace.fleet import schema
from headrace.fleet.planning import plan
from headrace.fleet.status.conditions import Observed
from headrace.fleet.status.service_status import build_status

KEDA: dict[str, Any] = {**LLAMA, "kedaConfig": {"enableKeda": True}}
NO_METRICS = "the HPA was unable to compute the replica count: no metrics returned from resource metrics API"


def seen(kind: str, conditions: list[dict[str, Any]], spec: dict[str, Any] = LLAMA, *, held: bool = True) -> Any:
    """The status where the autoscaler has these conditions; `held`: by an API server."""
    asked = service(spec)
    made = plan(asked, facts())
    up = observe(made)
    scalers = [each for each in up.objects if each["kind"] == kind]
    assert scalers
    for each in scalers:
        each["metadata"]["resourceVersion"] = "7" if held else ""  # type: ignore[index]
        each["status"] = {"conditions": conditions}  # type: ignore[index]
    found = build_status(asked, made, Observed(up.objects, ()), NOON)
    assert schema.validate_status({**asked, "status": found}) == []
    assert condition_of(found, "EngineReady")["status"] == "True", "a service serves without its autoscaler"
    return [each for each in found["conditions"] if each["type"] == "EngineScalingActive"]


@pytest.mark.parametrize(
    ("conditions", "status", "reason"),
    [
        (
            [condition("ScalingActive", False, "FailedGetResourceMetric", NO_METRICS)],
            "False",
            "FailedGetResourceMetric",
        ),
        ([condition("AbleToScale", False, "FailedGetScale", "no scale")], "False", "FailedGetScale"),
        ([condition("AbleToScale", True), condition("ScalingActive", True)], "True", None),
        ([condition("ScalingActive", False, "ScalingDisabled", "the target has no replicas")], "True", None),
    ],
)
def test_an_hpa_without_metrics(conditions: list[dict[str, Any]], status: str, reason: str | None) -> None:
    [found] = seen("HorizontalPodAutoscaler", conditions)
    assert (found["status"], found.get("reason"), found["severity"]) == (status, reason, "Info")
    if reason == "FailedGetResourceMetric":
        assert found["message"] == f"HorizontalPodAutoscaler llama-chat-engine: {NO_METRICS}"


def test_an_hpa_that_is_new_says_nothing() -> None:
    assert seen("HorizontalPodAutoscaler", []) == []


def test_a_scaled_object_without_its_operator() -> None:
    [found] = seen("ScaledObject", [], KEDA)
    assert (found["status"], found["reason"]) == ("Unknown", "WaitingForKeda")
    assert "is it running?" in found["message"]
    [found] = seen("ScaledObject", [condition("Ready", False, "ScaledObjectCheckFailed", "no Prometheus")], KEDA)
    assert (found["status"], found["reason"]) == ("False", "ScaledObjectCheckFailed")
    assert found["message"].endswith(": no Prometheus")
    [found] = seen("ScaledObject", [condition("Ready", True)], KEDA)
    assert found["status"] == "True"


def test_a_local_fleet_scales_by_itself() -> None:
    assert seen("ScaledObject", [], KEDA, held=False) == []
