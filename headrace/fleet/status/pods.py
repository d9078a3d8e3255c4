# SPDX-License-Identifier: Apache-2.0
"""What a pod's status tells of the model in it: not there yet, loading, loaded, or why it does not load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.fleet.names import MAIN_CONTAINER, ROUTER_CONTAINER
from headrace.fleet.status.observed import condition_of, records
from headrace.fleet.words import Document, name_of, part, text, whole

PENDING, STANDBY, LOADING, LOADED, FAILED = "Pending", "Standby", "Loading", "Loaded", "FailedToLoad"

_LOAD_FAILED, _UNHEALTHY = "ModelLoadFailed", "RuntimeUnhealthy"

_STUCK = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "RegistryUnavailable",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "StartError",
    }
)
"""Reasons to wait that seldom pass by themselves. The model was never tried."""
_GRAVE = frozenset({"warning", "error", "critical", "fatal"})


@dataclass(frozen=True)
class PodState:
    """One pod."""

    pod: str
    state: str
    reason: str = ""
    """Why it is not ready, as one word: `CrashLoopBackOff`, `OOMKilled`, `Unschedulable`."""
    message: str = ""
    failure: str = ""
    """A FailureReason of the status, when the state is FailedToLoad."""
    exit_code: int | None = None
    time: str = ""


def state_of(pod: Document) -> PodState:
    """What one pod tells."""
    name = name_of(pod)
    if text(condition_of(pod, "Ready"), "status") == "True":
        return PodState(name, LOADED)
    if text(pod, "status", "phase") == "Failed" and text(pod, "status", "reason"):
        reason = text(pod, "status", "reason")
        return PodState(name, FAILED, reason, text(pod, "status", "message") or reason, _UNHEALTHY)
    for place, container in _containers(pod):
        found = _fault(name, container, starting=place == "init")
        if found is not None:
            return found
    return _waiting(pod)


def _fault(pod: str, container: Document, *, starting: bool) -> PodState | None:
    """Why a container does not run. One that has failed and is tried again has still failed, until it is ready."""
    if container.get("ready") is True and not starting:
        return None
    waiting, named = part(container, "state", "waiting"), text(container, "name")
    if text(waiting, "reason") in _STUCK:
        said = text(waiting, "message") or text(waiting, "reason")
        return PodState(pod, FAILED, text(waiting, "reason"), f"container {named}: {said}", _UNHEALTHY)
    ended = part(container, "state", "terminated") or part(container, "lastState", "terminated")
    code = whole(ended, "exitCode")
    if not ended or (code == 0 and (starting or not waiting)):
        return None
    why = text(ended, "reason") or "Error"
    reason = text(waiting, "reason") if why in ("", "Error", "Completed") else why
    said = _last_words(text(ended, "message"))
    message = f"container {named} ended with exit code {code} ({why})" + (f": {said}" if said else "")
    return PodState(pod, FAILED, reason or why, message, _LOAD_FAILED, code, text(ended, "finishedAt"))


def _last_words(log: str) -> str:
    """Of the end of a container's log what most likely says why: the last warning of a log of JSON, else the last line."""
    lines = [each.strip() for each in log.splitlines() if each.strip()]
    for line in reversed(lines):
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            return line
        if str(said.get("level")).lower() in _GRAVE:
            return str(said.get("message", ""))
    return ""


def _waiting(pod: Document) -> PodState:
    name = name_of(pod)
    scheduled = condition_of(pod, "PodScheduled")
    if text(scheduled, "status") == "False":
        return PodState(name, PENDING, text(scheduled, "reason") or "Unschedulable", text(scheduled, "message"))
    for place, container in _containers(pod):
        if "running" in part(container, "state"):
            if place == "init":
                return PodState(name, LOADING, "PodInitializing", f"container {text(container, 'name')} is running")
            if container.get("ready") is not True:
                said = f"container {text(container, 'name')} runs and is not ready yet"
                return PodState(name, LOADING, "ContainersNotReady", said)
    for _, container in _containers(pod):
        waiting = part(container, "state", "waiting")
        if "waiting" in part(container, "state"):
            said = text(waiting, "message") or f"container {text(container, 'name')} is waiting"
            return PodState(name, PENDING, text(waiting, "reason") or "ContainerCreating", said)
    return PodState(name, PENDING, "Pending", "it has not been started yet")


def _containers(pod: Document) -> Iterator[tuple[str, Document]]:
    """Init containers, then the main one, then the others."""
    for each in records(pod, "status", "initContainerStatuses"):
        yield "init", each
    yield from (
        ("main", each)
        for each in sorted(
            records(pod, "status", "containerStatuses"),
            key=lambda each: text(each, "name") not in (MAIN_CONTAINER, ROUTER_CONTAINER),
        )
    )
