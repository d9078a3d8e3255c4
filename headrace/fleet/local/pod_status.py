# SPDX-License-Identifier: Apache-2.0
"""The status of a pod of this machine, as Kubernetes reports it, and the state files that it is derived from.

`fleet.status` and `headrace describe` read the status. The states of pods, containers and jobs are data classes; their files
are read when a daemon starts and written when a state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from headrace.core.errors import FailedPrecondition
from headrace.core.files import read_json, write_json
from headrace.fleet.local.container_command import ADDRESS
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Role = Literal["init", "sidecar", "main"]
"""The role of a container in its pod: an init container, a sidecar (a restartable init container), or a main container."""
STATE_FILE = "state.json"
T = TypeVar("T")
UNSCHEDULABLE = "Unschedulable"
CRASH_LOOP = "CrashLoopBackOff"
STATUS_UNKNOWN = "ContainerStatusUnknown"
OOM_KILLED = "OOMKilled"


@dataclass
class PodState:
    """The state of a pod, stored in its folder."""

    unschedulable: str = ""
    """Why it cannot be scheduled."""
    placed: bool = False


@dataclass
class ContainerState:
    """The state of a container, stored in its folder."""

    reason: str = ""
    """Kubernetes' reason why it does not run, while it does not."""
    message: str = ""
    started_at: str = ""
    """When it was started; "" while it does not run."""
    started: bool = False
    """Whether its startup probe has succeeded since."""
    ready: bool = False
    restarts: int = 0
    crashes: int = 0
    """Crashes since it last ran for long; the back-off grows with them."""
    last: dict[str, Any] = field(default_factory=dict)
    """How it ended the last time: Kubernetes' `terminated`."""
    ended: dict[str, Any] = field(default_factory=dict)
    """How it ended for good, in the same form."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended for good with exit code 0."""
        return bool(self.ended) and not self.ended.get("exitCode")


def containers_with_roles(spec: Document) -> list[tuple[Document, Role]]:
    """Return the containers of a pod in start order, with their roles."""
    init_containers = get_list(spec, "initContainers")
    return [
        *(
            (container, "sidecar" if get_str(container, "restartPolicy") == "Always" else "init")
            for container in init_containers
        ),
        *((container, "main") for container in get_list(spec, "containers")),
    ]


@dataclass(frozen=True)
class ContainerStatus:
    """A container with its role and its state."""

    container: Document
    role: Role
    state: ContainerState

    @property
    def is_done(self) -> bool:
        """Whether the containers after this init container or sidecar may start."""
        return self.state.started if self.role == "sidecar" else self.state.succeeded


def terminated_state(code: int | None, started: str, finished: str, message: str, reason: str = "") -> dict[str, Any]:
    """Return Kubernetes' `terminated` state. `code`: negative for a signal, None if it is unknown."""
    exit_code = 137 if code is None else code if code >= 0 else 128 - code
    reason_text = reason or (STATUS_UNKNOWN if code is None else "Completed" if code == 0 else "Error")
    state: dict[str, Any] = {"exitCode": exit_code, "reason": reason_text, "startedAt": started, "finishedAt": finished}
    if code is not None and code < 0:
        state["signal"] = -code
    return {**state, "message": message} if message else state


def is_pod_ready(containers: Sequence[ContainerStatus]) -> bool:
    """Whether a pod is ready: its init containers have succeeded, and all other containers are ready."""
    mains = [container for container in containers if container.role == "main"]
    return bool(mains) and all(
        container.state.succeeded if container.role == "init" else container.state.ready for container in containers
    )


def pod_document(
    pod: Document, state: PodState, containers: Sequence[ContainerStatus], node: str, deleting: str = ""
) -> Document:
    """Return the pod with its status."""
    metadata = {**get_mapping(pod, "metadata"), **({"deletionTimestamp": deleting} if deleting else {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**get_mapping(pod, "spec"), **({"nodeName": node} if state.placed else {})},
        "status": _status(pod, state, containers),
    }


def pod_phase(containers: Sequence[ContainerStatus]) -> str:
    """Return the phase of a pod: Pending, Running, Succeeded or Failed."""
    mains = [container.state for container in containers if container.role == "main"]
    if any(
        container.role == "init" and container.state.ended and not container.state.succeeded for container in containers
    ):
        return "Failed"
    if mains and all(container.ended for container in mains):
        return "Succeeded" if all(container.succeeded for container in mains) else "Failed"
    return (
        "Running"
        if any(container.started_at or container.last or container.ended for container in mains)
        else "Pending"
    )


def _status(pod: Document, state: PodState, containers: Sequence[ContainerStatus]) -> dict[str, Any]:
    conditions: list[dict[str, Any]] = []
    initialized = all(container.is_done for container in containers if container.role != "main")
    if state.placed:
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Initialized", "status": _condition_status(initialized)},
        ]
    elif state.unschedulable:
        cause = {"reason": UNSCHEDULABLE, "message": state.unschedulable}
        conditions = [{"type": "PodScheduled", "status": "False", **cause}]
    ready = _condition_status(is_pod_ready(containers))
    status: dict[str, Any] = {
        "phase": pod_phase(containers),
        "conditions": [*conditions, {"type": "ContainersReady", "status": ready}, {"type": "Ready", "status": ready}],
    }
    if not state.placed:
        return status
    first = [container for container in containers if container.role != "main"]
    return status | {
        "podIP": ADDRESS,
        "hostIP": ADDRESS,
        "startTime": get_str(pod, "metadata", "creationTimestamp"),
        **({"initContainerStatuses": [_container_status(container, True) for container in first]} if first else {}),
        "containerStatuses": [
            _container_status(container, initialized) for container in containers if container.role == "main"
        ],
    }


def _container_status(container: ContainerStatus, initialized: bool) -> dict[str, Any]:
    state = container.state
    if state.started_at:
        current: dict[str, Any] = {"running": {"startedAt": state.started_at}}
    elif state.ended:
        current = {"terminated": dict(state.ended)}
    else:
        reason = state.reason or ("ContainerCreating" if initialized else "PodInitializing")
        current = {"waiting": {"reason": reason, "message": state.message}}
    return {
        "name": get_str(container.container, "name"),
        "image": get_str(container.container, "image"),
        "ready": state.succeeded if container.role == "init" else state.ready,
        "started": state.started,
        "restartCount": state.restarts,
        "state": current,
        "lastState": {"terminated": dict(state.last)} if state.last else {},
    }


def _condition_status(value: bool) -> str:
    return "True" if value else "False"


def parse_state(new: T, content: Document | None) -> T:
    """Copy known fields of the right type from a file's content into a new state."""
    for name, value in (content or {}).items():
        if hasattr(new, name) and isinstance(value, type(getattr(new, name))):
            setattr(new, name, value)
    return new


def load_state(folder: Path, new: T) -> T:
    """Return the state in a folder; the new one if there is no file."""
    return parse_state(new, read_json(folder / STATE_FILE))


def update_state(
    state: DataclassInstance, folder: Path, changes: Mapping[str, Any], on_write_error: Callable[[str], None]
) -> bool:
    """Change a state and its file; return whether it differs from before.

    `on_write_error` gets the message if the file cannot be written: the state is kept in memory, and
    the next daemon will not know it.
    """
    before = asdict(state)
    for name, value in changes.items():
        setattr(state, name, value)
    after = asdict(state)
    if after == before:
        return False
    try:
        write_json(folder / STATE_FILE, after, durable=False)
    except FailedPrecondition as error:
        on_write_error(error.message)
    return True
