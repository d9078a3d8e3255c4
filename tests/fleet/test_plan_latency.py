# SPDX-License-Identifier: Apache-2.0
"""Latency targets of a service: what is planned for KEDA, for a HorizontalPodAutoscaler and for the front router."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from plan_cases import facts, names, one, planned, service

from headrace.fleet.documents import CAPABILITIES
from headrace.fleet.planning import Plan, plan
from headrace.fleet.planning.autoscalers import COUNTS_REQUESTS

TARGETS = {"ttftMilliseconds": 1500, "tpotMilliseconds": 40}
ENGINE = {"minReplicas": 1, "maxReplicas": 6}


def planned_here(spec: dict[str, Any], **more: Any) -> Plan:
    """As the local fleet plans it, which counts requests itself."""
    return plan(service(spec, **more), replace(facts(), capabilities=CAPABILITIES | {COUNTS_REQUESTS}))


def test_keda_queries_the_front_routers_percentiles() -> None:
    made = planned({"slo": TARGETS, "engine": ENGINE})
    spec = one(made, "ScaledObject", "scaledobject-chat-engine")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 6)
    first, following = spec["triggers"]
    labels = 'namespace="default",ome_io_inferenceservice="chat"'
    value = f"histogram_quantile(0.95, sum by (le) (rate(headrace_router_first_token_seconds_bucket{{{labels}}}[1m])))"
    assert first["metadata"]["query"] == f"clamp_min({value} > 0.75, 1.5) or {value} > 0"
    assert (first["type"], first["metricType"], first["metadata"]["threshold"]) == ("prometheus", "Value", "1.5")
    assert "headrace_router_token_seconds_bucket" in following["metadata"]["query"]
    assert following["metadata"]["threshold"] == "0.04"
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


@pytest.mark.parametrize(
    "planned_by",
    [
        planned_here,
        lambda spec: planned(spec, "keda"),
        lambda spec: planned(spec, ome_io__autoscalerClass="hpa"),
    ],
)
def test_external_metrics_for_a_horizontal_pod_autoscaler(planned_by: Callable[[dict[str, Any]], Plan]) -> None:
    made = planned_by({"slo": {**TARGETS, "percentile": 99.5}, "engine": ENGINE})
    spec = one(made, "HorizontalPodAutoscaler", "chat-engine")["spec"]
    matched = {"namespace": "default", "inferenceservice": "chat", "percentile": "99.5"}
    assert spec["metrics"] == [
        {
            "type": "External",
            "external": {
                "metric": {"name": name, "selector": {"matchLabels": matched}},
                "target": {"type": "Value", "value": value},
            },
        }
        for name, value in (("headrace_first_token_latency", "1500m"), ("headrace_token_latency", "40m"))
    ]
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300


def test_the_front_router_measures_streams() -> None:
    made = planned({"slo": TARGETS, "engine": ENGINE})
    config = json.loads(one(made, "ConfigMap", "chat-front")["data"]["router.yaml"])
    assert config["measure_streams"] is True
    assert one(made, "Deployment", "chat-front")["spec"]["replicas"] == 2
    assert "Deployment/chat-front" not in names(planned({"engine": ENGINE}))


def metrics(made: Any, component: str) -> list[str]:
    spec = one(made, "HorizontalPodAutoscaler", f"chat-{component}")["spec"]
    return [metric["external"]["metric"]["name"] for metric in spec["metrics"]]


def test_prefill_and_decode_scale_apart() -> None:
    plain = {"runner": {"name": "ome-container", "image": "engine:1", "ports": [{"containerPort": 9000}]}}
    spec: dict[str, Any] = {"slo": TARGETS, "engine": {**ENGINE, **plain}, "decoder": {**ENGINE, **plain}}
    made = planned_here({**spec, "router": {"runner": {"name": "router", "image": "r:1"}}})
    assert metrics(made, "engine") == ["headrace_first_token_latency"]
    assert metrics(made, "decoder") == ["headrace_token_latency"]


def test_a_component_overrides_the_service_and_the_annotation_does_as_the_field() -> None:
    made = planned_here({"slo": TARGETS, "engine": {**ENGINE, "slo": {"ttftMilliseconds": 800}}})
    spec = one(made, "HorizontalPodAutoscaler", "chat-engine")["spec"]
    assert [metric["external"]["target"]["value"] for metric in spec["metrics"]] == ["800m", "40m"]
    made = planned_here({"engine": ENGINE}, ome_io__slo=json.dumps({"tpotMilliseconds": 30}))
    assert metrics(made, "engine") == ["headrace_token_latency"]


def test_a_service_with_targets_scales_to_zero_by_its_router() -> None:
    made = planned({"slo": TARGETS, "engine": {"minReplicas": 0, "maxReplicas": 3}}, "keda knative")
    assert metrics(made, "engine")
    config = json.loads(one(made, "ConfigMap", "chat-front")["data"]["router.yaml"])
    assert config["measure_streams"] is True
    assert config["activation"]["targets"][0]["name"] == "chat-engine"
    assert "scale" not in config["activation"]["targets"][0]


@pytest.mark.parametrize(
    ("engine", "annotations", "fix"),
    [
        ({"minReplicas": 2, "maxReplicas": 2}, {}, "raise spec.engine.maxReplicas"),
        (ENGINE, {"ome_io__deploymentMode": "Serverless"}, "ome.io/deploymentMode to RawDeployment"),
    ],
)
def test_what_cannot_scale_by_latency(engine: dict[str, Any], annotations: dict[str, str], fix: str) -> None:
    [problem] = planned({"slo": TARGETS, "engine": engine}, **annotations).problems
    assert problem.field == "spec.engine.slo"
    assert fix in problem.fix
