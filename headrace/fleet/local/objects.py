# SPDX-License-Identifier: Apache-2.0
"""The live objects of services: what was planned, as this machine has it. In memory, and on disk one file for each service.

What an API server would do to an object is done to it here: a uid, a generation, and the number of replicas that somebody
set stays. The status of workloads is not kept: pods know it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.fleet.local.store import read_json, utc_now, write_json
from headrace.fleet.local.workloads import bounds_of, scaler_of, wanted_of
from headrace.fleet.planning.site import live_key
from headrace.fleet.status.conditions import time_text
from headrace.fleet.words import Document, kind_of, name_of, part, text, whole

log = logging.getLogger("headrace.fleet")

Service = tuple[str, str]
WORKLOADS = ("Deployment", "LeaderWorkerSet")


class Objects:
    """See the module."""

    def __init__(self, folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._folder = folder
        self._now = now
        self._all: dict[Service, dict[str, Document]] = {}

    def load(self) -> None:
        """Read what is on disk."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(self._folder.glob("*/*.json")):
            found = read_json(path) or {}
            objects = [each for each in found.get("objects", []) if isinstance(each, dict)]
            self._all[(path.parent.name, path.stem)] = {_key(each): each for each in objects}

    def services(self) -> set[Service]:
        """Who has any."""
        return set(self._all)

    def of(self, service: Service) -> Mapping[str, Document]:
        """The objects of a service, by `live_key`."""
        return self._all.get(service, {})

    def workloads(self, service: Service) -> list[Document]:
        """What has pods."""
        return [each for each in self.of(service).values() if kind_of(each) in WORKLOADS]

    def bring(self, service: Service, planned: Iterable[Document]) -> None:
        """What was planned takes the place of what was there. Raises FailedPrecondition; then nothing has changed."""
        before = self._all.get(service, {})
        after = {_key(each): _merged(before.get(_key(each)), each, self._now()) for each in planned}
        for name, each in after.items():
            if kind_of(each) in WORKLOADS:
                after[name] = _scaled(each, list(before.values()), list(after.values()))
        self._keep(service, after)

    def scale(self, service: Service, workload: Document, replicas: int) -> None:
        """Another number of replicas. Raises FailedPrecondition."""
        changed = {**workload, "spec": {**part(workload, "spec"), "replicas": replicas}}
        self._keep(service, {**self._all.get(service, {}), _key(workload): changed})

    def tell(self, service: Service, workload: Document, status: Mapping[str, Any]) -> None:
        """The status of a workload, in memory alone."""
        mine = self._all.get(service, {})
        if _key(workload) in mine:
            mine[_key(workload)] = {**mine[_key(workload)], "status": dict(status)}

    def remove(self, service: Service) -> None:
        """Forget a service."""
        self._all.pop(service, None)
        self._path(service).unlink(missing_ok=True)

    def _keep(self, service: Service, objects: dict[str, Document]) -> None:
        before = self._all.get(service, {})
        if [_bare(each) for each in objects.values()] != [_bare(each) for each in before.values()]:
            write_json(self._path(service), {"objects": [_bare(each) for each in objects.values()]})
        self._all[service] = objects

    def _path(self, service: Service) -> Path:
        return self._folder / service[0] / f"{service[1]}.json"


def _merged(before: Document | None, planned: Document, now: datetime) -> Document:
    metadata = {**part(planned, "metadata")}
    if before is None:
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": time_text(now), "generation": 1}
        return {**planned, "metadata": metadata}
    for name in ("uid", "creationTimestamp"):
        metadata[name] = text(before, "metadata", name)
    made: dict[str, Any] = {**planned, "metadata": metadata}
    if kind_of(planned) in WORKLOADS and "replicas" not in part(planned, "spec"):
        replicas = whole(before, "spec", "replicas")
        if replicas is not None:
            made["spec"] = {**part(planned, "spec"), "replicas": replicas}
    generation = whole(before, "metadata", "generation") or 1
    metadata["generation"] = generation + (part(before, "spec") != part(made, "spec"))
    if "status" in before:
        made["status"] = before["status"]
    return made


def _scaled(workload: Document, before: Sequence[Document], after: Sequence[Document]) -> Document:
    """With the number of replicas that its autoscaler would give it while nothing comes."""
    old, new = scaler_of(workload, before), scaler_of(workload, after)
    asked = whole(workload, "spec", "replicas")
    if old is not None and new is not None and asked == bounds_of(old)[0]:
        asked = bounds_of(new)[0]  # nobody asked for more than the least
    spec = {**part(workload, "spec"), **({"replicas": asked} if asked is not None else {})}
    return {**workload, "spec": {**spec, "replicas": wanted_of({"spec": spec}, new)}}


def _bare(document: Document) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "status"}


def _key(document: Document) -> str:
    return live_key(kind_of(document), name_of(document))
