# SPDX-License-Identifier: Apache-2.0
"""The way into a service: its own Service, Ingress, HTTPRoutes, Istio; and its URLs."""

from __future__ import annotations

from typing import Any

from plan_cases import facts, names, one, planned, service

from headrace.fleet.planning import plan

OPEN = {"disable_ingress_creation": False, "ingress_domain": "example.com", "ingress_class": "nginx"}
GATEWAY = {**OPEN, "enable_gateway_api": True, "ingress_gateway": "infra/public"}


def test_the_service_is_the_entry_point_unless_configured() -> None:
    plan = planned({"engine": {}})
    spec = one(plan, "Service", "chat")["spec"]
    assert spec["ports"] == [{"name": "http", "port": 9000, "protocol": "TCP", "targetPort": 9000}]
    assert spec["selector"] == {"ome.io/inferenceservice": "chat", "component": "engine"}
    assert one(plan, "Service", "chat")["metadata"]["labels"]["component"] == "external-service"
    assert plan.urls.url == plan.urls.address == "http://chat.default.svc.cluster.local:9000"
    assert plan.urls.components == {"engine": "http://chat-engine.default.svc.cluster.local:9000"}


def test_a_router_is_the_way_in() -> None:
    plan = planned({"engine": {}, "router": {}}, runtime="routed")
    assert one(plan, "Service", "chat")["spec"]["selector"]["component"] == "router"
    assert plan.urls.url == "http://chat.default.svc.cluster.local:8080"


def test_ingress_leads_to_real_ports_and_the_address_exists() -> None:
    plan = planned({"engine": {}, "router": {}}, settings=OPEN, runtime="routed")
    spec = one(plan, "Ingress", "chat")["spec"]
    assert spec["ingressClassName"] == "nginx"
    backends = {rule["host"]: rule["http"]["paths"][0]["backend"]["service"] for rule in spec["rules"]}
    assert backends == {
        "chat.default.example.com": {"name": "chat-router", "port": {"number": 8080}},
        "chat-engine.default.example.com": {"name": "chat-engine", "port": {"number": 9000}},
        "chat-router.default.example.com": {"name": "chat-router", "port": {"number": 8080}},
    }
    assert plan.urls.url == "http://chat.default.example.com"
    assert plan.urls.address == "http://chat.default.svc.cluster.local"
    assert one(plan, "Service", "chat")["spec"]["ports"][0]["port"] == 80
    assert plan.urls.components["engine"] == "http://chat-engine.default.example.com"


def test_annotations_of_the_service_count_for_more() -> None:
    given = service({"engine": {}})
    given["metadata"]["annotations"] = {
        "ome.io/ingress-disable-creation": "false",
        "ome.io/ingress-domain": "ai.test",
        "ome.io/ingress-domain-template": "{{ .Name }}-{{.Namespace}}.{{.IngressDomain}}",
        "ome.io/ingress-additional-domains": "two.test, three.test",
        "ome.io/ingress-url-scheme": "https",
        "ome.io/ingress-path-template": "/serve/{{.Namespace}}/{{.Name}}",
    }
    planned = plan(given, facts())
    rules = one(planned, "Ingress", "chat")["spec"]["rules"]
    hosts = [rule["host"] for rule in rules]
    assert hosts[:3] == ["chat-default.ai.test", "chat-default.two.test", "chat-default.three.test"]
    assert rules[-1]["host"] == "ai.test"
    assert rules[-1]["http"]["paths"][0]["path"] == "/serve/default/chat"
    assert planned.urls.url == "https://chat-default.ai.test"


def test_gateway() -> None:
    plan = planned({"engine": {"timeoutSeconds": 300}}, settings=GATEWAY)
    spec = one(plan, "HTTPRoute", "chat")["spec"]
    assert spec["hostnames"] == ["chat.default.example.com"]
    [rule] = spec["rules"]
    assert rule["timeouts"] == {"request": "300s"}
    headers = {header["name"]: header["value"] for header in rule["filters"][0]["requestHeaderModifier"]["set"]}
    assert headers == {"OMe-Isvc-Name": "chat", "OME-Isvc-Namespace": "default"}
    assert rule["backendRefs"][0]["port"] == 9000
    assert one(plan, "HTTPRoute", "chat-engine")["spec"]["hostnames"] == ["chat-engine.default.example.com"]


def test_gateway_that_is_not_there() -> None:
    assert planned({"engine": {}}, settings=GATEWAY, without="gateway").problems
    [problem] = planned({"engine": {}}, settings={**GATEWAY, "ingress_gateway": ""}).problems
    assert "omeIngressGateway" in problem.fix


def test_a_host_that_is_none() -> None:
    plan = planned({"engine": {}}, settings={**OPEN, "domain_template": "{{.Other}}.{{.IngressDomain}}"})
    [problem] = plan.problems
    assert "ingress-domain-template" in problem.field


def test_cluster_local_services_are_not_opened() -> None:
    given: dict[str, Any] = service({"engine": {}})
    given["metadata"]["labels"] = {"networking.knative.dev/visibility": "cluster-local"}
    planned = plan(given, facts(**OPEN))
    assert not {"Ingress/chat", "Service/chat"} & names(planned)
    assert planned.urls.url == "http://chat-engine.default.svc.cluster.local:9000"


def test_serverless_by_istio() -> None:
    plan = planned({"engine": {"minReplicas": 0}}, settings=OPEN)
    spec = one(plan, "VirtualService", "chat")["spec"]
    assert spec["hosts"] == ["chat.default.example.com", "chat.default.svc.cluster.local"]
    [route] = spec["http"][0]["route"]
    assert route["headers"]["request"]["set"]["Host"] == "chat-engine.default.svc.cluster.local"
    assert one(plan, "Service", "chat")["spec"]["type"] == "ExternalName"
    assert "Deployment/chat-front" not in names(plan)


def test_serverless_without_istio_is_led_by_the_front() -> None:
    plan = planned({"engine": {"minReplicas": 0}}, settings=OPEN, without="istio")
    [rule] = one(plan, "Ingress", "chat")["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "chat", "port": {"number": 80}}
    assert one(plan, "Service", "chat")["spec"]["ports"][0]["targetPort"] == 8080


def test_a_scaled_to_zero_service_is_reached_through_the_front_from_outside_too() -> None:
    plan = planned({"engine": {"minReplicas": 0}}, settings=GATEWAY, without="knative")
    for name in ("chat", "chat-engine"):
        [backend] = one(plan, "HTTPRoute", name)["spec"]["rules"][0]["backendRefs"]
        assert (backend["name"], backend["port"]) == ("chat", 80)
