# SPDX-License-Identifier: Apache-2.0
"""Conditions: what is so, why, and since when.

A condition keeps its time for as long as its status stays the same, whatever its reason does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from headrace.fleet.names import COMPONENTS
from headrace.fleet.status.observed import records
from headrace.fleet.words import Document, text, whole

Truth = Literal["True", "False", "Unknown"]

READY = "Ready"
INGRESS_READY = "IngressReady"
ROUTES_READY = "RoutesReady"
LATEST_DEPLOYMENT_READY = "LatestDeploymentReady"

LONGEST_MESSAGE = 1024
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Condition:
    """One condition, before it has a time."""

    type: str
    status: Truth
    reason: str = ""
    message: str = ""
    informs: bool = False
    """Said, but no part of Ready."""


def ready_type(component: str) -> str:
    """`EngineReady`."""
    return f"{component.capitalize()}Ready"


def copied(kind: str, source: Document | None, *, informs: bool = False) -> Condition:
    """Another object's condition under a name of ours, its reason kept."""
    said = text(source, "status")
    status: Truth = "True" if said == "True" else "False" if said == "False" else "Unknown"
    # An empty reason would hide that nobody has said anything yet.
    reason = text(source, "reason") or ("" if status == "True" else "Waiting")
    return Condition(kind, status, reason, text(source, "message"), informs)


def overall(conditions: Sequence[Condition], kind: str = READY, *, informs: bool = False) -> Condition:
    """All of them together: False if one is, else Unknown if one is. Tells of every one that is not True."""
    counted = [each for each in conditions if not each.informs or informs]
    for status in ("False", "Unknown"):
        bad = [each for each in counted if each.status == status]
        if bad:
            said = "; ".join(f"{each.type}: {each.message or each.reason}" for each in bad)
            return Condition(kind, bad[0].status, bad[0].reason, said, informs)
    return Condition(kind, "True", informs=informs)


def written(conditions: Iterable[Condition], service: Document, now: datetime) -> list[dict[str, Any]]:
    """The conditions as the status has them, with those that others put there."""
    before = {text(each, "type"): each for each in records(service, "status", "conditions")}
    generation = whole(service, "metadata", "generation")
    made = []
    for each in conditions:
        old = before.get(each.type)
        since = text(old, "lastTransitionTime") if text(old, "status") == each.status else ""
        entry: dict[str, Any] = {"type": each.type, "status": each.status}
        if each.reason:
            entry["reason"] = each.reason if _REASON.fullmatch(each.reason) else "Other"
        if each.message:
            entry["message"] = shortened(each.message)
        if each.informs:
            entry["severity"] = "Info"
        entry["lastTransitionTime"] = since or time_text(now)
        if generation is not None:
            entry["observedGeneration"] = generation
        made.append(entry)
    return made + [dict(each) for kind, each in before.items() if kind and not _ours(kind)]


def shortened(message: str) -> str:
    """The end of a message that is too long: programs say last what they died of."""
    return message if len(message) <= LONGEST_MESSAGE else "..." + message[-(LONGEST_MESSAGE - 3) :]


def time_text(now: datetime) -> str:
    """`2024-01-15T10:30:00Z`."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _ours(kind: str) -> bool:
    return kind in _OURS


_OURS = frozenset(
    [READY, INGRESS_READY, ROUTES_READY, LATEST_DEPLOYMENT_READY]
    + [
        f"{component.capitalize()}{what}Ready"
        for component in (*COMPONENTS, "predictor")
        for what in ("", "Route", "Configuration", "Rollout")
    ]
)
