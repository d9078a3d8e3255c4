# SPDX-License-Identifier: Apache-2.0
"""The shared activator program: hold the requests of all services that are scaled to zero, and start their pods.

It only watches Deployments and LeaderWorkerSets: an annotation of a front router's Deployment has the port, the backends and
the workloads of its service (`fleet.planning.shared_activator`). Any number of replicas may run: they start pods and never
stop any.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from headrace.core.errors import HeadraceError
from headrace.fleet.metrics import ProgramMetrics, metrics_server
from headrace.fleet.names import SERVICE_LABEL
from headrace.fleet.planning.shared_activator import activation_of, front_serves
from headrace.fleet.router.scale_targets import ReplicaCounts, ScalerError
from headrace.fleet.router.settings import ScaleTarget
from headrace.net.server import drain_servers
from headrace.net.sockets import Address
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.informer import Informer
from headrace.platforms.kubernetes_client.objects import Document, Key, Resource, kind_of, name_of, served_resources
from headrace.platforms.kubernetes_client.objects import get_str as text_of
from headrace.platforms.kubernetes_client.work_queue import WorkQueue
from headrace.programs.activated_service import ActivatedService, HostOf, cluster_host
from headrace.programs.cluster_program import run_until_signal
from headrace.programs.router_scalers import KubernetesScaler, parse_counts

log = logging.getLogger("headrace.activator")

WORKLOADS = (
    Resource("apps", ("v1",), "Deployment", "deployments"),
    Resource("leaderworkerset.x-k8s.io", ("v1",), "LeaderWorkerSet", "leaderworkersets", capability="lws"),
)
"""Resources that services scale to zero."""
_SWEEP_SECONDS = 1.0


@dataclass(frozen=True)
class ActivatorSettings:
    """Settings of the shared activator."""

    kubeconfig: str = ""
    context: str = ""
    host: str = "127.0.0.1"
    """Address that the ports of services are opened on."""
    address: str = ""
    """`host:port` of `/metrics`, `/healthz` and `/readyz`; "": do not serve them."""
    grace_seconds: float = 600.0
    """How long open and held requests may take after SIGTERM."""
    discover_seconds: float = 60.0
    """Interval of the discovery of LeaderWorkerSet."""
    host_of: HostOf = cluster_host


class WatchedWorkloads(KubernetesScaler):
    """The workloads of all services: a scaler that reads replica counts from informers, one for each resource type."""

    def __init__(self, api: ApiClient, on_change: Callable[[Document], None]) -> None:
        super().__init__(api)
        self._on_change = on_change
        self._informers: dict[str, Informer] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[tuple[str, Key], set[asyncio.Event]] = {}

    @property
    def synced(self) -> bool:
        """Whether all workloads were read once."""
        return bool(self._informers) and all(informer.synced.is_set() for informer in self._informers.values())

    async def discover(self) -> None:
        """Start an informer for each resource type that is served. Raises ApiError, Unreachable."""
        for resource, served in served_resources(WORKLOADS, await self._api.discover(WORKLOADS)).items():
            if resource.kind not in self._informers:
                informer = Informer(self._api, served, self._changed, selector=SERVICE_LABEL)
                self._informers[resource.kind] = informer
                self._tasks.append(asyncio.create_task(informer.run(), name=f"informer {resource.plural}"))

    def get(self, kind: str, key: Key) -> Document | None:
        """Return a workload."""
        informer = self._informers.get(kind)
        return informer.get(key) if informer is not None else None

    def all(self, kind: str) -> list[Document]:
        """Return all workloads of a kind."""
        informer = self._informers.get(kind)
        return informer.all() if informer is not None else []

    async def replicas(self, target: ScaleTarget) -> ReplicaCounts:
        """Return the last observed counts."""
        informer = self._informers.get(target.kind)
        if informer is None:
            raise ScalerError(f"the cluster has no {target.kind}; install it")
        await informer.synced.wait()
        workload = informer.get((target.namespace, target.name))
        return parse_counts(workload) if workload is not None else ReplicaCounts(0, 0)

    async def watch(self, target: ScaleTarget) -> AsyncIterator[ReplicaCounts]:
        """Yield the counts and every change."""
        last: ReplicaCounts | None = None
        changed = asyncio.Event()
        waiting = self._waiting.setdefault((target.kind, (target.namespace, target.name)), set())
        waiting.add(changed)
        try:
            while True:
                changed.clear()
                counts = await self.replicas(target)
                if counts != last:
                    last = counts
                    yield counts
                    continue
                await changed.wait()
        finally:
            waiting.discard(changed)

    async def close(self) -> None:
        """Do nothing: all services share this scaler. `stop` ends it."""

    async def stop(self) -> None:
        """Stop the informers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _changed(self, before: Document | None, after: Document | None) -> None:
        workload = after if after is not None else before
        if workload is None:
            return
        for changed in self._waiting.get((kind_of(workload), _key(workload)), ()):
            changed.set()
        self._on_change(workload)


class ActivatedServices:
    """All services of the activator, by the namespace and name of their front router's Deployment."""

    def __init__(self, api: ApiClient, settings: ActivatorSettings) -> None:
        self.workloads = WatchedWorkloads(api, self._workload_changed)
        self._settings = settings
        self._services: dict[Key, ActivatedService] = {}
        self._queue = WorkQueue(self._reconcile)
        self._closing: set[asyncio.Task[None]] = set()
        self._tried: set[Key] = set()
        self.ready = asyncio.Event()
        """Set once every service has its port; requests that arrive earlier are refused."""

    @property
    def settled(self) -> bool:
        """Whether every service of the cluster has its port, or failed to get one."""
        fronts = [
            _key(workload) for workload in self.workloads.all("Deployment") if activation_of(workload) is not None
        ]
        return self.workloads.synced and self._tried.issuperset(fronts)

    def get(self, key: Key) -> ActivatedService | None:
        """Return a service by the namespace and name of its front router's Deployment."""
        return self._services.get(key)

    def register_metrics(self, metrics: ProgramMetrics) -> None:
        """Register the metrics of all services."""
        labels = ["namespace", "front"]
        metrics.registry.callback(
            "headrace_activator_services", "Services that the activator has a port for.", lambda: len(self._services)
        )
        metrics.registry.callback(
            "headrace_activator_held_requests",
            "Requests held until their service has replicas.",
            lambda: {service.key: service.held for service in self._services.values()},
            labels,
        )
        metrics.registry.callback(
            "headrace_activator_wakes_total",
            "Number of activations: requests waited for replicas to start.",
            lambda: {service.key: service.wakes for service in self._services.values()},
            labels,
            kind="counter",
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._discover())
            group.create_task(self._queue.run())
            group.create_task(self._hand_over())

    async def close(self, grace_seconds: float) -> None:
        """Stop all services; open and held requests have a grace period."""
        services = list(self._services.values())
        for service in services:
            service.drain(grace_seconds)
        if services:
            await drain_servers([service.server for service in services], grace_seconds)
        await asyncio.gather(*(service.release() for service in services), *self._closing, return_exceptions=True)
        await self.workloads.stop()

    async def _discover(self) -> None:
        while True:
            try:
                await self.workloads.discover()
            except (ApiError, Unreachable) as error:
                log.warning("Cannot discover the workloads of the cluster: %s", error)
            await asyncio.sleep(self._settings.discover_seconds if self.workloads.synced else _SWEEP_SECONDS)

    async def _hand_over(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for service in self._services.values():
                service.hand_over()
            if not self.ready.is_set() and self.settled:
                self.ready.set()

    def _workload_changed(self, workload: Document) -> None:
        key = _key(workload)
        if kind_of(workload) == "Deployment" and (key in self._services or activation_of(workload) is not None):
            self._queue.add(key)

    async def _reconcile(self, key: Key) -> bool:
        """Create or update a service from its front router's Deployment. Return whether that succeeded."""
        front = self.workloads.get("Deployment", key)
        activation, service = activation_of(front), self._services.get(key)
        if service is not None and (activation is None or activation["port"] != service.port):
            del self._services[key]
            self._close(service)
            service = None
        if activation is None:
            self._tried.discard(key)
            return True
        try:
            if service is None:
                service = ActivatedService(key, activation, self.workloads, self._settings.host, self._settings.host_of)
                await self._start(service)
            elif activation != service.activation:
                await service.update(activation)
        except HeadraceError as error:
            log.warning("Cannot serve %s/%s on port %d: %s", *key, activation["port"], error.message)
            return False
        except Exception:
            # A bug in Headrace: it must not affect the other services.
            log.exception("Cannot serve %s/%s", *key)
            return False
        finally:
            self._tried.add(key)
        service.front_changed(front_serves(front))
        return True

    async def _start(self, service: ActivatedService) -> None:
        try:
            await service.start()
        except BaseException:
            await service.release()
            raise
        self._services[service.key] = service

    def _close(self, service: ActivatedService) -> None:
        """Close a service in the background, after its open requests."""
        task = asyncio.create_task(service.close(self._settings.grace_seconds))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _key(workload: Document) -> Key:
    return text_of(workload, "metadata", "namespace"), name_of(workload)


def run_activator(settings: ActivatorSettings) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    return run_until_signal(settings.kubeconfig, settings.context, lambda api, stop: activate(api, settings, stop), log)


async def activate(api: ApiClient, settings: ActivatorSettings, stop: asyncio.Event) -> int:
    """Serve until `stop` is set. Return the exit code."""
    metrics = ProgramMetrics(api, "headrace_activator_api_calls_total")
    metrics.is_ready = False
    services = ActivatedServices(api, settings)
    services.register_metrics(metrics)
    server = metrics_server(metrics, Address.parse(settings.address)) if settings.address else None
    running = asyncio.create_task(services.run())
    stopped = asyncio.create_task(stop.wait())
    try:
        if server is not None:
            await server.start()
        ready = asyncio.create_task(_set_ready(services, metrics))
        await asyncio.wait([stopped, running], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        if running.done():
            await running
        return 0
    finally:
        stopped.cancel()
        # The watches continue, because held requests wait for replicas.
        await services.close(settings.grace_seconds if stop.is_set() else 0.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if server is not None:
            await server.drain(0)


async def _set_ready(services: ActivatedServices, metrics: ProgramMetrics) -> None:
    await services.ready.wait()
    metrics.is_ready = True
