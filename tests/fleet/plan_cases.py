# SPDX-License-Identifier: Apache-2.0
"""A small cluster and services for tests of planning, and plans as a cluster would have them."""

from __future__ import annotations

from typing import Any

from fleet_documents import document

from headrace.fleet.documents import CAPABILITIES, ClusterFacts, FleetSettings
from headrace.fleet.planning import Plan, plan
from headrace.fleet.planning.context import live_key

UID = "5a9f1c0e-0000-4000-8000-000000000010"
FORMAT = {"modelFormat": {"name": "safetensors"}, "modelArchitecture": "LlamaForCausalLM"}
RUNNER = {
    "name": "ome-container",
    "image": "engine:1",
    "args": ["--model", "$(MODEL_PATH)"],
    "ports": [{"name": "http", "containerPort": 9000}, {"containerPort": 9001}],
}
ROUTER = {"name": "router", "image": "router:1", "command": ["smg"], "args": ["--policy", "random"]}
PODS = {
    "leader": {"runner": RUNNER},
    "worker": {"size": 2, "runner": {**RUNNER, "ports": []}},
}


def runtime(name: str, **spec: Any) -> dict[str, Any]:
    formats = [{"name": "safetensors", **FORMAT, "autoSelect": name == "plain"}]
    return document("ClusterServingRuntime", name, {"supportedModelFormats": formats, **spec})


def facts(without: str = "", **settings: Any) -> ClusterFacts:
    """A cluster that has everything but these (words)."""
    return ClusterFacts(
        runtimes=(
            runtime("plain", engineConfig={"runner": RUNNER}),
            runtime("routed", engineConfig={"runner": RUNNER}, routerConfig={"runner": ROUTER}),
            runtime("groups", engineConfig=PODS, decoderConfig=PODS, routerConfig={"runner": ROUTER}),
        ),
        models=(document("ClusterBaseModel", "llama", {**FORMAT, "storage": {"path": "/mnt/llama"}}),),
        capabilities=CAPABILITIES - frozenset(without.split()),
        settings=FleetSettings(**settings),
    )


def service(spec: dict[str, Any], name: str = "chat", runtime: str = "plain", **annotations: str) -> dict[str, Any]:
    """A service of the cluster above; `ome_io__x` names the annotation `ome.io/x`."""
    created = document(
        "InferenceService", name, {"model": {"name": "llama"}, "runtime": {"name": runtime}, **spec}, "default"
    )
    created["metadata"]["uid"] = UID
    if annotations:
        created["metadata"]["annotations"] = {
            key.replace("__", "/").replace("ome_io", "ome.io").replace("_", "-"): value
            for key, value in annotations.items()
        }
    return created


def one(made: Plan, kind: str, name: str) -> dict[str, Any]:
    """The object of that kind and name; Knative's Services by `ksvc`."""
    assert not made.problems, [str(problem) for problem in made.problems]
    results = [
        manifest
        for manifest in made.objects
        if (manifest["kind"] if "knative" not in manifest["apiVersion"] else "ksvc") == kind
        and manifest["metadata"]["name"] == name
    ]
    assert len(results) == 1, [f"{manifest['kind']}/{manifest['metadata']['name']}" for manifest in made.objects]
    return results[0]


def names(made: Plan) -> set[str]:
    assert not made.problems, [str(problem) for problem in made.problems]
    return {f"{manifest['kind']}/{manifest['metadata']['name']}" for manifest in made.objects}


def live(made: Plan, ready: str = "all", replicas: int = 2, generation: int = 1) -> dict[str, dict[str, Any]]:
    """The objects as a cluster has them once their pods answer; `ready` names those that do."""
    document = {}
    for manifest in made.objects:
        count = manifest.get("spec", {}).get("replicas", replicas)
        up = ready == "all" or manifest["metadata"]["name"] in ready.split()
        status = {"observedGeneration": generation, "replicas": count, "updatedReplicas": count if up else 0}
        document[live_key(manifest["kind"], manifest["metadata"]["name"])] = {
            **manifest,
            "metadata": {**manifest["metadata"], "generation": generation},
            "spec": {**manifest.get("spec", {}), "replicas": count},
            "status": {**status, "availableReplicas": count if up else 0},
        }
    return document


def planned(spec: dict[str, Any], without: str = "", settings: dict[str, Any] | None = None, **more: Any) -> Plan:
    return plan(service(spec, **more), facts(without, **(settings or {})))
