# SPDX-License-Identifier: Apache-2.0
"""A service of the fleet as the console's page wants it. Pure; for `fleet`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headrace.fleet.client.describing import event_json, pod_json
from headrace.fleet.client.rollouts import ComponentRollout, rollouts_of
from headrace.fleet.client.summaries import components_of, summary, verdict
from headrace.fleet.status.observed import records
from headrace.fleet.words import Document, text, whole


def row(service: Document) -> dict[str, Any]:
    """A line of the table, with the shares that its revisions have."""
    told = asdict(summary(service))
    deleting = bool(text(service, "metadata", "deletionTimestamp"))
    shares = [asdict(each) for rollout in rollouts_of(service) if rollout.two for each in rollout.shares]
    return {**told, "verdict": "deleting" if deleting else verdict(service), "shares": shares}


def detail(service: Document, pods: Sequence[Document], events: list[dict[str, Any]]) -> dict[str, Any]:
    """All that there is to see of one."""
    return {
        **row(service),
        "generation": whole(service, "metadata", "generation"),
        "conditions": [_condition(each) for each in records(service, "status", "conditions")],
        "components": [_component(service, each) for each in rollouts_of(service)],
        "pods": [pod_json(each) for each in pods],
        "events": events,
    }


def newest(events: Sequence[Document], most: int) -> list[dict[str, Any]]:
    """The last that happened first; of one moment, the last that was written."""
    told = [event_json(each) for each in reversed(events)]
    told.sort(key=lambda each: str(each["time"]), reverse=True)
    return told[:most]


def _condition(told: Document) -> dict[str, str]:
    names = {
        "type": "type",
        "status": "status",
        "reason": "reason",
        "message": "message",
        "since": "lastTransitionTime",
    }
    return {name: text(told, field) for name, field in names.items()}


def _component(service: Document, rollout: ComponentRollout) -> dict[str, Any]:
    told, name = components_of(service)[rollout.component], rollout.component
    return {
        "name": name,
        "mode": rollout.mode,
        "ready": whole(told, "readyReplicas") or 0,
        "replicas": whole(told, "replicas") or 0,
        "least": whole(service, "spec", name, "minReplicas"),
        "most": whole(service, "spec", name, "maxReplicas"),
        "url": text(told, "url"),
        "rollout": rollout.state,
        "asked": rollout.asked,
        "canary": rollout.two,
        "shares": [asdict(each) for each in rollout.shares],
    }
