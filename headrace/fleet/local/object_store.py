# SPDX-License-Identifier: Apache-2.0
"""The object store of the local fleet: documents that users applied, and the live objects planned from them.

Both are in memory and on disk, one file per document and one per service, written atomically. A file that cannot be read is
left in place and logged; the others are used. A change that cannot be written raises an error, and the old content stays.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.fault_points import fault_point
from headrace.core.files import read_json, remove_temporary_files, write_json
from headrace.fleet.documents import DEFAULT_NAMESPACE
from headrace.fleet.local.workloads import autoscaler_of, desired_replicas, replica_bounds
from headrace.fleet.names import API_VERSION
from headrace.fleet.planning.context import live_key
from headrace.fleet.schema.kinds import KINDS
from headrace.fleet.status.conditions import format_time, utc_now
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

Key = tuple[str, str, str]
"""Kind, namespace ("" for a kind without), name."""

Service = tuple[str, str]
"""Namespace and name of an InferenceService."""
"""Namespace and name of an InferenceService."""
WORKLOADS = ("Deployment", "LeaderWorkerSet")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A valid name of an object; it is safe as the name of a file."""
NAMESPACED = frozenset(kind.name for kind in KINDS if kind.namespaced) | {"ConfigMap", "Secret"}
CORE = frozenset({"ConfigMap", "Secret", "Namespace"})
"""Kubernetes' own kinds that services may refer to."""


class DocumentStore:
    """The documents that users applied. Used from the loop's thread only."""

    def __init__(self, folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._folder = folder
        self.on_change: Callable[[Document], None] = lambda _: None
        self._now = now
        self._all: dict[Key, Document] = {}
        self._edited: dict[Key, int] = {}
        """By document: the resource version of the last edit by a user since the daemon started."""
        self._version = 0

    def load(self) -> None:
        """Read the files."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_temporary_files(self._folder)
        for path in sorted(self._folder.glob("*/*/*.json")):
            document = read_json(path)
            if document is None or not name_of(document):
                log.error("Ignoring %s: it cannot be read. Check the file, or apply its document again", path)
                continue
            self._all[key_of(document)] = document
            version = get_str(document, "metadata", "resourceVersion")
            self._version = max(self._version, int(version) if version.isdecimal() else 0)

    def all(self, kind: str = "", namespace: str = "", selector: Mapping[str, str] | None = None) -> list[Document]:
        """Return documents, sorted by namespace and name."""
        return [
            document
            for key, document in sorted(self._all.items())
            if (not kind or key[0] == kind)
            and (not namespace or key[1] == namespace)
            and all(labels_of(document).get(name) == value for name, value in (selector or {}).items())
        ]

    def get(self, kind: str, namespace: str, name: str) -> Document | None:
        """Return one document; None if there is none."""
        return self._all.get((kind, namespace if kind in NAMESPACED else "", name))

    def apply(self, document: Document, *, dry_run: bool = False) -> tuple[Document, str]:
        """Store a user's document. Return it and `created`, `configured` or `unchanged`. Raises FailedPrecondition."""
        if not all(_NAME.fullmatch(name) for name in (name_of(document), key_of(document)[1] or "default")):
            raise InvalidArgument(
                "names are lower-case letters, digits, '-' and '.', and begin and end with a letter or a digit"
            )
        before = self._all.get(key_of(document))
        metadata = {
            name: value
            for name, value in get_mapping(document, "metadata").items()
            if name in ("name", "namespace", "labels", "annotations") and value
        }
        if kind_of(document) in NAMESPACED:
            metadata.setdefault("namespace", DEFAULT_NAMESPACE)
        body = {name: value for name, value in document.items() if name not in ("metadata", "status")}
        if before is not None and _user_fields(before) == (body, metadata):
            return before, "unchanged"
        stored: dict[str, Any] = {**body, "metadata": metadata}
        if before is None:
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": format_time(self._now()), "generation": 1}
        else:
            same = _user_fields(before)[0] == body
            metadata |= {
                name: get_mapping(before, "metadata").get(name)
                for name in ("uid", "creationTimestamp", "deletionTimestamp")
                if get_mapping(before, "metadata").get(name)
            }
            metadata["generation"] = (get_int(before, "metadata", "generation") or 0) + (0 if same else 1)
            if "status" in before:
                stored["status"] = before["status"]
        return stored if dry_run else self._edit(stored), "created" if before is None else "configured"

    def update(self, document: Document) -> Document:
        """Store an edited document. Raises FailedPrecondition."""
        before = self._all.get(key_of(document))
        changed = before is None or get_mapping(before, "spec") != get_mapping(document, "spec")
        generation = (get_int(document, "metadata", "generation") or 0) + (1 if changed else 0)
        return self._edit({**document, "metadata": {**get_mapping(document, "metadata"), "generation": generation}})

    def edited_since(self, document: Document, version: str) -> bool:
        """Whether a user edited it after a resource version. Changes of the status do not count."""
        return version.isdecimal() and int(version) < self._edited.get(key_of(document), 0)

    def update_status(self, document: Document) -> None:
        """Store a document with a new status; in memory only if it cannot be written: the controller computes it again."""
        try:
            self._put(document, durable=False)
        except FailedPrecondition as error:
            log.error("%s", error.message)
            self._all[key_of(document)] = document

    def mark_deleted(self, document: Document) -> Document:
        """Set the deletion timestamp of a document."""
        metadata = {**get_mapping(document, "metadata")}
        metadata.setdefault("deletionTimestamp", format_time(self._now()))
        return self._edit({**document, "metadata": metadata})

    def remove(self, document: Document) -> None:
        """Remove a document."""
        key = key_of(document)
        self._edited.pop(key, None)
        if self._all.pop(key, None) is not None:
            self._path(key).unlink(missing_ok=True)
            self.on_change(document)

    def _edit(self, document: Mapping[str, Any]) -> Document:
        stored = self._put(document)
        self._edited[key_of(stored)] = int(get_str(stored, "metadata", "resourceVersion"))
        return stored

    def _put(self, document: Mapping[str, Any], *, durable: bool = True) -> Document:
        self._version += 1
        stored = {**document, "metadata": {**get_mapping(document, "metadata"), "resourceVersion": str(self._version)}}
        key = key_of(stored)
        fault_point("fleet.document.write")
        write_json(self._path(key), stored, durable=durable)
        fault_point("fleet.document.written")
        self._all[key] = stored
        self.on_change(stored)
        return stored

    def _path(self, key: Key) -> Path:
        return self._folder / key[0] / (key[1] or "_") / f"{key[2]}.json"


def key_of(document: Document) -> Key:
    """Return the key of a document."""
    kind = kind_of(document)
    namespace = get_str(document, "metadata", "namespace") or DEFAULT_NAMESPACE
    return kind, namespace if kind in NAMESPACED else "", name_of(document)


def is_supported(document: Document) -> bool:
    """Whether the local fleet supports the kind of a document."""
    if get_str(document, "apiVersion") == API_VERSION:
        return any(kind.name == kind_of(document) for kind in KINDS)
    return get_str(document, "apiVersion") == "v1" and kind_of(document) in CORE


def _user_fields(document: Document) -> tuple[dict[str, Any], dict[str, Any]]:
    metadata = {
        name: value
        for name, value in get_mapping(document, "metadata").items()
        if name in ("name", "namespace", "labels", "annotations")
    }
    return {name: value for name, value in document.items() if name not in ("metadata", "status")}, metadata


class ServiceObjects:
    """The live objects of services: the planned objects, with what an API server adds.

    That is a uid, a generation, and the number of replicas that was set. The status of workloads is in memory only: the
    workload controller derives it from the pods.
    """

    def __init__(self, folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._folder = folder
        self._now = now
        self._all: dict[Service, dict[str, Document]] = {}

    def load(self) -> None:
        """Read the files."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_temporary_files(self._folder)
        for path in sorted(self._folder.glob("*/*.json")):
            content = read_json(path) or {}
            objects = [document for document in content.get("objects", []) if isinstance(document, dict)]
            self._all[(path.parent.name, path.stem)] = {_object_key(document): document for document in objects}

    def services(self) -> set[Service]:
        """Return the services that have objects."""
        return set(self._all)

    def of(self, service: Service) -> Mapping[str, Document]:
        """Return the objects of a service, by `live_key`."""
        return self._all.get(service, {})

    def workloads(self, service: Service) -> list[Document]:
        """Return the Deployments and LeaderWorkerSets of a service."""
        return [document for document in self.of(service).values() if kind_of(document) in WORKLOADS]

    def apply(self, service: Service, planned: Iterable[Document]) -> None:
        """Replace the objects of a service by planned ones. Raises FailedPrecondition; then nothing has changed."""
        before = self._all.get(service, {})
        after = {
            _object_key(document): _merged(before.get(_object_key(document)), document, self._now())
            for document in planned
        }
        for name, document in after.items():
            if kind_of(document) in WORKLOADS:
                after[name] = _with_replicas(document, list(before.values()), list(after.values()))
        self._write(service, after)

    def scale(self, service: Service, workload: Document, replicas: int) -> None:
        """Set the number of replicas of a workload. Raises FailedPrecondition."""
        changed = {**workload, "spec": {**get_mapping(workload, "spec"), "replicas": replicas}}
        self._write(service, {**self._all.get(service, {}), _object_key(workload): changed})

    def update_status(self, service: Service, workload: Document, status: Mapping[str, Any]) -> None:
        """Set the status of a workload, in memory."""
        objects, key = self._all.get(service, {}), _object_key(workload)
        if key in objects:
            objects[key] = {**objects[key], "status": dict(status)}

    def remove(self, service: Service) -> None:
        """Remove the objects of a service."""
        self._all.pop(service, None)
        self._path(service).unlink(missing_ok=True)

    def _write(self, service: Service, objects: dict[str, Document]) -> None:
        before = self._all.get(service, {})
        if [_without_status(document) for document in objects.values()] != [
            _without_status(document) for document in before.values()
        ]:
            fault_point("fleet.objects.write")
            write_json(self._path(service), {"objects": [_without_status(document) for document in objects.values()]})
        self._all[service] = objects

    def _path(self, service: Service) -> Path:
        return self._folder / service[0] / f"{service[1]}.json"


def _merged(before: Document | None, planned: Document, now: datetime) -> Document:
    metadata = {**get_mapping(planned, "metadata")}
    if before is None:
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": format_time(now), "generation": 1}
        return {**planned, "metadata": metadata}
    for name in ("uid", "creationTimestamp"):
        metadata[name] = get_str(before, "metadata", name)
    merged: dict[str, Any] = {**planned, "metadata": metadata}
    if kind_of(planned) in WORKLOADS and "replicas" not in get_mapping(planned, "spec"):
        replicas = get_int(before, "spec", "replicas")
        if replicas is not None:
            merged["spec"] = {**get_mapping(planned, "spec"), "replicas": replicas}
    generation = get_int(before, "metadata", "generation") or 1
    metadata["generation"] = generation + (get_mapping(before, "spec") != get_mapping(merged, "spec"))
    if "status" in before:
        merged["status"] = before["status"]
    return merged


def _with_replicas(workload: Document, before: Sequence[Document], after: Sequence[Document]) -> Document:
    """Return a workload with the replicas that its autoscaler sets without load."""
    old, new = autoscaler_of(workload, before), autoscaler_of(workload, after)
    replicas = get_int(workload, "spec", "replicas")
    if old is not None and new is not None and replicas == replica_bounds(old)[0]:
        replicas = replica_bounds(new)[0]  # it had the minimum before, and gets the new minimum
    spec = {**get_mapping(workload, "spec"), **({"replicas": replicas} if replicas is not None else {})}
    return {**workload, "spec": {**spec, "replicas": desired_replicas({"spec": spec}, new)}}


def _without_status(document: Document) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "status"}


def _object_key(document: Document) -> str:
    return live_key(kind_of(document), name_of(document))
