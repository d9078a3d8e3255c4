# SPDX-License-Identifier: Apache-2.0
"""The pods of workloads: makes and ends them as `workloads` says, and tells their status. For `controller`."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import FailedPrecondition
from headrace.fleet.local.commands import ADDRESS, LEADER_ADDRESS
from headrace.fleet.local.contract import Record
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.objects import Objects
from headrace.fleet.local.replica import Replica
from headrace.fleet.local.routes import is_front
from headrace.fleet.local.workloads import Unit, bounds_of, scaler_of, steps, templates_of, wanted_of, workload_status
from headrace.fleet.planning.site import digest_of
from headrace.fleet.status.conditions import time_text
from headrace.fleet.status.models import WORKER_INDEX
from headrace.fleet.words import Document, kind_of, labels_of, name_of, part, text, whole

log = logging.getLogger("headrace.fleet")

Service = tuple[str, str]
_LWS = "leaderworkerset.sigs.k8s.io"
_DEADLINE = 600


class Units:
    """See the module."""

    def __init__(self, kubelet: Kubelet, objects: Objects, clock: Clock) -> None:
        self._kubelet = kubelet
        self._objects = objects
        self._clock = clock
        self._failures: dict[tuple[Service, str], str] = {}
        """Why pods of a workload could not be written down."""
        self._moved: dict[tuple[Service, str], tuple[Any, float]] = {}
        """How a workload stood when it last moved, and when that was."""

    def forget(self, key: Service, *, but: Collection[str] = ()) -> None:
        """The workloads of a service are gone, but for some: one that comes by the same name begins anew."""
        for place in {*self._failures, *self._moved}:
            if place[0] == key and place[1] not in but:
                self._failures.pop(place, None)
                self._moved.pop(place, None)

    def bring(self, key: Service, service: Document) -> None:
        """One step nearer to what the live objects ask for."""
        pods = self._kubelet.of(key)
        live = {(kind_of(each), name_of(each)) for each in self._objects.workloads(key)}
        self.forget(key, but={name for _, name in live})
        for each in pods:
            if each.record.owner not in live:
                each.delete()
        for workload in self._objects.workloads(key):
            if not is_front(workload):
                self._step(key, service, workload, pods)

    def tell(self, key: Service) -> None:
        """The status of all workloads."""
        pods = self._kubelet.of(key)
        for workload in self._objects.workloads(key):
            newest, wanted = _newest(workload), self._wanted(key, workload)
            if is_front(workload):
                # The way in does its work, and is told for itself.
                units = [Unit(f"{number}", newest, True) for number in range(wanted)]
            else:
                units, _ = _units(workload, pods)
            stuck = self._stuck(key, workload, wanted, newest, units)
            scaler = scaler_of(workload, list(self._objects.of(key).values()))
            least = bounds_of(scaler)[0] if scaler is not None else None
            status = workload_status(workload, wanted, newest, units, stuck, least)
            failure = self._failures.get((key, name_of(workload)))
            if failure:
                failed = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": failure}
                status["conditions"].append(failed)
            self._objects.tell(key, workload, status)

    def _step(self, key: Service, service: Document, workload: Document, pods: Sequence[Replica]) -> None:
        newest = _newest(workload)
        units, leaving = _units(workload, pods)
        recreate = text(workload, "spec", "strategy", "type") == "Recreate"
        wanted = self._wanted(key, workload)
        spare = 0 < wanted <= sum(each.ready for each in units)
        todo = steps(wanted, newest, units, leaving=leaving, recreate=recreate)
        for each in pods:
            if each.record.owner == (kind_of(workload), name_of(workload)) and each.record.unit in todo.delete:
                each.delete()
        self._failures.pop((key, name_of(workload)), None)
        try:
            for _ in range(todo.create):
                self._create(key, service, workload, newest, spare=spare)
        except FailedPrecondition as error:
            self._failures[(key, name_of(workload))] = error.message

    def _create(self, key: Service, service: Document, workload: Document, newest: str, *, spare: bool) -> None:
        kind, name = kind_of(workload), name_of(workload)
        templates = templates_of(workload)
        unit, group = _fresh_name(workload, newest, self._kubelet.of(key)), kind == "LeaderWorkerSet"
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
                "annotations": dict(part(template, "metadata", "annotations")),
                "creationTimestamp": time_text(self._kubelet.system.now()),
                "ownerReferences": [
                    {
                        "apiVersion": text(workload, "apiVersion"),
                        "kind": kind,
                        "name": name,
                        "uid": text(workload, "metadata", "uid"),
                        "controller": True,
                    }
                ],
            }
            document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": part(template, "spec")}
            self._kubelet.create(
                Record(uid, document, key, (kind, name), unit, newest, not index, index, variables, spare=spare),
            )

    def _wanted(self, key: Service, workload: Document) -> int:
        return wanted_of(workload, scaler_of(workload, list(self._objects.of(key).values())))

    def _stuck(self, key: Service, workload: Document, wanted: int, newest: str, units: Sequence[Unit]) -> str:
        """Why nothing moves, when nothing has for too long."""
        now = self._clock.monotonic()
        state = (newest, wanted, len(units), sum(each.ready for each in units))
        place = (key, name_of(workload))
        if self._moved.get(place, (None, 0.0))[0] != state:
            self._moved[place] = (state, now)
        if all(each.ready and each.hash == newest for each in units) and len(units) == wanted:
            return ""
        limit = whole(workload, "spec", "progressDeadlineSeconds") or _DEADLINE
        if now - self._moved[place][1] < limit:
            return ""
        return f"{kind_of(workload)} {name_of(workload)} has not got further for {limit} s"


def _units(workload: Document, pods: Sequence[Replica]) -> tuple[list[Unit], int]:
    """The units of a workload, and how many of them are being ended."""
    size = len(templates_of(workload))
    mine: dict[str, list[Replica]] = {}
    for each in pods:
        if each.record.owner == (kind_of(workload), name_of(workload)):
            mine.setdefault(each.record.unit, []).append(each)
    found, leaving = [], 0
    for name, members in mine.items():
        if any(each.record.deleting for each in members):
            leaving += 1
            for each in members:
                each.delete()
            continue
        first = members[0].record
        ready = len(members) >= size and all(each.ready for each in members)
        # A group whose making was cut short is of no template, so that it is replaced.
        whole_one = len(members) >= size
        created = text(first.document, "metadata", "creationTimestamp")
        found.append(Unit(name, first.hash if whole_one else "", ready, created))
    return found, leaving


def _newest(workload: Document) -> str:
    return digest_of(json.dumps(list(templates_of(workload)), sort_keys=True, default=str))


def _fresh_name(workload: Document, newest: str, pods: Sequence[Replica]) -> str:
    name = name_of(workload)
    if kind_of(workload) != "LeaderWorkerSet":
        return f"{name}-{newest}-{uuid.uuid4().hex[:5]}"
    taken = {each.record.unit for each in pods}
    return next(each for number in range(10_000) if (each := f"{name}-{number}") not in taken)
