# SPDX-License-Identifier: Apache-2.0
"""BenchmarkJobs, the pure part: the Job that is made, why none is, and what is told."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from headrace.fleet.benchmarks.job import DIGEST, BenchmarkPlan, plan_benchmark
from headrace.fleet.benchmarks.status import benchmark_status
from headrace.fleet.documents import ClusterFacts

NOW, LATER = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
FACTS = ClusterFacts()


def benchmark(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ome.io/v1beta1",
        "kind": "BenchmarkJob",
        "metadata": {"name": "llama-load", "namespace": "team", "uid": "u1", "generation": 3},
        "spec": {
            "endpoint": {"endpoint": {"url": "http://host:8080/", "apiFormat": "openai", "modelName": "llama"}},
            "task": "text-to-text",
            "trafficScenarios": ["D(100,100)", "N(480,240)/(300,150)"],
            "numConcurrency": [1, 8],
            "maxTimePerIteration": 2,
            "maxRequestsPerIteration": 50,
            "outputLocation": {"storageUri": "s3://bucket/results", "key": "keys", "parameters": {"region": "eu"}},
            **spec,
        },
    }


def service(ready: str = "True", message: str = "") -> dict[str, Any]:
    status: dict[str, Any] = {"conditions": [{"type": "Ready", "status": ready, "message": message}]}
    if ready == "True":
        status["address"] = {"url": "http://chat.team.svc.cluster.local"}
    return {"kind": "InferenceService", "metadata": {"name": "chat", "namespace": "team"}, "status": status}


OURS = {"inferenceService": {"name": "chat", "namespace": "team"}}


def made(asked: dict[str, Any], of: dict[str, Any] | None = None) -> Any:
    planned = plan_benchmark(asked, of, FACTS)
    assert planned.job is not None, planned
    return planned.job


def container(asked: dict[str, Any]) -> Any:
    return made(asked)["spec"]["template"]["spec"]["containers"][0]


def test_the_job() -> None:
    job = made(benchmark())
    assert job["metadata"]["name"] == "llama-load" and job["metadata"]["labels"] == {"benchmark": "llama-load"}
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("BenchmarkJob", "u1", True)
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["activeDeadlineSeconds"] == 2 * 2 * 2 * 60 + 900, (
        "four runs of two minutes, and some for the rest"
    )
    (run,) = job["spec"]["template"]["spec"]["containers"]
    assert run["image"] == FACTS.settings.image
    assert run["args"] == [
        *("bench", "llama", "--protocol", "openai", "--url", "http://host:8080", "--task", "text-to-text"),
        *("--scenario", "D(100,100)", "--scenario", "N(480,240)/(300,150)", "--concurrency", "1,8"),
        *("--duration", "120", "--max-requests", "50", "--timeout", "120"),
        *("--output", "s3://bucket/results/llama-load"),
    ]
    assert run["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert run["env"] == [{"name": "AWS_REGION", "value": "eu"}]
    assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_the_same_twice_and_nothing_is_changed() -> None:
    request = benchmark(podOverride={"env": [{"name": "A", "value": "1"}]})
    kept = copy.deepcopy(request)
    assert made(request) == made(request)
    assert request == kept


def test_claims_folders_secrets_and_what_is_overridden() -> None:
    request = benchmark(
        outputLocation={"storageUri": "pvc://team:results/runs/"},
        dataset={"storageUri": "local:///data/prompts"},
        resultFolderName="first",
        huggingFaceSecretReference={"name": "hub"},
        additionalRequestParams={"temperature": "0.5", "stop": "$(HOME)", "seed": 3},
        serviceMetadata={"engine": "vllm", "gpuCount": 2},
        podOverride={
            "image": "mine:1",
            "resources": {"requests": {"cpu": "4"}},
            "nodeSelector": {"pool": "load"},
            "volumes": [{"name": "extra", "emptyDir": {}}],
            "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
            "env": [{"name": "HF_TOKEN", "value": "mine"}],
        },
    )
    pod = made(request)["spec"]["template"]["spec"]
    (run,) = pod["containers"]
    assert run["image"] == "mine:1" and run["resources"] == {"requests": {"cpu": "4"}}
    assert pod["nodeSelector"] == {"pool": "load"}
    assert {volume["name"]: volume for volume in pod["volumes"]}["output"]["persistentVolumeClaim"] == {
        "claimName": "results"
    }
    assert [volume_mount["mountPath"] for volume_mount in run["volumeMounts"]] == [
        "/tmp",
        "/output",
        "/dataset",
        "/extra",
    ]
    words = run["args"]
    assert words[-2:] == ["--output", "/output/runs/first"]
    assert words[words.index("--dataset") + 1] == "/dataset"
    assert words[words.index("--params") + 1] == '{"seed": 3, "stop": "$$(HOME)", "temperature": 0.5}'
    assert words[words.index("--about") + 1] == "engine=vllm"
    assert run["env"] == [{"name": "HF_TOKEN", "value": "mine"}], "what the user writes wins"
    (token,) = container(benchmark(huggingFaceSecretReference={"name": "hub"}))["env"][1:]
    assert token["name"] == "HF_TOKEN"
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "HUGGINGFACE_API_KEY"}}
    other = benchmark(dataset={"storageUri": "hf://org/prompts", "key": "hub"})
    assert container(other)["env"][-1]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


def test_a_service_is_waited_for() -> None:
    request = benchmark(endpoint=OURS)
    assert plan_benchmark(request, None, FACTS) == BenchmarkPlan(
        waits="there is no InferenceService team/chat; apply it, or name another in spec.endpoint", missing=True
    )
    waits = plan_benchmark(request, service("False", "no image"), FACTS)
    assert waits.waits == "InferenceService team/chat is not ready: no image" and not waits.missing
    words = made(request, service())["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[:5] == ["bench", "--protocol", "openai", "--url", "http://chat.team.svc.cluster.local"]


def test_a_name_that_is_too_long_for_a_label() -> None:
    request = benchmark()
    request["metadata"]["name"] = "n" * 100
    job = made(request)
    assert len(job["metadata"]["name"]) <= 63 and len(job["metadata"]["labels"]["benchmark"]) <= 63


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        ({"outputLocation": {"storageUri": "hf://a/b"}}, "spec.outputLocation.storageUri", "cannot be written"),
        ({"outputLocation": {"storageUri": "pvc://other:claim/x"}}, "spec.outputLocation.storageUri", "namespace other"),
        ({"outputLocation": {"storageUri": "pvc://claim/../x"}}, "spec.outputLocation.storageUri", "`..`"),
        ({"dataset": {"storageUri": "github://a/b"}}, "spec.dataset.storageUri", "cannot be read"),
        ({"resultFolderName": "../out"}, "spec.resultFolderName", "leaves the output"),
        ({"trafficScenarios": ["D(9)"]}, "spec.trafficScenarios[0]", "wrong number of values"),
        ({"trafficScenarios": ["D(9,9)", "E(5)"]}, "spec.trafficScenarios[1]", "not for text-to-text"),
        ({"endpoint": {"endpoint": {"url": "http://x", "apiFormat": "cohere"}}},
         "spec.endpoint.endpoint.apiFormat", "does not speak cohere"),
        ({"endpoint": {}}, "spec.endpoint", "neither"),
        ({"endpoint": {**OURS, "endpoint": {"url": "http://x"}}}, "spec.endpoint", "both"),
        ({"numConcurrency": [0]}, "spec.numConcurrency[0]", ""),
        ({"task": "sing"}, "spec.task", ""),
        ({"maxTimePerIteration": "long"}, "spec.maxTimePerIteration", ""),
    ],
)  # fmt: skip
def test_what_is_wrong(spec: dict[str, Any], field: str, says: str) -> None:
    planned = plan_benchmark(benchmark(**spec), service(), FACTS)
    assert planned.job is None
    (problem,) = planned.problems
    assert problem.field == field and says in problem.message and problem.fix
    reported = benchmark_status(benchmark(**spec), planned, None, (), NOW)
    assert reported["state"] == "Failed" and field in reported["failureMessage"]


def status(job: Any = None, pods: Any = (), planned: BenchmarkPlan | None = None, before: Any = None) -> Any:
    request = benchmark() | ({"status": before} if before else {})
    return benchmark_status(request, planned or BenchmarkPlan(), job, pods, NOW if before is None else LATER)


def ended(kind: str, **more: Any) -> dict[str, Any]:
    condition = {"type": kind, "status": "True", "lastTransitionTime": "T2", "message": "it is so"}
    job = made(benchmark())
    return {**job, "status": {"startTime": "T1", "conditions": [condition], **more}}


def test_the_reported_status() -> None:
    job = made(benchmark())
    common = {"observedGeneration": 3, "lastReconcileTime": "2026-01-01T00:00:00Z"}
    assert status(planned=BenchmarkPlan(waits="it waits")) == {"state": "Pending", "details": "it waits", **common}
    assert status(job)["state"] == "Pending"
    assert status({**job, "status": {"active": 1, "startTime": "T1"}})["state"] == "Running"
    assert status(ended("Complete", completionTime="T3")) == {
        "state": "Completed",
        "startTime": "T1",
        "completionTime": "T3",
        "details": "results are in s3://bucket/results/llama-load",
        **common,
    }
    failed = status(ended("Failed"))
    assert failed["state"] == "Failed" and failed["completionTime"] == "T2" and "it is so" in failed["failureMessage"]
    over = {"exitCode": 1, "message": "http://host does not answer\n"}
    pod = {"status": {"containerStatuses": [{"name": "benchmark", "state": {"terminated": over}}]}}
    assert status(ended("Failed"), [pod])["failureMessage"] == (
        "`headrace bench` ended with 1: http://host does not answer"
    )
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    pod = {"status": {"containerStatuses": [{"name": "benchmark", "state": {"waiting": waiting}}]}}
    reported = status({**job, "status": {"active": 1}}, [pod])
    assert reported["state"] == "Pending" and reported["details"] == "ImagePullBackOff: no such image"
    condition = {"type": "PodScheduled", "reason": "Unschedulable", "message": "0/1 nodes"}
    assert "0/1 nodes" in status(job, [{"status": {"conditions": [condition]}}])["details"]


def test_an_unchanged_status_is_not_written() -> None:
    first = status(ended("Complete"))
    assert status(ended("Complete"), before=first) == first
    assert status(ended("Failed"), before=first)["lastReconcileTime"] == "2026-01-02T00:00:00Z"


def test_an_edit_makes_another_job() -> None:
    one, other = (
        made(item)["metadata"]["annotations"][DIGEST] for item in (benchmark(), benchmark(numConcurrency=[2]))
    )
    assert one != other
