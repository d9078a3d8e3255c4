# SPDX-License-Identifier: Apache-2.0
"""Every object of every sample, in several clusters, is taken by a real API server.

It is of version 1.20: autoscalers and disruption budgets go to it in their beta versions, whose fields are the same. Of
kinds that others bring (Knative, LeaderWorkerSet, KubeRay) the pods are tried.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plan_cases import UID, facts, live, service

import headrace.fleet
from headrace.fleet import yaml_documents
from headrace.fleet.documents import CAPABILITIES, ClusterFacts, FleetSettings, cluster_facts
from headrace.fleet.planning import Plan, plan
from headrace.platforms.kubernetes_client.objects import kind_of

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

SHIPPED = Path(headrace.fleet.__file__).parent
SAMPLES = sorted((SHIPPED / "samples").glob("*.yaml"))
BETAS = {"autoscaling/v2": "autoscaling/v2beta2", "policy/v1": "policy/v1beta1"}
OURS = {"v1", "apps/v1", "rbac.authorization.k8s.io/v1", "networking.k8s.io/v1", *BETAS.values()}
CLUSTERS = {
    "all": (CAPABILITIES, FleetSettings()),
    "bare": (
        frozenset({"lws", "ray", "keda", "inference-pool", "inference-objective"}),
        FleetSettings(disable_ingress_creation=False, ingress_domain="x.test"),
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from support.kubernetes_server import KubernetesServer

    with KubernetesServer(tmp_path_factory.mktemp("plans") / "server") as server:
        yield server


def templates(document: Any) -> Iterator[dict[str, Any]]:
    """The pod templates inside of an object."""
    if isinstance(document, dict):
        if "containers" in document.get("spec", {}):
            yield document
        else:
            for item in document.values():
                yield from templates(item)
    elif isinstance(document, list):
        for item in document:
            yield from templates(item)


def as_taken(each: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the server is asked in place of an object."""
    version = BETAS.get(each["apiVersion"], each["apiVersion"])
    if version in OURS:
        yield {**each, "apiVersion": version}
        return
    metadata = {key: each["metadata"][key] for key in ("labels", "ownerReferences")}
    name = f"{each['kind'].lower()}-{each['metadata']['name']}"
    data = {"object": json.dumps(each)}
    yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**metadata, "name": name[:200]}, "data": data}
    for number, template in enumerate(templates(each)):
        # Knative's own fields of a pod.
        mine = ("containerConcurrency", "timeoutSeconds", "responseStartTimeoutSeconds")
        spec = {key: value for key, value in template["spec"].items() if key not in mine}
        pod = {**template.get("metadata", {}), "name": f"{name[:200]}-{number}"}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": spec}


def check(server: Any, *plans: Plan) -> None:
    """All at once: each run of kubectl asks for all that the server can do first."""
    assert [plan.problems for plan in plans] == [[]] * len(plans)
    requests = [other for plan in plans for manifest in plan.objects for other in as_taken(manifest)]
    bundle = {"apiVersion": "v1", "kind": "List", "items": requests}
    arguments = ("apply", "--server-side", "--dry-run=server", "-n", "default", "-f", "-")
    result = server.kubectl(*arguments, input=json.dumps(bundle))
    assert requests
    assert result.count("serverside-applied") == len(requests), result


def cluster(path: Path, name: str) -> tuple[dict[str, Any], ClusterFacts]:
    result = yaml_documents.read([SHIPPED / "runtimes", path]).documents
    around = cluster_facts(result)
    capabilities, settings = CLUSTERS[name]
    [asked] = [item for item in result if kind_of(item) == "InferenceService"]
    with_uid = {**asked, "metadata": {**asked["metadata"], "uid": UID}}
    return with_uid, ClusterFacts(
        around.runtimes, around.models, around.weights, around.accelerators, capabilities, settings
    )


@pytest.mark.parametrize("around", CLUSTERS)
def test_samples_are_accepted(server: Any, around: str) -> None:
    check(server, *(plan(*cluster(path, around)) for path in SAMPLES))


def test_canaries_are_accepted(server: Any) -> None:
    around = facts(disable_ingress_creation=False, ingress_domain="x.test")
    plans = []
    for runtime, percent in [("plain", 0), ("plain", 30), ("groups", 0), ("groups", 30)]:
        name = f"{runtime}-{percent}"
        first = plan(service({"engine": {"minReplicas": 2}}, name, runtime), around)
        runner = {"runner": {"name": "ome-container", "image": "engine:2"}}
        changed = runner if runtime == "plain" else {"leader": runner, "worker": runner}
        document = service({"engine": {"minReplicas": 2, "canaryTrafficPercent": percent, **changed}}, name, runtime)
        begun = plan(document, around, live(first))
        plans.append(plan(document, around, live(begun)))
        assert plans[-1].rollouts["engine"].state == "canary"
    check(server, *plans)


def test_our_router_and_long_names_are_accepted(server: Any) -> None:
    name = "a" + "long-name-" * 5 + "at-the-end"
    spec = {"engine": {"minReplicas": 0}, "router": {"config": {"routing_strategy": "round_robin"}}}
    long = plan(service(spec, name=name), facts("knative"))
    check(server, long, plan(service({"engine": {"minReplicas": 0}}, name=f"b{name[1:]}"), facts()))
