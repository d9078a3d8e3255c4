# SPDX-License-Identifier: Apache-2.0
"""BenchmarkJobs on a real API server, whose own controller makes pods of the Jobs; the test is their kubelet."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

PATH = "/apis/ome.io/v1beta1/namespaces/default/benchmarkjobs"
JOBS = "/apis/batch/v1/namespaces/default/jobs"


def benchmark(name: str, endpoint: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ome.io/v1beta1",
        "kind": "BenchmarkJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "endpoint": endpoint,
            "task": "text-to-text",
            "trafficScenarios": ["D(100,100)"],
            "numConcurrency": [1],
            "maxTimePerIteration": 1,
            "maxRequestsPerIteration": 10,
            "outputLocation": {"storageUri": "s3://bucket/results"},
            **spec,
        },
    }


def state(site: Any, name: str) -> dict[str, Any]:
    found = site.fetch(f"{PATH}/{name}") or {}
    return found.get("status", {})


def events(site: Any, name: str) -> list[tuple[str, str]]:
    uid = site.fetch(f"{PATH}/{name}")["metadata"]["uid"]
    found = site.fetch(f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.uid={uid}")["items"]
    return [(each["type"], each["reason"]) for each in found]


def pod_of(site: Any, name: str) -> str:
    from controller_site import until

    pods = until(lambda: site.fetch(f"/api/v1/namespaces/default/pods?labelSelector=benchmark={name}")["items"])
    return str(pods[0]["metadata"]["name"])


def test_it_waits_runs_ends_and_leaves_nothing(clean: Any) -> None:
    from controller_site import Running, until

    with Running(clean.server.kubeconfig) as running:
        clean.apply(benchmark("load", {"inferenceService": {"name": "digits"}}))
        until(lambda: "there is no InferenceService default/digits" in state(clean, "load").get("details", ""))
        assert state(clean, "load")["state"] == "Pending"
        until(lambda: ("Warning", "InferenceServiceNotFound") in events(clean, "load"))
        assert clean.fetch(f"{JOBS}/load") is None

        clean.apply(*clean.sample("cpu"))
        until(lambda: "is not ready" in state(clean, "load").get("details", ""))
        clean.mark_pods("digits")
        job = until(lambda: clean.fetch(f"{JOBS}/load"))
        words = job["spec"]["template"]["spec"]["containers"][0]["args"]
        url = clean.service("digits")["status"]["address"]["url"]
        assert words[words.index("--url") + 1] == url

        pod = pod_of(clean, "load")
        clean.server.mark(pod, {"phase": "Running"})
        until(lambda: state(clean, "load")["state"] == "Running")
        until(lambda: state(clean, "load").get("startTime"))  # a Job has it after its pod
        clean.server.mark(pod, {"phase": "Succeeded"})
        until(lambda: state(clean, "load")["state"] == "Completed")
        told = state(clean, "load")
        assert told["completionTime"] and told["details"] == "results are in s3://bucket/results/load"
        until(lambda: ("Normal", "BenchmarkCompleted") in events(clean, "load"))

        running.settle()
        count = len(running.writes)
        clean.server.kubectl("delete", "job", "load")
        clean.server.kubectl("delete", "isvc", "digits")
        running.settle()
        assert running.writes[count:] == [], "what is done stays done"
        assert state(clean, "load") == told
    with Running(clean.server.kubeconfig) as again:
        again.settle()
        assert again.writes == []
    # An edit asks for it again.
    with Running(clean.server.kubeconfig):
        clean.apply(benchmark("load", {"endpoint": {"url": "http://elsewhere:80"}}, numConcurrency=[2]))
        until(lambda: clean.fetch(f"{JOBS}/load"))
        until(lambda: "completionTime" not in state(clean, "load"))
        left = '{"metadata": {"finalizers": ["benchmarkjob.finalizers"]}}'  # by OME
        clean.server.kubectl("patch", "benchmarkjob", "load", "--type=merge", "-p", left)
        clean.server.kubectl("delete", "benchmarkjob", "load")
        assert clean.fetch(f"{PATH}/load") is None
        until(lambda: not clean.fetch(f"{JOBS}?labelSelector=benchmark")["items"])
        until(lambda: not clean.fetch("/api/v1/pods?labelSelector=benchmark")["items"])


def test_the_reason_of_a_failure_is_reported(clean: Any) -> None:
    from controller_site import Running, until

    elsewhere = {"endpoint": {"url": "http://elsewhere:80"}}
    with Running(clean.server.kubeconfig) as running:
        clean.apply(
            benchmark("sad", elsewhere),
            benchmark("wrong", elsewhere, trafficScenarios=["E(9)"]),
            benchmark("taken", elsewhere),
        )
        until(lambda: "not for text-to-text" in state(clean, "wrong").get("failureMessage", ""))
        until(lambda: ("Warning", "BenchmarkFailed") in events(clean, "wrong"))
        pod = pod_of(clean, "sad")
        over = {"exitCode": 1, "reason": "Error", "message": "error: http://elsewhere does not answer"}
        container = {"name": "benchmark", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
        status = {**container, "state": {"terminated": over}}
        clean.server.mark(pod, {"phase": "Failed", "containerStatuses": [status]})
        until(lambda: state(clean, "sad").get("state") == "Failed")
        until(lambda: "elsewhere does not answer" in state(clean, "sad").get("failureMessage", ""))
        # While it runs, a Job that somebody deletes is made again, and one that is edited is made anew.
        first = until(lambda: clean.fetch(f"{JOBS}/taken"))["metadata"]["uid"]
        clean.server.kubectl("delete", "job", "taken")
        second = until(lambda: (clean.fetch(f"{JOBS}/taken") or {}).get("metadata", {}).get("uid"))
        assert second != first
        clean.apply(benchmark("taken", elsewhere, maxRequestsPerIteration=11))
        until(lambda: (clean.fetch(f"{JOBS}/taken") or {}).get("metadata", {}).get("uid") not in (None, first, second))
        running.settle()


def test_a_job_of_another_owner_is_not_touched(clean: Any) -> None:
    from controller_site import Running, until

    container = {"name": "x", "image": "x"}
    theirs = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "mine", "namespace": "default"},
        "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }
    clean.apply(theirs)
    with Running(clean.server.kubeconfig):
        clean.apply(benchmark("mine", {"endpoint": {"url": "http://elsewhere:80"}}))
        until(lambda: "a Job mine exists" in state(clean, "mine").get("failureMessage", ""))
        clean.server.kubectl("delete", "job", "mine")
        until(lambda: (clean.fetch(f"{JOBS}/mine") or {}).get("metadata", {}).get("ownerReferences"))
