# SPDX-License-Identifier: Apache-2.0
"""Record Kubernetes Events, which `kubectl describe` shows below a service. A lost event is no failure."""

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

    async def ready_changed(self, service: Document, before: Document, after: Document) -> None:
        """Record that a service became ready, or why it is not. Normal startup is recorded only for one that was ready."""
        # Messages are not compared: they name pods, which change. The generation changes with every edit.
        same = all(before.get(name) == after.get(name) for name in ("status", "reason", "observedGeneration"))
        if same or get_str(after, "status") not in ("True", "False"):
            return
        if get_str(after, "status") == "True":
            if get_str(before, "status") != "True":
                await self.record(service, "Normal", READY, f"{name_of(service)} is ready")
            return
        reason = get_str(after, "reason") or NOT_READY
        if reason in _STARTING_REASONS and get_str(before, "status") != "True":
            return
        await self.record(service, "Warning", reason, get_str(after, "message") or "it is not ready")

    async def record(self, document: Document, kind: str, reason: str, message: str) -> None:
        """Record an Event about a document. kind: `Normal` or `Warning`."""
        namespace, now = get_str(document, "metadata", "namespace"), format_time(self._now())
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
            "reason": reason,
            "message": message[:_MAX_MESSAGE],
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.create(EVENTS, namespace, event)
        except (ApiError, Unreachable) as error:
            log.info("cannot record an Event of %s/%s: %s", namespace, name_of(document), error)
