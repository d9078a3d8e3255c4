# SPDX-License-Identifier: Apache-2.0
"""Events: what `kubectl describe` shows below a service. Nothing waits for them, and a lost one is no failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from headrace.fleet.cluster.api import MANAGER, Api, Refused, Unreachable
from headrace.fleet.cluster.resources import EVENTS
from headrace.fleet.status.conditions import time_text
from headrace.fleet.words import Document, kind_of, name_of, text

log = logging.getLogger("headrace.operator")

READY, NOT_READY = "InferenceServiceReady", "InferenceServiceNotReady"
_LONGEST = 1024
_STARTING = frozenset(
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
"""Reasons that every service goes through on its way up. What is stuck has another sooner or later."""


class Recorder:
    """Writes events about services."""

    def __init__(self, api: Api, now: Callable[[], datetime]) -> None:
        self._api = api
        self._now = now

    async def ready_changed(self, service: Document, before: Document, after: Document) -> None:
        """Tell that a service has become ready, or why it is not. That it is on its way is no news, unless it was there."""
        # Messages name pods, which come and go; what somebody edited since is another matter.
        same = all(before.get(name) == after.get(name) for name in ("status", "reason", "observedGeneration"))
        if same or text(after, "status") not in ("True", "False"):
            return
        if text(after, "status") == "True":
            if text(before, "status") != "True":
                await self.record(service, "Normal", READY, f"{name_of(service)} is ready")
            return
        reason = text(after, "reason") or NOT_READY
        if reason in _STARTING and text(before, "status") != "True":
            return
        await self.record(service, "Warning", reason, text(after, "message") or "it is not ready")

    async def record(self, document: Document, kind: str, reason: str, message: str) -> None:
        """One event about a document: `Normal` or `Warning`, a word, a sentence."""
        namespace, now = text(document, "metadata", "namespace"), time_text(self._now())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{name_of(document)[:50]}.", "namespace": namespace},
            "involvedObject": {
                "apiVersion": text(document, "apiVersion"),
                "kind": kind_of(document),
                "namespace": namespace,
                "name": name_of(document),
                "uid": text(document, "metadata", "uid"),
                "resourceVersion": text(document, "metadata", "resourceVersion"),
            },
            "type": kind,
            "reason": reason,
            "message": message[:_LONGEST],
            "source": {"component": MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.create(EVENTS, namespace, event)
        except (Refused, Unreachable) as error:
            log.info("an event of %s/%s is lost: %s", namespace, name_of(document), error)
