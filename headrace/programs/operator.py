# SPDX-License-Identifier: Apache-2.0
"""The controller as a program: waits until it leads, follows the cluster, works until a signal. Called by the CLI."""

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

from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.fleet.agent.summing import ModelStatuses
from headrace.fleet.cluster.api import Api, Refused, Unreachable
from headrace.fleet.cluster.configuration import CONFIG_MAP, configured
from headrace.fleet.cluster.events import Recorder
from headrace.fleet.cluster.leading import Leader, LeaseSettings
from headrace.fleet.cluster.queue import Queue
from headrace.fleet.cluster.reconciling import Reconciler, utc_now
from headrace.fleet.cluster.resources import SETTINGS, Served
from headrace.fleet.cluster.serving import OperatorMetrics, server_of
from headrace.fleet.cluster.view import View
from headrace.fleet.cluster.webhooks.reviews import Sight
from headrace.fleet.cluster.webhooks.settings import WebhookSettings
from headrace.fleet.names import NAMESPACE
from headrace.fleet.words import FleetSettings
from headrace.net.sockets import Address
from headrace.programs.cluster_program import run_until_signal

if TYPE_CHECKING:
    from headrace.fleet.cluster.webhooks.running import Webhooks

log = logging.getLogger("headrace.operator")

LOST_LEAD = 3


@dataclass(frozen=True)
class OperatorSettings:
    """What the operator is told."""

    kubeconfig: str = ""
    """"": in a pod its service account, else KUBECONFIG or ~/.kube/config."""
    context: str = ""
    namespace: str = NAMESPACE
    """Its own: where its Lease and `inferenceservice-config` are."""
    elect: bool = True
    """Off for a single one: then an idle operator writes nothing at all."""
    workers: int = 4
    address: str = ""
    """Where `/metrics` and `/healthz` are, `host:port`; "": nowhere."""
    discover_seconds: float = 60.0
    """How often to look whether Knative, KEDA and the like came or went, and what `inferenceservice-config` says."""
    fleet: FleetSettings = field(default_factory=FleetSettings)
    webhooks: WebhookSettings | None = None
    """Where the API server may ask about documents before it keeps them; None: it does not."""


class Controller:
    """Follows a cluster and brings its services to what they ask for."""

    def __init__(self, api: Api, settings: OperatorSettings, metrics: OperatorMetrics | None = None) -> None:
        self.api = api
        self.metrics = metrics or OperatorMetrics(api)
        self._settings = settings
        self._queue = Queue(self._reconcile, settings.workers)
        self._view = View(api, settings.fleet, self._queue.add)
        self._reconciler = Reconciler(api, self._view, Recorder(api, utc_now), later=self._queue.add_later)
        self._models = ModelStatuses(api, settings.namespace)
        self._seen = asyncio.Event()

    @property
    def settled(self) -> bool:
        """Whether everything was seen, and nothing is left to do."""
        return self._view.complete and self._queue.idle and self._models.settled

    @property
    def sight(self) -> Sight:
        """What is known of the cluster."""
        return Sight(self._view.facts, self._view.complete)

    async def run(self) -> None:
        """Follow and work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow())
            group.create_task(self.work())

    async def follow(self) -> None:
        """Keep the view up to date until cancelled.

        Those that do not lead do so, too: for their webhooks, and to be quick when their time comes.
        """
        try:
            while not self._view.complete:
                await self._discover()
                if not self._view.complete:
                    log.warning("waiting for our kinds: run `headrace operator manifests | kubectl apply -f -`")
                    await asyncio.sleep(min(5.0, self._settings.discover_seconds))
            self._seen.set()
            while True:
                await asyncio.sleep(self._settings.discover_seconds)
                await self._discover()
        finally:
            await self._view.close()

    async def work(self) -> None:
        """Bring services to what they ask for, and models to what the nodes tell, once all was seen, until cancelled."""
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
        """Never raises for what the API server says or does not say: what is known stays."""
        try:
            config = await self._api_config()
            self._view.set_settings(config)
            if await self._view.discover():
                # A kind that is taken away just now is never listed: only another look finds that out.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.discover_seconds):
                        await self._view.listed()
                self._view.ask_all()
        except (Refused, Unreachable) as error:
            log.warning("cannot look which kinds the cluster has: %s", error)

    async def _api_config(self) -> FleetSettings:
        where = Served(SETTINGS, "v1")
        try:
            found = await self.api.get(where, self._settings.namespace, CONFIG_MAP)
        except Refused as refused:
            log.warning("%s/%s cannot be read: %s", self._settings.namespace, CONFIG_MAP, refused)
            found = None
        return configured(self._settings.fleet, found)


def run_operator(settings: OperatorSettings) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    return run_until_signal(settings.kubeconfig, settings.context, lambda api, stop: operate(api, settings, stop), log)


async def operate(api: Api, settings: OperatorSettings, stop: asyncio.Event) -> int:
    """Lead, and work, until told to stop or until another leads. Returns the exit code."""
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}"
    leader = Leader(api, LeaseSettings(settings.namespace, identity), utc_now) if settings.elect else None
    metrics = OperatorMetrics(api)
    server = server_of(metrics, Address.parse(settings.address)) if settings.address else None
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
        # Whatever works ends before another may lead.
        for each in reversed(tasks):
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if leader is not None:
            await leader.release()
        if server is not None:
            await server.drain(0)


def _webhooks(controller: Controller, settings: WebhookSettings) -> Webhooks:
    try:
        from headrace.fleet.cluster.webhooks.running import Webhooks
    except ImportError:
        raise FailedPrecondition("webhooks need cryptography: pip install 'headrace[kubernetes]'") from None
    return Webhooks(controller.api, settings, lambda: controller.sight, controller.metrics.registry, utc_now)


async def _lead(controller: Controller, leader: Leader | None, webhooks: Webhooks | None) -> int:
    """Work while this process leads."""
    if leader is not None:
        await leader.acquire()
    controller.metrics.leads.set(1)
    if webhooks is not None:
        webhooks.lead()
    work = asyncio.create_task(controller.work())
    lost = asyncio.create_task(leader.keep() if leader is not None else asyncio.Event().wait())
    try:
        await asyncio.wait([work, lost], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
        return LOST_LEAD
    finally:
        for each in (work, lost):
            each.cancel()
        await asyncio.gather(work, lost, return_exceptions=True)


def _code(ended: asyncio.Task[Any]) -> int:
    """The exit code for a part that ended by itself. Raises HeadraceError, which says what to do."""
    error = ended.exception()
    if isinstance(error, HeadraceError):
        raise error
    if error is not None:
        log.error("the operator failed", exc_info=error)
        return 1
    return int(ended.result() or 1)
