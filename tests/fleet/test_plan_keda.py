# SPDX-License-Identifier: Apache-2.0
"""KEDA: what turns it on, every field of kedaConfig, queries with percent signs."""

from __future__ import annotations

from typing import Any

import pytest
from plan_cases import names, one, planned

OBJECT = "scaledobject-chat-engine"


def trigger(keda: dict[str, Any], **more: Any) -> dict[str, Any]:
    plan = planned({"engine": {"minReplicas": 1, "maxReplicas": 9, "kedaConfig": {"enableKeda": True, **keda}}}, **more)
    [found] = one(plan, "ScaledObject", OBJECT)["spec"]["triggers"]
    result: dict[str, Any] = found
    return result


@pytest.mark.parametrize(
    ("spec", "annotations"),
    [
        ({"kedaConfig": {"enableKeda": True}, "engine": {}}, {}),
        ({"engine": {"kedaConfig": {"enableKeda": True}}}, {}),
        ({"engine": {}}, {"ome_io__autoscalerClass": "keda"}),
    ],
)
def test_what_turns_it_on(spec: dict[str, Any], annotations: dict[str, str]) -> None:
    plan = planned(spec, **annotations)
    assert f"ScaledObject/{OBJECT}" in names(plan)
    assert "HorizontalPodAutoscaler/chat-engine" not in names(plan)
    spec = one(plan, "ScaledObject", OBJECT)["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat-engine"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 3)


def test_a_component_may_turn_it_off() -> None:
    plan = planned({"kedaConfig": {"enableKeda": True}, "engine": {"kedaConfig": {"enableKeda": False}}})
    assert "HorizontalPodAutoscaler/chat-engine" in names(plan)


def test_the_query_finds_the_pods_by_their_labels() -> None:
    query = trigger({})["metadata"]["query"]
    assert 'ome_io_inferenceservice="chat"' in query
    assert 'component="engine"' in query
    assert 'namespace="default"' in query


def test_every_field_is_honoured() -> None:
    result = trigger(
        {
            "promServerAddress": "http://prom:9090",
            "customPromQuery": "sum(up)",
            "scalingThreshold": "0.5",
            "authenticationRef": {"name": "prom", "kind": "ClusterTriggerAuthentication"},
            "authModes": "basic,tls",
        }
    )
    assert result == {
        "type": "prometheus",
        "metadata": {
            "serverAddress": "http://prom:9090",
            "query": "sum(up)",
            "threshold": "0.5",
            "authModes": "basic,tls",
        },
        "authenticationRef": {"name": "prom", "kind": "ClusterTriggerAuthentication"},
    }


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("latency{service='%s'}", "latency{service='chat-engine'}"),
        ("a{x='%s'} + b{x='%s'}", "a{x='chat-engine'} + b{x='chat-engine'}"),
        ("100 * a % 7", "100 * a % 7"),
        ("a{path=~'/50%25'} %d %", "a{path=~'/50%25'} %d %"),
    ],
)
def test_percent_signs(query: str, expected: str) -> None:
    assert trigger({"customPromQuery": query})["metadata"]["query"] == expected


def test_less_than_scales_up_while_the_value_is_small() -> None:
    result = trigger({"customPromQuery": "tokens", "scalingThreshold": "20", "scalingOperator": "LessThanOrEqual"})
    assert result["metadata"]["query"] == "20 / clamp_min((tokens), (20 / 1000))"
    assert result["metadata"]["threshold"] == "1"
    assert result["metricType"] == "Value"
    assert "metricType" not in trigger({"scalingOperator": "GreaterThan"})


def test_annotations_override_the_configuration() -> None:
    engine = {
        "kedaConfig": {"enableKeda": True, "customPromQuery": "b", "scalingThreshold": "2"},
        "annotations": {
            "autoscaling.keda.sh/prometheus.query": "a",
            "autoscaling.keda.sh/threshold": "1.5",
            "autoscaling.keda.sh/prometheus.serverAddress": "http://x:1",
        },
    }
    [found] = one(planned({"engine": engine}), "ScaledObject", OBJECT)["spec"]["triggers"]
    assert found["metadata"] == {"query": "a", "threshold": "1.5", "serverAddress": "http://x:1"}


@pytest.mark.parametrize("threshold", ["0", "-3", "0.0"])
def test_a_threshold_that_cannot_be_divided_by(threshold: str) -> None:
    plan = planned({"engine": {"kedaConfig": {"enableKeda": True, "scalingThreshold": threshold}}})
    assert [problem.field for problem in plan.problems] == ["spec.engine.kedaConfig.scalingThreshold"]


def test_a_cluster_without_keda() -> None:
    [problem] = planned({"kedaConfig": {"enableKeda": True}, "engine": {}}, without="keda").problems
    assert "install KEDA" in problem.fix


def test_groups_are_scaled_too() -> None:
    plan = planned({"kedaConfig": {"enableKeda": True}, "engine": {}}, runtime="groups")
    reference = one(plan, "ScaledObject", OBJECT)["spec"]["scaleTargetRef"]
    assert reference["kind"] == "LeaderWorkerSet"
    assert reference["name"] == "lws-chat-engine"
    assert "replicas" not in one(plan, "LeaderWorkerSet", "lws-chat-engine")["spec"]


def test_routers_are_not_scaled_by_tokens() -> None:
    spec: dict[str, Any] = {"kedaConfig": {"enableKeda": True}, "engine": {}, "router": {}}
    assert "HorizontalPodAutoscaler/chat-router" in names(planned(spec, runtime="routed"))
    spec["router"] = {"kedaConfig": {"enableKeda": True, "customPromQuery": "x"}}
    assert "ScaledObject/scaledobject-chat-router" in names(planned(spec, runtime="routed"))
