# SPDX-License-Identifier: Apache-2.0
"""A pod of this machine as Kubernetes would show it. Pure; for `status`, and for `headrace describe`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.fleet.local.commands import ADDRESS
from headrace.fleet.planning.pods import main_container
from headrace.fleet.words import Document, part, text

UNSCHEDULABLE = "Unschedulable"
CRASH_LOOP = "CrashLoopBackOff"
UNKNOWN_END = "ContainerStatusUnknown"


@dataclass
class State:
    """How a pod's container is. Kept on disk beside the pod."""

    unschedulable: str = ""
    """Why there is no room for it."""
    placed: bool = False
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

    @classmethod
    def read(cls, said: Document | None) -> State:
        """Of a file; what is not known counts as new."""
        fresh = cls()
        for name, value in (said or {}).items():
            if hasattr(fresh, name) and isinstance(value, type(getattr(fresh, name))):
                setattr(fresh, name, value)
        return fresh

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


def terminated(code: int | None, started: str, finished: str, said: str) -> dict[str, Any]:
    """How a container ended: `code` as Python has it, None where nobody knows."""
    exit_code = 137 if code is None else code if code >= 0 else 128 - code
    reason = UNKNOWN_END if code is None else "Completed" if code == 0 else "Error"
    made: dict[str, Any] = {"exitCode": exit_code, "reason": reason, "startedAt": started, "finishedAt": finished}
    if code is not None and code < 0:
        made["signal"] = -code
    return {**made, "message": said} if said else made


def pod_shown(pod: Document, state: State, node: str, deleting: str = "") -> Document:
    """The pod with its status."""
    metadata = {**part(pod, "metadata"), **({"deletionTimestamp": deleting} if deleting else {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**part(pod, "spec"), **({"nodeName": node} if state.placed else {})},
        "status": _status(pod, state),
    }


def _status(pod: Document, state: State) -> dict[str, Any]:
    container = main_container(part(pod, "spec"))
    told: list[dict[str, Any]] = []
    if state.placed:
        told = [{"type": "PodScheduled", "status": "True"}, {"type": "Initialized", "status": "True"}]
    elif state.unschedulable:
        said = {"reason": UNSCHEDULABLE, "message": state.unschedulable}
        told = [{"type": "PodScheduled", "status": "False", **said}]
    truth = "True" if state.ready else "False"
    made: dict[str, Any] = {
        "phase": "Running" if state.started_at else "Pending",
        "conditions": [
            *told,
            {"type": "ContainersReady", "status": truth},
            {"type": "Ready", "status": truth},
        ],
    }
    if not state.placed:
        return made
    running: dict[str, Any] = {"running": {"startedAt": state.started_at}}
    waiting = {"waiting": {"reason": state.reason or "ContainerCreating", "message": state.message}}
    return made | {
        "podIP": ADDRESS,
        "hostIP": ADDRESS,
        "startTime": text(pod, "metadata", "creationTimestamp"),
        "containerStatuses": [
            {
                "name": text(container, "name"),
                "image": text(container, "image"),
                "ready": state.ready,
                "started": state.started,
                "restartCount": state.restarts,
                "state": running if state.started_at else waiting,
                "lastState": {"terminated": dict(state.last)} if state.last else {},
            }
        ],
    }
