# SPDX-License-Identifier: Apache-2.0
"""InferencePool and InferenceObjective of a service, its endpoint picker, and what cannot have them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_cases import facts, live, names, one, planned, service

from headrace.cli.router_settings import router_settings
from headrace.fleet.documents import CAPABILITIES
from headrace.fleet.planning import plan
from headrace.fleet.planning.autoscalers import COUNTS_REQUESTS

ENGINE = {"minReplicas": 2, "maxReplicas": 4}
POOL = {"ome_io__inference_pool": "predicted_latency"}
OBJECTIVES = {**POOL, "ome_io__inference_objectives": "interactive=10, batch=-10"}
GATEWAY = {"enable_gateway_api": True, "ingress_gateway": "infra/gw", "disable_ingress_creation": False}


def picker_config(made: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(one(made, "ConfigMap", "chat-picker")["data"]["router.yaml"])
    return config


def test_a_pool_of_the_pods_that_serve() -> None:
    made = planned({"engine": ENGINE}, **POOL)
    spec = one(made, "InferencePool", "chat")["spec"]
    assert spec == {
        "selector": {"matchLabels": {"ome.io/inferenceservice": "chat", "component": "engine"}},
        "targetPorts": [{"number": 9000}],
        "endpointPickerRef": {
            "kind": "Service",
            "name": "chat-picker",
            "port": {"number": 9002},
            "failureMode": "FailClose",
        },
    }
    pods = one(made, "Deployment", "chat-engine")["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= pods.items()
    assert not [name for name in names(made) if name.startswith("InferenceObjective")]


def test_the_picker_finds_these_pods_and_nothing_else_selects_its_own() -> None:
    made = planned({"engine": ENGINE}, **POOL)
    config = picker_config(made)
    assert config["endpoint_picker"] is True
    assert config["policy"] == "predicted_latency"
    assert config["discovery"] == {
        "pods": "ome.io/inferenceservice=chat,component=engine",
        "namespace": "default",
        "port": 9000,
    }
    picker = one(made, "Deployment", "chat-picker")["spec"]["template"]
    backing = one(made, "Service", "chat-picker")["spec"]
    assert backing["selector"].items() <= picker["metadata"]["labels"].items()
    assert [port["port"] for port in backing["ports"]] == [9002]
    assert picker["metadata"]["labels"]["component"] == "picker"
    [rule] = one(made, "Role", "chat-picker")["rules"]
    assert (rule["resources"], "create" in rule["verbs"]) == (["pods"], False)
    assert picker["spec"]["serviceAccountName"] == "chat-picker"


def test_the_router_takes_the_pickers_configuration(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(one(planned({"engine": ENGINE}, **OBJECTIVES), "ConfigMap", "chat-picker")["data"]["router.yaml"])
    settings = router_settings({}, str(file)).router
    assert settings.endpoint_picker
    assert settings.fairness.tenant_header == "x-gateway-inference-objective"
    assert settings.discovery.port == 9000


def test_objectives_have_their_priorities_in_the_cluster_and_in_the_picker() -> None:
    made = planned({"engine": ENGINE}, **OBJECTIVES)
    for name, priority in (("chat-interactive", 10), ("chat-batch", -10)):
        assert one(made, "InferenceObjective", name)["spec"] == {
            "priority": priority,
            "poolRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "chat"},
        }
    config = picker_config(made)
    assert config["fairness"]["priorities"] == "chat-interactive=10,chat-batch=-10"
    assert config["max_outstanding"] == 64


def test_the_route_of_a_gateway_goes_to_the_pool() -> None:
    made = planned({"engine": ENGINE}, settings=GATEWAY, **POOL)
    [rule] = one(made, "HTTPRoute", "chat")["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "chat", "port": 9000, "weight": 1}
    ]
    [rule] = one(planned({"engine": ENGINE}, settings=GATEWAY), "HTTPRoute", "chat")["spec"]["rules"]
    assert rule["backendRefs"][0]["kind"] == "Service"


def test_both_revisions_are_in_the_pool() -> None:
    def with_image(image: str, **more: Any) -> dict[str, Any]:
        return service({"engine": {**ENGINE, "runner": {"name": "ome-container", "image": image}, **more}}, **POOL)

    first = plan(with_image("engine:1"), facts())
    made = plan(with_image("engine:2", canaryTrafficPercent=50), facts(), live(first))
    chosen = one(made, "InferencePool", "chat")["spec"]["selector"]["matchLabels"]
    for name in ("chat-engine", "chat-engine-canary"):
        pods = one(made, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        assert chosen.items() <= pods.items()


def test_only_leaders_of_groups_are_in_the_pool() -> None:
    made = planned({"engine": ENGINE}, runtime="groups", **POOL)
    labels = one(made, "InferencePool", "chat")["spec"]["selector"]["matchLabels"]
    assert labels["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


def test_without_the_annotation_nothing_is_planned() -> None:
    assert not {name for name in names(planned({"engine": ENGINE})) if "picker" in name or "Inference" in name}


def test_the_local_fleet_has_no_gateways() -> None:
    here = replace(facts(), capabilities=CAPABILITIES | {COUNTS_REQUESTS})
    made = plan(service({"engine": ENGINE}, **OBJECTIVES), here)
    assert not {name for name in names(made) if "picker" in name or "Inference" in name}


@pytest.mark.parametrize(
    ("spec", "annotations", "without", "says"),
    [
        ({"engine": ENGINE}, POOL, "inference-pool", "needs the kind InferencePool"),
        ({"engine": ENGINE}, OBJECTIVES, "inference-objective", "needs the kind InferenceObjective"),
        ({"engine": {"minReplicas": 0}}, POOL, "knative", "cannot start the pods"),
        ({"engine": ENGINE, "slo": {"ttftMilliseconds": 500}}, POOL, "", "no router that measures"),
        ({"engine": ENGINE, "router": {}}, {**POOL, "runtime": "routed"}, "", "spec.router has its own way"),
        ({"engine": ENGINE}, {"ome_io__inference_pool": "weighted"}, "", "takes a policy"),
        ({"engine": ENGINE}, {"ome_io__inference_objectives": "a=1"}, "", "is for a service with an InferencePool"),
        ({"engine": ENGINE}, {**POOL, "ome_io__inference_objectives": "a=1,b"}, "", "'b', which is not a name"),
        ({"engine": ENGINE}, {**POOL, "ome_io__inference_objectives": "a=1,a=2"}, "", "'a=2', which is not a name"),
        ({"engine": ENGINE}, {**POOL, "ome_io__deploymentMode": "Serverless"}, "", "mode Serverless"),
    ],
)
def test_what_cannot_have_a_pool(spec: dict[str, Any], annotations: dict[str, str], without: str, says: str) -> None:
    made = planned(spec, without, **annotations)
    assert says in " ".join(str(problem) for problem in made.problems)
    assert not made.objects
