# SPDX-License-Identifier: Apache-2.0
"""Everything about one document, brought together from a fleet: for `headrace describe`."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import PermissionDenied
from headrace.fleet.admission import defaulted
from headrace.fleet.client.advice import next_steps
from headrace.fleet.client.contract import Fleet, NodeProgress
from headrace.fleet.client.kinds import SERVICE, kind_named
from headrace.fleet.names import COMPONENT_LABEL
from headrace.fleet.selection import Selection, select
from headrace.fleet.status.observed import records
from headrace.fleet.status.pods import state_of
from headrace.fleet.words import (
    Document,
    items,
    kind_of,
    labels_of,
    name_of,
    namespace_of,
    part,
    text,
    whole,
    without_notes,
)

_EVENTS = 12
_PODS_ASKED = 8
"""Of so many pods the events are asked for."""
_MODELS, _RUNTIMES = ("BaseModel", "ClusterBaseModel"), ("ServingRuntime", "ClusterServingRuntime")


@dataclass(frozen=True)
class Description:
    """What is known."""

    document: Document
    pods: Sequence[Document] = ()
    events: Sequence[Document] = ()
    model: Document | None = None
    selection: Selection | None = None
    """As it would be now; None where the user may not see what it depends on."""
    progress: Sequence[NodeProgress] = ()
    users: Sequence[Document] = ()
    """Services that name it."""
    steps: Sequence[str] = ()
    unseen: Sequence[str] = ()
    """What the user may not look at."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        chosen = self.selection
        return {
            "document": without_notes(self.document),
            "pods": [pod_json(each) for each in self.pods],
            "events": [event_json(each) for each in self.events],
            "rejectedRuntimes": [{"name": each.name, "reason": each.reason} for each in chosen.rejected]
            if chosen is not None
            else None,
            "nodes": [
                {
                    "node": each.node,
                    "state": each.state,
                    "phase": each.phase,
                    "doneBytes": each.done_bytes,
                    "totalBytes": each.total_bytes,
                }
                for each in self.progress
            ],
            "usedBy": [{"namespace": namespace_of(each), "name": name_of(each)} for each in self.users],
            "next": list(self.steps),
            "unseen": list(self.unseen),
        }


async def describe(fleet: Fleet, document: Document) -> Description:
    """All about a document that the fleet has."""
    if kind_of(document) == SERVICE:
        return await _service(fleet, document)
    unseen: list[str] = []
    events = await _allowed(fleet.events([document]), unseen)
    users = await _users(fleet, document, unseen)
    progress = await fleet.progress(document) if kind_of(document) in _MODELS else []
    return Description(document, events=events[-_EVENTS:], progress=progress, users=users, unseen=unseen)


async def _service(fleet: Fleet, service: Document) -> Description:
    unseen: list[str] = []
    pods = await _allowed(fleet.pods(service), unseen)
    events = await _allowed(fleet.events([service, *pods[-_PODS_ASKED:]]), unseen)
    model = await _model(fleet, service)
    progress = await fleet.progress(model) if model is not None else []
    selection = None
    try:
        facts = await fleet.facts()
        selection = select(defaulted(service, facts), facts)
    except PermissionDenied as denied:
        unseen.append(denied.message)
    steps = next_steps(service, pods, model, fleet.commands)
    return Description(service, pods, events[-_EVENTS:], model, selection, progress, (), steps, unseen)


async def _allowed(call: Awaitable[Sequence[Document]], unseen: list[str]) -> Sequence[Document]:
    """What came of a call; nothing where the user may not look, which is noted. The rest is worth showing then, too."""
    try:
        return await call
    except PermissionDenied as denied:
        unseen.append(denied.message)
        return []


async def _model(fleet: Fleet, service: Document) -> Document | None:
    told = part(service, "status", "model") or part(service, "spec", "model")
    name, kind = text(told, "name"), text(told, "kind") or "ClusterBaseModel"
    if not name or kind not in _MODELS:
        return None
    found = None
    for each in dict.fromkeys((kind, *_MODELS)):
        space = namespace_of(service) if each == "BaseModel" else ""
        try:
            found = await fleet.get(kind_named(each), space, name)
        except PermissionDenied:
            continue
        if found is not None:
            break
    return found


async def _users(fleet: Fleet, document: Document, unseen: list[str]) -> Sequence[Document]:
    """Services that a model, a runtime or weights are used by, as far as the user may see them."""
    kind, name = kind_of(document), name_of(document)
    if kind not in (*_MODELS, *_RUNTIMES, "FineTunedWeight"):
        return []
    found = await _allowed(fleet.list(kind_named(SERVICE), text(document, "metadata", "namespace")), unseen)
    if kind == "FineTunedWeight":
        return [each for each in found if name in items(each, "spec", "model", "fineTunedWeights")]
    return [each for each in found if _names(each, "model" if kind in _MODELS else "runtime", kind, name)]


def _names(service: Document, what: str, kind: str, name: str) -> bool:
    told = part(service, "status", what)
    if text(told, "name"):
        return text(told, "name") == name and text(told, "kind") in ("", kind)
    return text(service, "spec", what, "name") == name


def pod_json(pod: Document) -> dict[str, Any]:
    """What counts of a pod."""
    seen = state_of(pod)
    return {
        "name": name_of(pod),
        "component": labels_of(pod).get(COMPONENT_LABEL, ""),
        "state": "Terminating" if text(pod, "metadata", "deletionTimestamp") else seen.state,
        "reason": seen.reason,
        "message": seen.message,
        "restarts": sum(whole(each, "restartCount") or 0 for each in records(pod, "status", "containerStatuses")),
        "node": text(pod, "spec", "nodeName"),
        "created": text(pod, "metadata", "creationTimestamp"),
    }


def event_json(event: Document) -> dict[str, Any]:
    """What counts of an event."""
    return {
        "time": text(event, "lastTimestamp") or text(event, "eventTime"),
        "type": text(event, "type"),
        "reason": text(event, "reason"),
        "object": f"{text(event, 'involvedObject', 'kind')}/{text(event, 'involvedObject', 'name')}",
        "message": " ".join(text(event, "message").split()),
        "count": whole(event, "count") or 1,
    }
