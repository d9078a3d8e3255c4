# SPDX-License-Identifier: Apache-2.0
"""Deployments and LeaderWorkerSets: which replicas to create and delete, and the status of a workload. Pure.

A replica is a pod, or a group of pods. During a rolling update there may be a quarter more replicas than desired, and no
fewer ready ones: old replicas are deleted when new ones are ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from headrace.platforms.kubernetes_client.objects import Document, get_int, get_mapping, get_str, kind_of, name_of

HPA, KEDA = "HorizontalPodAutoscaler", "ScaledObject"
_SURGE = 0.25


@dataclass(frozen=True)
class Replica:
    """One replica of a workload that is not being deleted."""

    name: str
    hash: str
    """Hash of the template that it was created from."""
    ready: bool
    created: str = ""


@dataclass(frozen=True)
class ReplicaChanges:
    """Replicas to create and to delete now."""

    create: int = 0
    delete: tuple[str, ...] = ()


def plan_replicas(
    desired: int, newest: str, replicas: Sequence[Replica], *, terminating: int = 0, recreate: bool = False
) -> ReplicaChanges:
    """Return the next step towards `desired` replicas of the `newest` template. `terminating`: replicas being deleted."""
    new = sorted((replica for replica in replicas if replica.hash == newest), key=_deletion_order)
    old = sorted((replica for replica in replicas if replica.hash != newest), key=_deletion_order)
    surplus = [replica.name for replica in new[: max(0, len(new) - desired)]]
    missing = max(0, desired - len(new))
    if recreate:
        return ReplicaChanges(0 if old or terminating else missing, (*surplus, *(replica.name for replica in old)))
    ready = sum(replica.ready for replica in new)
    # An old replica that is not ready is useless, unless the new ones have not been created yet.
    not_ready = [replica.name for replica in old if not replica.ready] if not missing or ready else []
    replaceable = max(0, min(ready, desired) + sum(replica.ready for replica in old) - desired)
    replaced = [replica.name for replica in old if replica.ready][:replaceable]
    allowed = desired + ceil(desired * _SURGE) - len(new) - len(old) if old else missing
    return ReplicaChanges(max(0, min(missing, allowed)), (*surplus, *not_ready, *replaced))


def _deletion_order(replica: Replica) -> tuple[bool, str, str]:
    """Sort key: replicas that are not ready first, then the oldest."""
    return replica.ready, replica.created, replica.name


def workload_status(
    workload: Document,
    desired: int,
    newest: str,
    replicas: Sequence[Replica],
    stuck: str = "",
    minimum: int | None = None,
) -> dict[str, Any]:
    """Return the status as Kubernetes reports it. `stuck`: why there is no progress. `minimum`: replicas that must be ready.

    Replicas that the autoscaler added beyond the minimum do not make a workload unavailable while they start.
    """
    ready = sum(replica.ready for replica in replicas)
    updated = sum(replica.hash == newest for replica in replicas)
    status: dict[str, Any] = {
        "observedGeneration": get_int(workload, "metadata", "generation") or 1,
        "replicas": len(replicas),
        "updatedReplicas": updated,
        "readyReplicas": ready,
    }
    kind = kind_of(workload)
    if kind == "Deployment":
        status |= {"availableReplicas": ready, "unavailableReplicas": max(0, desired - ready)}
    is_available = ready >= (desired if minimum is None else min(desired, minimum))
    reason = "MinimumReplicasAvailable" if is_available else "MinimumReplicasUnavailable"
    message = f"{kind} has minimum availability." if is_available else f"{kind} does not have minimum availability."
    status["conditions"] = [
        {"type": "Available", "status": "True" if is_available else "False", "reason": reason, "message": message}
    ]
    if stuck:
        status["conditions"].append(
            {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": stuck}
        )
    else:
        reason = (
            "NewReplicaSetAvailable" if is_available and updated == len(replicas) == desired else "ReplicaSetUpdated"
        )
        status["conditions"].append({"type": "Progressing", "status": "True", "reason": reason})
    return status


def desired_replicas(workload: Document, autoscaler: Document | None) -> int:
    """Return the desired replicas: those that were set, within the bounds of the autoscaler; 0 stays 0."""
    replicas = get_int(workload, "spec", "replicas")
    if autoscaler is None:
        return 1 if replicas is None else replicas
    minimum, maximum = replica_bounds(autoscaler)
    # A HorizontalPodAutoscaler keeps zero replicas; KEDA does if zero is its minimum.
    if replicas == 0 and not get_int(autoscaler, "spec", "minReplicaCount"):
        return 0
    return max(minimum, min(replicas if replicas is not None else minimum, maximum))


def replica_bounds(autoscaler: Document) -> tuple[int, int]:
    """Return the minimum and maximum replicas of an autoscaler, for a workload that runs."""
    min_field, max_field = (
        ("minReplicas", "maxReplicas") if kind_of(autoscaler) != KEDA else ("minReplicaCount", "maxReplicaCount")
    )
    minimum = get_int(autoscaler, "spec", min_field) or 1
    return minimum, max(minimum, get_int(autoscaler, "spec", max_field) or 1)


def autoscaler_of(workload: Document, objects: Sequence[Document]) -> Document | None:
    """Return the autoscaler of a workload: a HorizontalPodAutoscaler, or KEDA's ScaledObject."""
    for autoscaler in objects:
        if kind_of(autoscaler) in (HPA, KEDA):
            target = get_mapping(autoscaler, "spec", "scaleTargetRef")
            if (get_str(target, "kind"), get_str(target, "name")) == (kind_of(workload), name_of(workload)):
                return autoscaler
    return None


def pod_templates(workload: Document) -> Sequence[Mapping[str, Any]]:
    """Return the pod templates of one replica: one, or a leader and its workers."""
    if kind_of(workload) != "LeaderWorkerSet":
        return [get_mapping(workload, "spec", "template")]
    group = get_mapping(workload, "spec", "leaderWorkerTemplate")
    leader = get_mapping(group, "leaderTemplate") or get_mapping(group, "workerTemplate")
    return [leader, *[get_mapping(group, "workerTemplate")] * ((get_int(group, "size") or 1) - 1)]
