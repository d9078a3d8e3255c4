# SPDX-License-Identifier: Apache-2.0
"""A service at zero without pods of its own: its front goes, and the shared activator has its requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plan_cases import facts, live, names, one, service

from headrace.fleet.documents import ClusterFacts
from headrace.fleet.planning import Plan, plan
from headrace.fleet.planning.shared_activator import ACTIVATION, SharedActivator, activation_of, front_serves

ZERO = {"engine": {"minReplicas": 0, "maxReplicas": 6, "timeoutSeconds": 40}}
ACTIVATOR = SharedActivator("headrace-system", "headrace-activator", ("10.0.0.7", "10.0.1.7"), 20017)
SLICE = "EndpointSlice/chat-activator"


def planned(
    objects: dict[str, dict[str, Any]] | None = None,
    activator: SharedActivator | None = ACTIVATOR,
    cluster: ClusterFacts | None = None,
    **spec: Any,
) -> Plan:
    return plan(service({**ZERO, **spec}), cluster or facts("knative"), objects or {}, activator)


def at(made: Plan, **replicas: int) -> dict[str, dict[str, Any]]:
    """The objects of a plan, with these numbers of pods: `engine=0, front=1`."""
    objects = live(made)
    for component, count in replicas.items():
        found = objects[f"Deployment/chat-{component}"]
        found["spec"]["replicas"] = count
        found["status"] |= {"replicas": count, "updatedReplicas": count, "availableReplicas": count}
    return objects


def front_replicas(made: Plan) -> int:
    return int(one(made, "Deployment", "chat-front")["spec"]["replicas"])


def test_the_activator_is_added_before_the_front_goes_and_removed_after_it_is_back() -> None:
    new = planned()
    assert SLICE not in names(new) and front_replicas(new) == 1, "the activator has no port for it yet"
    first = planned(at(new, engine=1, front=0))
    assert SLICE in names(first), "until the front runs"
    active = planned(at(first, engine=1, front=1))
    assert SLICE not in names(active) and front_replicas(active) == 1
    # Scaled to zero: first the activator, and only once it is there the front.
    begun = planned(at(active, engine=0, front=1))
    assert SLICE in names(begun) and front_replicas(begun) == 1
    order = [f"{item['kind']}/{item['metadata']['name']}" for item in begun.objects]
    assert order.index(SLICE) < order.index("Deployment/chat-front")
    asleep = planned(at(begun, engine=0, front=1))
    assert SLICE in names(asleep) and front_replicas(asleep) == 0
    settled = planned(at(asleep, engine=0, front=0))
    assert settled.objects == asleep.objects, "nothing changes while it sleeps"
    # A request has started the engine: the front starts, and the activator stays until it runs.
    waking = planned(at(asleep, engine=1, front=0))
    assert SLICE in names(waking) and front_replicas(waking) == 1
    starting = at(waking, engine=1, front=1)
    starting["Deployment/chat-front"]["status"]["availableReplicas"] = 0
    assert SLICE in names(planned(starting))
    assert SLICE not in names(planned(at(waking, engine=1, front=1)))


def test_a_changed_port_is_open_before_requests_go_there() -> None:
    asleep = at(planned(at(planned(), engine=0)), engine=0, front=0)
    other = SharedActivator(ACTIVATOR.namespace, ACTIVATOR.account, ACTIVATOR.addresses, 20018)
    made = planned(asleep, activator=other)
    assert SLICE not in names(made) and front_replicas(made) == 1
    assert SLICE in names(planned(at(made, engine=0, front=0), activator=other))


def test_requests_reach_the_activator_by_the_service_itself() -> None:
    made = planned(at(planned(), engine=0))
    found, entry = one(made, "EndpointSlice", "chat-activator"), one(made, "Service", "chat")
    labels = found["metadata"]["labels"]
    assert labels["kubernetes.io/service-name"] == "chat"
    assert labels["endpointslice.kubernetes.io/managed-by"] == "headrace-operator"
    assert [endpoint["addresses"] for endpoint in found["endpoints"]] == [["10.0.0.7"], ["10.0.1.7"]]
    assert found["addressType"] == "IPv4"
    # kube-proxy matches ports by name; the numbers differ.
    assert [port["name"] for port in found["ports"]] == [port["name"] for port in entry["spec"]["ports"]] == ["http"]
    assert (found["ports"][0]["port"], entry["spec"]["ports"][0]["targetPort"]) == (20017, 8080)
    # The Service never selects other pods: a changed selector would be a gap.
    for engine in (0, 1):
        assert one(planned(at(made, engine=engine, front=0)), "Service", "chat")["spec"]["selector"] == {
            "app": "chat-front"
        }


def test_pods_that_answer_are_endpoints_until_the_activator_is_one() -> None:
    """A service that may be scaled to zero from now on has no front yet, and its pods are asked meanwhile."""
    running = plan(service({"engine": {"minReplicas": 1}}), facts("knative"), {}, ACTIVATOR)
    objects = at(running, engine=1)
    seen = []
    for _ in range(4):
        made = planned(objects)
        seen.append((one(made, "Service", "chat")["spec"]["selector"].get("component"), SLICE in names(made)))
        objects = at(made, engine=1, front=0)
        objects["Deployment/chat-front"]["spec"]["replicas"] = 1
    assert seen == [("engine", False), ("engine", True), (None, True), (None, True)]


def test_the_configuration_of_the_activator() -> None:
    front = one(planned(), "Deployment", "chat-front")
    assert activation_of(front) == {
        "port": 20017,
        "backends": [{"service": "chat-engine", "port": 9000, "weight": 100}],
        "targets": [{"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat-engine"}],
        "timeoutSeconds": 40,
        "waitSeconds": 900,
        "heldRequests": 1000,
        "heldBytes": 256 << 20,
    }
    config = json.loads(one(planned(), "ConfigMap", "chat-front")["data"]["router.yaml"])
    assert config["activation"]["shared"] is True
    # It may scale this service, by a Role of this service.
    assert one(planned(), "RoleBinding", "chat-front")["subjects"] == [
        {"kind": "ServiceAccount", "name": "chat-front", "namespace": "default"},
        {"kind": "ServiceAccount", "name": "headrace-activator", "namespace": "headrace-system"},
    ]


def test_without_an_activator_the_front_stays() -> None:
    asleep = at(planned(at(planned(), engine=0)), engine=0, front=0)
    left = planned(asleep, activator=None)
    assert SLICE not in names(left) and front_replicas(left) == 1
    assert ACTIVATION not in one(left, "Deployment", "chat-front")["metadata"].get("annotations", {})
    assert len(one(left, "RoleBinding", "chat-front")["subjects"]) == 1


def test_other_pods_of_the_activator_are_written_before_the_front_goes() -> None:
    asleep = at(planned(at(planned(), engine=0)), engine=0, front=0)
    moved = SharedActivator(ACTIVATOR.namespace, ACTIVATOR.account, ("10.0.2.9",), ACTIVATOR.port)
    made = planned(asleep, activator=moved)
    assert one(made, "EndpointSlice", "chat-activator")["endpoints"][0]["addresses"] == ["10.0.2.9"]
    # Until that is stored, a front bridges the gap.
    assert front_replicas(made) == 1
    assert front_replicas(planned(at(made, engine=0, front=0), activator=moved)) == 0


def test_with_two_revisions_the_front_stays() -> None:
    running = {**ZERO["engine"], "runner": {"image": "engine:1"}}
    canary = {**running, "runner": {"image": "engine:2"}, "canaryTrafficPercent": 20}
    first = plan(service({"engine": running}), facts("knative"), {}, ACTIVATOR)
    made = plan(service({"engine": canary}), facts("knative"), at(first, engine=0, front=1), ACTIVATOR)
    assert "Deployment/chat-engine-canary" in names(made)
    assert SLICE not in names(made) and front_replicas(made) == 1


def test_all_workloads_have_to_be_at_zero() -> None:
    spec = {"engine": {"minReplicas": 0}, "decoder": {"minReplicas": 0}, "router": {"minReplicas": 1}}
    document = service(spec, runtime="groups")
    first = plan(document, facts("knative"), {}, ACTIVATOR)
    objects = live(first, replicas=0)
    objects["Deployment/chat-front"]["spec"]["replicas"] = 1
    begun = live(plan(document, facts("knative"), objects, ACTIVATOR), replicas=0)
    objects |= {SLICE: begun[SLICE]}
    assert front_replicas(plan(document, facts("knative"), objects, ACTIVATOR)) == 0
    objects["LeaderWorkerSet/lws-chat-decoder"]["spec"]["replicas"] = 1
    assert front_replicas(plan(document, facts("knative"), objects, ACTIVATOR)) == 1


def test_an_ipv6_cluster_has_ipv6_endpoints() -> None:
    activator = SharedActivator("headrace-system", "headrace-activator", ("fd00::7", "10.0.0.7"), 20017)
    found = one(planned(at(planned(), front=0), activator=activator), "EndpointSlice", "chat-activator")
    assert found["addressType"] == "IPv6"
    assert [endpoint["addresses"] for endpoint in found["endpoints"]] == [["fd00::7"]]


def test_only_services_that_scale_to_zero_by_our_router_have_a_port() -> None:
    document = service({"engine": {"minReplicas": 1}})
    assert SLICE not in names(plan(document, facts("knative"), {}, ACTIVATOR))
    assert SLICE not in names(plan(service(ZERO), facts(), {}, ACTIVATOR)), "Knative has an activator of its own"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"port": 80}', '{"port": "20000"}', '{"port": 30000}'])
def test_an_annotation_that_is_not_ours_is_ignored(text: str) -> None:
    assert activation_of({"metadata": {"annotations": {ACTIVATION: text}}}) is None
    assert activation_of(None) is None


def test_when_a_front_serves() -> None:
    front = {"metadata": {"generation": 2}, "spec": {"replicas": 1}, "status": {"availableReplicas": 1}}
    assert front_serves(front) and not front_serves(None)
    assert not front_serves({**front, "spec": {"replicas": 0}}), "it goes, and its pods answer for a while"
    assert not front_serves({**front, "status": {"availableReplicas": 1, "observedGeneration": 1}})
    assert not front_serves({**front, "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
