# SPDX-License-Identifier: Apache-2.0
"""What OME 1.3 added: its modes and autoscalers are planned by our own means, and the rest is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleet_documents import document
from plan_cases import RUNNER, facts, names, one, planned, runtime, service

from headrace.fleet.admission.service_rules import service_problems
from headrace.fleet.merging.components import choose_mode
from headrace.fleet.planning import plan
from headrace.fleet.schema.validation import OME_ONLY_FIELDS, OME_ONLY_KINDS, validate

MODE = "ome.io/deploymentMode"
CPU = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}}
TRIGGER = {"type": "prometheus", "metadata": {"serverAddress": "http://p:9090", "query": "up", "threshold": "5"}}


@pytest.mark.parametrize(
    ("name", "component", "requested", "expected"),
    [
        ("engine", {}, "OMENative", "RawDeployment"),
        ("engine", {"worker": {"size": 1}}, "OMENative", "MultiNode"),
        ("engine", {"worker": {"size": 1}}, "RawDeployment", "RawDeployment"),
        ("engine", {"minReplicas": 0}, "RawDeployment", "RawDeployment"),
        ("engine", {"annotations": {MODE: "MultiNode"}}, "RawDeployment", "MultiNode"),
        ("engine", {"annotations": {MODE: "OMENative"}}, "", "RawDeployment"),
        ("engine", {"annotations": {MODE: "OMENative"}, "leader": {}}, "RawDeployment", "MultiNode"),
        ("decoder", {"leader": {}}, "OMENative", "MultiNode"),
        ("decoder", {"annotations": {MODE: "OMENative"}}, "", "RawDeployment"),
        ("router", {"minReplicas": 0}, "OMENative", "RawDeployment"),
    ],
)
def test_its_modes_become_deployments_and_leader_worker_sets(
    name: str, component: dict[str, Any], requested: str, expected: str
) -> None:
    spec = {name: component, **({"deploymentMode": requested} if requested else {})}
    chosen = choose_mode(name, component, service(spec), facts())
    assert chosen.mode == expected
    declared = component.get("annotations", {}).get(MODE) or requested
    assert declared in chosen.rule


def autoscaled(autoscaler: dict[str, Any], least: int = 2, **more: Any) -> Any:
    return planned({"engine": {"minReplicas": least, "maxReplicas": 4, "autoscaler": autoscaler, **more}})


def test_an_hpa_has_the_metrics_and_behavior_of_the_autoscaler() -> None:
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 300}}
    spec = one(autoscaled({"class": "HPA", "hpa": {"metrics": [CPU], "behavior": behavior}}), "HorizontalPodAutoscaler",
               "chat-engine")["spec"]  # fmt: skip
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
    assert (spec["metrics"], spec["behavior"]) == ([CPU], behavior)


def test_without_metrics_an_hpa_keeps_the_cpu_at_80_percent() -> None:
    spec = one(autoscaled({"class": "HPA"}), "HorizontalPodAutoscaler", "chat-engine")["spec"]
    assert spec["metrics"][0]["resource"]["target"]["averageUtilization"] == 80
    assert "behavior" not in spec


def test_a_scaled_object_has_the_triggers_and_settings_of_the_autoscaler() -> None:
    keda = {"triggers": [TRIGGER], "pollingInterval": 15, "idleReplicaCount": 1, "fallback": {"replicas": 3}}
    plan = autoscaled({"class": "KEDA", "keda": keda}, kedaConfig={"enableKeda": True, "customPromQuery": "sum(other)"})
    spec = one(plan, "ScaledObject", "scaledobject-chat-engine")["spec"]
    assert spec["triggers"] == [TRIGGER]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 4)
    assert (spec["pollingInterval"], spec["idleReplicaCount"], spec["fallback"]) == (15, 1, {"replicas": 3})
    assert "HorizontalPodAutoscaler/chat-engine" not in names(plan)


@pytest.mark.parametrize(("chosen", "replicas"), [("None", 2), ("External", None)])
def test_without_an_autoscaler_of_ours(chosen: str, replicas: int | None) -> None:
    plan = autoscaled({"class": chosen})
    assert not {"HorizontalPodAutoscaler/chat-engine", "ScaledObject/scaledobject-chat-engine"} & set(names(plan))
    assert one(plan, "Deployment", "chat-engine")["spec"].get("replicas") == replicas


def test_the_autoscaler_of_a_service_replaces_that_of_its_runtime_as_a_whole() -> None:
    given = runtime("plain", engineConfig={"runner": RUNNER, "autoscaler": {"class": "HPA", "hpa": {"metrics": [CPU]}}})
    known = replace(facts(), runtimes=(given,))

    def metrics(component: dict[str, Any]) -> Any:
        planned = plan(service({"engine": component}), known)
        return one(planned, "HorizontalPodAutoscaler", "chat-engine")["spec"]["metrics"]

    assert metrics({}) == [CPU]
    [default] = metrics({"autoscaler": {"class": "HPA"}})
    assert default["resource"]["target"]["averageUtilization"] == 80


@pytest.mark.parametrize(
    ("component", "place"),
    [
        ({"autoscaler": {"class": "KEDA"}}, "autoscaler.keda.triggers"),
        ({"minReplicas": 0, "autoscaler": {"class": "None"}}, "autoscaler.class"),
        ({"autoscaler": {"class": "HPA", "hpa": {"metrics": [{"resource": {}}]}}}, "autoscaler.hpa.metrics[0].type"),
        ({"autoscaler": {"class": "HPA", "hpa": {"metrics": [{"type": "Pods"}]}}}, "autoscaler.hpa.metrics[0].pods"),
        (
            {"minReplicas": 1, "autoscaler": {"class": "KEDA", "keda": {"triggers": [TRIGGER], "idleReplicaCount": 1}}},
            "autoscaler.keda.idleReplicaCount",
        ),
    ],
)
def test_an_autoscaler_that_cannot_work_is_refused(component: dict[str, Any], place: str) -> None:
    problems = service_problems(service({"engine": component}), facts())
    assert [problem.field for problem in problems if "autoscaler" in problem.field] == [f"spec.engine.{place}"]


def test_an_autoscaler_beside_the_annotation_is_refused() -> None:
    doubled = service({"engine": {"autoscaler": {"class": "HPA"}}}, ome_io__autoscalerClass="keda")
    paths = [problem.field for problem in service_problems(doubled, facts())]
    assert "spec.engine.autoscaler" in paths


@pytest.mark.parametrize("path", OME_ONLY_FIELDS)
def test_a_field_that_headrace_lacks_is_refused_with_the_next_step(path: str) -> None:
    *parents, name = path.split(".")[1:]
    spec: dict[str, Any] = {"engine": {}, "model": {"name": "llama"}}
    record = spec
    for parent in parents:
        record = record.setdefault(parent, {})
    record[name] = {}
    problems = [problem for problem in validate(document("InferenceService", "chat", spec)) if problem.field == path]
    assert [(problem.message, problem.fix) for problem in problems] == [
        ("is a field of OME that Headrace does not have", OME_ONLY_FIELDS[path])
    ]


@pytest.mark.parametrize("kind", OME_ONLY_KINDS)
def test_a_kind_that_headrace_lacks_is_refused_with_the_next_step(kind: str) -> None:
    [problem] = [problem for problem in validate(document(kind, "x", {})) if problem.field == "kind"]
    assert kind in problem.message
    assert problem.fix == OME_ONLY_KINDS[kind]
