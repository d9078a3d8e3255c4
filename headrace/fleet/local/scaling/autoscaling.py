# SPDX-License-Identifier: Apache-2.0
"""The loop of scaling by load: looks at workloads that may have more or fewer replicas, and asks for another number.

Made and run by `controller`. While there is no such workload it does nothing at all; while nothing comes, one look in two
seconds. What it remembers are the last minute's samples: after a restart nobody is taken away before there are new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import FailedPrecondition
from headrace.fleet.autoscaling.deciding import TICK_SECONDS
from headrace.fleet.local.asking import router_status
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.objects import Objects
from headrace.fleet.local.replica import Replica
from headrace.fleet.local.routes import is_front
from headrace.fleet.local.routing import Routers
from headrace.fleet.local.scaling.aims import CPU, QUERY, Aimed, Unaimed, aim_of
from headrace.fleet.local.scaling.keeping import Keeper
from headrace.fleet.local.scaling.metrics import told_by
from headrace.fleet.local.scaling.usage import Used
from headrace.fleet.local.workloads import scaler_of, wanted_of
from headrace.fleet.words import Document, name_of, part

log = logging.getLogger("headrace.fleet")

Service = tuple[str, str]
_BUSY_SECONDS = 0.5
"""Between two looks at routers while requests come."""
_FAILURES = 3
_FORGET_SECONDS = 10.0
_NOT_COUNTED = "no router of this machine sends it requests, so nobody counts them: scale it by cpu, memory or a query"


@dataclass(frozen=True)
class Note:
    """What is known of how a workload scales."""

    component: str
    active: bool
    reason: str
    message: str


class Autoscaling:
    """See the module. Used from the loop's thread only."""

    def __init__(
        self,
        objects: Objects,
        kubelet: Kubelet,
        routers: Routers,
        scaled: Callable[[Service, Document, int], None],
        told: Callable[[Service, Note], None],
    ) -> None:
        """scaled: brings another number about, and may raise FailedPrecondition. told: a note that is new."""
        self._objects = objects
        self._kubelet = kubelet
        self._routers = routers
        self._scaled = scaled
        self._told = told
        self._keepers: dict[tuple[Service, str], Keeper] = {}
        self._notes: dict[tuple[Service, str], Note] = {}
        self._usage = kubelet.system.usage()
        self._used: dict[int, tuple[float, Used]] = {}
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """The objects of a service may be others."""
        if not self._keepers:
            self._changed.set()

    def notes(self, service: Service) -> list[Note]:
        """Of the workloads of a service."""
        return [note for (each, _), note in sorted(self._notes.items()) if each == service]

    def components(self, service: Service) -> set[str]:
        """Those of a service that are scaled by load, or should be."""
        objects = list(self._objects.of(service).values())
        found = [aim_of(each, objects) for each in self._objects.workloads(service) if not is_front(each)]
        return {each.component for each in found if each is not None}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._changed.clear()
            try:
                self._aim()
                await self._look()
            except Exception:
                log.exception("looking at how much load there is failed; trying again")
                await asyncio.sleep(TICK_SECONDS)
            if not self._keepers:
                await self._changed.wait()
                continue
            await asyncio.sleep(min(map(_pace, self._keepers.values())))

    # Whom

    def _aim(self) -> None:
        there: set[tuple[Service, str]] = set()
        for service in self._objects.services():
            objects = list(self._objects.of(service).values())
            for workload in self._objects.workloads(service):
                found = None if is_front(workload) else aim_of(workload, objects)
                if found is None:
                    continue
                place = (service, name_of(workload))
                there.add(place)
                if isinstance(found, Unaimed):
                    self._keepers.pop(place, None)
                    self._note(place, Note(found.component, False, found.reason, found.message))
                elif place not in self._keepers or self._keepers[place].aimed != found:
                    self._keepers[place] = Keeper(found)
        for gone in self._keepers.keys() - there:
            del self._keepers[gone]
        for gone in self._notes.keys() - there:
            del self._notes[gone]

    # How much

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        due = {place: keeper for place, keeper in self._keepers.items() if keeper.due(now)}
        await self._count(now)
        await self._measure(now, {place: each for place, each in due.items() if not each.by_requests})
        for place, keeper in due.items():
            # What was waited for may have changed everything.
            workload = self._workload(*place)
            if workload is not None and self._keepers.get(place) is keeper:
                self._decide(place, keeper, workload)

    async def _count(self, now: float) -> None:
        mine = {place: keeper for place, keeper in self._keepers.items() if keeper.by_requests}
        for service in {service for service, _ in mine}:
            routers = [each for each in self._routers.of(service) if each.up]
            answers = await asyncio.gather(*(router_status(each.port) for each in routers))
            told: dict[str, Any] = {each.name: answer for each, answer in zip(routers, answers, strict=True)}
            for place, keeper in mine.items():
                if place[0] != service:
                    continue
                pods = list(self._pods(place, every=True))
                ports = {
                    port for each in pods if each.record.placement for port in each.record.placement.ports.values()
                }
                load = keeper.arrivals.look(told, ports)
                if load.routed:
                    keeper.count(now, load)
                    self._works(place)
                elif any(each.ready for each in pods) and None not in answers and routers:
                    self._fails(place, "NotCounted", _NOT_COUNTED)

    async def _measure(self, now: float, due: dict[tuple[Service, str], Keeper]) -> None:
        pods = {place: [each for each in self._pods(place) if each.ready] for place in due}
        by_use = {place: pods[place] for place, keeper in due.items() if keeper.aimed.metric != QUERY}
        sessions = {session for found in by_use.values() for each in found for session in each.sessions}
        used = await asyncio.to_thread(self._usage.read, now, sessions) if sessions else {}
        for place, found in by_use.items():
            mine = {session for each in found for session in each.sessions}
            value = self._value(due[place].aimed, now, used, mine)
            if value is not None:
                due[place].measure(now, value)
                self._works(place)
        recent = {session: each for session, each in self._used.items() if now - each[0] < _FORGET_SECONDS}
        self._used = recent | {session: (now, each) for session, each in used.items()}
        for place, keeper in due.items():
            if keeper.computation is None or not pods[place]:
                continue
            try:
                keeper.compute(now, await told_by(pods[place], keeper.computation.wants))
                self._works(place)
            except FailedPrecondition as error:
                self._fails(place, "NoMetric", error.message)

    def _value(self, aimed: Aimed, now: float, used: Mapping[int, Used], sessions: Set[int]) -> float | None:
        """Cores or bytes of all pods together; None until there is something to compare with."""
        if not sessions or not sessions <= used.keys():
            return None
        if aimed.metric != CPU:
            return float(sum(used[each].memory for each in sessions))
        if not sessions <= self._used.keys():
            return None
        before = {each: self._used[each] for each in sessions}
        return sum(self._usage.cores(old, used[each], now - then) for each, (then, old) in before.items())

    # How many

    def _decide(self, place: tuple[Service, str], keeper: Keeper, workload: Document) -> None:
        service = place[0]
        wanted = wanted_of(workload, scaler_of(workload, list(self._objects.of(service).values())))
        if not wanted:
            return  # it sleeps: whoever put it to sleep wakes it
        ready = part(workload, "status").get("readyReplicas", 0)
        change = keeper.decide(asyncio.get_running_loop().time(), wanted, ready)
        if change is None:
            return
        try:
            self._scaled(service, workload, change.replicas)
        except FailedPrecondition as error:
            log.error("%s cannot be scaled: %s", place[1], error.message)
            return
        self._note(place, Note(keeper.aimed.component, True, "SuccessfulRescale", change.message))

    # Small things

    def _pods(self, place: tuple[Service, str], *, every: bool = False) -> Iterator[Replica]:
        """every: those that are being ended, too."""
        for each in self._kubelet.of(place[0]):
            if each.record.owner[1] == place[1] and (every or not each.record.deleting):
                yield each

    def _workload(self, service: Service, name: str) -> Document | None:
        found = (each for each in self._objects.workloads(service) if name_of(each) == name)
        return next(found, None)

    def _works(self, place: tuple[Service, str]) -> None:
        """What was in the way is not any more."""
        keeper, note = self._keepers[place], self._notes.get(place)
        keeper.failures = 0
        if note is not None and not note.active:
            self._note(place, Note(note.component, True, "ValidMetricFound", f"{keeper.aimed.metric} is counted"))

    def _fails(self, place: tuple[Service, str], reason: str, message: str) -> None:
        """Told when it goes on: who has just come need not have told everything yet."""
        keeper = self._keepers[place]
        keeper.failures += 1
        if keeper.failures >= _FAILURES:
            self._note(place, Note(keeper.aimed.component, False, reason, message))

    def _note(self, place: tuple[Service, str], note: Note) -> None:
        if self._notes.get(place) != note:
            self._notes[place] = note
            self._told(place[0], note)


def _pace(keeper: Keeper) -> float:
    tick = keeper.aimed.aim.windows.tick_seconds
    return min(tick, _BUSY_SECONDS) if keeper.busy else tick
