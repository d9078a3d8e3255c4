# SPDX-License-Identifier: Apache-2.0
"""Record Kubernetes Events, which `kubectl describe` shows below a service. Losing one is not an error.

A repeated event is counted, as the kubelet counts its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from headrace.fleet.status.conditions import format_time
from headrace.platforms.kubernetes_client.api import FIELD_MANAGER, ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.objects import EVENTS, Document, get_str, kind_of, name_of

log = logging.getLogger("headrace.operator")

READY, NOT_READY = "InferenceServiceReady", "InferenceServiceNotReady"
_MAX_MESSAGE = 1024
_MAX_REMEMBERED = 10_000
_STARTING_REASONS = frozenset(
    {
        "Creating",
        "Deploying",
        "Waiting",
        "Pending",
        "ContainerCreating",
        "PodInitializing",
        "ContainersNotReady",
        "MinimumReplicasUnavailable",
        "Progressing",
    }
)
"""Reasons of a service that is starting normally."""


class EventRecorder:
    """Writes Events about services."""

    def __init__(self, api: ApiClient, now: Callable[[], datetime]) -> None:
        self._api = api
        self._now = now
        self._recorded: dict[tuple[str, str, str], tuple[str, int]] = {}
        """Name and count of the last Events, by uid, reason and message."""

    async def ready_changed(self, service: Document, before: Document, after: Document) -> None:
        """Record that a service became ready, or why it is not. Normal startup is recorded only for one that was ready."""
        if _is_same(before, after) or get_str(after, "status") not in ("True", "False"):
            return
        if get_str(after, "status") == "True":
            if get_str(before, "status") != "True":
                await self.record(service, "Normal", READY, f"{name_of(service)} is ready", latest=True)
            return
        reason = get_str(after, "reason") or NOT_READY
        if reason in _STARTING_REASONS and get_str(before, "status") != "True":
            return
        await self.record(service, "Warning", reason, get_str(after, "message") or "it is not ready", latest=True)

    async def rollout_changed(self, service: Document, before: Document, after: Document) -> None:
        """Record why the last change of a service that is ready is not rolled out, as `headrace describe` shows it."""
        if get_str(after, "status") == "False" and not _is_same(before, after):
            reason = get_str(after, "reason") or NOT_READY
            await self.record(
                service, "Warning", reason, get_str(after, "message") or "it is not rolled out", latest=True
            )

    async def record(self, document: Document, kind: str, reason: str, message: str, *, latest: bool = False) -> None:
        """Record an Event about a document. kind: `Normal` or `Warning`.

        latest: the message names pods and differs each time: the last one is kept, and all are counted.
        """
        namespace, now = get_str(document, "metadata", "namespace"), format_time(self._now())
        message = message[:_MAX_MESSAGE]
        key = get_str(document, "metadata", "uid"), reason, "" if latest else message
        try:
            if not await self._count(namespace, key, message, now):
                await self._create(document, namespace, key, kind, message, now)
        except (ApiError, Unreachable) as error:
            log.info("cannot record an Event of %s/%s: %s", namespace, name_of(document), error)

    async def _count(self, namespace: str, key: tuple[str, str, str], message: str, now: str) -> bool:
        """Count an Event that was recorded before. Return False if there is none, or no longer."""
        name, count = self._recorded.pop(key, ("", 0))
        if not name:
            return False
        change = {"count": count + 1, "lastTimestamp": now, "message": message}
        try:
            await self._api.patch(EVENTS, namespace, name, change)
        except ApiError as error:
            if error.code != 404:  # the API server forgets Events after an hour
                raise
            return False
        self._recorded[key] = name, count + 1
        return True

    async def _create(
        self, document: Document, namespace: str, key: tuple[str, str, str], kind: str, message: str, now: str
    ) -> None:
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{name_of(document)[:50]}.", "namespace": namespace},
            "involvedObject": {
                "apiVersion": get_str(document, "apiVersion"),
                "kind": kind_of(document),
                "namespace": namespace,
                "name": name_of(document),
                "uid": get_str(document, "metadata", "uid"),
                "resourceVersion": get_str(document, "metadata", "resourceVersion"),
            },
            "type": kind,
            "reason": key[1],
            "message": message,
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        created = await self._api.create(EVENTS, namespace, event)
        self._recorded[key] = name_of(created), 1
        while len(self._recorded) > _MAX_REMEMBERED:
            del self._recorded[next(iter(self._recorded))]


def _is_same(before: Document, after: Document) -> bool:
    # Messages are not compared: they name pods, which change. The generation changes with every edit.
    return all(before.get(name) == after.get(name) for name in ("status", "reason", "observedGeneration"))
