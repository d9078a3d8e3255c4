# SPDX-License-Identifier: Apache-2.0
"""The workload controller: creates and deletes the pods of Deployments and LeaderWorkerSets, and updates their status."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import FailedPrecondition
from headrace.fleet.local.container_command import ADDRESS, LEADER_ADDRESS
from headrace.fleet.local.endpoints import is_front
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.object_store import Service, ServiceObjects
from headrace.fleet.local.pod import Pod, PodRecord
from headrace.fleet.local.workloads import (
    Replica,
    autoscaler_of,
    desired_replicas,
    plan_replicas,
    pod_templates,
    replica_bounds,
    workload_status,
)
from headrace.fleet.planning.context import digest_of
from headrace.fleet.status.conditions import format_time
from headrace.fleet.status.model_status import WORKER_INDEX
from headrace.platforms.kubernetes_client.objects import (
    Document,
    get_int,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
    name_of,
)

log = logging.getLogger("headrace.fleet")

_LWS = "leaderworkerset.sigs.k8s.io"
_DEADLINE_SECONDS = 600


class WorkloadController:
    """Reconciles the workloads of services."""

    def __init__(self, kubelet: Kubelet, objects: ServiceObjects, clock: Clock) -> None:
        self._kubelet = kubelet
        self._objects = objects
        self._clock = clock
        self._failures: dict[tuple[Service, str], str] = {}
        """Why pods of a workload could not be created."""
        self._progress: dict[tuple[Service, str], tuple[Any, float]] = {}
        """The progress of a workload, and when it last changed."""

    def forget(self, key: Service, *, keep: Collection[str] = ()) -> None:
        """Drop the state of a service's workloads except those of `keep`; a new one of the same name has no history."""
        for key_and_name in {*self._failures, *self._progress}:
            if key_and_name[0] == key and key_and_name[1] not in keep:
                self._failures.pop(key_and_name, None)
                self._progress.pop(key_and_name, None)

    def reconcile(self, key: Service, service: Document) -> None:
        """Create or delete pods: one step towards the live objects."""
        pods = self._kubelet.pods_of(key)
        live = {(kind_of(workload), name_of(workload)) for workload in self._objects.workloads(key)}
        self.forget(key, keep={name for _, name in live})
        for pod in pods:
            if pod.record.owner not in live:
                pod.delete()
        for workload in self._objects.workloads(key):
            if not is_front(workload):
                self._reconcile_workload(key, service, workload, pods)

    def update_status(self, key: Service) -> None:
        """Update the status of all workloads of a service."""
        pods = self._kubelet.pods_of(key)
        for workload in self._objects.workloads(key):
            newest, desired = _template_hash(workload), self._desired(key, workload)
            if is_front(workload):
                # The router of the entry Service does its work, and has a status of its own.
                replicas = [Replica(f"{number}", newest, True) for number in range(desired)]
            else:
                replicas, _ = _replicas(workload, pods)
            stuck = self._stuck(key, workload, desired, newest, replicas)
            autoscaler = autoscaler_of(workload, list(self._objects.of(key).values()))
            minimum = replica_bounds(autoscaler)[0] if autoscaler is not None else None
            status = workload_status(workload, desired, newest, replicas, stuck, minimum)
            failure = self._failures.get((key, name_of(workload)))
            if failure:
                condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": failure}
                status["conditions"].append(condition)
            self._objects.update_status(key, workload, status)

    def _reconcile_workload(self, key: Service, service: Document, workload: Document, pods: Sequence[Pod]) -> None:
        newest = _template_hash(workload)
        replicas, terminating = _replicas(workload, pods)
        recreate = get_str(workload, "spec", "strategy", "type") == "Recreate"
        desired = self._desired(key, workload)
        spare = 0 < desired <= sum(replica.ready for replica in replicas)
        changes = plan_replicas(desired, newest, replicas, terminating=terminating, recreate=recreate)
        for pod in pods:
            if pod.record.owner == (kind_of(workload), name_of(workload)) and pod.record.unit in changes.delete:
                pod.delete()
        self._failures.pop((key, name_of(workload)), None)
        try:
            for _ in range(changes.create):
                self._create_replica(key, service, workload, newest, spare=spare)
        except FailedPrecondition as error:
            self._failures[(key, name_of(workload))] = error.message

    def _create_replica(self, key: Service, service: Document, workload: Document, newest: str, *, spare: bool) -> None:
        kind, name = kind_of(workload), name_of(workload)
        templates = pod_templates(workload)
        unit, group = _new_replica_name(workload, newest, self._kubelet.pods_of(key)), kind == "LeaderWorkerSet"
        for index, template in enumerate(templates):
            uid = str(uuid.uuid4())
            labels = {**labels_of(template), "pod-template-hash": newest}
            variables: dict[str, str] = {}
            if group:
                labels |= {
                    f"{_LWS}/name": name,
                    f"{_LWS}/group-index": unit.rpartition("-")[2],
                    WORKER_INDEX: str(index),
                    f"{_LWS}/template-revision-hash": newest,
                }
                variables = {
                    LEADER_ADDRESS: ADDRESS,
                    "LWS_GROUP_SIZE": str(len(templates)),
                    "LWS_WORKER_INDEX": str(index),
                }
            metadata = {
                "name": f"{unit}-{index}" if group and index else unit,
                "namespace": key[0],
                "uid": uid,
                "labels": labels,
                "annotations": dict(get_mapping(template, "metadata", "annotations")),
                "creationTimestamp": format_time(self._kubelet.system.now()),
                "ownerReferences": [
                    {
                        "apiVersion": get_str(workload, "apiVersion"),
                        "kind": kind,
                        "name": name,
                        "uid": get_str(workload, "metadata", "uid"),
                        "controller": True,
                    }
                ],
            }
            document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": get_mapping(template, "spec")}
            self._kubelet.create(
                PodRecord(uid, document, key, (kind, name), unit, newest, not index, index, variables, spare=spare),
            )

    def _desired(self, key: Service, workload: Document) -> int:
        return desired_replicas(workload, autoscaler_of(workload, list(self._objects.of(key).values())))

    def _stuck(self, key: Service, workload: Document, desired: int, newest: str, replicas: Sequence[Replica]) -> str:
        """Return why a workload is stuck, after its progress deadline; else an empty text."""
        now = self._clock.monotonic()
        state = (newest, desired, len(replicas), sum(replica.ready for replica in replicas))
        key_and_name = (key, name_of(workload))
        if self._progress.get(key_and_name, (None, 0.0))[0] != state:
            self._progress[key_and_name] = (state, now)
        if all(replica.ready and replica.hash == newest for replica in replicas) and len(replicas) == desired:
            return ""
        limit = get_int(workload, "spec", "progressDeadlineSeconds") or _DEADLINE_SECONDS
        if now - self._progress[key_and_name][1] < limit:
            return ""
        return f"{kind_of(workload)} {name_of(workload)} has made no progress for {limit} s"


def _replicas(workload: Document, pods: Sequence[Pod]) -> tuple[list[Replica], int]:
    """Return the replicas of a workload, and how many are being deleted."""
    size = len(pod_templates(workload))
    groups: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.record.owner == (kind_of(workload), name_of(workload)):
            groups.setdefault(pod.record.unit, []).append(pod)
    replicas, terminating = [], 0
    for name, members in groups.items():
        if any(pod.record.deleting for pod in members):
            terminating += 1
            for pod in members:
                pod.delete()
            continue
        first = members[0].record
        ready = len(members) >= size and all(pod.is_ready for pod in members)
        # An incomplete group, whose creation was interrupted, has no template hash, so that it is replaced.
        is_complete = len(members) >= size
        created = get_str(first.document, "metadata", "creationTimestamp")
        replicas.append(Replica(name, first.hash if is_complete else "", ready, created))
    return replicas, terminating


def _template_hash(workload: Document) -> str:
    return digest_of(json.dumps(list(pod_templates(workload)), sort_keys=True, default=str))


def _new_replica_name(workload: Document, newest: str, pods: Sequence[Pod]) -> str:
    name = name_of(workload)
    if kind_of(workload) != "LeaderWorkerSet":
        return f"{name}-{newest}-{uuid.uuid4().hex[:5]}"
    taken = {pod.record.unit for pod in pods}
    return next(unit for number in range(10_000) if (unit := f"{name}-{number}") not in taken)
