# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicies: who may connect to whom, as a network plug-in would decide."""

from __future__ import annotations

from typing import Any

import pytest
from plan_cases import facts, names, one, service

from headrace.fleet.install.manifests import ManifestSettings, manifests
from headrace.fleet.planning import Plan, plan

Pod = tuple[str, dict[str, str]]
"""Namespace and labels."""
OPERATOR: Pod = ("headrace-system", {"app.kubernetes.io/name": "headrace-operator"})
ACTIVATOR: Pod = ("headrace-system", {"app.kubernetes.io/name": "headrace-activator"})
AGENT: Pod = ("headrace-system", {"app.kubernetes.io/name": "headrace-model-agent"})
CLIENT: Pod = ("default", {"app": "notebook"})
STRANGER: Pod = ("team-b", {"app": "notebook"})
INGRESS: Pod = ("ingress-nginx", {"app": "nginx"})
FORGED: Pod = ("team-b", {"app.kubernetes.io/name": "headrace-operator", "ome.io/inferenceservice": "chat"})
OUTSIDE: Pod = ("", {})
"""No pod: the API server, or a client outside of the cluster."""


def selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector selects these labels."""
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(item["key"]) in item["values"] for item in selector.get("matchExpressions", [])
    )


def allowed(policies: list[dict[str, Any]], source: Pod, target: Pod, port: int = 9000) -> bool:
    """Whether a pod may connect to another: as any of the policies that select it allow, or if none does."""
    own = [
        item["spec"]
        for item in policies
        if item["metadata"]["namespace"] == target[0] and selected(item["spec"]["podSelector"], target[1])
    ]
    rules = [rule for spec in own for rule in spec["ingress"]]
    return not own or any(_rule_allows(rule, source, target[0], port) for rule in rules)


def _rule_allows(rule: dict[str, Any], source: Pod, namespace: str, port: int) -> bool:
    if "ports" in rule and not any(item["port"] <= port <= item.get("endPort", item["port"]) for item in rule["ports"]):
        return False
    return "from" not in rule or any(_comes_from(item, source, namespace) for item in rule["from"])


def _comes_from(item: dict[str, Any], source: Pod, namespace: str) -> bool:
    if not source[0]:
        return False
    if "namespaceSelector" in item:
        if not selected(item["namespaceSelector"], {"kubernetes.io/metadata.name": source[0]}):
            return False
    elif source[0] != namespace:
        return False
    return selected(item.get("podSelector", {}), source[1])


def planned(spec: dict[str, Any], runtime: str = "plain", **annotations: str) -> Plan:
    cluster = facts("knative", isolate_services=True, client_namespaces=("ingress-nginx",))
    return plan(service(spec, runtime=runtime, **annotations), cluster)


def policies(made: Plan) -> list[dict[str, Any]]:
    return [item for item in made.objects if item["kind"] == "NetworkPolicy"]


def pod(made: Plan, name: str) -> Pod:
    template = one(made, "Deployment", name)["spec"]["template"]
    return "default", template["metadata"]["labels"]


def test_an_engine_is_reached_from_its_namespace_and_from_those_that_are_named() -> None:
    made = planned({"engine": {}})
    engine = pod(made, "chat-engine")
    verdicts = {source: allowed(policies(made), sources, engine) for source, sources in SOURCES.items()}
    assert verdicts == {
        "operator": True,
        "activator": True,
        "agent": False,
        "client": True,
        "stranger": False,
        "ingress": True,
        "forged": False,
        "outside": False,
    }


SOURCES = {
    "operator": OPERATOR,
    "activator": ACTIVATOR,
    "agent": AGENT,
    "client": CLIENT,
    "stranger": STRANGER,
    "ingress": INGRESS,
    "forged": FORGED,
    "outside": OUTSIDE,
}


def test_behind_a_router_an_engine_is_reached_from_its_service_alone() -> None:
    made = planned({"engine": {}, "router": {}}, runtime="routed")
    engine, router = pod(made, "chat-engine"), pod(made, "chat-router")
    assert allowed(policies(made), router, engine) and allowed(policies(made), OPERATOR, engine)
    assert not allowed(policies(made), CLIENT, engine) and not allowed(policies(made), STRANGER, engine)
    assert allowed(policies(made), CLIENT, router) and not allowed(policies(made), STRANGER, router)
    other = ("default", {**engine[1], "ome.io/inferenceservice": "other"})
    assert not allowed(policies(made), other, engine)


def test_a_front_reaches_the_engine_and_clients_the_front() -> None:
    made = planned({"engine": {"minReplicas": 0}})
    front, engine = pod(made, "chat-front"), pod(made, "chat-engine")
    assert allowed(policies(made), front, engine) and allowed(policies(made), CLIENT, front, 8080)
    assert not allowed(policies(made), STRANGER, front, 8080)
    assert allowed(policies(made), ACTIVATOR, engine)


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_an_exposed_service_is_reached_from_everywhere(kind: str) -> None:
    made = planned({"engine": {}}, ome_io__service_type=kind)
    assert one(made, "Service", "chat")["spec"]["type"] == kind
    assert allowed(policies(made), OUTSIDE, pod(made, "chat-engine"))


def test_services_are_isolated_only_by_the_operators_option() -> None:
    made = plan(service({"engine": {}}), facts())
    assert not any(name.startswith("NetworkPolicy") for name in names(made))
    knative = plan(service({"engine": {"minReplicas": 0}}), facts(isolate_services=True))
    assert knative.modes == {"engine": "Serverless"} and policies(knative) == []


def installed(**settings: Any) -> list[dict[str, Any]]:
    made = manifests(ManifestSettings(network_policies=True, **settings))
    return [dict(item) for item in made if item["kind"] == "NetworkPolicy"]


def test_our_programs_accept_what_they_need() -> None:
    made = installed(client_namespaces=("monitoring",))
    prometheus: Pod = ("monitoring", {})
    for program in (OPERATOR, ACTIVATOR, AGENT):
        assert allowed(made, prometheus, program, 8080) and allowed(made, OPERATOR, program, 8080)
        assert not allowed(made, STRANGER, program, 8080) and not allowed(made, prometheus, program, 22)
    # The API server calls the webhooks, and clients are anywhere.
    assert allowed(made, OUTSIDE, OPERATOR, 9443) and not allowed(made, OUTSIDE, AGENT, 9443)
    for port in (20000, 29999):
        assert allowed(made, STRANGER, ACTIVATOR, port) and allowed(made, OUTSIDE, ACTIVATOR, port)
    assert not allowed(made, OUTSIDE, ACTIVATOR, 19999)


def test_there_is_a_policy_for_each_program_that_is_installed() -> None:
    assert [item["metadata"]["name"] for item in installed(without=frozenset({"agent", "activator", "webhook"}))] == [
        "headrace-operator"
    ]
    bare = installed(without=frozenset({"webhook"}))
    assert not allowed(bare, OUTSIDE, OPERATOR, 9443)
    assert not any(item["kind"] == "NetworkPolicy" for item in manifests(ManifestSettings())), "off unless asked for"


def test_the_operator_gets_the_namespaces() -> None:
    made = manifests(ManifestSettings(isolate_services=True, client_namespaces=("a", "b")))
    (args,) = [
        item["spec"]["template"]["spec"]["containers"][0]["args"]
        for item in made
        if (item["kind"], item["metadata"]["name"]) == ("Deployment", "headrace-operator")
    ]
    assert {"--isolate-services", "--client-namespace=a", "--client-namespace=b"} <= set(args)
