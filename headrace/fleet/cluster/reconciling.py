# SPDX-License-Identifier: Apache-2.0
"""One look at one service: plan, apply, remove, tell. Called by the queue; what it knows comes from the view.

It remembers nothing that the next look needs, so that it may be killed between any two calls. Benchmarks are passed on to
`benchmarking`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.fleet.cluster.api import Api, Refused, Unreachable
from headrace.fleet.cluster.applying import Applier
from headrace.fleet.cluster.benchmarking import Benchmarker
from headrace.fleet.cluster.events import Recorder
from headrace.fleet.cluster.leaving import let_go
from headrace.fleet.cluster.queue import Key
from headrace.fleet.cluster.resources import SERVICES
from headrace.fleet.cluster.stepping import LOOK_SECONDS, Stepping
from headrace.fleet.cluster.view import View
from headrace.fleet.planning import Plan, plan
from headrace.fleet.planning.site import live_key
from headrace.fleet.rollouts.looking import under_way
from headrace.fleet.status.document import status
from headrace.fleet.status.failures import status_of_problems
from headrace.fleet.status.observed import Observed
from headrace.fleet.words import Document, Problem, items, kind_of, name_of, part, text

log = logging.getLogger("headrace.operator")

RECONCILE_ERROR, INTERNAL_ERROR = "ReconcileError", "InternalError"


def utc_now() -> datetime:
    """The time of this machine."""
    return datetime.now(UTC)


class Reconciler:
    """Brings services to what they ask for."""

    def __init__(
        self,
        api: Api,
        view: View,
        recorder: Recorder,
        now: Callable[[], datetime] = utc_now,
        later: Callable[[Key, float], None] | None = None,
        stepping: Stepping | None = None,
    ) -> None:
        """later: have another look at a service after so many seconds."""
        self._api = api
        self._view = view
        self._recorder = recorder
        self._applier = Applier(api, view)
        self._benchmarker = Benchmarker(api, view, recorder, now)
        self._now = now
        self._later = later
        self._stepping = stepping or Stepping(now)

    async def reconcile(self, key: Key) -> bool:
        """Look at a service once. False: try again later. Never raises but when cancelled."""
        _, slash, name = key[1].rpartition("/")
        service = self._view.service(key)
        if service is None and not slash:
            return True
        try:
            if service is None:
                return await self._benchmarker.bring((key[0], name))
            if text(service, "metadata", "deletionTimestamp"):
                await let_go(self._api, self._view, SERVICES, service)
                return True
            return await self._bring(service)
        except Unreachable as error:
            log.warning("%s/%s: the API server does not answer (%s)", *key, error)
        except Refused as refused:
            if refused.code != 409:  # somebody was quicker, and what they wrote is on its way to us
                log.warning("%s/%s: %s", *key, refused)
        except Exception:
            log.exception("%s/%s cannot be looked at", *key)
        return False

    async def _bring(self, service: Document) -> bool:
        planned = self._plan(service)
        if isinstance(planned, Problem):
            await self._tell(service, status_of_problems(service, [planned], self._now(), reason=INTERNAL_ERROR))
            return False
        if planned.problems:
            await self._tell(service, status(service, planned, Observed(), self._now()))
            return True
        for rise in planned.rises:
            await self._applier.rise(service, rise)
        refused = await self._applier.apply(service, planned.objects)
        if refused:
            await self._tell(service, status_of_problems(service, refused, self._now(), reason=RECONCILE_ERROR))
            return False
        objects, pods = self._view.owned(service), self._view.pods(service)
        seen = Observed(tuple(objects), tuple(pods))
        moved, notes = await self._stepping.moved(service, planned, pods)
        await self._tell(service, status(moved, planned, seen, self._now()))
        # After the status: what could not be kept has not happened, and is decided anew.
        for each in notes:
            await self._recorder.record(service, each.kind, each.reason, each.message)
        if self._later is not None and under_way(moved):
            self._later((text(service, "metadata", "namespace"), name_of(service)), LOOK_SECONDS)
        return True

    def _plan(self, service: Document) -> Plan | Problem:
        live = {live_key(kind_of(each), name_of(each)): each for each in self._view.owned(service)}
        try:
            return plan(service, self._view.facts, live)
        except Exception:
            # A mistake of ours. It must show at this service, and must not reach the others.
            log.exception("%s/%s cannot be planned", text(service, "metadata", "namespace"), name_of(service))
            return Problem("", "the operator failed to plan this service", "look at its log, and report it")

    async def _tell(self, service: Document, told: Document) -> None:
        """Write the status if it changed, and an event if Ready did."""
        before = part(service, "status")
        after: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(told))
        if before == after:
            return
        where = self._view.where(SERVICES)
        if where is None:
            return
        change = {
            "metadata": {"resourceVersion": text(service, "metadata", "resourceVersion")},
            "status": _difference(before, after),
        }
        namespace = text(service, "metadata", "namespace")
        try:
            made = await self._api.patch(where, namespace, name_of(service), change, "status")
        except Refused as refused:
            if refused.code == 404:  # deleted meanwhile
                return
            raise
        self._view.put(SERVICES, made)
        await self._recorder.ready_changed(service, _ready(before), _ready(after))


def _ready(told: Document) -> Document:
    return next((each for each in items(told, "conditions") if text(each, "type") == "Ready"), {})


def _difference(before: Document, after: Document) -> dict[str, Any]:
    """The merge patch that makes one of the other."""
    change: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if old == value:
            continue
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        change[name] = _difference(old, value) if both else value  # type: ignore[arg-type]
    return change
