# SPDX-License-Identifier: Apache-2.0
"""One pod: room, start, probes, restarts with back-off, end. A task of the daemon's for each, made by `kubelet`.

Its folder is made first and removed last: `pod.json` says what it is, `process.json` which process, `state.json` how it
fares, `log` what it said. Another daemon finds all that again and goes on from there, without a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, ResourceExhausted
from headrace.fleet.local.commands import CannotRun
from headrace.fleet.local.contract import Around, Record
from headrace.fleet.local.machine import Placement
from headrace.fleet.local.probes import Failed, Probe, follow_liveness, follow_readiness, look_of, until_started
from headrace.fleet.local.processes import Process, spawn
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.sight import CRASH_LOOP, State, pod_shown, terminated
from headrace.fleet.local.starting import command_of
from headrace.fleet.local.store import read_json, utc_now, write_json
from headrace.fleet.planning.pods import main_container
from headrace.fleet.status.conditions import time_text
from headrace.fleet.words import Document, items, name_of, part, text, whole
from headrace.launch.logs import keep_end, last_lines

log = logging.getLogger("headrace.fleet")

_GRACE_SECONDS = 30
_SAID_LINES, _SAID_BYTES = 20, 2048


class Replica:
    """See the module. Used from the loop's thread only."""

    def __init__(self, folder: Path, record: Record, settings: LocalSettings, around: Around) -> None:
        self.folder = folder
        self.record = record
        self.state = State.read(read_json(folder / "state.json"))
        self._settings = settings
        self._around = around
        self._process = Process.found(read_json(folder / "process.json"))
        self._stop = asyncio.Event()
        self._again = asyncio.Event()
        self._changed_room = asyncio.Event()
        self._hurry = asyncio.Event()
        if self._process is None and self.state.started_at:
            self.state.restarts += 1
            self._note_end(None)

    # What others see

    @property
    def name(self) -> str:
        """The pod's name."""
        return name_of(self.record.document)

    @property
    def ready(self) -> bool:
        """Whether it may get requests."""
        return self.state.ready and not self.record.deleting

    @property
    def pid(self) -> int | None:
        """Its process."""
        return self._process.pid if self._process is not None else None

    def shown(self) -> Document:
        """As Kubernetes would show it."""
        return pod_shown(self.record.document, self.state, self._settings.node, self.record.deleting)

    def port(self, number: int) -> int | None:
        """Where a port of its container is."""
        placement = self.record.placement
        return placement.ports.get(number, number) if placement is not None else None

    def logs(self, tail: int, previous: bool = False) -> str:
        """The last lines that it said."""
        path = self.folder / ("log.previous" if previous else "log")
        return last_lines(path, tail, 2 * self._settings.log_bytes)

    # What others ask

    def delete(self) -> None:
        """End it, soon. Kept on disk before anything is done. Raises FailedPrecondition."""
        if not self.record.deleting:
            gone = replace(self.record, deleting=time_text(utc_now()))
            with contextlib.suppress(FailedPrecondition):  # a full disk is no reason to keep it
                self._keep(gone)
            self.record = gone
        self._stop.set()
        self._hurry.set()
        self._wake()

    def restart(self) -> None:
        """Start it anew: another of its group has ended."""
        if self._process is not None:
            self._again.set()
            self._wake()

    def look_again(self, *, hurry: bool = False) -> None:
        """There may be room now, or what it missed. `hurry`: what it failed of may be put right, so no back-off."""
        if hurry:
            self._hurry.set()
        self._wake()

    def rotate(self) -> None:
        """Drop the beginning of a long log."""
        with contextlib.suppress(OSError):
            keep_end(self.folder / "log", self._settings.log_bytes)

    def let_go(self) -> None:
        """The daemon ends, and this runs on."""
        if self._process is not None:
            self._process.let_go()

    # The task

    async def run(self) -> None:
        """Until it is deleted and gone."""
        while not self._stop.is_set() and not self.record.deleting:
            self._again.clear()
            if self._process is None and not self._start():
                await self._pause(self._settings.retry_seconds)
                continue
            await self._follow()
            if self._stop.is_set() or self.record.deleting:
                break
            self._around.ended(self)
            await self._back_off()
        await self._finish()

    def _start(self) -> bool:
        """Whether it runs now."""
        state = self.state
        try:
            models = self._around.models(self)
            if self.record.placement is None:
                placed = replace(self.record, placement=self._around.place(self))
                try:
                    self._keep(placed)
                except FailedPrecondition:
                    self._around.release(self)
                    raise
                self.record = placed
            if not state.placed:
                state.placed, state.unschedulable = True, ""
            command = command_of(self, self._around, self._settings.node, models)
            self._turn_log()
            path = self.folder / "process.json"
            self._process = spawn(
                command, self.folder / "log", lambda known: write_json(path, dict(known), lasting=False)
            )
        except ResourceExhausted as error:
            if state.unschedulable != error.message:
                self._around.tell(self, "Warning", "FailedScheduling", error.message)
            self._say(unschedulable=error.message, placed=False)
            return False
        except CannotRun as error:
            if state.message != error.message:
                self._around.tell(self, "Warning", "Failed", error.message)
            self._say(reason=error.reason, message=error.message)
            return False
        except (OSError, FailedPrecondition) as error:
            said = error.message if isinstance(error, FailedPrecondition) else os.strerror(error.errno or 0)
            self._say(reason="CreateContainerError", message=f"{said}; its folder is {self.folder}")
            return False
        self._say(reason="", message="", started_at=time_text(utc_now()), started=False, ready=False)
        self._around.tell(self, "Normal", "Started", f"process {self._process.pid}")
        return True

    async def _follow(self) -> None:
        """Until the container has ended, by itself, by its probes, or because somebody asked."""
        process = self._process
        if process is None:
            return
        ended = asyncio.ensure_future(process.ended())
        probing = asyncio.ensure_future(self._probe())
        asked = asyncio.ensure_future(self._asked())
        try:
            await asyncio.wait({ended, probing, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self.record.deleting:
                return
            self._say(ready=False)
            said = ""
            if not ended.done():
                failure = probing.exception() if probing.done() else None
                if isinstance(failure, Failed):
                    said = f"{failure}; it was ended"
                    self._around.tell(self, "Warning", "Unhealthy", str(failure))
                elif failure is not None:
                    log.error("%s: its probes cannot be run", self.name, exc_info=failure)
                await process.end(self._grace())
            code = await ended
            await process.kill()
            self._process = None
            self._note_end(code, said)
        finally:
            for each in (ended, probing, asked):
                each.cancel()
            await asyncio.gather(ended, probing, asked, return_exceptions=True)

    async def _asked(self) -> None:
        stop, again = asyncio.ensure_future(self._stop.wait()), asyncio.ensure_future(self._again.wait())
        try:
            await asyncio.wait({stop, again}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            again.cancel()

    async def _probe(self) -> None:
        container = main_container(part(self.record.document, "spec"))
        startup, readiness, liveness = (
            self._probe_of(container, each) for each in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        quick = self._settings.quick_seconds
        if startup is not None and not self.state.started:
            await until_started(startup, quick)
        if not self.state.started:
            self._say(started=True)
        looks: list[asyncio.Future[None]] = []
        if liveness is not None:
            looks.append(asyncio.ensure_future(follow_liveness(liveness)))
        if readiness is None:
            self._say(ready=True)
        else:
            follow = follow_readiness(readiness, quick, lambda ready: self._say(ready=ready), self.state.ready)
            looks.append(asyncio.ensure_future(follow))
        try:
            await asyncio.gather(*looks, asyncio.get_running_loop().create_future())
        finally:
            for each in looks:
                each.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    def _probe_of(self, container: Document, name: str) -> Probe | None:
        said = part(container, name)
        ports = (self.record.placement or Placement()).ports
        names = {text(each, "name"): whole(each, "containerPort") or 0 for each in items(container, "ports")}
        look = look_of(said, ports, names, self.record.variables)
        return Probe.of(said, look) if look is not None else None

    async def _back_off(self) -> None:
        """Before the next start. The first comes at once; who ran long starts from there again."""
        waits = self.state.crashes - 1
        self.state.restarts += 1
        self.state.crashes += 1
        if waits < 0:
            return
        limit = self._settings.back_off_most_seconds
        seconds = min(self._settings.back_off_seconds * 2.0 ** min(waits, 16), limit)
        said = f"back-off {seconds:g} s restarting failed container"
        self._say(reason=CRASH_LOOP, message=said)
        self._around.tell(self, "Warning", "BackOff", said)
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def _finish(self) -> None:
        """Nothing is left of it after this."""
        self.state.ready = False
        await self._around.forgotten(self)
        process = self._process
        if process is not None:
            await process.end(self._grace())
            self._process = None
        await asyncio.to_thread(shutil.rmtree, self.folder, True)
        self._around.release(self)
        self._around.changed(self)

    # Small things

    def _note_end(self, code: int | None, said: str = "") -> None:
        state = self.state
        told = said or last_lines(self.folder / "log", _SAID_LINES, _SAID_BYTES)
        ran = (utc_now() - _time(state.started_at)).total_seconds() if state.started_at else 0.0
        if ran >= self._settings.healthy_seconds:
            state.crashes = 0
        last = terminated(code, state.started_at, time_text(utc_now()), told if code != 0 else "")
        self._say(reason=CRASH_LOOP, message="it is restarted", started_at="", started=False, ready=False, last=last)
        if code != 0:
            self._around.tell(self, "Warning", "Ended", f"its process ended with {last['exitCode']}")

    def _say(self, **changes: Any) -> None:
        before = self.state.as_json()
        for name, value in changes.items():
            setattr(self.state, name, value)
        if self.state.as_json() == before:
            return
        try:
            write_json(self.folder / "state.json", self.state.as_json(), lasting=False)
        except FailedPrecondition as error:
            log.error("%s", error.message)
        self._around.changed(self)

    def _keep(self, record: Record) -> None:
        write_json(self.folder / "pod.json", asdict(record), lasting=False)

    def _turn_log(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "log").replace(self.folder / "log.previous")

    def _grace(self) -> float:
        said = whole(self.record.document, "spec", "terminationGracePeriodSeconds")
        return float(_GRACE_SECONDS if said is None else said)

    async def _pause(self, seconds: float) -> None:
        self._changed_room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed_room.wait()

    def _wake(self) -> None:
        self._changed_room.set()


def make_replica(folder: Path, record: Record, settings: LocalSettings, around: Around) -> Replica:
    """A new pod, on disk before it is anything else. Raises FailedPrecondition."""
    write_json(folder / "pod.json", asdict(record), lasting=False)
    return Replica(folder, record, settings, around)


def found_replica(folder: Path, settings: LocalSettings, around: Around) -> Replica | None:
    """A pod that is on disk; None for a folder that says nothing."""
    said = read_json(folder / "pod.json")
    if said is None:
        return None
    try:
        return Replica(folder, Record.read(said), settings, around)
    except (KeyError, TypeError, ValueError, AttributeError):
        log.error("%s cannot be understood and is left out", folder / "pod.json")
        return None


def _time(said: str) -> datetime:
    return datetime.fromisoformat(said.replace("Z", "+00:00"))
