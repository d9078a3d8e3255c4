# SPDX-License-Identifier: Apache-2.0
"""Service proxies: one `headrace router` process in front of each Service that has to be reachable.

A router outlives the daemon, and keeps its port. Ready pods are listed in a file that it watches, so that pods come and go
without a restart. Its folder is created first and removed last. The daemon listens on its port too, and lets the router
accept: if a router is killed, connections wait for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, ResourceExhausted
from headrace.core.files import list_folders, read_json, write_json
from headrace.fleet import pod_client
from headrace.fleet.local.container_command import ADDRESS
from headrace.fleet.local.object_store import Service
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import System
from headrace.fleet.planning.context import CLUSTER_DOMAIN
from headrace.net.sockets import Address, Listener
from headrace.platforms.kubernetes_client.objects import Document
from headrace.platforms.log_files import truncate_log
from headrace.platforms.node_resources import PortAllocator
from headrace.platforms.processes import Command, headrace_command, inherited_environment

log = logging.getLogger("headrace.fleet")

"""Namespace and name of an InferenceService."""
_GRACE_SECONDS = 30.0
_PORT_COUNT = 1000
_DISCOVERY_SECONDS = 0.1
_STATUS_SECONDS = 0.02
_ACTIVE, _DRAINING = "backends", "leaving"
"""Lists in a router's status: backends that get requests, and backends that only finish open requests."""


@dataclass(frozen=True)
class Backend:
    """A ready pod behind a Service."""

    port: int
    weight: float = 100.0
    revision: str = ""


class Router:
    """The router process of one Service."""

    def __init__(
        self, folder: Path, service: Service, name: str, settings: LocalSettings, ports: PortAllocator, system: System
    ) -> None:
        self.folder = folder
        self.service = service
        self.name = name
        self.is_up = False
        content = read_json(folder / "router.json") or {}
        self.port = content["port"] if isinstance(content.get("port"), int) else 0
        self._settings = settings
        self._ports = ports
        self._system = system
        self._process = system.find_process(read_json(folder / "process.json"))
        self._backends = _read_backends(folder / "backends.json") if self._process is not None else None
        self.has_backends = bool(self._backends)
        """Whether it has a backend to send requests to."""
        self._listener: Listener | None = None
        """None for a router of an earlier daemon, until it has to be restarted."""
        self._waiting: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def id(self) -> str:
        """Its owner name in port claims."""
        return f"router:{self.service[0]}/{self.name}"

    @property
    def pid(self) -> int | None:
        """The pid of its process."""
        return self._process.pid if self._process is not None else None

    @property
    def url(self) -> str:
        """Its URL; "" while it is down."""
        return f"http://{ADDRESS}:{self.port}" if self.is_up else ""

    def start(self, is_known: Callable[[str], bool], on_change: Callable[[], None]) -> None:
        """Claim a port, start the router, and restart it when it ends. Raises FailedPrecondition, ResourceExhausted."""
        if not self.port:
            self._claim_port(is_known)
        if self._task is None:
            self._task = asyncio.ensure_future(self._run(is_known, on_change))

    def update(
        self,
        backends: Sequence[Backend],
        split: bool,
        activation: Document | None,
        on_backends: Callable[[], None],
        *,
        measure_streams: bool = False,
    ) -> None:
        """Set its backends. Raises FailedPrecondition.

        split: the weights are traffic shares to keep exactly. activation: what to scale up from zero. on_backends: called
        when it sends requests to a backend after it had none. measure_streams: count latencies for the autoscaler.
        """
        entries = [_backend_entry(backend) for backend in backends]
        if entries != self._backends:
            write_json(self.folder / "backends.json", entries, durable=False)
            self._backends = entries
            if not entries:
                self.has_backends = False
            elif not self.has_backends and self._waiting is None:
                self._waiting = asyncio.ensure_future(self._wait_backends(on_backends))
        if activation is not None:
            activation = {**activation, "local": {"folder": str(self._settings.root), "service": self.service[1]}}
        current, settings = (
            read_json(self.folder / "router.yaml") or {},
            self._config("weighted" if split else "p2c", activation, measure_streams=measure_streams),
        )
        if current != settings:
            write_json(self.folder / "router.yaml", settings)  # the router watches it

    def rotate_log(self) -> None:
        """Drop the beginning of a long log."""
        with contextlib.suppress(OSError):
            truncate_log(self.folder / "log", self._settings.log_bytes)

    async def wait_drained(self, port: int) -> None:
        """Wait until it has no open requests to a port and sends no more, up to a time limit."""
        settings, now = self._settings, asyncio.get_running_loop().time
        began = now()
        while self.is_up and (list_name := await self._list_with(port)):
            seconds = now() - began
            if seconds >= (settings.forget_seconds if list_name == _ACTIVE else settings.drain_seconds):
                return
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop it and remove everything of it."""
        self._stopped, self.is_up = True, False
        await self._cancel_tasks()
        self._stop_listening()
        if self._process is not None:
            await self._process.stop(_GRACE_SECONDS)
        self._ports.release(self.id)
        await asyncio.to_thread(shutil.rmtree, self.folder, True)

    async def detach(self) -> None:
        """Leave it running when the daemon ends."""
        self._stopped = True
        await self._cancel_tasks()
        self._stop_listening()
        if self._process is not None:
            self._process.detach()

    async def _wait_backends(self, on_backends: Callable[[], None]) -> None:
        """Wait until it has a backend to send requests to."""
        try:
            while self._backends and not self.has_backends:
                status = await router_status(self.port) if self.is_up else None
                self.has_backends = bool(status and status.get("backends"))
                await asyncio.sleep(_STATUS_SECONDS)
        finally:
            self._waiting = None
        on_backends()

    async def _cancel_tasks(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self, is_known: Callable[[str], bool], on_change: Callable[[], None]) -> None:
        pause = self._settings.quick_seconds
        while not self._stopped:
            try:
                if self._process is None:
                    self._start(is_known)
                await self._wait_up()
                on_change()
                if self._process is not None:
                    await self._process.wait()
                    self._listen()
                    await self._process.kill()
                log.warning("The router of %s ended; restarting it", self.name)
            except (FailedPrecondition, ResourceExhausted, OSError) as error:
                log.error("Cannot start the router of %s: %s", self.name, error)
            self._process, was_up, self.is_up = None, self.is_up, False
            on_change()
            pause = self._settings.quick_seconds if was_up else min(pause * 2, self._settings.back_off_seconds)
            await asyncio.sleep(pause)

    def _listen(self) -> None:
        """Listen on its port. If another program has taken the port, `_start` chooses a new one."""
        if self._listener is None:
            with contextlib.suppress(FailedPrecondition):
                self._listener = self._system.listen(Address(self._settings.host, self.port))

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _start(self, is_known: Callable[[str], bool]) -> None:
        self._listen()
        if self._listener is None:
            self._ports.release(self.id)
            self._claim_port(is_known)
            self._listener = self._system.listen(Address(self._settings.host, self.port))
        if not (self.folder / "backends.json").exists():
            write_json(self.folder / "backends.json", [], durable=False)
        current = read_json(self.folder / "router.yaml") or {}
        settings = self._config(
            str(current.get("policy", "p2c")),
            current.get("activation"),
            measure_streams=current.get("measure_streams") is True,
        )
        write_json(self.folder / "router.yaml", settings)
        argv = (*headrace_command(), "router", "--config", str(self.folder / "router.yaml"))
        environment = inherited_environment(os.environ, "XDG_") | {"PYTHONUNBUFFERED": "1"}
        command = Command(argv, environment, self.folder, self._listener.fileno())
        path = self.folder / "process.json"
        self._process = self._system.spawn(
            command, self.folder / "log", lambda record: write_json(path, dict(record), durable=False)
        )

    async def _wait_up(self) -> None:
        while self._process is not None and self._process.is_alive:
            if await router_status(self.port) is not None:
                self.is_up = True
                return
            await asyncio.sleep(0.05)

    def _claim_port(self, is_known: Callable[[str], bool]) -> None:
        """Claim the first free port from the configured one on."""
        first = self._settings.port
        for port in range(first, min(first + _PORT_COUNT, 65536)):
            try:
                self.port = self._ports.claim(self.id, is_known, port)
            except ResourceExhausted:
                continue
            content = {"service": list(self.service), "name": self.name, "port": self.port}
            write_json(self.folder / "router.json", content)
            return
        raise ResourceExhausted(f"no port from {first} on is free for {self.name}: give `headrace up` another --port")

    def _config(self, policy: str, activation: Document | None, *, measure_streams: bool) -> dict[str, Any]:
        return {
            **({"measure_streams": True} if measure_streams else {}),
            **({"activation": activation} if activation else {}),
            **({"trace_endpoint": self._settings.trace_endpoint} if self._settings.trace_endpoint else {}),
            "host": self._settings.host,
            "port": self.port,
            "policy": policy,
            # Pods have their own probes, and a pod that is not ready is not in the file.
            "health": {"path": ""},
            "discovery": {"file": str(self.folder / "backends.json"), "interval_seconds": _DISCOVERY_SECONDS},
        }

    async def _list_with(self, port: int) -> str:
        """Return the name of the list in its status that contains a port; "" if none does."""
        status = await router_status(self.port)
        if status is None:
            return _ACTIVE  # too busy to answer, so it most likely has open requests
        for name in (_ACTIVE, _DRAINING):
            urls = [str(backend.get("url", "")) for backend in status.get(name, []) if isinstance(backend, dict)]
            if any(url.endswith(f"{ADDRESS}:{port}") for url in urls):
                return name
        return ""


class Routers:
    """All routers. Used from the loop's thread only."""

    def __init__(self, settings: LocalSettings, system: System) -> None:
        self._settings = settings
        self._system = system
        self._folder = settings.root / "routers"
        self._ports = PortAllocator(settings.root / "ports" / "routers", settings.host, settings.port, 65535)
        self._routers: dict[tuple[str, str], Router] = {}
        """By namespace and name of the Service."""
        self._stopping: dict[asyncio.Task[None], Router] = {}
        self.on_change: Callable[[Service], None] = lambda _: None

    def load(self) -> None:
        """Adopt the routers of an earlier daemon."""
        for space in list_folders(self._folder):
            for folder in list_folders(space):
                content = read_json(folder / "router.json")
                if content is None or not isinstance(content.get("service"), list):
                    shutil.rmtree(folder, ignore_errors=True)  # its creation was interrupted
                    continue
                service = (str(content["service"][0]), str(content["service"][1]))
                router = Router(folder, service, folder.name, self._settings, self._ports, self._system)
                self._routers[(space.name, folder.name)] = router
                if router.pid is not None:
                    log.info("Adopted the router of %s: process %d", router.name, router.pid)

    def services(self) -> set[Service]:
        """Return the InferenceServices that have routers."""
        return {router.service for router in self._routers.values()}

    def ensure(self, service: Service, names: Iterable[str]) -> None:
        """Start the routers of these Services of an InferenceService, and stop its others. Raises FailedPrecondition."""
        wanted = set(names)
        for key, router in list(self._routers.items()):
            if router.service == service and router.name not in wanted:
                del self._routers[key]
                self._stop_router(router)
        for name in sorted(wanted):
            key = (service[0], name)
            if key in {(router.service[0], router.name) for router in self._stopping.values()}:
                continue  # the previous one still has its folder and its port; its end triggers a reconciliation
            if key not in self._routers:
                folder = self._folder / service[0] / name
                self._routers[key] = Router(folder, service, name, self._settings, self._ports, self._system)
            self._routers[key].start(self._is_known, lambda: self.on_change(service))

    def get(self, namespace: str, name: str) -> Router | None:
        """Return the router of a Service."""
        return self._routers.get((namespace, name))

    def routers_of(self, service: Service) -> list[Router]:
        """Return the routers of an InferenceService."""
        return [router for router in self._routers.values() if router.service == service]

    def hosts(self) -> dict[str, str]:
        """Return the addresses of Services, by their host names in a cluster."""
        return {
            f"{name}.{namespace}.{CLUSTER_DOMAIN}": f"{ADDRESS}:{router.port}"
            for (namespace, name), router in self._routers.items()
        }

    async def wait_drained(self, service: Service, port: int) -> None:
        """Wait until no router of a service sends requests to a port."""
        await asyncio.gather(*(router.wait_drained(port) for router in self.routers_of(service)))

    def rotate_logs(self) -> None:
        """Drop the beginning of long logs."""
        for router in self._routers.values():
            router.rotate_log()

    async def stop_all(self) -> None:
        """Stop all routers."""
        for service in self.services():
            self.ensure(service, ())
        await asyncio.gather(*self._stopping, return_exceptions=True)

    async def close(self) -> None:
        """Stop watching; routers keep running."""
        await asyncio.gather(*self._stopping, return_exceptions=True)
        await asyncio.gather(*(router.detach() for router in self._routers.values()))

    def _is_known(self, claim: str) -> bool:
        return any(router.id == claim for router in self._routers.values())

    def _stop_router(self, router: Router) -> None:
        task = asyncio.ensure_future(router.stop())
        self._stopping[task] = router

        def stopped(done: asyncio.Task[None]) -> None:
            self._stopping.pop(task, None)
            if not done.cancelled() and done.exception() is not None:
                log.error("Cannot stop the router of %s", router.name, exc_info=done.exception())
            self.on_change(router.service)

        task.add_done_callback(stopped)

    def is_stopping(self, service: Service) -> bool:
        """Whether a router of a service is being stopped."""
        return any(router.service == service for router in self._stopping.values())


def _backend_entry(backend: Backend) -> dict[str, Any]:
    entry = {"url": f"http://{ADDRESS}:{backend.port}", "weight": round(backend.weight, 3)}
    return {**entry, "revision": backend.revision} if backend.revision else entry


def _read_backends(path: Path) -> list[dict[str, Any]] | None:
    """Return the backends that were set last."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, list) else None


async def fetch(port: int, path: str) -> bytes | None:
    """Return the body of a GET to a port of this machine; None without an answer of status 200."""
    return await pod_client.get_page(ADDRESS, port, path)


async def router_status(port: int) -> dict[str, Any] | None:
    """Return the status of a router; None if it does not answer."""
    return await pod_client.router_status(ADDRESS, port)
