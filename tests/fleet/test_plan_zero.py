# SPDX-License-Identifier: Apache-2.0
"""To zero without Knative: the front that holds requests and wakes pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_cases import facts, live, names, one, planned, service

from headrace.cli.router_settings import router_settings
from headrace.fleet.planning import Plan, ScaleUp, plan
from headrace.fleet.router.settings import ScaleTarget, TargetScale

ZERO = {"engine": {"minReplicas": 0, "maxReplicas": 6, "scaleTarget": 10}}


def config(made: Plan) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(one(made, "ConfigMap", "chat-front")["data"]["router.yaml"])
    return document


def test_without_knative_our_router_wakes_a_deployment() -> None:
    plan = planned(ZERO, without="knative")
    assert plan.modes == {"engine": "RawDeployment"}
    assert "HorizontalPodAutoscaler/chat-engine" not in names(plan)
    assert "replicas" not in one(plan, "Deployment", "chat-engine")["spec"]
    assert one(plan, "Service", "chat")["spec"]["selector"] == {"app": "chat-front"}
    activation = config(plan)["activation"]
    assert activation["targets"] == [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "namespace": "default",
            "name": "chat-engine",
            "scale": {"metric": "concurrency", "target": 10, "most": 6},
        }
    ]
    assert activation["idle_seconds"] == 300
    assert plan.urls.url == "http://chat.default.svc.cluster.local:9000"


def test_the_front_reads_what_is_written_for_it(tmp_path: Path) -> None:
    plan = planned(ZERO, without="knative")
    path = tmp_path / "router.yaml"
    path.write_text(one(plan, "ConfigMap", "chat-front")["data"]["router.yaml"])
    router = router_settings({}, str(path)).router
    assert router.activation is not None
    assert router.activation.targets == (ScaleTarget("chat-engine", scale=TargetScale("concurrency", 10, 6)),)
    assert (router.activation.wait_seconds, router.activation.held_requests) == (900, 1000)


def test_the_front_may_scale_its_services_and_nothing_else() -> None:
    plan = planned(ZERO, without="knative")
    rules = one(plan, "Role", "chat-front")["rules"]
    assert {(rule["resources"][0], *rule["resourceNames"]) for rule in rules} == {
        ("deployments", "chat-engine"),
        ("deployments/scale", "chat-engine"),
        ("configmaps", "chat-front"),
    }
    binding = one(plan, "RoleBinding", "chat-front")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "chat-front", "namespace": "default"}]
    pod = one(plan, "Deployment", "chat-front")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "chat-front"
    assert pod["containers"][0]["args"] == [
        *("router", "--config", "/etc/headrace/router.yaml"),
        *("--config-map", "default/chat-front"),
    ]


def test_requested_by_annotation_where_there_is_knative() -> None:
    assert planned(ZERO).modes == {"engine": "Serverless"}
    assert planned(ZERO, ome_io__deploymentMode="RawDeployment").modes == {"engine": "RawDeployment"}


def test_serverless_by_annotation_needs_knative() -> None:
    [problem] = planned({"engine": {}}, without="knative", ome_io__deploymentMode="Serverless").problems
    assert "Knative" in problem.message


def test_by_cpu_an_autoscaler_works_above_one() -> None:
    plan = planned({"engine": {"minReplicas": 0, "maxReplicas": 6, "scaleMetric": "cpu"}}, without="knative")
    assert one(plan, "HorizontalPodAutoscaler", "chat-engine")["spec"]["minReplicas"] == 1
    assert "scale" not in config(plan)["activation"]["targets"][0]


def test_all_that_sleep_are_woken_together() -> None:
    spec = {"engine": {"minReplicas": 0}, "decoder": {"minReplicas": 0}, "router": {"minReplicas": 1}}
    plan = planned(spec, runtime="groups")
    assert [target["name"] for target in config(plan)["activation"]["targets"]] == [
        "lws-chat-engine",
        "lws-chat-decoder",
    ]
    assert config(plan)["backends"] == ["http://chat-router.default.svc.cluster.local:8080,weight=100"]
    assert "replicas" not in one(plan, "LeaderWorkerSet", "lws-chat-engine")["spec"]
    resources = {rule["resources"][0] for rule in one(plan, "Role", "chat-front")["rules"]}
    assert resources == {"leaderworkersets", "leaderworkersets/scale", "configmaps"}


def test_pods_that_answer_are_not_left_for_a_front_that_does_not() -> None:
    cluster = facts("knative")
    first = plan(service({"engine": {"minReplicas": 1}}), cluster)
    begun = plan(service(ZERO), cluster, live(first))
    assert one(begun, "Service", "chat")["spec"]["selector"]["component"] == "engine"
    done = plan(service(ZERO), cluster, live(begun))
    assert one(done, "Service", "chat")["spec"]["selector"] == {"app": "chat-front"}


def test_keda_scales_to_zero_by_the_request_counts_of_the_front() -> None:
    plan = planned({**ZERO, "kedaConfig": {"enableKeda": True}}, without="knative")
    spec = one(plan, "ScaledObject", "scaledobject-chat-engine")["spec"]
    assert spec["minReplicaCount"] == 0
    counted = spec["triggers"][1]
    assert counted["type"] == "metrics-api"
    assert counted["metadata"]["url"] == "http://chat.default.svc.cluster.local:9000/router/status"
    assert "scale" not in config(plan)["activation"]["targets"][0]


def test_how_long_a_service_may_be_idle() -> None:
    spec = service(ZERO)
    spec["metadata"]["annotations"] = {"ome.io/scale-to-zero-idle-seconds": "45"}
    assert config(plan(spec, facts("knative")))["activation"]["idle_seconds"] == 45


@pytest.mark.parametrize(("given", "level"), [("1", 1), ("2", 2), ("3", None), ("", None)])
def test_how_deep_a_service_sleeps_in_the_local_fleet(given: str, level: int | None) -> None:
    spec = service(ZERO)
    spec["metadata"]["annotations"] = {"ome.io/scale-to-zero-sleep-level": given}
    assert config(plan(spec, facts("knative")))["activation"].get("sleep_level") == level


def test_self_scaling_components_are_not_changed() -> None:
    plan = planned(ZERO, without="knative", ome_io__autoscalerClass="external")
    assert "Deployment/chat-front" not in names(plan)


def test_who_sleeps_and_may_not_any_more_is_woken_by_us() -> None:
    asleep = live(planned(ZERO, without="knative"), replicas=0)
    awake = service({"engine": {"minReplicas": 2, "maxReplicas": 6}})
    made = plan(awake, facts("knative"), asleep)
    assert made.scale_ups == [ScaleUp("apps/v1", "Deployment", "chat-engine", 2)]
    # Nor is anybody's scaling undone: somebody may have put it to zero by hand, without a front.
    by_hand = {key: item for key, item in asleep.items() if "front" not in key}
    assert plan(awake, facts("knative"), by_hand).scale_ups == []
    assert plan(service(ZERO), facts("knative"), asleep).scale_ups == []
