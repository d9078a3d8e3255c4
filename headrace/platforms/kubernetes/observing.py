# SPDX-License-Identifier: Apache-2.0
"""What the API server tells of a workload and its pods, as `Observed`. No I/O; called by the driver.

Kubernetes tries on for ever where an image cannot be pulled or a container cannot be made. Whoever waits wants to know: such
a service counts as ended, with the reason, although it would run if the cause went away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.platforms.contract import Observed

Thing = Mapping[str, Any]

_HOPELESS = {
    "ImagePullBackOff": "the image cannot be pulled: look at its name, and at the image pull secret",
    "ErrImageNeverPull": "the image is not on the node, and is never to be pulled",
    "InvalidImageName": "the image's name is none",
    "CreateContainerError": "the container cannot be made",
    "CreateContainerConfigError": "the container cannot be made from what the pod names",
    "RunContainerError": "the container cannot be run",
}
_CRASHES = 2
"""Restarts after which a service that is not running is given up."""
_TOLD_CHARACTERS = 500
_KILLED = 128


def observe(workload: Thing | None, pods: Sequence[Thing], event: str = "") -> Observed:
    """How a service is. `event`: what the controllers complained of, if that was looked up."""
    pod = newest(pods)
    name = pod["metadata"]["name"] if pod is not None else ""
    if workload is None:
        # Its pods may still be on their way out, also where somebody took the workload away alone.
        return Observed("gone") if pod is None else _leaving(pod)
    name = name or workload["metadata"]["name"]
    if workload["metadata"].get("deletionTimestamp"):
        return (
            _leaving(pod) if pod is not None else Observed("ended", name, "Terminating", reason="it is being removed")
        )
    over = _finished_job(workload, pod, name)
    if over is not None:
        return over
    if pod is None:
        return Observed("starting", name, "Pending", reason=_without_pod(workload, event))
    return _of_pod(pod)


def newest(pods: Sequence[Thing]) -> Thing | None:
    """The pod that counts: one that is to stay before one that is going, then the latest."""
    return max(
        pods,
        key=lambda pod: (
            not pod["metadata"].get("deletionTimestamp"),
            pod["metadata"].get("creationTimestamp") or "",
            pod["metadata"]["name"],
        ),
        default=None,
    )


def _finished_job(workload: Thing, pod: Thing | None, name: str) -> Observed | None:
    for condition in _status(workload).get("conditions") or ():
        if condition["status"] != "True":
            continue
        if condition["type"] == "Complete":
            return Observed("ended", name, "Succeeded", 0, "the program has ended")
        if condition["type"] == "Failed":
            if pod is not None and _status(pod).get("phase") == "Failed":
                return _failed_pod(pod)
            told = _joined(condition.get("reason"), condition.get("message"))
            return Observed("ended", name, "Failed", reason=told or "the Job has failed")
    return None


def _without_pod(workload: Thing, event: str) -> str:
    details = workload.get("spec") or {}
    if details.get("parallelism", details.get("replicas", 1)) == 0:
        return "its start was cut short: stop it, and start it again"
    return event or "its pod is not made yet"


def _of_pod(pod: Thing) -> Observed:
    status = _status(pod)
    name = pod["metadata"]["name"]
    phase = status.get("phase") or "Pending"
    if pod["metadata"].get("deletionTimestamp"):
        return _leaving(pod)
    if phase == "Succeeded":
        return Observed("ended", name, "Succeeded", 0, "the program has ended")
    if phase == "Failed":
        return _failed_pod(pod)
    if phase == "Unknown":
        return Observed("running", name, "Unknown", reason=_joined(status.get("reason"), status.get("message")))
    container = _container_status(pod)
    waiting = (container.get("state") or {}).get("waiting")
    if waiting is not None:
        return _waiting(pod, container, waiting)
    if phase == "Running":
        ended = (container.get("state") or {}).get("terminated")
        if ended is not None:  # between two attempts of one that is started again and again
            return Observed("starting", name, "Pending", ended.get("exitCode"), _why_ended(ended))
        return Observed("running", name, "Running")
    return Observed("starting", name, "Pending", reason=_unscheduled(pod))


def _waiting(pod: Thing, container: Thing, waiting: Thing) -> Observed:
    name = pod["metadata"]["name"]
    reason = waiting.get("reason") or ""
    told = _joined(reason, waiting.get("message"))
    if reason in _HOPELESS:
        return Observed("ended", name, "Failed", reason=_joined(_HOPELESS[reason], told))
    if reason == "CrashLoopBackOff":
        last = (container.get("lastState") or {}).get("terminated") or {}
        told = _joined("the program ends again and again", _why_ended(last) if last else told)
        if (container.get("restartCount") or 0) >= _CRASHES:
            return Observed("ended", name, "Failed", last.get("exitCode"), told)
        return Observed("starting", name, "Pending", last.get("exitCode"), told)
    if reason in ("", "ContainerCreating", "PodInitializing"):
        told = ""
    return Observed("starting", name, "Pending", reason=told or "the image is pulled and the container is made")


def _failed_pod(pod: Thing) -> Observed:
    status = _status(pod)
    name = pod["metadata"]["name"]
    ended = (_container_status(pod).get("state") or {}).get("terminated") or {}
    if status.get("reason"):  # Evicted, NodeLost, DeadlineExceeded: the pod's own end, not its program's
        told = _joined(status["reason"], status.get("message"))
        return Observed("ended", name, "Failed", ended.get("exitCode"), told)
    return Observed(
        "ended", name, "Failed", ended.get("exitCode"), _why_ended(ended) if ended else "the pod has failed"
    )


def _leaving(pod: Thing) -> Observed:
    alive = _status(pod).get("phase") == "Running"
    return Observed(
        "running" if alive else "ended", pod["metadata"]["name"], "Terminating", reason="it is being removed"
    )


def _why_ended(ended: Thing) -> str:
    code = ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        return f"the program was killed for want of memory (OOMKilled, code {code}): allow it more, or serve a smaller model"
    told = f"the program has ended with code {code}"
    if isinstance(code, int) and code > _KILLED:
        told = f"the program was ended by signal {code - _KILLED}"
    return _joined(told, ended.get("message"))


def _unscheduled(pod: Thing) -> str:
    for condition in _status(pod).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            told = _joined(condition.get("reason"), condition.get("message"))
            if "nvidia.com/gpu" in told:
                return f"no node has that many free GPUs: {told}"
            return f"no node takes it: {told}"
    return "it waits for a node"


def _status(thing: Thing) -> Mapping[str, Any]:
    return thing.get("status") or {}


def _container_status(pod: Thing) -> Mapping[str, Any]:
    found: Sequence[Mapping[str, Any]] = _status(pod).get("containerStatuses") or ({},)
    return found[0]


def _joined(first: object, second: object) -> str:
    return ": ".join(str(each) for each in (first, second) if each)[:_TOLD_CHARACTERS]
