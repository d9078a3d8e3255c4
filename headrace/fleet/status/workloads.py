# SPDX-License-Identifier: Apache-2.0
"""Whether a component runs: the word of its Deployment, LeaderWorkerSet, Knative Service or RayCluster, and the real reason.

A Deployment says "does not have minimum availability" of a container that crashes; the pods say why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.fleet.names import COMPONENT_LABEL, trunc63
from headrace.fleet.status.conditions import Condition, Truth, copied
from headrace.fleet.status.observed import KNATIVE, Observed, condition_of, group_of
from headrace.fleet.status.pods import FAILED, LOADED, PodState, state_of
from headrace.fleet.words import Document, kind_of, labels_of, name_of, part, text, whole

WORKLOADS = frozenset({"Deployment", "LeaderWorkerSet", "RayCluster"})


def workloads(objects: Iterable[Document], component: str) -> list[Document]:
    """The planned objects that run a component's pods."""
    return [
        each
        for each in objects
        if labels_of(each).get(COMPONENT_LABEL) == component
        and (kind_of(each) in WORKLOADS or (kind_of(each) == "Service" and group_of(each) == KNATIVE))
    ]


def is_knative(workload: Document) -> bool:
    """Whether it is a Knative Service."""
    return group_of(workload) == KNATIVE


def component_ready(kind: str, counted: Sequence[Document], observed: Observed, pods: Sequence[Document]) -> Condition:
    """Whether all of a component that gets requests can answer them."""
    found = [ready(kind, each, observed, pods) for each in counted]
    if not found:
        return Condition(kind, "Unknown", "Creating", "nothing that runs it has been made yet")
    if all(kind_of(each) == "RayCluster" for each in counted):
        # Each cluster is a replica: one is enough to answer.
        return min(found, key=lambda each: ("True", "Unknown", "False").index(each.status))
    return max(found, key=lambda each: ("True", "Unknown", "False").index(each.status))


def ready(kind: str, planned: Document, observed: Observed, pods: Sequence[Document]) -> Condition:
    """Whether one workload answers."""
    live = observed.live(planned)
    if live is None:
        return Condition(kind, "Unknown", "Creating", f"{kind_of(planned)} {name_of(planned)} has not been made yet")
    if is_knative(planned):
        return _explained(copied(kind, condition_of(live, "Ready")), pods)
    if kind_of(planned) == "RayCluster":
        return _explained(_ray(kind, live), pods)
    said = copied(kind, condition_of(live, "Available"))
    if said.status == "True":
        return said
    own = [each for each in pods if _runs(live, each)]
    for each, bad in (("ReplicaFailure", "True"), ("Progressing", "False")):
        other = condition_of(live, each)
        if text(other, "status") == bad and not own:
            return Condition(kind, "False", text(other, "reason"), text(other, "message"))
    if said.reason == "Waiting":
        said = Condition(kind, "Unknown", "Deploying", f"{kind_of(live)} {name_of(live)} is starting")
    return _explained(said, own)


def rolled_out(planned: Document, observed: Observed) -> bool:
    """Whether all of what the workload should run is what it runs."""
    live = observed.live(planned)
    if live is None:
        return False
    if whole(live, "status", "observedGeneration") is not None:
        seen, wanted = whole(live, "status", "observedGeneration") or 0, whole(live, "metadata", "generation") or 0
        if seen < wanted:
            return False
    if is_knative(planned):
        created = text(live, "status", "latestCreatedRevisionName")
        return bool(created) and created == text(live, "status", "latestReadyRevisionName")
    if kind_of(planned) == "RayCluster":
        return text(live, "status", "state") == "ready"
    wanted = replicas(live)
    updated, there = whole(live, "status", "updatedReplicas") or 0, whole(live, "status", "replicas") or 0
    available = whole(live, "status", "availableReplicas" if kind_of(live) == "Deployment" else "readyReplicas") or 0
    return updated >= wanted and there <= updated and available >= min(wanted, updated)


def replicas(live: Document) -> int:
    """How many a live workload is asked for."""
    found = whole(live, "spec", "replicas")
    return 1 if found is None else found


def _ray(kind: str, live: Document) -> Condition:
    state = text(live, "status", "state")
    if state == "ready":
        return Condition(kind, "True")
    status: Truth = "False" if state in ("failed", "unhealthy", "suspended") else "Unknown"
    said = text(live, "status", "reason") or f"RayCluster {name_of(live)} is {state or 'starting'}"
    return Condition(kind, status, f"RayCluster{state.capitalize()}" if state else "Deploying", said)


def _explained(said: Condition, pods: Sequence[Document]) -> Condition:
    """With what the pods know, if the workload only knows that they are not there."""
    if said.status == "True":
        return said
    reason = _worst([state_of(each) for each in pods])
    if reason is None:
        return said
    status: Truth = "False" if reason.state == FAILED else said.status
    return Condition(said.type, status, reason.reason, f"pod {reason.pod}: {reason.message}")


def _worst(states: Sequence[PodState]) -> PodState | None:
    """The newest that failed, else the newest that waits."""
    failed = [each for each in states if each.state == FAILED]
    waiting = [each for each in states if each.state != LOADED and each.reason]
    return failed[-1] if failed else waiting[-1] if waiting else None


def _runs(workload: Document, pod: Document) -> bool:
    """Whether the pod is one of the workload's: its selector says so, or the label that LeaderWorkerSets give."""
    labels = labels_of(pod)
    if is_knative(workload):
        return labels.get("serving.knative.dev/service", name_of(workload)) == name_of(workload)
    if kind_of(workload) == "RayCluster":
        return labels.get("ray.io/cluster", name_of(workload)) == name_of(workload)
    if kind_of(workload) == "LeaderWorkerSet":
        return labels.get("leaderworkerset.sigs.k8s.io/name", name_of(workload)) == name_of(workload)
    wanted = part(workload, "spec", "selector", "matchLabels") or {"app": trunc63(name_of(workload))}
    return all(labels.get(name) == value for name, value in wanted.items())
