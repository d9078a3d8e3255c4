# SPDX-License-Identifier: Apache-2.0
"""Containers as processes of this machine, held to their limits: by the kernel where we may, else by looking at them.

Made by `program`. Everything about one container: its process (`processes`), its group (`cgroups`), its log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from headrace.fleet.local.cgroups import CONTROLLERS, Cgroups, Group, find_cgroups, read_group
from headrace.fleet.local.commands import CannotRun, Line
from headrace.fleet.local.driving import LOG, RECORD, Box, Ended
from headrace.fleet.local.limits import Limits
from headrace.fleet.local.priority import may_return, step_back, step_up
from headrace.fleet.local.probes import exec_look
from headrace.fleet.local.processes import Command, Process, headrace_words, passed_on, spawn
from headrace.fleet.local.sight import OOM_KILLED
from headrace.fleet.local.store import read_json, write_json
from headrace.fleet.local.watching import Watch
from headrace.platforms.identity import session_members
from headrace.platforms.logs import last_lines

log = logging.getLogger("headrace.fleet")

_LATE_SECONDS = 60.0


class ProcessDriver:
    """See `driving.Driver`."""

    runs_images = False

    def __init__(self, groups: Cgroups | None = None, watch: Watch | None = None) -> None:
        self._groups = groups
        self._watch = watch or Watch()
        self._tied: dict[Path, tuple[int, ...]] = {}
        """Cores of containers that only these hold to their limit, by their folders."""

    async def open(self, pods: Collection[str]) -> None:
        """See `Driver.open`. A process without a record is none of ours, so that there is nothing to look for."""
        if self._groups is None:
            self._groups = find_cgroups()
        held = [each for each in CONTROLLERS if each in self._groups.places]
        log.info("limits of containers are held by %s", f"cgroups ({', '.join(held)})" if held else "looking at them")

    def found(self, folder: Path) -> ProcessRun | None:
        """See `Driver.found`."""
        said = read_json(folder / RECORD) or {}
        process, group = Process.found(said), read_group(said.get("groups"), said.get("weighing"))
        if process is None:
            if group is not None:
                group.remove()
            return None
        cores = said.get("cores")
        if isinstance(cores, list):
            self._tied[folder] = tuple(each for each in cores if isinstance(each, int))
        late, weight = bool(said.get("late")), said.get("weight")
        given = weight if isinstance(weight, str) else ""
        return ProcessRun(self, process, folder, group, _limits(said.get("watched")), late=late, weight=given)

    async def start(self, box: Box) -> ProcessRun:
        """See `Driver.start`."""
        environment = passed_on(os.environ) | {"PYTHONUNBUFFERED": "1", **_temporary(box), **box.line.variables}
        command = Command(_program(box.line, environment), environment, box.work)
        group, watched = self._grouped(box)
        cores = self._cores(box)
        weight = _set_back(group) if box.modest else ""
        late = bool(weight)

        def record(known: Mapping[str, Any]) -> None:
            nonlocal late
            by_policy = box.modest and not weight and step_back(known["pid"])
            late = late or by_policy
            if group is not None:
                group.join(known["pid"], late=by_policy)
            kept = {"memory": watched.memory, "tasks": watched.tasks}
            record = {**known, **_paths(group), "cores": cores, "watched": kept, "late": late, "weight": weight}
            write_json(box.folder / RECORD, record, lasting=False)
            if cores:
                os.sched_setaffinity(known["pid"], cores)

        try:
            process = spawn(command, box.folder / LOG, record)
        except BaseException:
            if group is not None:
                group.remove()
            self.freed(box.folder)
            raise
        return ProcessRun(self, process, box.folder, group, watched, late=late, weight=weight)

    async def close(self) -> None:
        """See `Driver.close`."""
        await self._watch.close()
        if self._groups is not None:
            self._groups.close()

    def freed(self, folder: Path) -> None:
        """A container of a folder has ended."""
        self._tied.pop(folder, None)

    async def over(self, session: int, limits: Limits) -> Ended:
        """See `Watch.over`."""
        return await self._watch.over(session, limits)

    def _grouped(self, box: Box) -> tuple[Group | None, Limits]:
        """Its group, and what it is held to by looking at it."""
        limits, places = box.limits, self._groups.places if self._groups is not None else {}
        group = None
        if limits and self._groups is not None and places:
            try:
                group = self._groups.make(f"{box.pod}-{box.name}", limits)
            except OSError as error:
                log.warning("no group for container %s: %s", box.name, os.strerror(error.errno or 0))
                places = {}
        left = replace(
            limits,
            memory=None if "memory" in places else limits.memory,
            tasks=None if "pids" in places else limits.tasks,
        )
        return group, left

    def _cores(self, box: Box) -> tuple[int, ...]:
        """Those that fewest others are tied to, where nothing else holds it to its limit."""
        here = sorted(os.sched_getaffinity(0))
        places = self._groups.places if self._groups is not None else {}
        if box.limits.cores is None or "cpu" in places or box.limits.cores >= len(here):
            return ()
        used = Counter(core for cores in self._tied.values() for core in cores)
        chosen = sorted(here, key=lambda core: (used[core], core))[: max(1, ceil(box.limits.cores))]
        self._tied[box.folder] = tuple(chosen)
        return tuple(chosen)


class ProcessRun:
    """See `driving.Running`."""

    def __init__(
        self,
        driver: ProcessDriver,
        process: Process,
        folder: Path,
        group: Group | None,
        watched: Limits,
        *,
        late: bool = False,
        weight: str = "",
    ) -> None:
        self._driver = driver
        self._process = process
        self._folder = folder
        self._group = group
        self._watched = watched
        self._late = late
        """Others come before it (`priority`); not for ever, as a machine may never have anything to spare."""
        self._weight = weight
        """Of its group, afterwards."""
        if late:
            asyncio.get_running_loop().call_later(_LATE_SECONDS, self.is_ready)

    @property
    def label(self) -> str:
        """See `Running.label`."""
        return f"process {self._process.pid}"

    @property
    def session(self) -> int | None:
        """See `Running.session`."""
        return self._process.pid

    async def ended(self) -> Ended:
        """See `Running.ended`."""
        if self._watched.memory is None and self._watched.tasks is None:
            return self._how(await self._process.ended())
        ended = asyncio.ensure_future(self._process.ended())
        over = asyncio.ensure_future(self._driver.over(self._process.pid, self._watched))
        try:
            await asyncio.wait({ended, over}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return self._how(ended.result())
            await self._process.kill()
            return over.result()
        finally:
            for each in (ended, over):
                each.cancel()
            await asyncio.gather(ended, over, return_exceptions=True)

    async def end(self, grace_seconds: float) -> None:
        """See `Running.end`."""
        await self._process.end(grace_seconds)

    async def clear(self) -> None:
        """See `Running.clear`."""
        await self._process.kill()
        if self._group is not None:
            await asyncio.to_thread(self._group.remove)
        self._driver.freed(self._folder)

    async def run(self, words: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
        """See `Running.run`."""
        return await exec_look(words, variables, seconds)

    async def said(self, tail: int, most_bytes: int) -> str:
        """See `Running.said`."""
        return last_lines(self._folder / LOG, tail, most_bytes)

    def is_ready(self) -> None:
        """See `Running.is_ready`."""
        if self._late and self._process.lives:
            step_up(self._process.pid)
            if self._group is not None:
                self._group.step_up(self._weight)
                self._group.join_all(lambda: [each.pid for each in session_members(self._process.pid)])
        self._late = False

    def let_go(self) -> None:
        """See `Running.let_go`."""
        self._process.let_go()

    def _how(self, code: int | None) -> Ended:
        if code != 0 and self._group is not None and self._group.out_of_memory():
            return Ended(-9 if code is None else code, OOM_KILLED, "it used more memory than its limit")
        return Ended(code)


def _set_back(group: Group | None) -> str:
    """Have a group come last, unless there is a better way (`priority`). Its weight, if it does."""
    return group.step_back() if group is not None and not (group.weighing and may_return()) else ""


def _paths(group: Group | None) -> dict[str, list[str]]:
    if group is None:
        return {"groups": [], "weighing": []}
    return {"groups": [*map(str, group.paths)], "weighing": [*map(str, group.weighing)]}


def _program(line: Line, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The words with a path in front."""
    if line.ours:
        return (*headrace_words(), *line.words)
    found = shutil.which(line.words[0], path=environment.get("PATH"))
    if found is None and line.words[0] in ("python", "python3"):
        found = sys.executable
    if found is None:
        raise CannotRun(
            "ErrImageNeverPull",
            f"{line.words[0]} is not on this machine: install it, or run images by `headrace up --driver docker`",
        )
    return (found, *line.words[1:])


def _temporary(box: Box) -> dict[str, str]:
    mounted = {each.inside.rstrip("/"): each.here for each in box.mounts}
    return {"TMPDIR": mounted.get("/tmp", str(box.work))}  # noqa: S108  the container's


def _limits(said: object) -> Limits:
    kept: Mapping[str, Any] = said if isinstance(said, dict) else {}
    memory, tasks = kept.get("memory"), kept.get("tasks")
    return Limits(memory=memory if isinstance(memory, int) else None, tasks=tasks if isinstance(tasks, int) else None)
