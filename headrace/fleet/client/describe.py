# SPDX-License-Identifier: Apache-2.0
"""Collect everything about one document for `headrace describe`, with advice on what to do next."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from headrace.core.errors import PermissionDenied
from headrace.fleet.admission import with_defaults
from headrace.fleet.client.contract import Commands, Fleet, NodeProgress, kind_named
from headrace.fleet.client.rollouts import rollouts_of
from headrace.fleet.client.tables import CHANGE_NOT_RECONCILED, NOT_RECONCILED, mode_of, progress_of, reason_of, summary
from headrace.fleet.documents import namespace_of
from headrace.fleet.names import COMPONENT_LABEL, MAIN_CONTAINER, SERVICE, VIRTUAL
from headrace.fleet.selection import Selection, select
from headrace.fleet.status.conditions import READY, condition_of, get_mappings
from headrace.fleet.status.workloads import FAILED, LOADING, NODE_LOST, PENDING, PodState, pod_state
from headrace.platforms.kubernetes_client.objects import (
    Document,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
    name_of,
    without_managed_fields,
)

_EVENTS = 12
_MAX_PODS = 8
"""Number of pods whose Events are read."""
_MODELS, _RUNTIMES = ("BaseModel", "ClusterBaseModel"), ("ServingRuntime", "ClusterServingRuntime")


@dataclass(frozen=True)
class Description:
    """A document with everything that is known about it."""

    document: Document
    pods: Sequence[Document] = ()
    events: Sequence[Document] = ()
    model: Document | None = None
    selection: Selection | None = None
    """The selection as it would be now; None if the user may not read what it depends on."""
    progress: Sequence[NodeProgress] = ()
    users: Sequence[Document] = ()
    """Services that use it."""
    steps: Sequence[str] = ()
    unseen: Sequence[str] = ()
    """Messages about what the user may not read."""

    def as_json(self) -> dict[str, Any]:
        """Return the description as JSON."""
        chosen = self.selection
        return {
            "document": without_managed_fields(self.document),
            "pods": [pod_json(pod) for pod in self.pods],
            "events": [event_json(event) for event in self.events],
            "rejectedRuntimes": [{"name": rejection.name, "reason": rejection.reason} for rejection in chosen.rejected]
            if chosen is not None
            else None,
            "nodes": [
                {
                    "node": node.node,
                    "state": node.state,
                    "phase": node.phase,
                    "doneBytes": node.done_bytes,
                    "totalBytes": node.total_bytes,
                    **({"reason": node.reason} if node.reason else {}),
                }
                for node in self.progress
            ],
            "usedBy": [{"namespace": namespace_of(user), "name": name_of(user)} for user in self.users],
            "next": list(self.steps),
            "unseen": list(self.unseen),
        }


async def describe(fleet: Fleet, document: Document) -> Description:
    """Collect everything about a live document."""
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
    events = await _allowed(fleet.events([service, *pods[-_MAX_PODS:]]), unseen)
    model = await _model(fleet, service)
    progress = await fleet.progress(model) if model is not None else []
    selection = None
    try:
        facts = await fleet.facts()
        selection = select(with_defaults(service, facts), facts)
    except PermissionDenied as denied:
        unseen.append(denied.message)
    steps = next_steps(service, pods, model, fleet.commands)
    return Description(service, pods, events[-_EVENTS:], model, selection, progress, (), steps, unseen)


async def _allowed(call: Awaitable[Sequence[Document]], unseen: list[str]) -> Sequence[Document]:
    """Await a call; without permission, note it in `unseen` and return nothing."""
    try:
        return await call
    except PermissionDenied as denied:
        unseen.append(denied.message)
        return []


async def _model(fleet: Fleet, service: Document) -> Document | None:
    reference = get_mapping(service, "status", "model") or get_mapping(service, "spec", "model")
    name, kind = get_str(reference, "name"), get_str(reference, "kind") or "ClusterBaseModel"
    if not name or kind not in _MODELS:
        return None
    model = None
    for candidate in dict.fromkeys((kind, *_MODELS)):
        namespace = namespace_of(service) if candidate == "BaseModel" else ""
        try:
            model = await fleet.get(kind_named(candidate), namespace, name)
        except PermissionDenied:
            continue
        if model is not None:
            break
    return model


async def _users(fleet: Fleet, document: Document, unseen: list[str]) -> Sequence[Document]:
    """Return the services that use a model, a runtime or weights."""
    kind, name = kind_of(document), name_of(document)
    if kind not in (*_MODELS, *_RUNTIMES, "FineTunedWeight"):
        return []
    services = await _allowed(fleet.list(kind_named(SERVICE), get_str(document, "metadata", "namespace")), unseen)
    if kind == "FineTunedWeight":
        return [service for service in services if name in get_list(service, "spec", "model", "fineTunedWeights")]
    return [service for service in services if _uses(service, "model" if kind in _MODELS else "runtime", kind, name)]


def _uses(service: Document, field: str, kind: str, name: str) -> bool:
    reference = get_mapping(service, "status", field)
    if get_str(reference, "name"):
        return get_str(reference, "name") == name and get_str(reference, "kind") in ("", kind)
    return get_str(service, "spec", field, "name") == name


def pod_json(pod: Document) -> dict[str, Any]:
    """Return the state of a pod as JSON."""
    state = pod_state(pod)
    return {
        "name": name_of(pod),
        "component": labels_of(pod).get(COMPONENT_LABEL, ""),
        "state": "Terminating" if get_str(pod, "metadata", "deletionTimestamp") else state.state,
        "reason": state.reason,
        "message": state.message,
        "restarts": sum(
            get_int(record, "restartCount") or 0 for record in get_mappings(pod, "status", "containerStatuses")
        ),
        "node": get_str(pod, "spec", "nodeName"),
        "created": get_str(pod, "metadata", "creationTimestamp"),
    }


def event_json(event: Document) -> dict[str, Any]:
    """Return an Event as JSON."""
    return {
        "time": get_str(event, "lastTimestamp") or get_str(event, "eventTime"),
        "type": get_str(event, "type"),
        "reason": get_str(event, "reason"),
        "object": f"{get_str(event, 'involvedObject', 'kind')}/{get_str(event, 'involvedObject', 'name')}",
        "message": " ".join(get_str(event, "message").split()),
        "count": get_int(event, "count") or 1,
    }


_IMAGES = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "RegistryUnavailable"}
)
_CONFIGS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"})
KUBECTL = Commands()


def next_steps(
    service: Document, pods: Sequence[Document], model: Document | None = None, commands: Commands = KUBECTL
) -> list[str]:
    """Return advice on what to do next, the most likely step first; never empty."""
    if reason_of(service) in (NOT_RECONCILED, CHANGE_NOT_RECONCILED):
        return [f"wait a few seconds; if nothing changes, check that the operator runs: {commands.controller}"]
    state = progress_of(service)
    if state == "ready":
        return _ready_steps(service, commands)
    if state == "invalid":
        again = f"headrace apply -f FILE -n {namespace_of(service)}{commands.flag}"
        return [f"fix what Ready says above and apply the file again: {again}"]
    steps = [step for pod in pods if (step := _pod_step(service, pod, commands))]
    steps += _model_steps(model, commands)
    if not steps and not pods:
        steps = _no_pod_steps(service, commands)
    return list(dict.fromkeys(steps)) or ["wait: it is starting, and nothing has failed"]


def _ready_steps(service: Document, commands: Commands) -> list[str]:
    url = urlsplit(summary(service).url)
    steps = [f"ask it at {url.geturl()}"] if url.netloc else []
    host = (url.hostname or "").split(".")
    if commands.forward and host[1:3] == [namespace_of(service), "svc"] and mode_of(service) != VIRTUAL:
        forward = commands.forward.format(namespace=host[1], service=host[0], port=url.port or 80)
        steps = [f"ask it at {url.geturl()} from inside the cluster; to ask it from here, {forward}"]
    for rollout in rollouts_of(service):
        if rollout.two:
            verbs = "promote" if rollout.requested_percent == 0 else "promote|undo"
            steps.append(
                f"move the canary of {rollout.component}: headrace rollout {verbs} {name_of(service)}{commands.flag}"
            )
    return steps or ["nothing: it is ready"]


def _pod_step(service: Document, pod: Document, commands: Commands) -> str:
    state = pod_state(pod)
    logs = commands.logs.format(namespace=namespace_of(service), pod=state.pod, container=MAIN_CONTAINER)
    if state.state == FAILED:
        return _failure_step(state, f"{logs}{commands.previous}")
    if state.reason == NODE_LOST:
        node = get_str(pod, "spec", "nodeName") or "the node"
        return f"{node} does not report: restart it, or delete it to have its pods replaced"
    if state.state == PENDING and state.reason == "Unschedulable":
        return (
            f"no node takes pod {state.pod}: free or add what is named there, or ask for less in the engine's resources"
        )
    if state.state == LOADING:
        return f"wait for the model to load; its log: {logs}"
    return ""


def _failure_step(state: PodState, logs: str) -> str:
    if state.reason in _IMAGES:
        return "check the image's name in the runtime or the engine, and imagePullSecrets where its registry is private"
    if state.reason in _CONFIGS:
        return f"something that pod {state.pod} mounts or reads is not there: create it, or correct its name"
    if state.reason == "OOMKilled":
        return "raise the memory limit of the engine, or serve with a shorter context or smaller batches"
    if state.reason == "Evicted":
        return "the node ran short: request the memory and disk that the pod uses, so that it is placed where they are"
    return f"see the last output of the program: {logs}"


def _model_steps(model: Document | None, commands: Commands) -> list[str]:
    state = get_str(model, "status", "state")
    if model is None or state in ("", "Ready"):
        return []
    command = f"headrace describe model {name_of(model)}{commands.flag}"
    if state == "Failed" or get_list(model, "status", "nodesFailed"):
        reason = get_str(model, "status", "message")
        return [f"the model could not be downloaded to {reason or 'a node'}; see {command}"]
    return [f"wait for the download of the model: {command} shows its progress"]


def _no_pod_steps(service: Document, commands: Commands) -> list[str]:
    if get_str(condition_of(service, READY), "reason") == "ReconcileError":
        return ["follow the message of Ready above: the API server refuses an object of the service"]
    events = commands.events.format(namespace=namespace_of(service), service=name_of(service))
    return [f"no pod was created: {events} shows the reason, such as a quota"]
