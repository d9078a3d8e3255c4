# SPDX-License-Identifier: Apache-2.0
"""The status of a BenchmarkJob, from its Job and the pods of that. The time of the last look moves only with the rest."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from headrace.fleet.benchmarks.planning import CONTAINER, Benchmark, where_of
from headrace.fleet.status.conditions import shortened, time_text
from headrace.fleet.words import Document, items, name_of, part, text, whole

PENDING, RUNNING, COMPLETED, FAILED = "Pending", "Running", "Completed", "Failed"
ENDED = (COMPLETED, FAILED)
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
    planned: Benchmark,
    job: Document | None,
    pods: Sequence[Document],
    now: datetime,
    where: str = "",
) -> Document:
    """What to write; equal to what is there if nothing has changed. `where`: the results, if not as the user writes it."""
    before = part(benchmark, "status")
    told = _told(planned, job, pods, where or where_of(benchmark))
    generation = whole(benchmark, "metadata", "generation")
    if generation is not None:
        told["observedGeneration"] = generation
    same = {name: value for name, value in before.items() if name != "lastReconcileTime"} == told
    told["lastReconcileTime"] = text(before, "lastReconcileTime") if same else ""
    return {**told, "lastReconcileTime": told["lastReconcileTime"] or time_text(now)}


def ended(job: Document | None) -> str:
    """`Completed` or `Failed` once a Job is; else nothing."""
    conditions = {text(each, "type") for each in items(job, "status", "conditions") if text(each, "status") == "True"}
    return COMPLETED if "Complete" in conditions else FAILED if "Failed" in conditions else ""


def news(planned: Benchmark, before: Document, after: Document) -> tuple[str, str, str] | None:
    """The event of a change of status: its type, its reason and what it says; None where nobody need know."""
    state, same = text(after, "state"), text(before, "state") == text(after, "state")
    if state == FAILED and text(before, "failureMessage") != text(after, "failureMessage"):
        return "Warning", BENCHMARK_FAILED, text(after, "failureMessage")
    if state == COMPLETED and not same:
        return "Normal", BENCHMARK_COMPLETED, text(after, "details")
    if planned.missing and text(before, "details") != text(after, "details"):
        return "Warning", NO_SERVICE, text(after, "details")
    return None


def is_over(benchmark: Document) -> bool:
    """Whether what is asked for has been done, and only its Job is gone. What never had one is looked at again."""
    status = part(benchmark, "status")
    done = text(status, "state") in ENDED and bool(text(status, "completionTime"))
    return done and whole(status, "observedGeneration") == whole(benchmark, "metadata", "generation")


def _told(planned: Benchmark, job: Document | None, pods: Sequence[Document], where: str) -> dict[str, Any]:
    if planned.problems:
        return {"state": FAILED, "failureMessage": shortened("; ".join(map(str, planned.problems)))}
    if job is None:
        return {"state": PENDING, "details": shortened(planned.waits or "its Job is being made")}
    status = part(job, "status")
    begun = {"startTime": text(status, "startTime")} if text(status, "startTime") else {}
    state = ended(job)
    if state == COMPLETED:
        details = f"results are in {where}"
        return {"state": COMPLETED, **begun, "completionTime": _end(job, "Complete"), "details": details}
    if state == FAILED:
        return {
            "state": FAILED,
            **begun,
            "completionTime": _end(job, "Failed"),
            "failureMessage": shortened(_why(job, pods)),
        }
    stuck = _stuck(pods)
    if stuck:
        return {"state": PENDING, **begun, "details": shortened(stuck)}
    if any(text(each, "status", "phase") == "Running" for each in pods) or (not pods and whole(status, "active")):
        return {"state": RUNNING, **begun, "details": f"Job {name_of(job)} runs"}
    return {"state": PENDING, **begun, "details": f"Job {name_of(job)} has no pod that runs yet"}


def _end(job: Document, kind: str) -> str:
    found: Document = next((each for each in items(job, "status", "conditions") if text(each, "type") == kind), {})
    return text(job, "status", "completionTime") or text(found, "lastTransitionTime")


def _why(job: Document, pods: Sequence[Document]) -> str:
    """What the program said last, or what Kubernetes says of the Job."""
    for pod in pods:
        for each in items(pod, "status", "containerStatuses"):
            over = part(each, "state", "terminated")
            if text(each, "name") == CONTAINER and over and whole(over, "exitCode"):
                said = text(over, "message").strip() or text(over, "reason")
                return f"`headrace bench` ended with {whole(over, 'exitCode')}: {said}"
    failed: Document = next((each for each in items(job, "status", "conditions") if text(each, "type") == "Failed"), {})
    said = text(failed, "message") or text(failed, "reason") or "it failed"
    return f"Job {name_of(job)}: {said}; `kubectl logs job/{name_of(job)}` may tell more"


def _stuck(pods: Sequence[Document]) -> str:
    for pod in pods:
        for each in items(pod, "status", "conditions"):
            if text(each, "type") == "PodScheduled" and text(each, "reason") == "Unschedulable":
                return f"no node takes its pod: {text(each, 'message')}"
        for each in items(pod, "status", "containerStatuses"):
            waits = part(each, "state", "waiting")
            if text(waits, "reason") in _STUCK:
                return f"{text(waits, 'reason')}: {text(waits, 'message')}"
    return ""
