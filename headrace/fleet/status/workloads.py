# SPDX-License-Identifier: Apache-2.0
"""Whether a component's workload and pods run, and the reason why not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headrace.fleet.names import COMPONENT_LABEL, MAIN_CONTAINER, ROUTER_CONTAINER, trunc63
from headrace.fleet.status.conditions import (
    KNATIVE,
    Condition,
    ConditionStatus,
    Observed,
    condition_of,
    copy_condition,
    get_mappings,
    group_of,
)
from headrace.platforms.kubernetes_client.objects import (
    Document,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
    name_of,
)

WORKLOADS = frozenset({"Deployment", "LeaderWorkerSet", "RayCluster"})


def workloads(objects: Iterable[Document], component: str) -> list[Document]:
    """Return the planned workloads of a component."""
    return [
        document
        for document in objects
        if labels_of(document).get(COMPONENT_LABEL) == component
        and (kind_of(document) in WORKLOADS or (kind_of(document) == "Service" and group_of(document) == KNATIVE))
    ]


def is_knative(workload: Document) -> bool:
    """Whether a workload is a Knative Service."""
    return group_of(workload) == KNATIVE


def component_ready(
    kind: str, workloads: Sequence[Document], observed: Observed, pods: Sequence[Document]
) -> Condition:
    """Return whether all workloads of a component that get requests are ready."""
    conditions = [workload_ready(kind, workload, observed, pods) for workload in workloads]
    if not conditions:
        return Condition(kind, "Unknown", "Creating", "no workload has been created yet")
    if all(kind_of(workload) == "RayCluster" for workload in workloads):
        # Each cluster is a replica: one is enough.
        return min(conditions, key=lambda condition: ("True", "Unknown", "False").index(condition.status))
    return max(conditions, key=lambda condition: ("True", "Unknown", "False").index(condition.status))


def workload_ready(kind: str, planned: Document, observed: Observed, pods: Sequence[Document]) -> Condition:
    """Return whether one workload is ready."""
    live = observed.live(planned)
    if live is None:
        return Condition(kind, "Unknown", "Creating", f"{kind_of(planned)} {name_of(planned)} has not been created yet")
    if is_knative(planned):
        return _with_pod_reason(copy_condition(kind, condition_of(live, "Ready")), pods)
    if kind_of(planned) == "RayCluster":
        return _with_pod_reason(_ray_condition(kind, live), pods)
    value = copy_condition(kind, condition_of(live, "Available"))
    if value.status == "True":
        return value
    own_pods = [pod for pod in pods if _owns_pod(live, pod)]
    for name, bad in (("ReplicaFailure", "True"), ("Progressing", "False")):
        other = condition_of(live, name)
        if get_str(other, "status") == bad and not own_pods:
            return Condition(kind, "False", get_str(other, "reason"), get_str(other, "message"))
    if value.reason == "Waiting":
        value = Condition(kind, "Unknown", "Deploying", f"{kind_of(live)} {name_of(live)} is starting")
    return _with_pod_reason(value, own_pods)


def is_rolled_out(planned: Document, observed: Observed) -> bool:
    """Whether a workload runs only its latest template."""
    live = observed.live(planned)
    if live is None:
        return False
    if get_int(live, "status", "observedGeneration") is not None:
        observed_generation, desired = (
            get_int(live, "status", "observedGeneration") or 0,
            get_int(live, "metadata", "generation") or 0,
        )
        if observed_generation < desired:
            return False
    if is_knative(planned):
        created = get_str(live, "status", "latestCreatedRevisionName")
        return bool(created) and created == get_str(live, "status", "latestReadyRevisionName")
    if kind_of(planned) == "RayCluster":
        return get_str(live, "status", "state") == "ready"
    desired = desired_replicas(live)
    updated, replicas = get_int(live, "status", "updatedReplicas") or 0, get_int(live, "status", "replicas") or 0
    available = get_int(live, "status", "availableReplicas" if kind_of(live) == "Deployment" else "readyReplicas") or 0
    return updated >= desired and replicas <= updated and available >= min(desired, updated)


def desired_replicas(live: Document) -> int:
    """Return `spec.replicas` of a live workload."""
    count = get_int(live, "spec", "replicas")
    return 1 if count is None else count


def _ray_condition(kind: str, live: Document) -> Condition:
    state = get_str(live, "status", "state")
    if state == "ready":
        return Condition(kind, "True")
    status: ConditionStatus = "False" if state in ("failed", "unhealthy", "suspended") else "Unknown"
    value = get_str(live, "status", "reason") or f"RayCluster {name_of(live)} is {state or 'starting'}"
    return Condition(kind, status, f"RayCluster{state.capitalize()}" if state else "Deploying", value)


def _with_pod_reason(value: Condition, pods: Sequence[Document]) -> Condition:
    """Replace the reason of a workload that is not ready by that of its pods."""
    if value.status == "True":
        return value
    reason = _worst_state([pod_state(pod) for pod in pods])
    if reason is None:
        return value
    status: ConditionStatus = "False" if reason.state == FAILED else value.status
    if reason.reason == NODE_LOST:
        status = "Unknown"
    return Condition(value.type, status, reason.reason, f"pod {reason.pod}: {reason.message}")


def _worst_state(states: Sequence[PodState]) -> PodState | None:
    """Return the newest failed pod, else the newest waiting one."""
    failed = [state for state in states if state.state == FAILED]
    waiting = [state for state in states if state.state != LOADED and state.reason]
    return failed[-1] if failed else waiting[-1] if waiting else None


def _owns_pod(workload: Document, pod: Document) -> bool:
    """Whether a pod belongs to a workload, by its selector or by the label of its controller."""
    labels = labels_of(pod)
    if is_knative(workload):
        return labels.get("serving.knative.dev/service", name_of(workload)) == name_of(workload)
    if kind_of(workload) == "RayCluster":
        return labels.get("ray.io/cluster", name_of(workload)) == name_of(workload)
    if kind_of(workload) == "LeaderWorkerSet":
        return labels.get("leaderworkerset.sigs.k8s.io/name", name_of(workload)) == name_of(workload)
    selector = get_mapping(workload, "spec", "selector", "matchLabels") or {"app": trunc63(name_of(workload))}
    return all(labels.get(name) == value for name, value in selector.items())


PENDING, STANDBY, LOADING, LOADED, FAILED = "Pending", "Standby", "Loading", "Loaded", "FailedToLoad"

_LOAD_FAILED, _UNHEALTHY = "ModelLoadFailed", "RuntimeUnhealthy"

NODE_LOST = "NodeLost"
CRASH_LOOP = "CrashLoopBackOff"
_ENDED = ("", "Error", "Completed")
"""Termination reasons without information: the program ended."""
_LAST_LINES = 8

_STUCK_REASONS = frozenset(
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
"""Waiting reasons that rarely resolve by themselves. The model was never loaded."""
_LOG_LEVELS = frozenset({"warning", "error", "critical", "fatal"})


@dataclass(frozen=True)
class PodState:
    """The state of the model in one pod."""

    pod: str
    state: str
    reason: str = ""
    """Why it is not ready: `CrashLoopBackOff`, `OOMKilled`, `Unschedulable`."""
    message: str = ""
    output: str = ""
    """The last lines that a program printed before it failed."""
    failure: str = ""
    """A FailureReason of the status, when the state is FailedToLoad."""
    exit_code: int | None = None
    time: str = ""


def pod_state(pod: Document) -> PodState:
    """Return the state of one pod."""
    name = name_of(pod)
    if get_str(condition_of(pod, "Ready"), "status") == "True":
        return PodState(name, LOADED)
    lost = _lost_state(pod)
    if lost is not None:
        return lost
    if get_str(pod, "status", "phase") == "Failed" and get_str(pod, "status", "reason"):
        reason = get_str(pod, "status", "reason")
        message = get_str(pod, "status", "message") or reason
        return PodState(name, FAILED, reason, message, failure=_UNHEALTHY)
    for role, container in _containers(pod):
        failure = _container_failure(name, container, starting=role == "init")
        if failure is not None:
            return failure
    return _waiting_state(pod)


def _lost_state(pod: Document) -> PodState | None:
    """Return the state of a pod whose node no longer reports.

    The node's controller marks such a pod as not ready. All else is what the node reported last: its containers are ready.
    """
    ready = condition_of(pod, "Ready")
    since = get_str(ready, "lastTransitionTime")
    node = get_str(pod, "spec", "nodeName")
    subject = f"its node {node}" if node else "its node"
    node_lost = get_str(pod, "status", "reason") == NODE_LOST
    containers = get_mappings(pod, "status", "containerStatuses")
    stale = get_str(condition_of(pod, "ContainersReady"), "status") == "True" and all(
        container.get("ready") is True for container in containers
    )
    if not node_lost and not (ready is not None and stale and not get_list(pod, "spec", "readinessGates")):
        return None
    message = f"Unknown: {subject} stopped reporting" + (f" at {since}" if since else "")
    return PodState(name_of(pod), PENDING, NODE_LOST, message)


def _container_failure(pod: str, container: Document, *, starting: bool) -> PodState | None:
    """Return why a container does not run. A restarted container counts as failed until it is ready."""
    if container.get("ready") is True and not starting:
        return None
    waiting, named = get_mapping(container, "state", "waiting"), get_str(container, "name")
    if get_str(waiting, "reason") in _STUCK_REASONS:
        value = get_str(waiting, "message") or get_str(waiting, "reason")
        return PodState(pod, FAILED, get_str(waiting, "reason"), f"container {named}: {value}", failure=_UNHEALTHY)
    ended = get_mapping(container, "state", "terminated") or get_mapping(container, "lastState", "terminated")
    code = get_int(ended, "exitCode")
    if not ended or (code == 0 and (starting or not waiting)):
        return None
    why = get_str(ended, "reason") or "Error"
    # Not the current reason: a container in a crash loop alternates between running, ended and waiting.
    reason = CRASH_LOOP if why in _ENDED else why
    value = _last_error(get_str(ended, "message"))
    message = f"container {named} ended with exit code {code} ({why})" + (f": {value}" if value else "")
    lines = [line.rstrip() for line in get_str(ended, "message").splitlines() if line.strip()]
    output = "\n".join(lines[-_LAST_LINES:]) if len(lines) > 1 else ""
    return PodState(pod, FAILED, reason, message, output, _LOAD_FAILED, code, get_str(ended, "finishedAt"))


def _last_error(log: str) -> str:
    """Return the likely error from the end of a log: the last warning of a JSON log, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in reversed(lines):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            return line
        if str(value.get("level")).lower() in _LOG_LEVELS:
            return str(value.get("message", ""))
    return ""


def _waiting_state(pod: Document) -> PodState:
    name = name_of(pod)
    scheduled = condition_of(pod, "PodScheduled")
    if get_str(scheduled, "status") == "False":
        return PodState(name, PENDING, get_str(scheduled, "reason") or "Unschedulable", get_str(scheduled, "message"))
    for role, container in _containers(pod):
        if "running" in get_mapping(container, "state"):
            if role == "init":
                return PodState(name, LOADING, "PodInitializing", f"container {get_str(container, 'name')} is running")
            if container.get("ready") is not True:
                value = f"container {get_str(container, 'name')} runs and is not ready yet"
                return PodState(name, LOADING, "ContainersNotReady", value)
    for _, container in _containers(pod):
        waiting = get_mapping(container, "state", "waiting")
        if "waiting" in get_mapping(container, "state"):
            value = get_str(waiting, "message") or f"container {get_str(container, 'name')} is waiting"
            return PodState(name, PENDING, get_str(waiting, "reason") or "ContainerCreating", value)
    return PodState(name, PENDING, "Pending", "it has not been started yet")


def _containers(pod: Document) -> Iterator[tuple[str, Document]]:
    """Yield the status of init containers, then the main one, then the others."""
    for record in get_mappings(pod, "status", "initContainerStatuses"):
        yield "init", record
    yield from (
        ("main", status)
        for status in sorted(
            get_mappings(pod, "status", "containerStatuses"),
            key=lambda status: get_str(status, "name") not in (MAIN_CONTAINER, ROUTER_CONTAINER),
        )
    )
