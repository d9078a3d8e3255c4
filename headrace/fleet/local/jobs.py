# SPDX-License-Identifier: Apache-2.0
"""One Job: a process that runs once, to its end. Made by `benchmarking`; a task of the daemon's.

Its folder is made first and removed last: `job.json` says what it is, `process.json` which process, `exit` how that ended,
`state.json` how it fares, `log` what it said. Another daemon goes on from there; what ended while there was none is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import FailedPrecondition, ResourceExhausted
from headrace.fleet.local import once
from headrace.fleet.local.commands import CannotRun, Surroundings, line_of
from headrace.fleet.local.processes import Command, headrace_words, passed_on
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.sight import UNSCHEDULABLE, terminated
from headrace.fleet.local.states import restated, state_in
from headrace.fleet.local.store import read_json, write_json
from headrace.fleet.local.system import System
from headrace.fleet.local.volumes import mounted
from headrace.fleet.status.conditions import time_text
from headrace.fleet.words import Document, items, name_of, part, text, whole
from headrace.platforms.logs import keep_end, last_lines

log = logging.getLogger("headrace.fleet")

_GRACE_SECONDS = 10.0
_SAID_LINES, _SAID_BYTES = 20, 2048
_RESULTS = "--output"


@dataclass
class JobState:
    """How a Job is. Kept on disk beside it."""

    unschedulable: str = ""
    """Why there is no room for it."""
    reason: str = ""
    """Why it does not run, one word, while it does not."""
    message: str = ""
    started_at: str = ""
    """When it was started; "" while nothing runs."""
    last: dict[str, Any] = field(default_factory=dict)
    """How it ended: Kubernetes' `terminated`."""
    results: str = ""
    """Where it writes, as this machine knows it."""
    late: bool = False
    """Whether it was ended because it took too long."""


class Site(Protocol):
    """What a Job needs of the rest of the fleet."""

    @property
    def system(self) -> System:
        """Where it runs."""

    def find(self, namespace: str, kind: str, name: str) -> Document | None:
        """A ConfigMap or a Secret."""

    def hosts(self, namespace: str) -> Mapping[str, str]:
        """Where Services are."""

    def room_for(self, uid: str, pod: Document) -> None:
        """Whether it fits beside the pods. Raises ResourceExhausted."""


class JobRun:
    """See the module. Used from the loop's thread only."""

    def __init__(
        self, folder: Path, record: Document, settings: LocalSettings, site: Site, changed: Callable[[], None]
    ) -> None:
        self.folder = folder
        self.job = part(record, "job")
        self.state = state_in(folder, JobState())
        self.ending = False
        """Whether somebody removes it already."""
        self._pod = part(record, "pod")
        self._settings = settings
        self._site = site
        self._now = site.system.now
        self._changed = changed
        self._process = site.system.found(read_json(folder / "process.json"))
        self._again = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if self._process is not None and not self.state.started_at:
            self._say(started_at=time_text(self._now()))
        elif self._process is None and not self.ended and (self.state.started_at or self._code() is not None):
            self._note_end()

    # What others see

    @property
    def ended(self) -> bool:
        """Whether it has run, well or badly."""
        return bool(self.state.last)

    def shown(self) -> Document:
        """The Job as Kubernetes would show it."""
        state, last = self.state, self.state.last
        status: dict[str, Any] = {"startTime": state.started_at} if state.started_at else {"active": 1}
        if last:
            well = last["exitCode"] == 0
            condition = {"type": "Complete" if well else "Failed", "status": "True"}
            if state.late:
                condition |= {"reason": "DeadlineExceeded", "message": str(last.get("message", ""))}
            status = {"conditions": [{**condition, "lastTransitionTime": last["finishedAt"]}]}
            status |= {"startTime": last["startedAt"]} if last["startedAt"] else {}
            status |= {"completionTime": last["finishedAt"]} if well else {}
        return {**self.job, "status": status}

    def pods(self) -> list[Document]:
        """Its pod, in the same way."""
        state, (container,) = self.state, items(self._pod, "spec", "containers")
        if state.unschedulable:
            why = {"type": "PodScheduled", "status": "False", "reason": UNSCHEDULABLE, "message": state.unschedulable}
            return [{**self._pod, "status": {"phase": "Pending", "conditions": [why]}}]
        if state.last:
            phase, how = "Failed" if state.last["exitCode"] else "Succeeded", {"terminated": state.last}
        elif state.started_at:
            phase, how = "Running", {"running": {"startedAt": state.started_at}}
        else:
            phase, how = (
                "Pending",
                {"waiting": {"reason": state.reason or "ContainerCreating", "message": state.message}},
            )
        told = {"name": text(container, "name"), "image": text(container, "image"), "restartCount": 0, "state": how}
        return [{**self._pod, "status": {"phase": phase, "containerStatuses": [told]}}]

    def logs(self, tail: int) -> str:
        """The last lines that it said."""
        return last_lines(self.folder / "log", tail, 2 * self._settings.log_bytes)

    # What others ask

    def begin(self) -> None:
        """Run it, or go on with what runs."""
        if not self.ended and self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def look_again(self) -> None:
        """What it missed may be there now."""
        self._again.set()

    def rotate(self) -> None:
        """Keep its log short."""
        with contextlib.suppress(OSError):
            keep_end(self.folder / "log", self._settings.log_bytes)

    async def remove(self) -> None:
        """Nothing is left of it after this, but for its results."""
        await self._stop_following()
        if self._process is not None:
            await self._process.end(_GRACE_SECONDS)
        await asyncio.to_thread(shutil.rmtree, self.folder, True)

    async def let_go(self) -> None:
        """The daemon ends, and this runs on."""
        await self._stop_following()
        if self._process is not None:
            self._process.let_go()

    # The task

    async def _run(self) -> None:
        while self._process is None and not self._start():
            self._again.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.retry_seconds):
                    await self._again.wait()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(self._left()):
                await self._process.ended()
        except TimeoutError:
            self._say(late=True)  # first: whoever finds it ended is to know why
            await self._process.end(_GRACE_SECONDS)
        await self._process.kill()
        self._process = None
        self._note_end()

    def _start(self) -> bool:
        """Whether it runs now."""
        try:
            self._site.room_for(text(self._pod, "metadata", "uid"), self._pod)
            command, results = self._command()
            path = self.folder / "process.json"
            self._process = self._site.system.spawn(
                command, self.folder / "log", lambda known: write_json(path, dict(known), lasting=False)
            )
        except ResourceExhausted as error:
            self._say(unschedulable=error.message)
            return False
        except CannotRun as error:
            self._say(unschedulable="", reason=error.reason, message=error.message)
            return False
        except (OSError, FailedPrecondition) as error:
            said = error.message if isinstance(error, FailedPrecondition) else os.strerror(error.errno or 0)
            self._say(reason="CreateContainerError", message=f"{said}; its folder is {self.folder}")
            return False
        self._say(unschedulable="", reason="", message="", started_at=time_text(self._now()), results=results)
        return True

    def _command(self) -> tuple[Command, str]:
        """What to run, and where it writes. Raises CannotRun, OSError."""
        namespace = text(self._pod, "metadata", "namespace")

        def find(kind: str, name: str) -> Document | None:
            return self._site.find(namespace, kind, name)

        (container,) = items(self._pod, "spec", "containers")
        paths = [(each.inside, each.here) for each in mounted(self._pod, container, self.folder, find, {})]
        around = Surroundings(self._pod, self._settings.node, paths=paths, hosts=self._site.hosts(namespace), find=find)
        line = line_of(around)
        work = self.folder / "work"
        work.mkdir(exist_ok=True, mode=0o700)
        temporary = dict(paths).get("/tmp", str(work))  # noqa: S108  the container's
        environment = passed_on(os.environ) | {"PYTHONUNBUFFERED": "1", "TMPDIR": temporary} | dict(line.variables)
        waiter = (sys.executable, "-I", "-S", once.__file__, str(self.folder / "exit"))
        return Command((*waiter, *headrace_words(), *line.words), environment, work), _after(line.words, _RESULTS)

    # Small things

    def _left(self) -> float | None:
        """Seconds until it has taken too long."""
        limit = whole(self.job, "spec", "activeDeadlineSeconds")
        if limit is None:
            return None
        return max(0.0, limit - (self._now() - _time(self.state.started_at)).total_seconds())

    def _code(self) -> int | None:
        try:
            return int((self.folder / "exit").read_text())
        except (OSError, ValueError):
            return None

    def _note_end(self) -> None:
        code = self._code()
        said = last_lines(self.folder / "log", _SAID_LINES, _SAID_BYTES)
        if self.state.late:
            code = code or -signal.SIGTERM
            said = f"it took longer than {whole(self.job, 'spec', 'activeDeadlineSeconds')} s and was ended"
        elif code is None:
            said = "it was killed, or the machine was restarted: delete the benchmark and apply it again"
        last = terminated(code, self.state.started_at, time_text(self._now()), said if code != 0 else "")
        self._say(started_at="", last=last)

    def _say(self, **changes: Any) -> None:
        if restated(self.state, self.folder, changes, lambda said: log.error("%s", said)):
            self._changed()

    async def _stop_following(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


def make_job(
    folder: Path, planned: Document, settings: LocalSettings, site: Site, changed: Callable[[], None]
) -> JobRun:
    """A new one, on disk before it is anything else. Raises FailedPrecondition."""
    namespace, now = text(planned, "metadata", "namespace"), time_text(site.system.now())
    job = {**planned, "metadata": {**part(planned, "metadata"), "uid": str(uuid.uuid4()), "creationTimestamp": now}}
    template = part(planned, "spec", "template")
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name_of(job), "uid": text(job, "metadata", "uid")}
    metadata = {
        "name": f"{name_of(job)[:57]}-{uuid.uuid4().hex[:5]}",
        "namespace": namespace,
        "uid": str(uuid.uuid4()),
        "labels": dict(part(template, "metadata", "labels")),
        "creationTimestamp": now,
        "ownerReferences": [{**owner, "controller": True}],
    }
    spec = _with_claims(part(template, "spec"), settings.root / "claims" / namespace)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    record = {"job": job, "pod": pod}
    write_json(folder / "job.json", record)
    return JobRun(folder, record, settings, site, changed)


def found_job(folder: Path, settings: LocalSettings, site: Site, changed: Callable[[], None]) -> JobRun | None:
    """One that is on disk; None for a folder that says nothing."""
    record = read_json(folder / "job.json")
    return JobRun(folder, record, settings, site, changed) if record and part(record, "job") else None


def _with_claims(spec: Document, claims: Path) -> Document:
    """A claim is a folder of the fleet's here, as a cluster would make a volume for it; what is read must be there."""
    mounts = [each for one in items(spec, "containers") for each in items(one, "volumeMounts")]
    read_only = {text(each, "name") for each in mounts if each.get("readOnly") is True}
    volumes = []
    for each in items(spec, "volumes"):
        claim, name = text(each, "persistentVolumeClaim", "claimName"), text(each, "name")
        kind = "" if name in read_only else "DirectoryOrCreate"
        volumes.append({"name": name, "hostPath": {"path": str(claims / claim), "type": kind}} if claim else each)
    return {**spec, "volumes": volumes}


def _after(words: Sequence[str], option: str) -> str:
    return next((value for name, value in pairwise(words) if name == option), "")


def _time(said: str) -> datetime:
    return datetime.fromisoformat(said.replace("Z", "+00:00"))
