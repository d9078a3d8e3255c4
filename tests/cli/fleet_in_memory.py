# SPDX-License-Identifier: Apache-2.0
"""An in-memory fleet for tests of the fleet commands: documents in a dictionary."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from headrace.fleet.client.contract import Applied, Commands, NodeProgress
from headrace.fleet.documents import ClusterFacts, cluster_facts, namespace_of
from headrace.fleet.schema.fields import Kind
from headrace.platforms.kubernetes_client.objects import Document, kind_of, labels_of, name_of

Key = tuple[str, str, str]


class MemoryFleet:
    """See `headrace.fleet.client.contract.Fleet`. `looks` is called before each look at one document."""

    def __init__(self, *documents: Any) -> None:
        self.documents: dict[Key, Any] = {_key(document): document for document in documents}
        self.stored_events: list[Any] = []
        self.running: list[Any] = []
        self.nodes: list[NodeProgress] = []
        self.looks: Callable[[MemoryFleet], None] = lambda fleet: None
        self.denied: Exception | None = None
        self.closed = False
        self.uids = 0

    place, namespace, commands = "memory", "default", Commands(logs="logs of {pod}", flag="")

    async def list(self, kind: Kind, namespace: str = "", selector: str = "") -> Sequence[Document]:
        labels = dict(part.split("=") for part in selector.split(",") if part)
        return [
            item
            for (name, space, _), item in sorted(self.documents.items())
            if name == kind.name and space in ("", namespace or space) and labels.items() <= labels_of(item).items()
        ]

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        self.looks(self)
        return self.documents.get((kind.name, namespace if kind.namespaced else "", name))

    async def watch(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[tuple[str, Document]]:
        for document in await self.list(kind, namespace, selector):
            yield "ADDED", document
        for document in await self.list(kind, namespace, selector):
            yield "DELETED", document
        raise KeyboardInterrupt

    async def live(self, document: Document) -> Document | None:
        return self.documents.get(_key(document))

    async def apply(self, document: Document, *, dry_run: bool = False, force: bool = False) -> Applied:
        before = self.documents.get(_key(document))
        metadata = {**document["metadata"], "uid": self._uid(), "generation": 1, "resourceVersion": "1"}
        created = copy.deepcopy({**document, "metadata": metadata})
        if not dry_run:
            self.documents[_key(document)] = created
        return Applied(created, "created" if before is None else "configured")

    async def patch(self, kind: Kind, namespace: str, name: str, change: Document) -> Document:
        document = self.documents[(kind.name, namespace, name)]
        for component, fields in change.get("spec", {}).items():
            document["spec"][component] |= fields
        output = document["metadata"].setdefault("annotations", {}) | change.get("metadata", {}).get("annotations", {})
        document["metadata"]["annotations"] = {key: value for key, value in output.items() if value is not None}
        return document

    async def delete(self, live: Document) -> None:
        self.documents.pop(_key(live), None)

    async def pods(self, service: Document) -> Sequence[Document]:
        self.looks(self)
        return self.running

    async def events(self, objects: Sequence[Document]) -> Sequence[Document]:
        return self.stored_events

    async def progress(self, model: Document) -> Sequence[NodeProgress]:
        return self.nodes

    async def facts(self) -> ClusterFacts:
        await asyncio.sleep(0)
        if self.denied is not None:
            raise self.denied
        return cluster_facts(self.documents.values())

    async def close(self) -> None:
        self.closed = True

    def _uid(self) -> str:
        self.uids += 1
        return str(self.uids)


def _key(document: Document) -> Key:
    return kind_of(document), namespace_of(document), name_of(document)


def service(name: str = "digits", *, ready: str = "True", reason: str = "", message: str = "", **status: Any) -> Any:
    """A service that the operator has looked at."""
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": message}
    engine = {
        "mode": "RawDeployment",
        "replicas": 2,
        "readyReplicas": 2 if ready == "True" else 0,
        "latestReadyRevision": f"{name}-engine-00001",
        "latestCreatedRevision": f"{name}-engine-00001",
        "traffic": [{"revisionName": f"{name}-engine-00001", "percent": 100, "latestRevision": True}],
    }
    return {
        "apiVersion": "ome.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "generation": 1,
            "resourceVersion": "7",
            "creationTimestamp": "2024-01-01T00:00:00Z",
            "labels": {"app": name},
            "managedFields": [{"manager": "somebody"}],
        },
        "spec": {"model": {"name": "digits", "kind": "BaseModel"}, "engine": {"minReplicas": 2}},
        "status": {
            "observedGeneration": 1,
            "url": f"http://{name}.default.svc.cluster.local:8080",
            "conditions": [condition],
            "components": {"engine": engine},
            "runtime": {"name": "headrace-cpu", "kind": "ClusterServingRuntime", "reason": "it alone fits the model"},
            "model": {"name": "digits", "kind": "BaseModel"},
            "modelStatus": {
                "transitionStatus": "UpToDate",
                "modelRevisionStates": {"activeModelState": "Loaded", "targetModelState": "Loaded"},
            },
            **status,
        },
    }


def canary(name: str = "digits", percent: int = 20) -> Any:
    """One with two revisions."""
    document = service(name)
    document["spec"]["engine"]["canaryTrafficPercent"] = percent
    document["status"]["components"]["engine"]["traffic"] = [
        {"revisionName": f"{name}-engine-00002", "percent": percent, "latestRevision": True},
        {"revisionName": f"{name}-engine-00001", "percent": 100 - percent, "latestRevision": False, "tag": "prev"},
    ]
    return document


def stepping(name: str = "digits", phase: str = "Stepping") -> Any:
    """One that is at the second of its steps."""
    created = canary(name, 25)
    del created["spec"]["engine"]["canaryTrafficPercent"]
    created["metadata"]["annotations"] = {"ome.io/rollout-steps": "10,25,50"}
    created["status"]["components"]["engine"]["rollout"] = {
        "revision": "f00",
        "phase": phase,
        "step": 2,
        "since": "2026-01-15T10:30:00Z",
        "message": "step 25 %: 212 requests, 0.0 % errors",
    }
    return created


def model(name: str = "digits") -> Any:
    """A model of a namespace."""
    return {
        "apiVersion": "ome.io/v1beta1",
        "kind": "BaseModel",
        "metadata": {"name": name, "namespace": "default", "uid": f"model-{name}"},
        "spec": {"modelFormat": {"name": "onnx"}, "storage": {"storageUri": "pvc://models/x", "path": "/models/x"}},
    }
