# SPDX-License-Identifier: Apache-2.0
"""The routers in front of Services: one `headrace router` for each that somebody has to reach. Called by `controller`.

A router outlives the daemon like every process here, and keeps its port. Who is ready stands in a file that it follows, so
that pods come and go without a restart. Its folder is made first and removed last. The daemon listens on its port, too, and
leaves it to the router to accept: when one is killed, who connects meanwhile waits for the next.
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
from headrace.fleet.local.asking import router_status
from headrace.fleet.local.commands import ADDRESS
from headrace.fleet.local.processes import Command, headrace_words, passed_on
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.store import each_folder, read_json, write_json
from headrace.fleet.local.system import System
from headrace.fleet.planning.site import CLUSTER_DOMAIN
from headrace.fleet.words import Document
from headrace.net.sockets import Address, Listener
from headrace.platforms.logs import keep_end
from headrace.platforms.ports import Ports

log = logging.getLogger("headrace.fleet")

Service = tuple[str, str]
"""Namespace and name of an InferenceService."""
_GRACE_SECONDS = 30.0
_PORTS = 1000
_FOLLOW_SECONDS = 0.1
_HEAR_SECONDS = 0.02
_GETS, _LEAVES = "backends", "leaving"
"""Where a router tells of those that get requests, and of those that get no more and have some to answer."""


@dataclass(frozen=True)
class Backend:
    """A pod that gets requests."""

    port: int
    weight: float = 100.0
    revision: str = ""


class Router:
    """One of them."""

    def __init__(
        self, folder: Path, service: Service, name: str, settings: LocalSettings, ports: Ports, system: System
    ) -> None:
        self.folder = folder
        self.service = service
        self.name = name
        self.up = False
        said = read_json(folder / "router.json") or {}
        self.port = said["port"] if isinstance(said.get("port"), int) else 0
        self._settings = settings
        self._ports = ports
        self._system = system
        self._process = system.found(read_json(folder / "process.json"))
        self._backends = _listed(folder / "backends.json") if self._process is not None else None
        self.leads = bool(self._backends)
        """Whether it knows of somebody to send requests to."""
        self._listener: Listener | None = None
        """None for one that a daemon before this has started, until it has to be started again."""
        self._hearing: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = False

    @property
    def id(self) -> str:
        """Whose its port is."""
        return f"router:{self.service[0]}/{self.name}"

    @property
    def pid(self) -> int | None:
        """Its process."""
        return self._process.pid if self._process is not None else None

    @property
    def url(self) -> str:
        """Where it is; "" while it is not."""
        return f"http://{ADDRESS}:{self.port}" if self.up else ""

    def begin(self, known: Callable[[str], bool], changed: Callable[[], None]) -> None:
        """Give it a port, and keep it running from now on. Raises FailedPrecondition, ResourceExhausted."""
        if not self.port:
            self._choose(known)
        if self._task is None:
            self._task = asyncio.ensure_future(self._run(known, changed))

    def tell(
        self, backends: Sequence[Backend], split: bool, activation: Document | None, heard: Callable[[], None]
    ) -> None:
        """Who is ready. Raises FailedPrecondition.

        split: their weights are shares that are to be kept exactly. activation: what it is to wake. heard: called when it
        has begun to send them requests after it had nobody.
        """
        listed = [_entry(each) for each in backends]
        if listed != self._backends:
            write_json(self.folder / "backends.json", listed, lasting=False)
            self._backends = listed
            if not listed:
                self.leads = False
            elif not self.leads and self._hearing is None:
                self._hearing = asyncio.ensure_future(self._hear(heard))
        if activation is not None:
            activation = {**activation, "local": {"folder": str(self._settings.root), "service": self.service[1]}}
        said, settings = (
            read_json(self.folder / "router.yaml") or {},
            self._file("weighted" if split else "p2c", activation),
        )
        if said != settings:
            write_json(self.folder / "router.yaml", settings)  # which it follows by itself

    def rotate(self) -> None:
        """Keep its log short."""
        with contextlib.suppress(OSError):
            keep_end(self.folder / "log", self._settings.log_bytes)

    async def forgotten(self, port: int) -> None:
        """Wait until it sends nothing more to a port, and has all answers from it; not for ever."""
        settings, now = self._settings, asyncio.get_running_loop().time
        began = now()
        while self.up and (place := await self._place_of(port)):
            waited = now() - began
            if waited >= (settings.forget_seconds if place == _GETS else settings.drain_seconds):
                return
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        """Nothing is left of it after this."""
        self._ending, self.up = True, False
        await self._stop_following()
        self._listen_no_more()
        if self._process is not None:
            await self._process.end(_GRACE_SECONDS)
        self._ports.release(self.id)
        await asyncio.to_thread(shutil.rmtree, self.folder, True)

    async def let_go(self) -> None:
        """The daemon ends, and this runs on."""
        self._ending = True
        await self._stop_following()
        self._listen_no_more()
        if self._process is not None:
            self._process.let_go()

    async def _hear(self, heard: Callable[[], None]) -> None:
        """Until it sends requests to somebody it was told of."""
        try:
            while self._backends and not self.leads:
                told = await router_status(self.port) if self.up else None
                self.leads = bool(told and told.get("backends"))
                await asyncio.sleep(_HEAR_SECONDS)
        finally:
            self._hearing = None
        heard()

    async def _stop_following(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self, known: Callable[[str], bool], changed: Callable[[], None]) -> None:
        pause = self._settings.quick_seconds
        while not self._ending:
            try:
                if self._process is None:
                    self._start(known)
                await self._until_up()
                changed()
                if self._process is not None:
                    await self._process.ended()
                    self._listen()
                    await self._process.kill()
                log.warning("the router of %s ended; it is started again", self.name)
            except (FailedPrecondition, ResourceExhausted, OSError) as error:
                log.error("the router of %s cannot be started: %s", self.name, error)
            self._process, was, self.up = None, self.up, False
            changed()
            pause = self._settings.quick_seconds if was else min(pause * 2, self._settings.back_off_seconds)
            await asyncio.sleep(pause)

    def _listen(self) -> None:
        """At once, for one of the daemon before. If its port is another's by now, `_start` chooses one."""
        if self._listener is None:
            with contextlib.suppress(FailedPrecondition):
                self._listener = self._system.listen(Address(self._settings.host, self.port))

    def _listen_no_more(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _start(self, known: Callable[[str], bool]) -> None:
        self._listen()
        if self._listener is None:
            self._ports.release(self.id)
            self._choose(known)
            self._listener = self._system.listen(Address(self._settings.host, self.port))
        if not (self.folder / "backends.json").exists():
            write_json(self.folder / "backends.json", [], lasting=False)
        said = read_json(self.folder / "router.yaml") or {}
        write_json(self.folder / "router.yaml", self._file(str(said.get("policy", "p2c")), said.get("activation")))
        words = (*headrace_words(), "router", "--config", str(self.folder / "router.yaml"))
        environment = passed_on(os.environ) | {"PYTHONUNBUFFERED": "1"}
        command = Command(words, environment, self.folder, self._listener.fileno())
        path = self.folder / "process.json"
        self._process = self._system.spawn(
            command, self.folder / "log", lambda record: write_json(path, dict(record), lasting=False)
        )

    async def _until_up(self) -> None:
        while self._process is not None and self._process.lives:
            if await router_status(self.port) is not None:
                self.up = True
                return
            await asyncio.sleep(0.05)

    def _choose(self, known: Callable[[str], bool]) -> None:
        """The first port from the settings' on that is free."""
        first = self._settings.port
        for port in range(first, min(first + _PORTS, 65536)):
            try:
                self.port = self._ports.claim(self.id, known, port)
            except ResourceExhausted:
                continue
            said = {"service": list(self.service), "name": self.name, "port": self.port}
            write_json(self.folder / "router.json", said)
            return
        raise ResourceExhausted(f"no port from {first} on is free for {self.name}: give `headrace up` another --port")

    def _file(self, policy: str, activation: Document | None) -> dict[str, Any]:
        return {
            **({"activation": activation} if activation else {}),
            **({"trace_endpoint": self._settings.trace_endpoint} if self._settings.trace_endpoint else {}),
            "host": self._settings.host,
            "port": self.port,
            "policy": policy,
            # Pods are probed by their own probes, and who is not ready is not in the file.
            "health": {"path": ""},
            "discovery": {"file": str(self.folder / "backends.json"), "interval_seconds": _FOLLOW_SECONDS},
        }

    async def _place_of(self, port: int) -> str:
        """Where it tells of a port: among those that get requests, or that have some to answer; "" if nowhere."""
        told = await router_status(self.port)
        if told is None:
            return _GETS  # too busy to answer, so most likely for somebody
        for name in (_GETS, _LEAVES):
            urls = [str(each.get("url", "")) for each in told.get(name, []) if isinstance(each, dict)]
            if any(each.endswith(f"{ADDRESS}:{port}") for each in urls):
                return name
        return ""


class Routers:
    """All routers. Used from the loop's thread only."""

    def __init__(self, settings: LocalSettings, system: System) -> None:
        self._settings = settings
        self._system = system
        self._folder = settings.root / "routers"
        self._ports = Ports(settings.root / "ports" / "routers", settings.host, settings.port, 65535)
        self._all: dict[tuple[str, str], Router] = {}
        """By namespace and name of the Service."""
        self._ends: dict[asyncio.Task[None], Router] = {}
        self.on_change: Callable[[Service], None] = lambda _: None

    def load(self) -> None:
        """Find those of the daemon before."""
        for space in each_folder(self._folder):
            for folder in each_folder(space):
                said = read_json(folder / "router.json")
                if said is None or not isinstance(said.get("service"), list):
                    shutil.rmtree(folder, ignore_errors=True)  # its making was cut short
                    continue
                service = (str(said["service"][0]), str(said["service"][1]))
                router = Router(folder, service, folder.name, self._settings, self._ports, self._system)
                self._all[(space.name, folder.name)] = router
                if router.pid is not None:
                    log.info("the router of %s runs already, as process %d", router.name, router.pid)

    def services(self) -> set[Service]:
        """InferenceServices that have any."""
        return {each.service for each in self._all.values()}

    def want(self, service: Service, names: Iterable[str]) -> None:
        """The Services of an InferenceService that need one; others of it go. Raises FailedPrecondition."""
        wanted = set(names)
        for key, each in list(self._all.items()):
            if each.service == service and each.name not in wanted:
                del self._all[key]
                self._end(each)
        for name in sorted(wanted):
            key = (service[0], name)
            if key in {(each.service[0], each.name) for each in self._ends.values()}:
                continue  # the one before still has its folder and its port; its end brings another look
            if key not in self._all:
                folder = self._folder / service[0] / name
                self._all[key] = Router(folder, service, name, self._settings, self._ports, self._system)
            self._all[key].begin(self._known, lambda: self.on_change(service))

    def get(self, namespace: str, name: str) -> Router | None:
        """The router of a Service."""
        return self._all.get((namespace, name))

    def of(self, service: Service) -> list[Router]:
        """Those of an InferenceService."""
        return [each for each in self._all.values() if each.service == service]

    def hosts(self) -> dict[str, str]:
        """Where Services are, by their names in a cluster."""
        return {
            f"{name}.{namespace}.{CLUSTER_DOMAIN}": f"{ADDRESS}:{each.port}"
            for (namespace, name), each in self._all.items()
        }

    async def forgotten(self, service: Service, port: int) -> None:
        """Wait until no router of a service sends anything to a port."""
        await asyncio.gather(*(each.forgotten(port) for each in self.of(service)))

    def rotate(self) -> None:
        """Keep logs short."""
        for each in self._all.values():
            each.rotate()

    async def end_all(self) -> None:
        """End all of them."""
        for service in self.services():
            self.want(service, ())
        await asyncio.gather(*self._ends, return_exceptions=True)

    async def close(self) -> None:
        """Stop following; they run on."""
        await asyncio.gather(*self._ends, return_exceptions=True)
        await asyncio.gather(*(each.let_go() for each in self._all.values()))

    def _known(self, claim: str) -> bool:
        return any(each.id == claim for each in self._all.values())

    def _end(self, router: Router) -> None:
        task = asyncio.ensure_future(router.end())
        self._ends[task] = router

        def over(done: asyncio.Task[None]) -> None:
            self._ends.pop(task, None)
            if not done.cancelled() and done.exception() is not None:
                log.error("the router of %s could not be ended", router.name, exc_info=done.exception())
            self.on_change(router.service)

        task.add_done_callback(over)

    def ending(self, service: Service) -> bool:
        """Whether something of a service is still being ended."""
        return any(each.service == service for each in self._ends.values())


def _entry(backend: Backend) -> dict[str, Any]:
    told = {"url": f"http://{ADDRESS}:{backend.port}", "weight": round(backend.weight, 3)}
    return {**told, "revision": backend.revision} if backend.revision else told


def _listed(path: Path) -> list[dict[str, Any]] | None:
    """What a router was told last."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, list) else None
