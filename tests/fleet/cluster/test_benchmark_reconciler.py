# SPDX-License-Identifier: Apache-2.0
"""What the reconciler of BenchmarkJobs asks the API server for: over a real `ApiClient`, whose transport answers."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

import httpx2
import pytest

from headrace.fleet.benchmarks.job import DIGEST, plan_benchmark
from headrace.fleet.cluster.benchmark_reconciler import BenchmarkReconciler
from headrace.fleet.cluster.events import EventRecorder
from headrace.fleet.cluster.resources import BENCHMARKS, JOBS
from headrace.fleet.cluster.view import ClusterView
from headrace.fleet.documents import ClusterFacts
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError
from headrace.platforms.kubernetes_client.objects import ServedResource

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BENCHMARK = "/apis/ome.io/v1beta1/namespaces/team/benchmarkjobs/load"
JOB = "/apis/batch/v1/namespaces/team/jobs/load"
EVENTS = "/api/v1/namespaces/team/events"
URL = {"endpoint": {"url": "http://host:8080/", "apiFormat": "openai", "modelName": "llama"}}
SERVICE = {"inferenceService": {"name": "chat", "namespace": "team"}}


def benchmark(endpoint: dict[str, Any] = URL, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ome.io/v1beta1",
        "kind": "BenchmarkJob",
        "metadata": {
            "name": "load",
            "namespace": "team",
            "uid": "u1",
            "generation": 3,
            "resourceVersion": "7",
            **metadata,
        },
        "spec": {
            "endpoint": endpoint,
            "task": "text-to-text",
            "trafficScenarios": ["D(100,100)"],
            "maxTimePerIteration": 2,
            "maxRequestsPerIteration": 50,
            "outputLocation": {"storageUri": "s3://bucket/results"},
        },
    }


def job(of: dict[str, Any], **status: Any) -> dict[str, Any]:
    made = plan_benchmark(of, None, ClusterFacts()).job
    assert made is not None
    return {**made, "metadata": {**made["metadata"], "uid": "j1"}, "status": status}


class View:
    """The part of a `ClusterView` that a benchmark needs."""

    facts = ClusterFacts()

    def __init__(self, document: dict[str, Any] | None, jobs: tuple[Any, list[Any]] | None, kinds: set[str]) -> None:
        self._document = document
        self._jobs = jobs
        self._kinds = kinds
        self.stored: list[str] = []

    def benchmark(self, key: tuple[str, str]) -> dict[str, Any] | None:
        return self._document

    def benchmark_job(self, document: dict[str, Any]) -> tuple[Any, list[Any]] | None:
        return self._jobs

    def service(self, key: tuple[str, str]) -> None:
        return None

    def served(self, resource: Any) -> ServedResource | None:
        return ServedResource(resource, resource.versions[0]) if resource.kind in self._kinds else None

    def put(self, resource: Any, document: dict[str, Any]) -> None:
        self.stored.append(resource.kind)


class Result(NamedTuple):
    done: bool
    calls: list[tuple[str, str, Any]]
    stored: list[str]

    @property
    def status(self) -> Any:
        (body,) = (body for method, path, body in self.calls if path == f"{BENCHMARK}/status")
        return body["status"]


def reconcile(
    document: dict[str, Any] | None,
    jobs: tuple[Any, list[Any]] | None = (None, []),
    live: dict[str, Any] | None = None,
    refused: dict[str, int] | None = None,
    kinds: tuple[str, ...] = (BENCHMARKS.kind, JOBS.kind),
) -> Result:
    """Reconcile once. `live`: the Job that the API server has; `refused`: status codes of writes by path."""
    calls: list[tuple[str, str, Any]] = []
    view = View(document, jobs, set(kinds))

    def answer(request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        code = (404 if live is None else 200) if request.method == "GET" else (refused or {}).get(path, 200)
        body = json.loads(request.content) if request.content else None
        if request.method != "GET":
            calls.append((request.method, path, body))
        if code >= 400:
            return httpx2.Response(code, json={"kind": "Status", "code": code, "message": "spec.x:  is\n wrong"})
        return httpx2.Response(200, json=live if request.method == "GET" else body)

    async def run() -> bool:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://cluster") as client:
            api = ApiClient(client)
            reconciler = BenchmarkReconciler(
                api, cast("ClusterView", view), EventRecorder(api, lambda: NOW), lambda: NOW
            )
            return await reconciler.reconcile(("team", "load"))

    return Result(asyncio.run(run()), calls, view.stored)


def test_one_that_is_gone_or_whose_job_is_not_known_yet() -> None:
    assert reconcile(None) == (True, [], [])
    assert reconcile(benchmark(), None) == (False, [], [])


def test_its_job_is_created_once() -> None:
    result = reconcile(benchmark())
    assert [(method, path) for method, path, _ in result.calls] == [("PATCH", JOB), ("PATCH", f"{BENCHMARK}/status")]
    assert result.done and result.stored == ["Job", "BenchmarkJob"]
    assert result.calls[1][2]["metadata"] == {"resourceVersion": "7"}
    assert result.status["state"] == "Pending" and result.status["observedGeneration"] == 3
    # The Job exists, and the cache does not have it yet.
    assert [path for _, path, _ in reconcile(benchmark(), live=job(benchmark())).calls] == [f"{BENCHMARK}/status"]


def test_a_job_of_that_name_which_is_not_its_own() -> None:
    other = job(benchmark(uid="u2"))
    result = reconcile(benchmark(), live=other)
    assert not result.done
    assert "a Job load exists and does not belong to this benchmark" in result.status["failureMessage"]
    assert [path for _, path, _ in result.calls] == [f"{BENCHMARK}/status", EVENTS]


def test_a_job_that_the_server_refuses() -> None:
    result = reconcile(benchmark(), refused={JOB: 422})
    assert "the API server refuses Job load" in result.status["failureMessage"]
    assert "spec.x: is wrong" in result.status["failureMessage"]
    with pytest.raises(ApiError):
        reconcile(benchmark(), refused={JOB: 503})
    assert "this cluster has no Jobs" in reconcile(benchmark(), kinds=(BENCHMARKS.kind,)).status["failureMessage"]


def test_the_states_of_its_job() -> None:
    running = reconcile(benchmark(), (job(benchmark(), active=1), []))
    assert running.done and running.status["state"] in ("Pending", "Running")
    complete = {"conditions": [{"type": "Complete", "status": "True"}], "completionTime": "2026-01-01T00:00:00Z"}
    done = reconcile(benchmark(), (job(benchmark(), **complete), []))
    assert done.status["state"] == "Completed" and done.calls[-1][1] == EVENTS
    assert done.calls[-1][2]["reason"] == "BenchmarkCompleted"
    again = {**benchmark(), "status": done.status}
    assert reconcile(again, (job(benchmark(), **complete), [])).calls == [], "nothing has changed"
    assert reconcile(again) == (True, [], []), "a finished Job that is deleted stays deleted"


def test_an_edited_benchmark_deletes_its_old_job_first() -> None:
    old = job(benchmark())
    old["metadata"]["annotations"][DIGEST] = "another"
    result = reconcile(benchmark(), (old, []))
    assert [(method, path) for method, path, _ in result.calls] == [("DELETE", JOB), ("PATCH", f"{BENCHMARK}/status")]
    assert result.calls[0][2]["preconditions"] == {"uid": "j1"}
    old["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert [method for method, _, _ in reconcile(benchmark(), (old, [])).calls] == ["PATCH"]


def test_a_service_that_does_not_exist_is_waited_for() -> None:
    result = reconcile(benchmark(SERVICE))
    assert result.status["state"] == "Pending" and result.calls[-1][2]["reason"] == "InferenceServiceNotFound"


def test_it_may_be_deleted_meanwhile() -> None:
    assert reconcile(benchmark(), refused={f"{BENCHMARK}/status": 404}).done
    with pytest.raises(ApiError):
        reconcile(benchmark(), refused={f"{BENCHMARK}/status": 409})
    deleted = benchmark(deletionTimestamp="2026-01-01T00:00:00Z", finalizers=["benchmark.ome.io/finalizer"])
    assert reconcile(deleted).done
