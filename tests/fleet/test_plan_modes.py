# SPDX-License-Identifier: Apache-2.0
"""Objects of Serverless, MultiNode, Ray, prefill-decode and virtual services; the router component."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plan_cases import facts, names, one, planned, service

from headrace.fleet.documents import FleetSettings
from headrace.fleet.planning import plan

LEADERS = {"app": "chat-engine", "leaderworkerset.sigs.k8s.io/worker-index": "0"}


def test_serverless() -> None:
    engine = {
        "minReplicas": 0,
        "maxReplicas": 7,
        "scaleTarget": 10,
        "scaleMetric": "concurrency",
        "containerConcurrency": 4,
        "timeoutSeconds": 90,
        "annotations": {"serving.knative.dev/rollout-duration": "60s"},
    }
    plan = planned({"engine": engine})
    knative = one(plan, "ksvc", "chat-engine")
    assert knative["apiVersion"] == "serving.knative.dev/v1"
    assert knative["metadata"]["annotations"] == {"serving.knative.dev/rollout-duration": "60s"}
    template = knative["spec"]["template"]
    annotations = template["metadata"]["annotations"]
    assert annotations["autoscaling.knative.dev/min-scale"] == "0"
    assert annotations["autoscaling.knative.dev/max-scale"] == "7"
    assert annotations["autoscaling.knative.dev/target"] == "10"
    assert annotations["autoscaling.knative.dev/metric"] == "concurrency"
    assert annotations["autoscaling.knative.dev/class"] == "kpa.autoscaling.knative.dev"
    assert "serving.knative.dev/rollout-duration" not in annotations
    spec = template["spec"]
    assert (spec["containerConcurrency"], spec["timeoutSeconds"], spec["responseStartTimeoutSeconds"]) == (4, 90, 90)
    assert spec["containers"][0]["ports"] == [{"containerPort": 9000, "protocol": "TCP"}]
    assert knative["spec"]["traffic"] == [{"latestRevision": True, "percent": 100}]


def test_serverless_is_reached_through_knative_and_not_around_it() -> None:
    plan = planned({"engine": {"minReplicas": 0}})
    assert one(plan, "Service", "chat")["spec"]["selector"] == {"app": "chat-front"}
    config = json.loads(one(plan, "ConfigMap", "chat-front")["data"]["router.yaml"])
    assert config["backends"] == ["http://chat-engine.default.svc.cluster.local:80,weight=100"]
    assert config["keep_host"] is False
    assert "activation" not in config


def test_serverless_canary() -> None:
    spec = service({"engine": {"minReplicas": 0, "canaryTrafficPercent": 30}}, ome_io__enable_tag_routing="true")
    spec["status"] = {"components": {"engine": {"latestRolledoutRevision": "chat-engine-00001"}}}
    traffic = one(plan(spec, facts()), "ksvc", "chat-engine")["spec"]["traffic"]
    assert traffic == [
        {"latestRevision": True, "percent": 30, "tag": "latest"},
        {"latestRevision": False, "revisionName": "chat-engine-00001", "percent": 70, "tag": "prev"},
    ]


def test_groups() -> None:
    plan = planned({"engine": {"minReplicas": 2}}, runtime="groups")
    assert names(plan) == {
        "ConfigMap/modelconfig-chat",
        "LeaderWorkerSet/lws-chat-engine",
        "Service/chat-engine",
        "Service/chat",
    }
    spec = one(plan, "LeaderWorkerSet", "lws-chat-engine")["spec"]
    assert spec["replicas"] == 2
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["networkConfig"] == {"subdomainPolicy": "Shared"}
    template = spec["leaderWorkerTemplate"]
    assert template["size"] == 3
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader, worker = (template[f"{role}Template"] for role in ("leader", "worker"))
    assert leader["metadata"]["labels"]["app"] == "chat-engine"
    assert leader["metadata"]["labels"]["ray.io/node-type"] == "head"
    assert "app" not in worker["metadata"]["labels"]
    assert "readinessProbe" in leader["spec"]["containers"][0]
    assert "readinessProbe" not in worker["spec"]["containers"][0]


def test_services_before_groups_select_their_own_leaders_alone() -> None:
    plan = planned({"engine": {}, "decoder": {}}, runtime="groups")
    assert one(plan, "Service", "chat-engine")["spec"]["selector"] == LEADERS
    assert one(plan, "Service", "chat-decoder")["spec"]["selector"]["app"] == "chat-decoder"
    assert one(plan, "Service", "chat")["spec"]["selector"] == {
        "ome.io/inferenceservice": "chat",
        "component": "engine",
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }


def test_a_leader_without_workers_is_a_group_of_one() -> None:
    leader = {"runner": {"name": "ome-container", "image": "engine:1"}}
    plan = planned({"engine": {"leader": leader}})
    template = one(plan, "LeaderWorkerSet", "lws-chat-engine")["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 1
    assert template["workerTemplate"]["spec"]["containers"][0]["image"] == "engine:1"


@pytest.mark.parametrize(
    ("without", "word", "annotations"),
    [("lws", "LeaderWorkerSet", {}), ("ray", "KubeRay", {"ome_io__deploymentMode": "MultiNodeRayVLLM"})],
)
def test_what_the_cluster_does_not_have(without: str, word: str, annotations: dict[str, str]) -> None:
    plan = planned({"engine": {}}, without=without, runtime="groups", **annotations)
    assert [word in problem.message for problem in plan.problems] == [True]
    assert plan.objects == []


def test_ray() -> None:
    plan = planned({"engine": {"minReplicas": 2}}, runtime="groups", ome_io__deploymentMode="MultiNodeRayVLLM")
    assert {"RayCluster/chat-engine-0", "RayCluster/chat-engine-1", "Service/chat-engine"} <= names(plan)
    cluster = one(plan, "RayCluster", "chat-engine-0")
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"]) == ("wg", 2)
    worker = group["template"]["spec"]["containers"][0]
    assert "KUBERAY_GEN_RAY_START_CMD" in worker["command"][-1]
    assert "args" not in worker
    assert "ray stop" in worker["lifecycle"]["preStop"]["exec"]["command"][-1]
    own = one(plan, "Service", "chat-engine")["spec"]
    assert own["selector"] == {"app": "chat-engine", "ray.io/node-type": "head"}
    assert 8265 in [port["port"] for port in own["ports"]]


def test_prefill_and_decode() -> None:
    plan = planned({"engine": {}, "decoder": {"minReplicas": 2}, "router": {}}, runtime="groups")
    assert plan.modes == {"engine": "MultiNode", "decoder": "MultiNode", "router": "RawDeployment"}
    assert one(plan, "Service", "chat")["spec"]["selector"]["component"] == "router"


def test_virtual_services_are_made_of_nothing() -> None:
    plan = planned({"engine": {}}, ome_io__deploymentMode="VirtualDeployment")
    assert plan.objects == []
    assert plan.problems == []
    assert plan.urls.url == plan.urls.address == "http://chat.default.svc.cluster.local"


def router(config: dict[str, str], runtime: str = "routed", **more: Any) -> dict[str, Any]:
    plan = planned({"engine": {}, "router": {"config": config, **more}}, runtime=runtime)
    spec: dict[str, Any] = one(plan, "Deployment", "chat-router")["spec"]["template"]["spec"]
    return spec


def test_a_router_may_read_pods_and_no_more() -> None:
    plan = planned({"engine": {}, "router": {}}, runtime="routed")
    assert one(plan, "Role", "chat-router")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]
    assert one(plan, "Deployment", "chat-router")["spec"]["template"]["spec"]["serviceAccountName"] == "chat-router"
    assert "ServiceAccount/chat-router" in names(plan)


def test_a_router_with_its_own_service_account() -> None:
    plan = planned({"engine": {}, "router": {"serviceAccountName": "mine"}}, runtime="routed")
    assert "ServiceAccount/chat-router" not in names(plan)
    assert one(plan, "RoleBinding", "chat-router")["subjects"][0]["name"] == "mine"


def test_router_settings_become_flags_and_variables() -> None:
    [container] = router({"routing_strategy": "round_robin", "health_check_interval": "1m"})["containers"]
    assert container["args"] == ["--policy", "round_robin", "--health-check-interval-secs", "60"]
    assert {"name": "health_check_interval", "value": "1m"} in container["env"]
    assert [variable["name"] for variable in container["env"]] == sorted(
        variable["name"] for variable in container["env"]
    )


def test_a_line_for_a_shell_is_left_as_it_is() -> None:
    runner = {"name": "router", "command": ["bash", "-c"], "args": ["smg --policy random --port 1"]}
    [container] = router({"routing_strategy": "round_robin"}, runner=runner)["containers"]
    assert container["args"][-1] == "smg --policy random --port 1"


def test_where_a_runtime_has_no_router_ours_is_run() -> None:
    pod = router({"routing_strategy": "round_robin", "health_check_interval": "500ms"}, runtime="plain")
    [container] = pod["containers"]
    assert container["image"] == FleetSettings().image
    assert "http://chat-engine.default.svc.cluster.local:9000,weight=100" in container["args"]
    assert container["args"][container["args"].index("--policy") + 1] == "round-robin"
    assert container["args"][container["args"].index("--health-interval") + 1] == "0.5"
