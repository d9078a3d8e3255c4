# SPDX-License-Identifier: Apache-2.0
"""Conditions and their times, and what was observed of a service: its objects and pods."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal

from headrace.fleet.names import COMPONENT_LABEL, COMPONENTS
from headrace.platforms.kubernetes_client.objects import (
    Document,
    get_int,
    get_list,
    get_str,
    kind_of,
    labels_of,
    name_of,
)

ConditionStatus = Literal["True", "False", "Unknown"]

READY = "Ready"
INGRESS_READY = "IngressReady"
ROUTES_READY = "RoutesReady"
LATEST_DEPLOYMENT_READY = "LatestDeploymentReady"

MAX_MESSAGE = 1024
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Condition:
    """A condition without its time."""

    type: str
    status: ConditionStatus
    reason: str = ""
    message: str = ""
    informs: bool = False
    """Its severity is Info: it is not part of Ready."""


def ready_type(component: str) -> str:
    """Return `EngineReady`."""
    return f"{component.capitalize()}Ready"


def copy_condition(kind: str, source: Document | None, *, informs: bool = False) -> Condition:
    """Copy the condition of another object under our own type."""
    value = get_str(source, "status")
    status: ConditionStatus = "True" if value == "True" else "False" if value == "False" else "Unknown"
    # An empty reason would hide that there is no condition yet.
    reason = get_str(source, "reason") or ("" if status == "True" else "Waiting")
    return Condition(kind, status, reason, get_str(source, "message"), informs)


def summarize(conditions: Sequence[Condition], kind: str = READY, *, informs: bool = False) -> Condition:
    """Combine conditions: False if one is False, else Unknown if one is. The message has all that are not True."""
    relevant = [condition for condition in conditions if not condition.informs or informs]
    for status in ("False", "Unknown"):
        bad = [condition for condition in relevant if condition.status == status]
        if bad:
            message = "; ".join(f"{condition.type}: {condition.message or condition.reason}" for condition in bad)
            return Condition(kind, bad[0].status, bad[0].reason, message, informs)
    return Condition(kind, "True", informs=informs)


def conditions_to_json(conditions: Iterable[Condition], service: Document, now: datetime) -> list[dict[str, Any]]:
    """Return the conditions for the status, with those that other controllers wrote."""
    before = {get_str(record, "type"): record for record in get_mappings(service, "status", "conditions")}
    generation = get_int(service, "metadata", "generation")
    result = []
    for condition in conditions:
        old = before.get(condition.type)
        since = get_str(old, "lastTransitionTime") if get_str(old, "status") == condition.status else ""
        entry: dict[str, Any] = {"type": condition.type, "status": condition.status}
        if condition.reason:
            entry["reason"] = condition.reason if _REASON.fullmatch(condition.reason) else "Other"
        if condition.message:
            entry["message"] = truncate(condition.message)
        if condition.informs:
            entry["severity"] = "Info"
        entry["lastTransitionTime"] = since or format_time(now)
        if generation is not None:
            entry["observedGeneration"] = generation
        result.append(entry)
    return result + [dict(item) for kind, item in before.items() if kind and not _is_own(kind)]


def truncate(message: str) -> str:
    """Keep the end of a message that is too long: programs print their error last."""
    return message if len(message) <= MAX_MESSAGE else "..." + message[-(MAX_MESSAGE - 3) :]


def utc_now() -> datetime:
    """Return the current time."""
    return datetime.now(UTC)


def format_time(now: datetime) -> str:
    """Return `2024-01-15T10:30:00Z`."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    """Parse the time of an object. Raise ValueError."""
    return datetime.fromisoformat(text)


def _is_own(kind: str) -> bool:
    return kind in _OWN_TYPES


_OWN_TYPES = frozenset(
    [READY, INGRESS_READY, ROUTES_READY, LATEST_DEPLOYMENT_READY]
    + [
        f"{component.capitalize()}{what}Ready"
        for component in (*COMPONENTS, "predictor")
        for what in ("", "Route", "Configuration", "Rollout")
    ]
    + [f"{component.capitalize()}ScalingActive" for component in COMPONENTS]
)


KNATIVE = "serving.knative.dev"


@dataclass(frozen=True, eq=False)
class Observed:
    """The live objects and pods of a service."""

    objects: tuple[Document, ...] = ()
    """Live objects of this service."""
    pods: tuple[Document, ...] = ()
    """Pods of all components; those that are being deleted do not count."""

    def live(self, planned: Document) -> Document | None:
        """Return the live object of a planned one."""
        return self._objects.get(_key(planned))

    def pods_of(self, component: str) -> list[Document]:
        """Return the pods of a component, the oldest first."""
        return self._pods.get(component, [])

    @cached_property
    def _objects(self) -> dict[tuple[str, str, str], Document]:
        return {_key(document): document for document in self.objects}

    @cached_property
    def _pods(self) -> dict[str, list[Document]]:
        pods: dict[str, list[Document]] = {}
        for pod in sorted(self.pods, key=lambda pod: (get_str(pod, "metadata", "creationTimestamp"), name_of(pod))):
            if not get_str(pod, "metadata", "deletionTimestamp"):
                pods.setdefault(labels_of(pod).get(COMPONENT_LABEL, ""), []).append(pod)
        return pods


def group_of(document: Document) -> str:
    """Return the API group, `apps` of `apps/v1`; "" for the core group."""
    group, slash, _ = get_str(document, "apiVersion").partition("/")
    return group if slash else ""


def condition_of(document: Document | None, kind: str) -> Document | None:
    """Return a condition of an object's status."""
    return next(
        (record for record in get_mappings(document, "status", "conditions") if get_str(record, "type") == kind), None
    )


def get_mappings(document: Document | None, *path: str) -> list[Document]:
    """Return the mappings in a list of a document."""
    return [item for item in get_list(document, *path) if isinstance(item, Mapping)]


def of_kinds(objects: Iterable[Document], *kinds: str) -> list[Document]:
    """Return the objects of some kinds; `Service` means the core one."""
    return [
        document
        for document in objects
        if kind_of(document) in kinds and not (kind_of(document) == "Service" and group_of(document))
    ]


def _key(document: Document) -> tuple[str, str, str]:
    return group_of(document), kind_of(document), name_of(document)
