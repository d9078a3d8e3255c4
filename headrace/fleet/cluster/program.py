# SPDX-License-Identifier: Apache-2.0
"""The controller as a program: waits until it leads, follows the cluster, works until a signal. Called by the CLI."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field

from headrace.core.errors import HeadraceError
from headrace.fleet.cluster.api import Api, Refused, Unreachable, connect
from headrace.fleet.cluster.configuration import CONFIG_MAP, configured
from headrace.fleet.cluster.events import Recorder
from headrace.fleet.cluster.leading import Leader, LeaseSettings
from headrace.fleet.cluster.queue import Queue
from headrace.fleet.cluster.reconciling import Reconciler, utc_now
from headrace.fleet.cluster.resources import SETTINGS, Served
from headrace.fleet.cluster.serving import OperatorMetrics, server_of
from headrace.fleet.cluster.view import View
from headrace.fleet.words import FleetSettings
from headrace.wire.sockets import Address

log = logging.getLogger("headrace.operator")

NAMESPACE = "headrace-system"
BAD_CONFIGURATION = 2
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


class Controller:
    """Follows a cluster and brings its services to what they ask for."""

    def __init__(self, api: Api, settings: OperatorSettings, metrics: OperatorMetrics | None = None) -> None:
        self.api = api
        self.metrics = metrics or OperatorMetrics(api)
        self._settings = settings
        self._queue = Queue(self._reconcile, settings.workers)
        self._view = View(api, settings.fleet, self._queue.add)
        self._reconciler = Reconciler(api, self._view, Recorder(api, utc_now))

    @property
    def settled(self) -> bool:
        """Whether everything was seen, and nothing is left to do."""
        return self._view.complete and self._queue.idle

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while not self._view.complete:
                await self._discover()
                if not self._view.complete:
                    log.warning("waiting for our kinds: run `headrace operator manifests | kubectl apply -f -`")
                    await asyncio.sleep(min(5.0, self._settings.discover_seconds))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._queue.run())
                group.create_task(self._keep_discovering())
        finally:
            await self._view.close()

    async def _reconcile(self, key: tuple[str, str]) -> bool:
        since = time.perf_counter()
        done = await self._reconciler.reconcile(key)
        self.metrics.seconds.observe(time.perf_counter() - since)
        (self.metrics.done if done else self.metrics.failed).add()
        return done

    async def _keep_discovering(self) -> None:
        while True:
            await asyncio.sleep(self._settings.discover_seconds)
            await self._discover()

    async def _discover(self) -> None:
        """Never raises for what the API server says or does not say: what is known stays."""
        try:
            config = await self._api_config()
            self._view.set_settings(config)
            if await self._view.discover():
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
    # It tells of every single call.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    try:
        return asyncio.run(_run(settings))
    except HeadraceError as error:
        log.error("%s", error.message)
        return BAD_CONFIGURATION


async def _run(settings: OperatorSettings) -> int:
    api = connect(settings.kubeconfig, settings.context)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        return await operate(api, settings, stop)
    finally:
        await api.close()


async def operate(api: Api, settings: OperatorSettings, stop: asyncio.Event) -> int:
    """Lead, and work, until told to stop or until another leads. Returns the exit code."""
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}"
    leader = Leader(api, LeaseSettings(settings.namespace, identity), utc_now) if settings.elect else None
    metrics = OperatorMetrics(api)
    server = server_of(metrics, Address.parse(settings.address)) if settings.address else None
    stopped = asyncio.create_task(stop.wait())
    try:
        if server is not None:
            await server.start()
        if leader is not None and not await _before(stopped, leader.acquire()):
            return 0
        lost = asyncio.create_task(leader.keep()) if leader is not None else None
        metrics.leads.set(1)
        work = asyncio.create_task(Controller(api, settings, metrics).run())
        waited = [each for each in (stopped, lost, work) if each is not None]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for each in (work, lost):
            if each is not None:
                each.cancel()
        ended = await asyncio.gather(*(each for each in (work, lost) if each is not None), return_exceptions=True)
        if stopped.done():
            return 0
        if isinstance(ended[0], Exception):
            log.error("the controller failed", exc_info=ended[0])
            return 1
        return LOST_LEAD
    finally:
        stopped.cancel()
        if leader is not None:
            await leader.release()
        if server is not None:
            await server.drain(0)


async def _before(stopped: asyncio.Task[bool], work: Awaitable[None]) -> bool:
    """Whether the work was done before the signal came."""
    task = asyncio.ensure_future(work)
    await asyncio.wait([stopped, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False
