# SPDX-License-Identifier: Apache-2.0
"""All pods of this machine: made, found again, ended. Called by `controller`; each pod is a task of its own (`replica`)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from headrace.core.errors import FailedPrecondition, ResourceExhausted
from headrace.fleet.local.container import Container
from headrace.fleet.local.contract import Moments, Record
from headrace.fleet.local.driving import Driver
from headrace.fleet.local.events import Events
from headrace.fleet.local.machine import Machine, Placement
from headrace.fleet.local.models import READY, Models
from headrace.fleet.local.replica import Replica, found_replica, make_replica
from headrace.fleet.local.routing import Routers
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.store import Store, each_folder
from headrace.fleet.local.system import System
from headrace.fleet.planning.site import live_key
from headrace.fleet.words import Document, kind_of, part, text

log = logging.getLogger("headrace.fleet")

Service = tuple[str, str]
_ROTATE_SECONDS = 1.0


class Kubelet:
    """See the module; the `Around` of its pods."""

    def __init__(
        self,
        settings: LocalSettings,
        store: Store,
        machine: Machine,
        routers: Routers,
        events: Events,
        driver: Driver,
        system: System,
    ) -> None:
        self.system = system
        self._settings = settings
        self._folder = settings.root / "pods"
        self._store = store
        self._machine = machine
        self._routers = routers
        self._events = events
        self._driver = driver
        self._models = Models(settings, self._secret, self._told_model)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rotating: asyncio.Task[None] | None = None
        self._closing = False
        self.replicas: dict[str, Replica] = {}
        self.moments: dict[str, Moments] = {}
        """Of pods that run, by their uids."""
        self.on_change: Callable[[Service], None] = lambda _: None
        self.objects: Callable[[Service], Mapping[str, Document]] = lambda _: {}
        """The live objects of a service, by `live_key`."""

    def load(self) -> None:
        """Find the pods of the daemon before, and go on with them."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in each_folder(self._folder):
            replica = found_replica(folder, self._settings, self, self._driver)
            if replica is None:
                if not (folder / "pod.json").exists():
                    shutil.rmtree(folder, ignore_errors=True)  # its making was cut short
                continue
            for each in replica.containers:
                if each.runs is not None:
                    log.info("%s runs already: %s, %s", replica.name, each.name, each.runs.label)
            self._follow(replica)
        self._rotating = asyncio.ensure_future(self._rotate())

    def create(self, record: Record) -> None:
        """Make a pod. Raises FailedPrecondition where it cannot be written down."""
        try:
            self._follow(make_replica(self._folder / record.uid, record, self._settings, self, self._driver))
        except FailedPrecondition:
            shutil.rmtree(self._folder / record.uid, ignore_errors=True)
            raise

    def of(self, service: Service) -> list[Replica]:
        """The pods of a service, those that are being ended too, oldest first."""
        found = [each for each in self.replicas.values() if each.record.service == service]
        return sorted(found, key=lambda each: (text(each.record.document, "metadata", "creationTimestamp"), each.name))

    def rotate(self) -> None:
        """Keep logs short."""
        for each in self.replicas.values():
            each.rotate()

    def progress(self, model: Document) -> list[Any]:
        """See `Models.progress`."""
        return list(self._models.progress(model))

    def look_again(self, *, hurry: bool = False) -> None:
        """Something that pods may wait for is there. `hurry`: what they fail of may be put right."""
        for each in self.replicas.values():
            each.look_again(hurry=hurry)

    async def end_all(self) -> None:
        """Delete everything that runs."""
        for each in list(self.replicas.values()):
            each.delete()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """Stop following; what runs goes on."""
        self._closing = True
        if self._rotating is not None:
            self._rotating.cancel()
            await asyncio.gather(self._rotating, return_exceptions=True)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for each in self.replicas.values():
            each.let_go()
        await self._models.close()

    async def _rotate(self) -> None:
        """Often: one that floods its log has a second to fill the disk."""
        while True:
            await asyncio.sleep(_ROTATE_SECONDS)
            self.rotate()

    def _follow(self, replica: Replica) -> None:
        uid = replica.record.uid
        self.replicas[uid] = replica
        task = asyncio.ensure_future(replica.run())
        self._tasks[uid] = task
        task.add_done_callback(lambda done: self._over(replica, done))

    def _over(self, replica: Replica, done: asyncio.Task[None]) -> None:
        if self._closing or done.cancelled():
            return
        if done.exception() is not None:
            # A mistake of ours. The pod stays as it is, and is looked at again a little later.
            log.error("%s cannot be followed", replica.name, exc_info=done.exception())
            loop = asyncio.get_running_loop()
            loop.call_later(self._settings.retry_seconds, lambda: None if self._closing else self._follow(replica))
            return
        uid = replica.record.uid
        self.replicas.pop(uid, None)
        self.moments.pop(uid, None)
        self._tasks.pop(uid, None)
        self.look_again()
        self.on_change(replica.record.service)

    # What pods need: see `replica.Around`

    def find(self, namespace: str, kind: str, name: str) -> Document | None:
        """Of what users applied, and of what services were planned with."""
        found = self._store.get(kind, namespace, name)
        if found is not None:
            return _plain(found) if kind == "Secret" else found
        for service in {each.record.service for each in self.replicas.values() if each.record.service[0] == namespace}:
            live = self.objects(service).get(live_key(kind, name))
            if live is not None:
                return live
        return None

    def place(self, replica: Replica) -> Placement:
        """See `Around.place`."""
        others = [each.record.placement for each in self.replicas.values() if each is not replica]
        taken = [each for each in others if each is not None]
        record = replica.record
        return self._machine.place(record.uid, record.document, taken, [*self.replicas, record.uid], record.serves)

    def room_for(self, uid: str, pod: Document) -> None:
        """See `jobs.Site.room_for`: a job shares what pods leave, and takes nothing from them for good."""
        taken = [each.record.placement for each in self.replicas.values()]
        self._machine.place(uid, pod, [each for each in taken if each is not None], [*self.replicas, uid], False)

    def release(self, replica: Replica) -> None:
        """See `Around.release`."""
        try:
            self._machine.release(replica.record.uid)
        except OSError as error:
            log.warning("a port is not given back: %s", error)

    def models(self, replica: Replica) -> Mapping[str, str]:
        """See `Around.models`: by the service that the pod is of."""
        namespace, service = replica.record.service
        document = self._store.get("InferenceService", namespace, service)
        told = part(document, "status", "model") or part(document, "spec", "model")
        name = text(told, "name")
        if not name:
            return {}
        model = self._store.get("BaseModel", namespace, name) or self._store.get("ClusterBaseModel", "", name)
        if model is None:
            raise ResourceExhausted(f"there is no model {name}: apply it")
        known = self._models.use(model)
        if known.state != READY:
            raise ResourceExhausted(known.problem or f"model {name} is being brought to this machine")
        return {text(model, "spec", "storage", "path"): known.path}

    def hosts(self, namespace: str) -> Mapping[str, str]:
        """See `Around.hosts`."""
        return self._routers.hosts()

    def leader_ports(self, replica: Replica) -> Mapping[int, int]:
        """See `Around.leader_ports`."""
        record = replica.record
        if not record.index:
            return {}
        for each in self.replicas.values():
            other = each.record
            if (other.service, other.owner, other.unit, other.index) == (record.service, record.owner, record.unit, 0):
                if other.placement is None:
                    raise ResourceExhausted("it waits for its leader")
                return other.placement.ports
        return {}

    def changed(self, replica: Replica) -> None:
        """See `Around.changed`."""
        uid, now = replica.record.uid, self.system.clock.wall()
        known = self.moments.get(uid, Moments())
        if all(each.runs is None for each in replica.containers):
            self.moments.pop(uid, None)
        else:
            found = known.found or (now if replica.ready else 0.0)
            self.moments[uid] = Moments(known.started or now, found)
        self.on_change(replica.record.service)

    def ended(self, replica: Replica, container: Container) -> None:
        """See `Around.ended`."""
        record = replica.record
        if record.owner[0] != "LeaderWorkerSet":
            return
        for beside in replica.containers:
            if beside is not container:
                beside.restart()
        for each in self.replicas.values():
            other = each.record
            if each is not replica and (other.service, other.owner, other.unit) == (
                record.service,
                record.owner,
                record.unit,
            ):
                each.restart()

    def tell(self, replica: Replica, kind: str, reason: str, message: str) -> None:
        """See `Around.tell`."""
        self._events.record(replica.shown(), kind, reason, message)

    async def forgotten(self, replica: Replica) -> None:
        """See `Around.forgotten`."""
        placement = replica.record.placement
        for port in placement.ports.values() if placement is not None else ():
            await self._routers.forgotten(replica.record.service, port)

    def _secret(self, namespace: str, name: str) -> Document | None:
        return self._store.get("Secret", namespace, name)

    def _told_model(self, model: Document, status: Mapping[str, Any]) -> None:
        live = self._store.get(kind_of(model), text(model, "metadata", "namespace"), text(model, "metadata", "name"))
        if live is not None:
            self._store.told({**live, "status": {**part(live, "status"), **status}})
        self.look_again()


def _plain(secret: Document) -> Document:
    """A Secret whose values are texts."""
    data: dict[str, str] = {}
    for name, value in part(secret, "data").items():
        try:
            data[name] = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, TypeError, ValueError):
            continue
    return {**secret, "data": data}
