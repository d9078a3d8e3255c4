# SPDX-License-Identifier: Apache-2.0
"""What we ship: each runtime is admitted, each sample planned, in clusters that have everything and in bare ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import facts, runtime, service

import headrace.fleet
from headrace.fleet import admission, schema, yaml_documents
from headrace.fleet.documents import CAPABILITIES, ClusterFacts, cluster_facts
from headrace.fleet.planning import plan
from headrace.platforms.kubernetes_client.objects import Document, kind_of, name_of
from support.properties import examples

SHIPPED = Path(headrace.fleet.__file__).parent
SAMPLES = sorted((SHIPPED / "samples").glob("*.yaml"))
MODES = {
    "raw": {"engine": "RawDeployment"},
    "serverless": {"engine": "Serverless"},
    "scale-to-zero": {"engine": "RawDeployment"},
    "canary": {"engine": "RawDeployment"},
    "rollout-steps": {"engine": "RawDeployment"},
    "multi-node": {"engine": "MultiNode"},
    "multi-node-headrace": {"engine": "MultiNode"},
    "multi-node-ray": {"engine": "MultiNodeRayVLLM"},
    "prefill-decode": {"engine": "RawDeployment", "decoder": "RawDeployment", "router": "RawDeployment"},
    "prefill-decode-headrace": {"engine": "RawDeployment", "decoder": "RawDeployment", "router": "RawDeployment"},
    "router": {"engine": "RawDeployment", "router": "RawDeployment"},
    "keda": {"engine": "RawDeployment"},
    "latency": {"engine": "RawDeployment"},
    "inference-pool": {"engine": "RawDeployment"},
    "virtual": {},
    "cpu": {"engine": "RawDeployment"},
    "accelerators": {"engine": "RawDeployment"},
    "benchmark": {"engine": "RawDeployment"},
    "own-runtime": {"engine": "RawDeployment"},
}
NEEDED = {
    "multi-node": "lws",
    "multi-node-headrace": "lws",
    "multi-node-ray": "ray",
    "keda": "keda",
    "inference-pool": "inference-pool inference-objective",
}
"""What the samples need of a cluster."""
RUNTIMES = {
    "raw": "headrace-gpu",
    "multi-node": "vllm-multi-node",
    "multi-node-headrace": "headrace-multi-node",
    "prefill-decode": "sglang-prefill-decode",
    "prefill-decode-headrace": "headrace-prefill-decode",
    "cpu": "headrace-cpu",
}


def cluster(path: Path) -> tuple[list[Document], ClusterFacts]:
    read = yaml_documents.read([SHIPPED / "runtimes", path])
    assert read.problems == []
    return read.documents, cluster_facts(read.documents)


def test_every_sample_is_known() -> None:
    assert {sample.stem for sample in SAMPLES} == set(MODES)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_sample(path: Path) -> None:
    found, everything = cluster(path)
    for item in found:
        assert admission.validate(admission.with_defaults(item, everything), everything) == [], name_of(item)
        assert list(schema.warnings(item)) == [], name_of(item)
    [asked] = [entry for entry in found if kind_of(entry) == "InferenceService"]
    planned = plan(asked, everything)
    assert planned.problems == []
    assert planned.modes == MODES[path.stem]
    if path.stem in RUNTIMES:
        assert planned.selection is not None
        assert planned.selection.runtime is not None
        assert name_of(planned.selection.runtime) == RUNTIMES[path.stem]
    json.dumps(planned.objects)
    keys = [(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]) for manifest in planned.objects]
    assert len(set(keys)) == len(keys)
    bare = replace(everything, capabilities=frozenset(NEEDED.get(path.stem, "").split()) & CAPABILITIES)
    assert plan(asked, bare).problems == []


def test_our_servers_of_a_group_get_what_they_need_to_find_each_other() -> None:
    found, everything = cluster(SHIPPED / "samples" / "multi-node-headrace.yaml")
    [asked] = [entry for entry in found if kind_of(entry) == "InferenceService"]
    [group] = [manifest for manifest in plan(asked, everything).objects if manifest["kind"] == "LeaderWorkerSet"]
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    pods = [template[kind]["spec"]["containers"][0] for kind in ("leaderTemplate", "workerTemplate")]
    leader, worker = pods
    assert leader["args"] == worker["args"]
    # The rank and the number of nodes are in the environment that LeaderWorkerSet sets.
    assert leader["args"][0] == "serve"
    assert leader["args"][-2:] == [
        "--tensor-parallel-size=$(LWS_GROUP_SIZE)",
        "--master-addr=$(LWS_LEADER_ADDRESS):29500",
    ]
    assert [port["containerPort"] for port in leader["ports"]] == [8080, 29500]
    for pod in pods:
        assert pod["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": 8080}
        assert pod["env"][0]["name"] == "HEADRACE_HANDING_KEY"
        assert pod["env"][0]["valueFrom"]["secretKeyRef"]["name"] == "headrace-handing"


ANNOTATIONS = st.dictionaries(
    st.sampled_from(
        [
            "ome.io/deploymentMode",
            "ome.io/autoscalerClass",
            "ome.io/ingress-disable-creation",
            "ome.io/enable-tag-routing",
            "ome.io/rollout-steps",
        ]
    ),
    st.sampled_from(["RawDeployment", "Serverless", "MultiNode", "keda", "hpa", "external", "true", "false", "5,50"]),
)
COMPONENT = st.fixed_dictionaries(
    {},
    optional={
        "minReplicas": st.integers(0, 4),
        "maxReplicas": st.integers(1, 9),
        "scaleMetric": st.sampled_from(["cpu", "memory", "concurrency", "rps"]),
        "scaleTarget": st.integers(1, 100),
        "canaryTrafficPercent": st.integers(0, 100),
        "timeoutSeconds": st.integers(1, 1000),
        "kedaConfig": st.fixed_dictionaries({"enableKeda": st.booleans()}),
        "worker": st.fixed_dictionaries({"size": st.integers(0, 3)}),
        "runner": st.fixed_dictionaries({"name": st.just("ome-container"), "image": st.sampled_from(["a:1", "b:2"])}),
    },
)
SPEC = st.fixed_dictionaries({"engine": COMPONENT}, optional={"decoder": COMPONENT, "router": COMPONENT})


@settings(max_examples=examples(150), deadline=None)
@given(
    spec=SPEC,
    annotations=ANNOTATIONS,
    runtime=st.sampled_from(["plain", "routed", "groups"]),
    without=st.sets(st.sampled_from(sorted(CAPABILITIES))),
    name=st.from_regex(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", fullmatch=True),
)
def test_any_service_has_a_plan_or_a_problem(
    spec: dict, annotations: dict, runtime: str, without: set[str], name: str
) -> None:
    document = service(spec, name=name, runtime=runtime)
    document["metadata"]["annotations"] = annotations
    around = facts(" ".join(without))
    planned = plan(document, around)
    assert plan(document, around).objects == planned.objects
    assert bool(planned.objects) != bool(planned.problems)
    for manifest in planned.objects:
        metadata = manifest["metadata"]
        assert metadata["ownerReferences"][0]["name"] == name
        limit = 63 if manifest["kind"] == "Service" else 253
        assert len(metadata["name"]) <= limit
        assert all(len(value) <= 63 for value in metadata["labels"].values())
        needed = {"LeaderWorkerSet": "lws", "ScaledObject": "keda", "RayCluster": "ray", "HTTPRoute": "gateway"}
        assert needed.get(manifest["kind"]) not in without
        assert not ("knative" in manifest["apiVersion"] and "knative" in without)
    for problem in planned.problems:
        assert problem.message
        assert problem.fix


JUNK = st.sampled_from([None, 3, "x", [], [3], {}, {"name": 3}, [{"name": "ome-container"}], [{"containerPort": "a"}]])
PART = st.sampled_from(["containers", "initContainers", "ports", "env", "volumes", "runner", "lifecycle", "config"])


@settings(max_examples=examples(150), deadline=None)
@given(
    pods=st.dictionaries(PART, JUNK),
    runner=st.dictionaries(PART, JUNK),
    where=st.sampled_from(["engineConfig", "routerConfig"]),
    mode=st.sampled_from(["", "Serverless", "MultiNode", "MultiNodeRayVLLM"]),
)
def test_an_unvalidated_runtime_does_not_raise(pods: dict, runner: dict, where: str, mode: str) -> None:
    odd = {"runner": {"name": "ome-container", "image": "a:1", **runner}, **pods}
    around = replace(facts(), runtimes=(runtime("plain", **{"engineConfig": {}, where: odd}),))
    document = service({"engine": {"minReplicas": 1}, "router": {}})
    document["metadata"]["annotations"] = {"ome.io/deploymentMode": mode} if mode else {}
    planned = plan(document, around)
    assert bool(planned.objects) != bool(planned.problems)
