# SPDX-License-Identifier: Apache-2.0
"""A pod of this machine as Kubernetes would show it. Pure; for `status`, and for `headrace describe`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.fleet.local.commands import ADDRESS
from headrace.fleet.words import Document, items, part, text

Role = Literal["init", "sidecar", "main"]
"""What a container is to its pod: done before the others, beside them from before on, or one of them."""
UNSCHEDULABLE = "Unschedulable"
CRASH_LOOP = "CrashLoopBackOff"
UNKNOWN_END = "ContainerStatusUnknown"
OOM_KILLED = "OOMKilled"


@dataclass
class State:
    """How a pod is. Kept on disk beside the pod."""

    unschedulable: str = ""
    """Why there is no room for it."""
    placed: bool = False


@dataclass
class ContainerState:
    """How a container is. Kept on disk in its folder."""

    reason: str = ""
    """Why it does not run, one word, while it does not."""
    message: str = ""
    started_at: str = ""
    """When what runs now was started; "" while nothing does."""
    started: bool = False
    """Whether it has been found to be up once since."""
    ready: bool = False
    restarts: int = 0
    crashes: int = 0
    """Ends since it last ran for long: the back-off grows with them."""
    last: dict[str, Any] = field(default_factory=dict)
    """How it ended before: Kubernetes' `terminated`."""
    ended: dict[str, Any] = field(default_factory=dict)
    """How it ended for good, in the same words."""

    @property
    def succeeded(self) -> bool:
        """Whether it has done what it was for."""
        return bool(self.ended) and not self.ended.get("exitCode")


def roles_of(spec: Document) -> list[tuple[Document, Role]]:
    """The containers of a pod in the order in which they begin. One that is to be restarted always goes on beside others."""
    first = items(spec, "initContainers")
    return [
        *((each, "sidecar" if text(each, "restartPolicy") == "Always" else "init") for each in first),
        *((each, "main") for each in items(spec, "containers")),
    ]


@dataclass(frozen=True)
class Seen:
    """A container and how it is."""

    container: Document
    role: Role
    state: ContainerState

    @property
    def begun(self) -> bool:
        """Whether those after it may begin."""
        return self.state.started if self.role == "sidecar" else self.state.succeeded


def terminated(code: int | None, started: str, finished: str, said: str, reason: str = "") -> dict[str, Any]:
    """How a container ended: `code` as Python has it, None where nobody knows."""
    exit_code = 137 if code is None else code if code >= 0 else 128 - code
    why = reason or (UNKNOWN_END if code is None else "Completed" if code == 0 else "Error")
    made: dict[str, Any] = {"exitCode": exit_code, "reason": why, "startedAt": started, "finishedAt": finished}
    if code is not None and code < 0:
        made["signal"] = -code
    return {**made, "message": said} if said else made


def all_ready(seen: Sequence[Seen]) -> bool:
    """Whether a pod is: all that run beside each other are, and what comes before is done."""
    mains = [each for each in seen if each.role == "main"]
    return bool(mains) and all(each.state.succeeded if each.role == "init" else each.state.ready for each in seen)


def pod_shown(pod: Document, state: State, seen: Sequence[Seen], node: str, deleting: str = "") -> Document:
    """The pod with its status."""
    metadata = {**part(pod, "metadata"), **({"deletionTimestamp": deleting} if deleting else {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**part(pod, "spec"), **({"nodeName": node} if state.placed else {})},
        "status": _status(pod, state, seen),
    }


def phase_of(seen: Sequence[Seen]) -> str:
    """Pending until its containers have begun, Running, and how it ended for good."""
    mains = [each.state for each in seen if each.role == "main"]
    if any(each.role == "init" and each.state.ended and not each.state.succeeded for each in seen):
        return "Failed"
    if mains and all(each.ended for each in mains):
        return "Succeeded" if all(each.succeeded for each in mains) else "Failed"
    return "Running" if any(each.started_at or each.last or each.ended for each in mains) else "Pending"


def _status(pod: Document, state: State, seen: Sequence[Seen]) -> dict[str, Any]:
    told: list[dict[str, Any]] = []
    begun = all(each.begun for each in seen if each.role != "main")
    if state.placed:
        told = [{"type": "PodScheduled", "status": "True"}, {"type": "Initialized", "status": _truth(begun)}]
    elif state.unschedulable:
        said = {"reason": UNSCHEDULABLE, "message": state.unschedulable}
        told = [{"type": "PodScheduled", "status": "False", **said}]
    truth = _truth(all_ready(seen))
    made: dict[str, Any] = {
        "phase": phase_of(seen),
        "conditions": [*told, {"type": "ContainersReady", "status": truth}, {"type": "Ready", "status": truth}],
    }
    if not state.placed:
        return made
    first = [each for each in seen if each.role != "main"]
    return made | {
        "podIP": ADDRESS,
        "hostIP": ADDRESS,
        "startTime": text(pod, "metadata", "creationTimestamp"),
        **({"initContainerStatuses": [_container(each, True) for each in first]} if first else {}),
        "containerStatuses": [_container(each, begun) for each in seen if each.role == "main"],
    }


def _container(seen: Seen, begun: bool) -> dict[str, Any]:
    state = seen.state
    if state.started_at:
        now: dict[str, Any] = {"running": {"startedAt": state.started_at}}
    elif state.ended:
        now = {"terminated": dict(state.ended)}
    else:
        reason = state.reason or ("ContainerCreating" if begun else "PodInitializing")
        now = {"waiting": {"reason": reason, "message": state.message}}
    return {
        "name": text(seen.container, "name"),
        "image": text(seen.container, "image"),
        "ready": state.succeeded if seen.role == "init" else state.ready,
        "started": state.started,
        "restartCount": state.restarts,
        "state": now,
        "lastState": {"terminated": dict(state.last)} if state.last else {},
    }


def _truth(value: bool) -> str:
    return "True" if value else "False"
