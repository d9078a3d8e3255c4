# SPDX-License-Identifier: Apache-2.0
"""Which news of a service become events, without a cluster."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from headrace.fleet.cluster.events import EventRecorder
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SERVICE = {
    "apiVersion": "ome.io/v1beta1",
    "kind": "InferenceService",
    "metadata": {"name": "chat", "namespace": "team", "uid": "u", "resourceVersion": "7"},
}


class Listening:
    """Stands in for an API server: notes events, or refuses them."""

    def __init__(self, refuses: bool = False) -> None:
        self.events: list[Any] = []
        self._refuses = refuses

    async def create(self, where: object, namespace: str, document: Any) -> None:
        if self._refuses:
            raise ApiError(403, "Forbidden", "no")
        self.events.append(document)


def told(before: dict[str, Any], after: dict[str, Any], api: Listening | None = None) -> list[tuple[str, str]]:
    api = api or Listening()
    recorder = EventRecorder(cast("ApiClient", api), lambda: NOW)
    asyncio.run(recorder.ready_changed(SERVICE, before, after))
    return [(each["type"], each["reason"]) for each in api.events]


def ready(status: str, reason: str = "", generation: int = 1) -> dict[str, Any]:
    return {"type": "Ready", "status": status, "reason": reason, "message": "m", "observedGeneration": generation}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, ready("Unknown", "Deploying"), []),
        ({}, ready("True"), [("Normal", "InferenceServiceReady")]),
        (ready("True"), ready("True", generation=2), []),
        ({}, ready("False", "Pending"), []),
        (ready("False", "Pending"), ready("False", "ContainersNotReady"), []),
        (ready("False", "Pending"), ready("True"), [("Normal", "InferenceServiceReady")]),
        (ready("False", "Pending"), ready("False", "CrashLoopBackOff"), [("Warning", "CrashLoopBackOff")]),
        (ready("False", "Pending"), ready("False", "Unschedulable"), [("Warning", "Unschedulable")]),
        (ready("True"), ready("False", "Pending"), [("Warning", "Pending")]),
        (ready("False", "InvalidSpec"), ready("False", "InvalidSpec"), []),
        (ready("False", "InvalidSpec"), ready("False", "InvalidSpec", 2), [("Warning", "InvalidSpec")]),
    ],
)
def test_what_is_news(before: dict[str, Any], after: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert told(before, after) == expected


def test_a_refused_event_is_not_a_failure() -> None:
    assert told({}, ready("True"), Listening(refuses=True)) == []
