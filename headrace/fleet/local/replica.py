# SPDX-License-Identifier: Apache-2.0
"""One pod: room, its containers in their order, end. A task of the daemon's for each, made by `kubelet`.

Its folder is made first and removed last: `pod.json` says what it is, `state.json` how it fares, `containers` has a folder
for each container. Another daemon finds all that again and goes on from there, without a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, NotFound, ResourceExhausted
from headrace.fleet.local.commands import Surroundings
from headrace.fleet.local.container import Container
from headrace.fleet.local.contract import Around, Record
from headrace.fleet.local.driving import Box, Driver
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.sight import State, all_ready, pod_shown, roles_of
from headrace.fleet.local.starting import Starting
from headrace.fleet.local.states import restated, state_in
from headrace.fleet.local.store import read_json, write_json
from headrace.fleet.local.system import System
from headrace.fleet.planning.pods import main_container
from headrace.fleet.planning.site import digest_of
from headrace.fleet.status.conditions import time_text
from headrace.fleet.words import Document, name_of, part, text, whole

log = logging.getLogger("headrace.fleet")

_GRACE_SECONDS = 30
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class Replica:
    """See the module. Used from the loop's thread only."""

    def __init__(self, folder: Path, record: Record, settings: LocalSettings, around: Around, driver: Driver) -> None:
        self.folder = folder
        self.record = record
        self.state = state_in(folder, State())
        self._settings = settings
        self._around = around
        self._starting = Starting(self, around, settings, runs_images=driver.runs_images)
        self._stop = asyncio.Event()
        self._changed_room = asyncio.Event()
        roles = roles_of(part(record.document, "spec"))
        names = _folder_names([said for said, _ in roles])
        self.containers = [
            Container(folder / "containers" / name, said, role, self, settings, driver)
            for name, (said, role) in zip(names, roles, strict=True)
        ]

    # What others see

    @property
    def name(self) -> str:
        """The pod's name."""
        return name_of(self.record.document)

    @property
    def ready(self) -> bool:
        """Whether it may get requests."""
        return not self.record.deleting and all_ready([each.seen for each in self.containers])

    @property
    def sessions(self) -> frozenset[int]:
        """Of its processes."""
        found = (each.runs.session for each in self.containers if each.runs is not None)
        return frozenset(each for each in found if each is not None)

    def shown(self) -> Document:
        """As Kubernetes would show it."""
        seen = [each.seen for each in self.containers]
        return pod_shown(self.record.document, self.state, seen, self._settings.node, self.record.deleting)

    def port(self, number: int) -> int | None:
        """Where a port of its containers is."""
        placement = self.record.placement
        return placement.ports.get(number, number) if placement is not None else None

    def named(self, name: str = "") -> Container:
        """A container by its name; the main one unless told. Raises NotFound."""
        wanted = name or text(main_container(part(self.record.document, "spec")), "name")
        for each in self.containers:
            if each.name == wanted:
                return each
        there = ", ".join(each.name for each in self.containers)
        raise NotFound(f"{self.name} has no container {wanted}; it has {there}")

    # What others ask

    def delete(self) -> None:
        """End it, soon. Kept on disk before anything is done."""
        if not self.record.deleting:
            gone = replace(self.record, deleting=time_text(self.system.now()))
            with contextlib.suppress(FailedPrecondition):  # a full disk is no reason to keep it
                self._keep(gone)
            self.record = gone
        self._stop.set()

    def restart(self) -> None:
        """Start all its containers anew: another pod of its group has ended."""
        for each in self.containers:
            each.restart()

    def look_again(self, *, hurry: bool = False) -> None:
        """There may be room now, or what it missed. `hurry`: what it failed of may be put right, so no back-off."""
        self._changed_room.set()
        for each in self.containers:
            each.look_again(hurry=hurry)

    def rotate(self) -> None:
        """Drop the beginning of long logs."""
        for each in self.containers:
            each.rotate()

    def let_go(self) -> None:
        """The daemon ends, and this runs on."""
        for each in self.containers:
            each.let_go()

    # The task

    async def run(self) -> None:
        """Until it is deleted and gone."""
        working = asyncio.ensure_future(self._work())
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            if not self.record.deleting:
                await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()  # one that is over stays to be seen, until it is deleted
                    await stopped
        finally:
            working.cancel()
            stopped.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)
        await self._finish()

    async def _work(self) -> None:
        """Room, then the containers that come first, one after the other, then the others. Until all have ended for good."""
        while not self._place():
            await self._pause(self._settings.retry_seconds)
        async with asyncio.TaskGroup() as group:
            beside: list[asyncio.Task[None]] = []
            for each in self.containers:
                if each.role == "sidecar":
                    beside.append(group.create_task(each.run()))
                    await each.up()
                elif each.role == "init":
                    await each.run()
                    if not each.state.succeeded:
                        break
            else:
                # Tasks of the group: where one fails by a mistake of ours the others may not run on unseen.
                mains = [group.create_task(each.run()) for each in self.containers if each.role == "main"]
                await asyncio.gather(*mains)
            for task in beside:
                task.cancel()
        await asyncio.gather(*(each.end() for each in self.containers if each.role == "sidecar"))
        self.changed()

    def _place(self) -> bool:
        """Whether there is room for it, and what it needs is here."""
        try:
            if not any(each.runs for each in self.containers):
                self._around.models(self)
            if self.record.placement is None:
                placed = replace(self.record, placement=self._around.place(self))
                try:
                    self._keep(placed)
                except FailedPrecondition:
                    self._around.release(self)
                    raise
                self.record = placed
        except (ResourceExhausted, FailedPrecondition) as error:
            if self.state.unschedulable != error.message:
                self.tell("Warning", "FailedScheduling", error.message)
            self._say(unschedulable=error.message, placed=False)
            return False
        self._say(unschedulable="", placed=True)
        return True

    async def _finish(self) -> None:
        """Nothing is left of it after this. Who began before the others ends after them."""
        await self._around.forgotten(self)
        await asyncio.gather(*(each.end() for each in self.containers if each.role != "sidecar"))
        for each in reversed(self.containers):
            await each.end()
        await asyncio.to_thread(shutil.rmtree, self.folder, True)
        self._around.release(self)
        self._around.changed(self)

    # What its containers need: see `container.Pod`

    @property
    def system(self) -> System:
        """See `Pod.system`."""
        return self._around.system

    @property
    def ports(self) -> Mapping[int, int]:
        """See `Pod.ports`."""
        return self.record.placement.ports if self.record.placement is not None else {}

    @property
    def grace(self) -> float:
        """See `Pod.grace`."""
        said = whole(self.record.document, "spec", "terminationGracePeriodSeconds")
        return float(_GRACE_SECONDS if said is None else said)

    @property
    def policy(self) -> str:
        """See `Pod.policy`."""
        return text(self.record.document, "spec", "restartPolicy") or "Always"

    def box(self, container: Document, folder: Path) -> Box:
        """See `Pod.box`."""
        return self._starting.box(container, folder)

    def surroundings(self, container: Document) -> Surroundings:
        """See `Pod.surroundings`."""
        return self._starting.surroundings(container)

    def changed(self) -> None:
        """See `Pod.changed`."""
        self._around.changed(self)

    def ended(self, container: Container) -> None:
        """See `Pod.ended`."""
        self._around.ended(self, container)

    def tell(self, kind: str, reason: str, message: str) -> None:
        """See `Pod.tell`."""
        self._around.tell(self, kind, reason, message)

    # Small things

    def _say(self, **changes: Any) -> None:
        if restated(self.state, self.folder, changes, lambda said: self.tell("Warning", "DiskPressure", said)):
            self.changed()

    def _keep(self, record: Record) -> None:
        write_json(self.folder / "pod.json", asdict(record), lasting=False)

    async def _pause(self, seconds: float) -> None:
        self._changed_room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed_room.wait()


def make_replica(folder: Path, record: Record, settings: LocalSettings, around: Around, driver: Driver) -> Replica:
    """A new pod, on disk before it is anything else. Raises FailedPrecondition."""
    write_json(folder / "pod.json", asdict(record), lasting=False)
    return Replica(folder, record, settings, around, driver)


def found_replica(folder: Path, settings: LocalSettings, around: Around, driver: Driver) -> Replica | None:
    """A pod that is on disk; None for a folder that says nothing."""
    said = read_json(folder / "pod.json")
    if said is None:
        return None
    try:
        return Replica(folder, Record.read(said), settings, around, driver)
    except (KeyError, TypeError, ValueError, AttributeError):
        log.error("%s cannot be understood and is left out", folder / "pod.json")
        return None


def _folder_names(containers: Sequence[Document]) -> list[str]:
    """One for each; what cannot be a folder's name, or is another's, gets one of ours."""
    made: list[str] = []
    for number, each in enumerate(containers):
        name = text(each, "name")
        made.append(name if _NAME.fullmatch(name) and name not in made else f"{number}-{digest_of(name)}")
    return made
