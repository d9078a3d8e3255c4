# SPDX-License-Identifier: Apache-2.0
"""The operator program: watch the cluster, wait for leadership, reconcile until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.core.errors import HeadraceError
from headrace.core.extras import MissingExtra
from headrace.fleet.agent.model_status import ModelStatuses
from headrace.fleet.cluster.configuration import CONFIG_MAP, settings_from
from headrace.fleet.cluster.events import EventRecorder
from headrace.fleet.cluster.reconciler import Reconciler
from headrace.fleet.cluster.view import ClusterView
from headrace.fleet.cluster.webhooks.reviews import ClusterSnapshot
from headrace.fleet.cluster.webhooks.settings import WebhookSettings
from headrace.fleet.documents import FleetSettings
from headrace.fleet.metrics import OperatorMetrics, metrics_server
from headrace.fleet.names import NAMESPACE
from headrace.fleet.status.conditions import utc_now
from headrace.net.sockets import Address
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.leader_election import LeaderElector, LeaseSettings
from headrace.platforms.kubernetes_client.objects import CONFIG_MAPS
from headrace.platforms.kubernetes_client.work_queue import WorkQueue
from headrace.programs.cluster_program import run_until_signal

if TYPE_CHECKING:
    from headrace.fleet.cluster.webhooks.server import Webhooks

log = logging.getLogger("headrace.operator")

LOST_LEAD = 3


@dataclass(frozen=True)
class OperatorSettings:
    """Settings of the operator."""

    kubeconfig: str = ""
    """"": in a pod its service account, else KUBECONFIG or ~/.kube/config."""
    context: str = ""
    namespace: str = NAMESPACE
    """The operator's own namespace, with its Lease and `inferenceservice-config`."""
    elect: bool = True
    """Leader election. Off for a single operator: then it writes nothing while idle."""
    workers: int = 4
    address: str = ""
    """`host:port` of `/metrics` and `/healthz`; "": do not serve them."""
    discover_seconds: float = 60.0
    """Interval of the discovery of optional resource types (Knative, KEDA) and of reading `inferenceservice-config`."""
    fleet: FleetSettings = field(default_factory=FleetSettings)
    webhooks: WebhookSettings | None = None
    """Admission webhooks; None: do not serve them."""


class Controller:
    """Watches a cluster and reconciles its services, benchmarks and models."""

    def __init__(self, api: ApiClient, settings: OperatorSettings, metrics: OperatorMetrics | None = None) -> None:
        self.api = api
        self.metrics = metrics or OperatorMetrics(api)
        self._settings = settings
        self._queue = WorkQueue(self._reconcile, settings.workers)
        self._view = ClusterView(api, settings.fleet, self._queue.add, settings.namespace)
        self._reconciler = Reconciler(api, self._view, EventRecorder(api, utc_now), add_after=self._queue.add_after)
        self._models = ModelStatuses(api, settings.namespace)
        self._seen = asyncio.Event()

    @property
    def settled(self) -> bool:
        """Whether the caches are synced and the queues are empty."""
        return self._view.complete and self._queue.idle and self._models.settled

    @property
    def snapshot(self) -> ClusterSnapshot:
        """The cached state of the cluster, for the webhooks."""
        return ClusterSnapshot(self._view.facts, self._view.complete)

    async def run(self) -> None:
        """Watch and reconcile until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow())
            group.create_task(self.work())

    async def follow(self) -> None:
        """Keep the cache up to date until cancelled.

        Replicas that do not lead do so, too: for their webhooks, and to take over quickly.
        """
        try:
            while not self._view.complete:
                await self._discover()
                if not self._view.complete:
                    log.warning(
                        "waiting for the custom resource definitions: run `headrace operator manifests | kubectl apply -f -`"
                    )
                    await asyncio.sleep(min(5.0, self._settings.discover_seconds))
            self._seen.set()
            while True:
                await asyncio.sleep(self._settings.discover_seconds)
                await self._discover()
        finally:
            await self._view.close()

    async def work(self) -> None:
        """Reconcile services and models until cancelled, once the cache is synced."""
        await self._seen.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._queue.run())
            group.create_task(self._models.run())

    async def _reconcile(self, key: tuple[str, str]) -> bool:
        since = time.perf_counter()
        done = await self._reconciler.reconcile(key)
        self.metrics.seconds.observe(time.perf_counter() - since)
        (self.metrics.done if done else self.metrics.failed).add()
        return done

    async def _discover(self) -> None:
        """Discover resource types and read the settings. Errors of the API server are logged: the cache stays."""
        try:
            config = await self._api_config()
            self._view.set_settings(config)
            if await self._view.discover():
                # A type that was just removed never syncs: the next discovery notices.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.discover_seconds):
                        await self._view.wait_synced()
                self._view.enqueue_all()
        except (ApiError, Unreachable) as error:
            log.warning("cannot discover the resource types of the cluster: %s", error)

    async def _api_config(self) -> FleetSettings:
        try:
            config_map = await self.api.get(CONFIG_MAPS, self._settings.namespace, CONFIG_MAP)
        except ApiError as error:
            log.warning("cannot read %s/%s: %s", self._settings.namespace, CONFIG_MAP, error)
            config_map = None
        return settings_from(self._settings.fleet, config_map)


def run_operator(settings: OperatorSettings) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    return run_until_signal(settings.kubeconfig, settings.context, lambda api, stop: operate(api, settings, stop), log)


async def operate(api: ApiClient, settings: OperatorSettings, stop: asyncio.Event) -> int:
    """Run until `stop` is set or leadership is lost. Return the exit code."""
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}"
    leader = LeaderElector(api, LeaseSettings(settings.namespace, identity), utc_now) if settings.elect else None
    metrics = OperatorMetrics(api)
    server = metrics_server(metrics, Address.parse(settings.address)) if settings.address else None
    controller = Controller(api, settings, metrics)
    webhooks = _webhooks(controller, settings.webhooks.checked()) if settings.webhooks is not None else None
    tasks: list[asyncio.Task[Any]] = []
    try:
        if server is not None:
            await server.start()
        tasks += [asyncio.create_task(stop.wait()), asyncio.create_task(controller.follow())]
        if webhooks is not None:
            tasks.append(asyncio.create_task(webhooks.run()))
        tasks.append(asyncio.create_task(_lead(controller, leader, webhooks)))
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return 0 if tasks[0] in ended else _code(next(iter(ended)))
    finally:
        # All work stops before another replica may lead.
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if leader is not None:
            await leader.release()
        if server is not None:
            await server.drain(0)


def _webhooks(controller: Controller, settings: WebhookSettings) -> Webhooks:
    try:
        from headrace.fleet.cluster.webhooks.server import Webhooks
    except ImportError:
        raise MissingExtra("--webhook-listen", "kubernetes") from None
    return Webhooks(controller.api, settings, lambda: controller.snapshot, controller.metrics.registry, utc_now)


async def _lead(controller: Controller, leader: LeaderElector | None, webhooks: Webhooks | None) -> int:
    """Reconcile while this process is the leader."""
    if leader is not None:
        await leader.acquire()
    controller.metrics.leads.set(1)
    if webhooks is not None:
        webhooks.lead()
    work = asyncio.create_task(controller.work())
    lost = asyncio.create_task(leader.renew() if leader is not None else asyncio.Event().wait())
    try:
        await asyncio.wait([work, lost], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
        return LOST_LEAD
    finally:
        for task in (work, lost):
            task.cancel()
        await asyncio.gather(work, lost, return_exceptions=True)


def _code(ended: asyncio.Task[Any]) -> int:
    """Return the exit code after a task that ended by itself. Raises its HeadraceError."""
    error = ended.exception()
    if isinstance(error, HeadraceError):
        raise error
    if error is not None:
        log.error("the operator failed", exc_info=error)
        return 1
    return int(ended.result() or 1)
