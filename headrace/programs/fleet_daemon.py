# SPDX-License-Identifier: Apache-2.0
"""The daemon of this machine's fleet: puts the parts together, runs until a signal, leaves what runs running.

Called by `headrace up`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable
from typing import IO

import uvloop

from headrace.core.clock import SystemClock
from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.fleet.local.benchmarking import BENCHMARK, Benchmarks
from headrace.fleet.local.control import Control
from headrace.fleet.local.controller import Controller
from headrace.fleet.local.driving import Driver
from headrace.fleet.local.events import Events
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.machine import Machine
from headrace.fleet.local.objects import Objects
from headrace.fleet.local.process_driver import ProcessDriver
from headrace.fleet.local.routing import Routers
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.store import Store, each_folder, read_json, write_json
from headrace.fleet.local.system import System
from headrace.fleet.words import Document, kind_of
from headrace.net.server import WireServer, run_until_signal
from headrace.platforms.ports import Ports

log = logging.getLogger("headrace.fleet")

FAILED = 1


class Daemon:
    """All parts. Used from one loop."""

    def __init__(
        self,
        settings: LocalSettings,
        machine: Machine | None = None,
        driver: Driver | None = None,
        system: System | None = None,
    ) -> None:
        self.settings = settings
        self._lock: IO[bytes] | None = None
        root = settings.root
        self.system = system = system or System(SystemClock())
        self.events = Events(root / "events.json", settings.events, system.now)
        self.store = Store(root / "documents", system.now)
        self.objects = Objects(root / "objects", system.now)
        self.routers = Routers(settings, system)
        ports = Ports(root / "ports" / "pods", settings.host, *settings.pod_ports)
        self.driver = driver or _driver(settings)
        self.kubelet = Kubelet(
            settings, self.store, machine or Machine(ports), self.routers, self.events, self.driver, system
        )
        self.controller = Controller(
            settings, self.store, self.kubelet, self.routers, self.objects, self.events, system
        )
        self.benchmarks = Benchmarks(settings, self.store, self.kubelet, self.events, lambda: self.controller.facts)
        self.store.on_change = self._changed
        parts = (self.store, self.kubelet, self.controller, self.benchmarks, self.events)
        self.control = Control(settings, *parts)
        self.server = self.control.server()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Find what is there, and begin. Raises FailedPrecondition."""
        self._take()
        _check_driver(self.settings)
        await self.driver.open({each.name for each in each_folder(self.settings.root / "pods")})
        for each in (self.events, self.store, self.objects, self.routers, self.kubelet, self.benchmarks):
            each.load()
        self._tasks = [asyncio.ensure_future(each.run()) for each in (self.controller, self.benchmarks)]
        await self.server.start()

    async def close(self) -> None:
        """Let go of everything; what runs goes on, unless it was meant to end with the daemon."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.settings.ephemeral:
            await self.benchmarks.end_all()
            await self.kubelet.end_all()
            await self.routers.end_all()
        await self.benchmarks.close()
        await self.kubelet.close()
        await self.driver.close()
        await self.routers.close()
        self.events.flush()
        if self._lock is not None:
            self._lock.close()

    def _changed(self, document: Document) -> None:
        self.benchmarks.changed(document)
        if kind_of(document) != BENCHMARK:  # no service depends on one
            self.controller.changed(document)

    def _take(self) -> None:
        root = self.settings.root
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (root / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FailedPrecondition(f"a fleet runs in {root} already: stop it, or name another --state-dir") from None
        except OSError as error:
            said = os.strerror(error.errno or 0)
            raise FailedPrecondition(f"{root} cannot be used: {said}; name another --state-dir") from None


def _driver(settings: LocalSettings) -> Driver:
    if settings.driver == "process":
        return ProcessDriver()
    from headrace.fleet.local.docker_driver import DockerDriver
    from headrace.platforms.docker.settings import DockerSettings

    return DockerDriver(DockerSettings.from_environment(os.environ), settings)


def _check_driver(settings: LocalSettings) -> None:
    """What runs by one driver cannot be followed by another."""
    path = settings.root / "driver.json"
    before = str((read_json(path) or {}).get("driver", settings.driver))
    if before != settings.driver and any(each_folder(settings.root / "pods")):
        raise FailedPrecondition(
            f"pods in {settings.root} run by --driver {before}: start it with that, or delete their services first"
        )
    write_json(path, {"driver": settings.driver})


Beside = Callable[[Daemon], Awaitable[WireServer | None]]
"""Starts one more server over a daemon that runs, if one is wanted: a room above this one knows how."""


def run_local(
    settings: LocalSettings, on_ready: Callable[[Daemon], None] | None = None, beside: Beside | None = None
) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    try:
        return uvloop.run(_run(settings, on_ready, beside))
    except HeadraceError as error:
        log.error("%s", error.message)
        return FAILED


async def _run(settings: LocalSettings, on_ready: Callable[[Daemon], None] | None, beside: Beside | None) -> int:
    daemon = Daemon(settings)
    try:
        await daemon.start()
        more = await beside(daemon) if beside is not None else None
        servers = [daemon.server] if more is None else [daemon.server, more]
        if on_ready is not None:
            on_ready(daemon)
        return await run_until_signal(servers, 1.0, on_signal=daemon.controller.questions.close)
    finally:
        await daemon.close()
