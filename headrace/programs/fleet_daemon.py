# SPDX-License-Identifier: Apache-2.0
"""The daemon of the local fleet: assembles its parts, runs until a signal, and leaves services running.

`headrace up` runs it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

import uvloop

from headrace.core.clock import SystemClock
from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.core.files import FileLock, list_folders, read_json, write_json
from headrace.core.telemetry.logs import log_fatal
from headrace.fleet.local.api_server import ApiServer
from headrace.fleet.local.benchmark_controller import BENCHMARK, BenchmarkController
from headrace.fleet.local.container_runtime import ContainerRuntime
from headrace.fleet.local.controller import Controller
from headrace.fleet.local.events import Events
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.object_store import DocumentStore, ServiceObjects
from headrace.fleet.local.process_runtime import ProcessRuntime
from headrace.fleet.local.scheduler import Scheduler
from headrace.fleet.local.service_proxy import Routers
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import System
from headrace.net.server import HttpServer, run_until_signal
from headrace.platforms.kubernetes_client.objects import Document, kind_of
from headrace.platforms.node_resources import PortAllocator

log = logging.getLogger("headrace.fleet")

FAILED = 1


class Daemon:
    """All parts of the daemon. Used from one loop."""

    def __init__(
        self,
        settings: LocalSettings,
        scheduler: Scheduler | None = None,
        runtime: ContainerRuntime | None = None,
        system: System | None = None,
    ) -> None:
        self.settings = settings
        self._lock = FileLock(settings.root / "lock")
        root = settings.root
        self.system = system = system or System(SystemClock())
        self.events = Events(root / "events.json", settings.events, system.now)
        self.store = DocumentStore(root / "documents", system.now)
        self.objects = ServiceObjects(root / "objects", system.now)
        self.routers = Routers(settings, system)
        ports = PortAllocator(root / "ports" / "pods", settings.host, *settings.pod_ports)
        self.runtime = runtime or _runtime(settings)
        self.kubelet = Kubelet(
            settings, self.store, scheduler or Scheduler(ports), self.routers, self.events, self.runtime, system
        )
        self.controller = Controller(
            settings, self.store, self.kubelet, self.routers, self.objects, self.events, system
        )
        self.benchmarks = BenchmarkController(
            settings, self.store, self.kubelet, self.events, lambda: self.controller.facts
        )
        self.store.on_change = self._document_changed
        parts = (self.store, self.kubelet, self.controller, self.benchmarks, self.events)
        self.api = ApiServer(settings, *parts)
        self.server = self.api.server()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Adopt what runs, and start. Raises FailedPrecondition."""
        self._lock_root()
        _check_runtime(self.settings)
        await self.runtime.open({folder.name for folder in list_folders(self.settings.root / "pods")})
        for part in (self.events, self.store, self.objects, self.routers, self.kubelet, self.benchmarks):
            part.load()
        self._tasks = [asyncio.ensure_future(part.run()) for part in (self.controller, self.benchmarks)]
        await self.server.start()

    async def close(self) -> None:
        """Close everything; services keep running, unless the daemon is ephemeral."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.settings.ephemeral:
            await self.benchmarks.remove_all()
            await self.kubelet.delete_all()
            await self.routers.stop_all()
        await self.benchmarks.close()
        await self.kubelet.close()
        await self.runtime.close()
        await self.routers.close()
        self.events.flush()
        self._lock.release()

    def _document_changed(self, document: Document) -> None:
        self.benchmarks.document_changed(document)
        if kind_of(document) != BENCHMARK:  # no service depends on a BenchmarkJob
            self.controller.document_changed(document)

    def _lock_root(self) -> None:
        root = self.settings.root
        try:
            self._lock.acquire(0.0)
        except TimeoutError:
            raise FailedPrecondition(f"a fleet runs in {root} already: stop it, or name another --state-dir") from None
        except OSError as error:
            message = os.strerror(error.errno or 0)
            raise FailedPrecondition(f"{root} cannot be used: {message}; name another --state-dir") from None


def _runtime(settings: LocalSettings) -> ContainerRuntime:
    if settings.driver == "process":
        return ProcessRuntime()
    from headrace.fleet.local.docker_runtime import DockerRuntime
    from headrace.platforms.docker.settings import DockerSettings

    return DockerRuntime(DockerSettings.from_environment(os.environ), settings)


def _check_runtime(settings: LocalSettings) -> None:
    """Check that the pods were started by the same runtime: another one cannot adopt them."""
    path = settings.root / "driver.json"
    before = str((read_json(path) or {}).get("driver", settings.driver))
    if before != settings.driver and any(list_folders(settings.root / "pods")):
        raise FailedPrecondition(
            f"pods in {settings.root} were started with --driver {before}: use that, or delete their services first"
        )
    write_json(path, {"driver": settings.driver})


Beside = Callable[[Daemon], Awaitable[HttpServer | None]]
"""Starts one more server beside a running daemon, such as the console."""


def run_local(
    settings: LocalSettings, on_ready: Callable[[Daemon], None] | None = None, beside: Beside | None = None
) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    try:
        return uvloop.run(_run(settings, on_ready, beside))
    except HeadraceError as error:
        log_fatal(log, error.message)
        return FAILED


async def _run(settings: LocalSettings, on_ready: Callable[[Daemon], None] | None, beside: Beside | None) -> int:
    daemon = Daemon(settings)
    try:
        await daemon.start()
        more = await beside(daemon) if beside is not None else None
        servers = [daemon.server] if more is None else [daemon.server, more]
        if on_ready is not None:
            on_ready(daemon)
        return await run_until_signal(servers, 1.0, on_signal=daemon.controller.watches.close)
    finally:
        await daemon.close()
