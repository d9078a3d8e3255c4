# SPDX-License-Identifier: Apache-2.0
"""RawDeployment: names, selectors, ports, probes, autoscaling, disruption budgets, owners."""

from __future__ import annotations

import copy

import pytest
from plan_cases import UID, facts, names, one, planned, service

from headrace.fleet.planning import plan

ENGINE = {"engine": {"minReplicas": 2, "maxReplicas": 5}}


def test_objects_and_their_names() -> None:
    assert names(planned(ENGINE)) == {
        "ConfigMap/modelconfig-chat",
        "Deployment/chat-engine",
        "Service/chat-engine",
        "PodDisruptionBudget/chat-engine",
        "HorizontalPodAutoscaler/chat-engine",
        "Service/chat",
    }


def test_every_object_is_owned_by_the_service() -> None:
    for manifest in planned({**ENGINE, "router": {}}, runtime="routed").objects:
        owner = manifest["metadata"]["ownerReferences"]
        assert owner == [
            {
                "apiVersion": "ome.io/v1beta1",
                "kind": "InferenceService",
                "name": "chat",
                "uid": UID,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
        assert manifest["metadata"]["namespace"] == "default"


def test_deployment_selects_by_app_and_never_sends_replicas() -> None:
    spec = one(planned(ENGINE), "Deployment", "chat-engine")["spec"]
    assert "replicas" not in spec
    assert spec["selector"] == {"matchLabels": {"app": "chat-engine"}}
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    labels = spec["template"]["metadata"]["labels"]
    assert labels["app"] == "chat-engine"
    assert labels["ome.io/inferenceservice"] == "chat"
    assert labels["component"] == "engine"
    assert labels["serving-runtime"] == "plain"
    [container] = spec["template"]["spec"]["containers"]
    assert container["readinessProbe"]["tcpSocket"] == {"port": 9000}
    assert [port["protocol"] for port in container["ports"]] == ["TCP", "TCP"]
    assert {"name": "MODEL_PATH", "value": "/mnt/llama"} in container["env"]


def test_strategy_and_probe_of_the_user_stay() -> None:
    probe = {"httpGet": {"path": "/health", "port": 9000}}
    plan = planned(
        {
            "engine": {
                "deploymentStrategy": {"type": "Recreate"},
                "runner": {"name": "ome-container", "readinessProbe": probe},
            }
        }
    )
    spec = one(plan, "Deployment", "chat-engine")["spec"]
    assert spec["strategy"] == {"type": "Recreate"}
    assert spec["template"]["spec"]["containers"][0]["readinessProbe"] == probe


def test_ports_of_a_service_are_those_of_the_container_that_serves() -> None:
    sidecar = {"name": "aaa", "image": "side:1", "ports": [{"containerPort": 1}]}
    plan = planned({"engine": {"containers": [sidecar]}})
    spec = one(plan, "Service", "chat-engine")["spec"]
    assert spec["selector"] == {"app": "chat-engine"}
    assert spec["ports"] == [
        {"name": "http", "port": 9000, "protocol": "TCP", "targetPort": 9000},
        {"name": "port-9001", "port": 9001, "protocol": "TCP", "targetPort": 9001},
    ]


def test_service_type_and_annotations() -> None:
    plan = planned(
        {"engine": {"annotations": {"prometheus.io/scrape": "true", "team": "a"}}},
        ome_io__service_type="LoadBalancer",
        ome_io__load_balancer_ip="10.0.0.9",
    )
    own = one(plan, "Service", "chat-engine")
    assert own["spec"]["type"] == "LoadBalancer"
    assert own["spec"]["loadBalancerIP"] == "10.0.0.9"
    assert "prometheus.io/scrape" not in own["metadata"]["annotations"]
    assert own["metadata"]["annotations"]["team"] == "a"
    pods = one(plan, "Deployment", "chat-engine")["spec"]["template"]
    assert pods["metadata"]["annotations"]["prometheus.io/scrape"] == "true"


@pytest.mark.parametrize(
    ("engine", "annotations", "expected"),
    [
        ({"minReplicas": 2, "maxReplicas": 5}, {}, ("cpu", 80, 2, 5)),
        ({"minReplicas": 1, "scaleMetric": "memory", "scaleTarget": 60}, {}, ("memory", 60, 1, 3)),
        ({"scaleTarget": 60}, {"ome_io__targetUtilizationPercentage": "35"}, ("cpu", 35, 1, 3)),
    ],
)
def test_autoscaler(engine: dict, annotations: dict, expected: tuple) -> None:
    spec = one(planned({"engine": engine}, **annotations), "HorizontalPodAutoscaler", "chat-engine")["spec"]
    [metric] = spec["metrics"]
    resource = metric["resource"]
    results = (resource["name"], resource["target"]["averageUtilization"], spec["minReplicas"], spec["maxReplicas"])
    assert results == expected
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat-engine"}


def test_external_class_makes_no_autoscaler() -> None:
    plan = planned(ENGINE, ome_io__autoscalerClass="external")
    assert "HorizontalPodAutoscaler/chat-engine" not in names(plan)


@pytest.mark.parametrize("metric", ["rps", "concurrency"])
def test_an_autoscaler_that_cannot_work_is_refused(metric: str) -> None:
    [problem] = planned({"engine": {"scaleMetric": metric}}).problems
    assert problem.field == "spec.engine.scaleMetric"
    assert "kedaConfig" in problem.fix


def test_disruption_budgets() -> None:
    spec = one(planned(ENGINE), "PodDisruptionBudget", "chat-engine")["spec"]
    assert spec == {"selector": {"matchLabels": {"app": "chat-engine"}}, "maxUnavailable": 1}
    plan = planned({"engine": {"minAvailable": "50%"}})
    assert one(plan, "PodDisruptionBudget", "chat-engine")["spec"]["minAvailable"] == "50%"
    plan = planned({"engine": {"maxUnavailable": 0}})
    assert one(plan, "PodDisruptionBudget", "chat-engine")["spec"]["maxUnavailable"] == 0


def test_names_that_overflow_a_label() -> None:
    name = "a" + "long-name-" * 5 + "nearly-end"
    plan = planned(ENGINE, name=name)
    for manifest in plan.objects:
        assert manifest["kind"] != "Service" or len(manifest["metadata"]["name"]) <= 63
        for value in manifest["metadata"]["labels"].values():
            assert len(value) <= 63
    deployment = one(plan, "Deployment", f"{name}-engine")
    app = deployment["spec"]["selector"]["matchLabels"]["app"]
    assert len(app) <= 63
    assert deployment["spec"]["template"]["metadata"]["labels"]["app"] == app


def test_inputs_are_not_changed_and_results_are_deterministic() -> None:
    given = service({**ENGINE, "router": {"config": {"b": "2", "a": "1"}}}, runtime="routed")
    kept, cluster = copy.deepcopy(given), facts()
    first = plan(given, cluster)
    assert given == kept
    assert plan(given, cluster).objects == first.objects == plan(kept, facts()).objects


def test_problems_leave_no_objects() -> None:
    plan = planned({"engine": {"minReplicas": 5, "maxReplicas": 2}})
    assert plan.problems
    assert plan.objects == []


def test_a_service_without_any_image_is_reported() -> None:
    planned = plan(service({"engine": {}, "decoder": {}, "router": {}}, runtime="plain"), facts())
    assert any(problem.field.startswith("spec.router") for problem in planned.problems)


def test_the_token_of_a_model_is_in_no_config_map() -> None:
    from dataclasses import replace

    from fleet_documents import document

    cluster = facts()
    [model] = cluster.models
    storage = {"path": "/mnt/llama", "storageUri": "hf://a/b", "parameters": {"token": "hf_secret", "region": "x"}}
    secret = document("ClusterBaseModel", "llama", {**model["spec"], "storage": storage})
    planned = plan(service(ENGINE), replace(cluster, models=(secret,)))
    data = one(planned, "ConfigMap", "modelconfig-chat")["data"]["models.json"]
    assert "hf_secret" not in data
    assert '"region": "x"' in data
