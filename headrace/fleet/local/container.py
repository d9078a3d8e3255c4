# SPDX-License-Identifier: Apache-2.0
"""One container of a pod: start, probes, restarts with back-off, end. Made and run by `replica`.

Its folder has `process.json`, which says what runs, `state.json`, how it fares, and `log`, what it said. Another daemon
finds all that again and goes on from there, without a restart. How it is run is the business of a `driving.Driver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import HeadraceError, ResourceExhausted
from headrace.fleet.local.commands import CannotRun, Surroundings, variables_of, words_here
from headrace.fleet.local.driving import LOG, PREVIOUS, Box, Driver, Ended, Running
from headrace.fleet.local.probes import Failed, Probe, follow_liveness, follow_readiness, look_of, until_started
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.sight import CRASH_LOOP, ContainerState, Role, Seen, terminated
from headrace.fleet.local.states import restated, state_in
from headrace.fleet.local.system import System
from headrace.fleet.status.conditions import time_text
from headrace.fleet.words import Document, items, part, text, whole
from headrace.platforms.logs import keep_end, last_lines

log = logging.getLogger("headrace.fleet")

_SAID_LINES, _SAID_BYTES = 20, 2048
_RETRY_DOUBLINGS = 5


class Pod(Protocol):
    """What a container needs of its pod."""

    @property
    def system(self) -> System:
        """Where it runs."""

    @property
    def ports(self) -> Mapping[int, int]:
        """Ports of its containers, and those that they have here."""

    @property
    def grace(self) -> float:
        """Seconds between being asked to end and being made to."""

    @property
    def policy(self) -> str:
        """Whether who ends is restarted: Always, OnFailure, Never."""

    def box(self, container: Document, folder: Path) -> Box:
        """What to run. Raises CannotRun, OSError, FailedPrecondition, and ResourceExhausted while it has to wait."""

    def surroundings(self, container: Document) -> Surroundings:
        """What a probe's command finds. Raises as `box`."""

    def changed(self) -> None:
        """A container is otherwise than before."""

    def ended(self, container: Container) -> None:
        """One ended by itself, and will be restarted."""

    def tell(self, kind: str, reason: str, message: str) -> None:
        """An event."""


class Container:
    """See the module. Used from the loop's thread only."""

    def __init__(
        self, folder: Path, said: Document, role: Role, pod: Pod, settings: LocalSettings, driver: Driver
    ) -> None:
        self.folder = folder
        self.role = role
        self.state = state_in(folder, ContainerState())
        self._said = said
        self._pod = pod
        self._settings = settings
        self._driver = driver
        self._running: Running | None = driver.found(folder)
        self._again = asyncio.Event()
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._up = asyncio.Event()
        if self.state.started:
            self._up.set()

    # What others see

    @property
    def name(self) -> str:
        """As the pod calls it."""
        return text(self._said, "name")

    @property
    def seen(self) -> Seen:
        """For the pod's status."""
        return Seen(self._said, self.role, self.state)

    @property
    def runs(self) -> Running | None:
        """What runs for it now."""
        return self._running

    async def up(self) -> None:
        """Wait until it has been found to be up once."""
        await self._up.wait()

    async def logs(self, tail: int, previous: bool = False) -> str:
        """The last lines that it said."""
        if self._running is not None and not previous:
            return await self._running.said(tail, 2 * self._settings.log_bytes)
        return last_lines(self.folder / (PREVIOUS if previous else LOG), tail, 2 * self._settings.log_bytes)

    # What others ask

    def restart(self) -> None:
        """Start it anew: another of its group has ended."""
        if self._running is not None:
            self._again.set()

    def look_again(self, *, hurry: bool = False) -> None:
        """What it missed may be there. `hurry`: what it failed of may be put right, so no back-off."""
        if hurry:
            self._hurry.set()
        self._wake.set()

    def rotate(self) -> None:
        """Drop the beginning of a long log."""
        with contextlib.suppress(OSError):
            keep_end(self.folder / LOG, self._settings.log_bytes)

    def let_go(self) -> None:
        """The daemon ends, and this runs on."""
        if self._running is not None:
            self._running.let_go()

    async def end(self) -> None:
        """Nothing of it runs after this."""
        self.state.ready = False
        running = self._running or self._driver.found(self.folder)  # its start may have been cut short
        if running is not None:
            await running.end(self._pod.grace)
            await running.clear()
            self._running = None

    # The task

    async def run(self) -> None:
        """Until it has ended for good."""
        failures = 0
        if self._running is None and self.state.started_at:  # it died while nobody looked
            self._note_end(Ended(None), last_lines(self.folder / LOG, _SAID_LINES, _SAID_BYTES))
            self._pod.ended(self)
            self.state.restarts += not self.state.ended
        if self._running is not None and not self.state.started_at:  # the daemon before had no time to say so
            self._say(started_at=time_text(self._now()))
        while not self.state.ended:
            self._again.clear()
            if self._running is None:
                self._wake.clear()
                self._running = await self._start()
            if self._running is None:
                await self._until(self._wake, self._settings.retry_seconds * 2.0 ** min(failures, _RETRY_DOUBLINGS))
                failures += 1
                continue
            failures = 0
            asked = await self._follow(self._running)
            if self.state.ended:
                break
            if asked:
                self.state.restarts += 1
                continue
            self._pod.ended(self)
            await self._back_off()

    async def _start(self) -> Running | None:
        try:
            box = self._pod.box(self._said, self.folder)
            box = replace(box, modest=box.modest and not self.state.restarts)
            self._turn_log()
            running = await self._driver.start(box)
        except ResourceExhausted as error:
            self._say(reason="", message=error.message)
        except CannotRun as error:
            if self.state.message != error.message:
                self._pod.tell("Warning", "Failed", error.message)
            self._say(reason=error.reason, message=error.message)
        except (OSError, HeadraceError) as error:
            said = error.message if isinstance(error, HeadraceError) else os.strerror(error.errno or 0)
            if not self.state.message.startswith(said):
                self._pod.tell("Warning", "Failed", said)
            self._say(reason="CreateContainerError", message=f"{said}; its folder is {self.folder}")
        else:
            self._say(reason="", message="", started_at=time_text(self._now()), started=False, ready=False)
            self._pod.tell("Normal", "Started", f"{self.name}: {running.label}")
            return running
        return None

    async def _follow(self, running: Running) -> bool:
        """Until it has ended, by itself, by its probes, or because somebody asked. Whether somebody did."""
        ended = asyncio.ensure_future(running.ended())
        probing = asyncio.ensure_future(self._probe())
        asked = asyncio.ensure_future(self._again.wait())
        try:
            await asyncio.wait({ended, probing, asked}, return_when=asyncio.FIRST_COMPLETED)
            by_itself, said = ended.done(), ""
            self._say(ready=False)
            if not by_itself:
                failure = probing.exception() if probing.done() else None
                if isinstance(failure, Failed):
                    said = f"{failure}; it was ended"
                    self._pod.tell("Warning", "Unhealthy", f"{self.name}: {failure}")
                elif failure is not None:
                    log.error("%s: its probes cannot be run", self.name, exc_info=failure)
                await running.end(self._pod.grace)
            how = await ended
            words = said or how.message or await running.said(_SAID_LINES, _SAID_BYTES)
            await running.clear()
            self._running = None
            self._note_end(how, words)
            return asked.done() and not by_itself
        finally:
            for each in (ended, probing, asked):
                each.cancel()
            await asyncio.gather(ended, probing, asked, return_exceptions=True)

    async def _probe(self) -> None:
        """Raises Failed when it is to be restarted."""
        if self.role == "init":
            await asyncio.get_running_loop().create_future()
        startup, readiness, liveness = (
            self._probe_of(each) for each in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        quick = self._settings.quick_seconds
        if startup is not None and not self.state.started:
            await until_started(startup, quick)
        if not self.state.started:
            self._say(started=True)
        self._up.set()
        looks: list[asyncio.Future[None]] = []
        if liveness is not None:
            looks.append(asyncio.ensure_future(follow_liveness(liveness)))
        if readiness is None:
            self._say_ready(True)
        else:
            follow = follow_readiness(readiness, quick, self._say_ready, self.state.ready)
            looks.append(asyncio.ensure_future(follow))
        try:
            await asyncio.gather(*looks, asyncio.get_running_loop().create_future())
        finally:
            for each in looks:
                each.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    def _probe_of(self, name: str) -> Probe | None:
        said = part(self._said, name)
        names = {text(each, "name"): whole(each, "containerPort") or 0 for each in items(self._said, "ports")}
        look = look_of(said, self._pod.ports, names, self._run)
        return Probe.of(said, look) if look is not None else None

    async def _run(self, words: list[str], seconds: float) -> bool:
        """Whether a probe's command ends well."""
        if self._running is None:
            return False
        try:
            around = self._pod.surroundings(self._said)
            variables = {**variables_of(self._said, around), **around.variables}
            return await self._running.run(words_here(words, around), variables, seconds)
        except (CannotRun, OSError, HeadraceError):
            return False

    async def _back_off(self) -> None:
        """Before the next start. The first comes at once; who ran long starts from there again."""
        waits = self.state.crashes - 1
        self.state.restarts += 1
        self.state.crashes += 1
        if waits < 0:
            return
        limit = self._settings.back_off_most_seconds
        seconds = min(self._settings.back_off_seconds * 2.0 ** min(waits, 16), limit)
        said = f"back-off {seconds:g} s restarting failed container {self.name}"
        self._say(reason=CRASH_LOOP, message=said)
        self._pod.tell("Warning", "BackOff", said)
        self._hurry.clear()
        await self._until(self._hurry, seconds)

    # Small things

    def _note_end(self, how: Ended, said: str) -> None:
        state = self.state
        ran = (self._now() - _time(state.started_at)).total_seconds() if state.started_at else 0.0
        if ran >= self._settings.healthy_seconds:
            state.crashes = 0
        well = how.code == 0 and not how.reason
        last = terminated(how.code, state.started_at, time_text(self._now()), "" if well else said, how.reason)
        policy = "Always" if self.role == "sidecar" else self._pod.policy
        if policy == "Never" or (well and (self.role == "init" or policy == "OnFailure")):
            self._say(reason="", message="", started_at="", started=False, ready=False, ended=last)
        else:
            again = {"reason": CRASH_LOOP, "message": "it is restarted"}
            self._say(**again, started_at="", started=False, ready=False, last=last)
        if not well:
            why = f" ({last['reason']})" if how.reason else ""
            self._pod.tell("Warning", "Ended", f"{self.name} ended with {last['exitCode']}{why}")

    def _say_ready(self, ready: bool) -> None:
        if ready and self._running is not None:
            self._running.is_ready()
        self._say(ready=ready)

    def _say(self, **changes: Any) -> None:
        if restated(self.state, self.folder, changes, lambda said: self._pod.tell("Warning", "DiskPressure", said)):
            self._pod.changed()

    def _now(self) -> datetime:
        return self._pod.system.now()

    def _turn_log(self) -> None:
        self.rotate()
        with contextlib.suppress(FileNotFoundError):
            (self.folder / LOG).replace(self.folder / PREVIOUS)

    async def _until(self, event: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()


def _time(said: str) -> datetime:
    return datetime.fromisoformat(said.replace("Z", "+00:00"))
