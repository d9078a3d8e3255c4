# SPDX-License-Identifier: Apache-2.0
"""Which news of a service become events, without a cluster."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from headrace.fleet.client.tables import reason_of
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

    async def create(self, where: object, namespace: str, document: Any) -> Any:
        if self._refuses:
            raise ApiError(403, "Forbidden", "no")
        name = f"{document['metadata']['generateName']}{len(self.events)}"
        self.events.append({**document, "metadata": {"name": name}})
        return self.events[-1]

    async def patch(self, where: object, namespace: str, name: str, change: Any) -> Any:
        found = [each for each in self.events if each["metadata"]["name"] == name]
        if not found:
            raise ApiError(404, "NotFound", "it has been forgotten")
        found[0].update(change)
        return found[0]


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


def test_a_repeated_event_is_counted() -> None:
    api = Listening()
    recorder = EventRecorder(cast("ApiClient", api), lambda: NOW)
    up, down = ready("True"), {**ready("False", "CrashLoopBackOff"), "message": "pod a: it ended"}

    async def run() -> None:
        for pod in "abc":
            await recorder.ready_changed(SERVICE, up, {**down, "message": f"pod {pod}: it ended"})
            await recorder.ready_changed(SERVICE, down, up)
        for message in ("10 % now", "25 % now", "25 % now"):
            await recorder.record(SERVICE, "Normal", "RolloutStep", message)

    asyncio.run(run())
    assert [(each["reason"], each["message"], each["count"]) for each in api.events] == [
        ("CrashLoopBackOff", "pod c: it ended", 3),
        ("InferenceServiceReady", "chat is ready", 3),
        ("RolloutStep", "10 % now", 1),
        ("RolloutStep", "25 % now", 2),
    ]
    api.events.clear()
    asyncio.run(recorder.record(SERVICE, "Normal", "RolloutStep", "25 % now"))
    assert [each["count"] for each in api.events] == [1], "the API server had forgotten it"


def test_a_change_that_is_not_rolled_out_is_an_event_in_the_words_of_describe() -> None:
    api = Listening()
    recorder = EventRecorder(cast("ApiClient", api), lambda: NOW)
    latest = {**ready("False", "CrashLoopBackOff", 2), "type": "LatestDeploymentReady", "message": "pod b: it ended"}
    document = {
        **SERVICE,
        "metadata": {**SERVICE["metadata"], "generation": 2},  # type: ignore[dict-item]
        "status": {"observedGeneration": 2, "conditions": [ready("True", generation=2), latest]},
    }

    async def run() -> None:
        for before in ({}, latest):
            await recorder.rollout_changed(document, before, latest)

    asyncio.run(run())
    assert [f"{each['reason']}: {each['message']}" for each in api.events] == [reason_of(document)]


def test_a_refused_event_is_not_a_failure() -> None:
    assert told({}, ready("True"), Listening(refuses=True)) == []
