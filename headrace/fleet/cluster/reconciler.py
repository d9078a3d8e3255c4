# SPDX-License-Identifier: Apache-2.0
"""Reconcile one service: plan it, apply its objects, delete old ones, and write its status.

Called by the work queue. It keeps no state that the next call needs, so that it may be killed between any two calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from headrace.fleet.cluster.apply import Applier, remove_finalizer
from headrace.fleet.cluster.benchmark_reconciler import BenchmarkReconciler
from headrace.fleet.cluster.events import EventRecorder
from headrace.fleet.cluster.resources import SERVICES
from headrace.fleet.cluster.view import ClusterView
from headrace.fleet.documents import Problem
from headrace.fleet.names import COMPONENT_LABEL, ROUTER
from headrace.fleet.planning import Plan, plan
from headrace.fleet.planning.context import live_key
from headrace.fleet.planning.front_router import FRONT, PORT, config_version
from headrace.fleet.planning.revisions import SHARE
from headrace.fleet.pod_client import router_status
from headrace.fleet.rollouts.controller import RolloutEvent, advance_rollouts, is_in_progress
from headrace.fleet.rollouts.history import merge_patch
from headrace.fleet.rollouts.revision_stats import RouterStats, parse_router_stats
from headrace.fleet.status.conditions import LATEST_DEPLOYMENT_READY, READY, Observed, condition_of, utc_now
from headrace.fleet.status.service_status import build_status, problem_status
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.objects import (
    Document,
    Key,
    annotations_of,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
    name_of,
)

log = logging.getLogger("headrace.operator")

RECONCILE_ERROR, INTERNAL_ERROR = "ReconcileError", "InternalError"


class Reconciler:
    """Reconciles services and BenchmarkJobs."""

    def __init__(
        self,
        api: ApiClient,
        view: ClusterView,
        recorder: EventRecorder,
        now: Callable[[], datetime] = utc_now,
        add_after: Callable[[Key, float], None] | None = None,
        stepper: RolloutStepper | None = None,
    ) -> None:
        """add_after: queue a key again after a number of seconds."""
        self._api = api
        self._view = view
        self._recorder = recorder
        self._applier = Applier(api, view)
        self._benchmarks = BenchmarkReconciler(api, view, recorder, now)
        self._now = now
        self._add_after = add_after
        self._stepper = stepper or RolloutStepper(now)

    async def reconcile(self, key: Key) -> bool:
        """Reconcile a service or benchmark once. Return False to retry. Raises only when cancelled."""
        _, slash, name = key[1].rpartition("/")
        service = self._view.service(key)
        if service is None and not slash:
            return True
        try:
            if service is None:
                return await self._benchmarks.reconcile((key[0], name))
            if get_str(service, "metadata", "deletionTimestamp"):
                await remove_finalizer(self._api, self._view, SERVICES, service)
                return True
            return await self._reconcile_service(service)
        except Unreachable as error:
            log.warning("%s/%s: the API server does not answer (%s)", *key, error)
        except ApiError as error:
            if error.code != 409:  # the object has changed, and the informer will report it
                log.warning("%s/%s: %s", *key, error)
        except Exception:
            log.exception("cannot reconcile %s/%s", *key)
        return False

    async def _reconcile_service(self, service: Document) -> bool:
        live = {live_key(kind_of(child), name_of(child)): child for child in self._view.owned(service)}
        split_applied = await self._stepper.is_split_applied(service, live, self._view.pods(service))
        if not split_applied and self._add_after is not None:
            self._add_after((get_str(service, "metadata", "namespace"), name_of(service)), APPLIED_SECONDS)
        planned = self._plan(service, live, split_applied)
        if isinstance(planned, Problem):
            await self._write_status(service, problem_status(service, [planned], self._now(), reason=INTERNAL_ERROR))
            return False
        if planned.problems:
            await self._write_status(service, build_status(service, planned, Observed(), self._now()))
            return True
        scaled = [await self._applier.scale_up(service, scale_up) for scale_up in planned.scale_ups]
        problems = [problem for problem in scaled if problem is not None]
        problems += await self._applier.apply(service, planned.objects)
        if problems:
            await self._write_status(service, problem_status(service, problems, self._now(), reason=RECONCILE_ERROR))
            return False
        objects, pods = self._view.owned(service), self._view.pods(service)
        observed = Observed(tuple(objects), tuple(pods))
        advanced, notes = await self._stepper.advance(service, planned, pods)
        await self._write_status(service, build_status(advanced, planned, observed, self._now()))
        # After the status: a step that could not be stored is decided again.
        for note in notes:
            await self._recorder.record(service, note.kind, note.reason, note.message)
        if self._add_after is not None and is_in_progress(advanced):
            self._add_after((get_str(service, "metadata", "namespace"), name_of(service)), STEP_SECONDS)
        return True

    def _plan(self, service: Document, live: Mapping[str, Document], split_applied: bool) -> Plan | Problem:
        try:
            return plan(service, self._view.facts, live, self._view.activator_for(service), split_applied)
        except Exception:
            # A bug in Headrace: report it in this service's status, and continue with the others.
            log.exception("cannot plan %s/%s", get_str(service, "metadata", "namespace"), name_of(service))
            return Problem("", "the operator failed to plan this service", "see its log, and report the error")

    async def _write_status(self, service: Document, computed: Document) -> None:
        """Write the status if it changed, and an Event if the Ready condition did."""
        before = get_mapping(service, "status")
        after: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(computed))
        if before == after:
            return
        served = self._view.served(SERVICES)
        if served is None:
            return
        change = {
            "metadata": {"resourceVersion": get_str(service, "metadata", "resourceVersion")},
            "status": merge_patch(before, after),
        }
        namespace = get_str(service, "metadata", "namespace")
        try:
            patched = await self._api.patch(served, namespace, name_of(service), change, "status")
        except ApiError as error:
            if error.code == 404:  # deleted meanwhile
                return
            raise
        self._view.put(SERVICES, patched)
        ready = _condition(after, READY)
        await self._recorder.ready_changed(service, _condition(before, READY), ready)
        if get_str(ready, "status") == "True":
            old, new = _condition(before, LATEST_DEPLOYMENT_READY), _condition(after, LATEST_DEPLOYMENT_READY)
            await self._recorder.rollout_changed(service, old, new)


def _condition(status: Document, kind: str) -> Document:
    return condition_of({"status": status}, kind) or {}


APPLIED_SECONDS = 1.0
"""Interval of checks whether the front routers have applied their shares."""
UNCONFIRMED_SECONDS = 30.0
"""Front routers that have not confirmed their shares by then are taken to have applied them: a rollout never hangs."""
STEP_SECONDS = 5.0
"""Interval between reconciliations during a rollout."""
_FRESH_SHARE = 0.8
"""Share of the interval for which statistics are reused: a written status triggers a reconciliation at once."""
_EXPIRE_SECONDS = 10 * STEP_SECONDS
_QUERY_SECONDS = 3.0

RouterQuery = Callable[[str, int], Awaitable[Any]]
"""Returns the status of the router at a host and port; None if it does not answer."""


async def query_router(host: str, port: int) -> Any:
    """Return the status of a router pod; None if it does not answer."""
    return await router_status(host, port, _QUERY_SECONDS)


class RolloutStepper:
    """Advances rollouts by steps with the statistics of the routers.

    Where no router of ours splits the traffic (Knative, a Gateway), steps go by time.
    """

    def __init__(self, now: Callable[[], datetime], query: RouterQuery = query_router) -> None:
        self._now = now
        self._query = query
        self._stats: dict[str, tuple[datetime, RouterStats | None]] = {}
        """By the uid of the service: the last statistics and their time."""
        self._unconfirmed: dict[str, tuple[str, datetime]] = {}
        """By the uid of the service: the configuration that its front routers have not confirmed, and since when."""

    async def advance(
        self, service: Document, plan: Plan, pods: Iterable[Document]
    ) -> tuple[Document, Sequence[RolloutEvent]]:
        """Return the service with the next rollout states in its status, and the Events to record."""
        uid, now = get_str(service, "metadata", "uid"), self._now()
        if not plan.counted or not is_in_progress(service):
            self._stats.pop(uid, None)
            return advance_rollouts(service, plan, None, now)
        queried, stats = self._stats.get(uid, (None, None))
        if queried is None or stats is None or (now - queried).total_seconds() >= _FRESH_SHARE * STEP_SECONDS:
            stats = await self._router_stats(plan, pods)
            for old in [
                key for key, (read_at, _) in self._stats.items() if (now - read_at).total_seconds() > _EXPIRE_SECONDS
            ]:
                del self._stats[old]  # most likely of a service that was deleted during its rollout
            self._stats[uid] = (now, stats)
        return advance_rollouts(service, plan, stats, now)

    async def is_split_applied(self, service: Document, live: Mapping[str, Document], pods: Iterable[Document]) -> bool:
        """Whether all ready front routers run with the configuration of their ConfigMap.

        They are polled only while there are pods that must get no more requests.
        """
        uid = get_str(service, "metadata", "uid")
        config_map = next((item for key, item in live.items() if _is_front_config(key, item)), None)
        if config_map is None or all(annotations_of(item).get(SHARE) != "0" for item in live.values()):
            self._unconfirmed.pop(uid, None)
            return True
        fronts = [pod for pod in pods if labels_of(pod).get(COMPONENT_LABEL) == FRONT and _serves(pod)]
        answers = await asyncio.gather(*(self._query(get_str(pod, "status", "podIP"), PORT) for pod in fronts))
        version = config_version(config_map)
        if all(get_str(answer, "config_version") == version for answer in answers):
            self._unconfirmed.pop(uid, None)
            return True
        known, since = self._unconfirmed.get(uid, ("", self._now()))
        if known != version:
            since = self._now()
            self._unconfirmed[uid] = (version, since)
        if (self._now() - since).total_seconds() < UNCONFIRMED_SECONDS:
            return False
        log.warning(
            "%s/%s: a front router has not confirmed its new shares within %g s; the rollout goes on. Check that the "
            "operator can reach port %d of the front's pods, and their logs.",
            get_str(service, "metadata", "namespace"),
            name_of(service),
            UNCONFIRMED_SECONDS,
            PORT,
        )
        return True

    async def _router_stats(self, plan: Plan, pods: Iterable[Document]) -> RouterStats | None:
        """Return the statistics of all ready routers; None while one of them does not answer."""
        component = ROUTER if ROUTER in plan.components else FRONT
        routers = [pod for pod in pods if labels_of(pod).get(COMPONENT_LABEL) == component and _serves(pod)]
        if not routers:
            return None
        answers = await asyncio.gather(*(self._query(get_str(router, "status", "podIP"), PORT) for router in routers))
        return parse_router_stats({name_of(router): answer for router, answer in zip(routers, answers, strict=True)})


def _is_front_config(key: str, document: Document) -> bool:
    return key.startswith("ConfigMap/") and labels_of(document).get(COMPONENT_LABEL) == FRONT


def _serves(pod: Document) -> bool:
    ready = get_str(condition_of(pod, "Ready"), "status") == "True"
    return ready and bool(get_str(pod, "status", "podIP")) and not get_str(pod, "metadata", "deletionTimestamp")
