# SPDX-License-Identifier: Apache-2.0
"""The status of a BenchmarkJob, from its Job and pods. `lastReconcileTime` changes only with the rest."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from headrace.fleet.benchmarks.job import CONTAINER, BenchmarkPlan, results_uri
from headrace.fleet.status.conditions import format_time, truncate
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_list, get_mapping, get_str, name_of

PENDING, RUNNING, COMPLETED, FAILED = "Pending", "Running", "Completed", "Failed"
FINISHED = (COMPLETED, FAILED)
NO_SERVICE, BENCHMARK_FAILED, BENCHMARK_COMPLETED = "InferenceServiceNotFound", "BenchmarkFailed", "BenchmarkCompleted"
_STUCK = (
    "ImagePullBackOff",
    "ErrImagePull",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
)


def benchmark_status(
    benchmark: Document,
    planned: BenchmarkPlan,
    job: Document | None,
    pods: Sequence[Document],
    now: datetime,
    results: str = "",
) -> Document:
    """Return the status; equal to the current one if nothing has changed.

    results: URI of the results, if not the one that the user wrote.
    """
    before = get_mapping(benchmark, "status")
    status = _state(planned, job, pods, results or results_uri(benchmark))
    generation = get_int(benchmark, "metadata", "generation")
    if generation is not None:
        status["observedGeneration"] = generation
    same = {name: value for name, value in before.items() if name != "lastReconcileTime"} == status
    time = get_str(before, "lastReconcileTime") if same else ""
    return {**status, "lastReconcileTime": time or format_time(now)}


def job_state(job: Document | None) -> str:
    """Return `Completed` or `Failed` for a finished Job, else ""."""
    conditions = {
        get_str(condition, "type")
        for condition in get_list(job, "status", "conditions")
        if get_str(condition, "status") == "True"
    }
    return COMPLETED if "Complete" in conditions else FAILED if "Failed" in conditions else ""


def status_event(planned: BenchmarkPlan, before: Document, after: Document) -> tuple[str, str, str] | None:
    """Return the event of a status change: type, reason and message; None if the change needs none."""
    state, same = get_str(after, "state"), get_str(before, "state") == get_str(after, "state")
    if state == FAILED and get_str(before, "failureMessage") != get_str(after, "failureMessage"):
        return "Warning", BENCHMARK_FAILED, get_str(after, "failureMessage")
    if state == COMPLETED and not same:
        return "Normal", BENCHMARK_COMPLETED, get_str(after, "details")
    if planned.missing and get_str(before, "details") != get_str(after, "details"):
        return "Warning", NO_SERVICE, get_str(after, "details")
    return None


def is_finished(benchmark: Document) -> bool:
    """Whether the current spec was run to its end, so that a deleted Job is not created again."""
    status = get_mapping(benchmark, "status")
    done = get_str(status, "state") in FINISHED and bool(get_str(status, "completionTime"))
    return done and get_int(status, "observedGeneration") == get_int(benchmark, "metadata", "generation")


def _state(planned: BenchmarkPlan, job: Document | None, pods: Sequence[Document], results: str) -> dict[str, Any]:
    if planned.problems:
        return {"state": FAILED, "failureMessage": truncate("; ".join(map(str, planned.problems)))}
    if job is None:
        return {"state": PENDING, "details": truncate(planned.waits or "its Job is being created")}
    status = get_mapping(job, "status")
    started = {"startTime": get_str(status, "startTime")} if get_str(status, "startTime") else {}
    state = job_state(job)
    if state == COMPLETED:
        details = f"results are in {results}"
        return {"state": COMPLETED, **started, "completionTime": _finish_time(job, "Complete"), "details": details}
    if state == FAILED:
        return {
            "state": FAILED,
            **started,
            "completionTime": _finish_time(job, "Failed"),
            "failureMessage": truncate(_failure_message(job, pods)),
        }
    stuck = _stuck(pods)
    if stuck:
        return {"state": PENDING, **started, "details": truncate(stuck)}
    if any(get_str(pod, "status", "phase") == "Running" for pod in pods) or (not pods and get_int(status, "active")):
        return {"state": RUNNING, **started, "details": f"Job {name_of(job)} runs"}
    return {"state": PENDING, **started, "details": f"Job {name_of(job)} has no pod that runs yet"}


def _finish_time(job: Document, kind: str) -> str:
    finished: Document = next(
        (condition for condition in get_list(job, "status", "conditions") if get_str(condition, "type") == kind), {}
    )
    return get_str(job, "status", "completionTime") or get_str(finished, "lastTransitionTime")


def _failure_message(job: Document, pods: Sequence[Document]) -> str:
    """Return the last output of the program, or the message of the Job's condition."""
    for pod in pods:
        for status in get_list(pod, "status", "containerStatuses"):
            over = get_mapping(status, "state", "terminated")
            if get_str(status, "name") == CONTAINER and over and get_int(over, "exitCode"):
                value = get_str(over, "message").strip() or get_str(over, "reason")
                return f"`headrace bench` ended with {get_int(over, 'exitCode')}: {value}"
    failed: Document = next(
        (condition for condition in get_list(job, "status", "conditions") if get_str(condition, "type") == "Failed"), {}
    )
    value = get_str(failed, "message") or get_str(failed, "reason") or "it failed"
    return f"Job {name_of(job)}: {value}; `kubectl logs job/{name_of(job)}` may show more"


def _stuck(pods: Sequence[Document]) -> str:
    for pod in pods:
        for condition in get_list(pod, "status", "conditions"):
            if get_str(condition, "type") == "PodScheduled" and get_str(condition, "reason") == "Unschedulable":
                return f"no node takes its pod: {get_str(condition, 'message')}"
        for status in get_list(pod, "status", "containerStatuses"):
            waits = get_mapping(status, "state", "waiting")
            if get_str(waits, "reason") in _STUCK:
                return f"{get_str(waits, 'reason')}: {get_str(waits, 'message')}"
    return ""
