# SPDX-License-Identifier: Apache-2.0
"""Containers by the Docker engine of this machine, for `headrace up --driver docker`. Made by `program`.

They outlive the daemon as processes do. A container's name is kept in its folder before it is made, so that the next daemon
finds it, and labels say whose they are, so that what lost its folder goes. That one has ended, the engine's own events tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.fleet.local.commands import CannotRun
from headrace.fleet.local.docker_words import FLEET, POD, create_words, ended_of
from headrace.fleet.local.driving import LOG, RECORD, Box, Ended
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.store import read_json, write_json
from headrace.fleet.planning.site import digest_of
from headrace.fleet.words import part, text, whole
from headrace.platforms.docker.checking import checks_of, machine_of
from headrace.platforms.docker.engine import Engine
from headrace.platforms.docker.pulling import present_image
from headrace.platforms.docker.settings import DockerSettings
from headrace.platforms.docker.troubles import engine_error, is_missing

log = logging.getLogger("headrace.fleet")

_FOREVER = 10.0 * 365 * 86_400
_LOOK_SECONDS = 10.0
_AGAIN_SECONDS = 1.0
_KEPT_LINES = 10_000


class DockerDriver:
    """See `driving.Driver`."""

    runs_images = True

    def __init__(self, docker: DockerSettings, settings: LocalSettings) -> None:
        self._docker = docker
        self._settings = settings
        self._fleet = digest_of(str(settings.root))
        self._engine = Engine(docker)
        self._watching: asyncio.Task[None] | None = None
        self._ends: dict[str, asyncio.Event] = {}
        """By container: that there is reason to look at it."""

    async def open(self, pods: Collection[str]) -> None:
        """See `Driver.open`."""
        if machine_of(self._docker.host):
            raise FailedPrecondition("DOCKER_HOST names another machine: --driver docker needs the engine of this one")
        for check in await checks_of(self._engine, self._docker):
            if not check.passed:
                raise FailedPrecondition(f"--driver docker cannot be used: {check.message}")
        found = await self._engine.must(
            "containers cannot be listed",
            *("ps", "--all", "--no-trunc", "--filter", f"label={FLEET}={self._fleet}"),
            *("--format", f'{{{{.ID}}}} {{{{.Label "{POD}"}}}}'),
        )
        lost = [line.split()[0] for line in found.splitlines() if line.split()[1:2] not in [[each] for each in pods]]
        if lost:
            log.info("%d containers of pods that are no more are removed", len(lost))
            await self._engine.must("containers cannot be removed", "rm", "--force", "--volumes", *lost)
        self._watching = asyncio.ensure_future(self._watch())

    def found(self, folder: Path) -> DockerRun | None:
        """See `Driver.found`. Whether it lives is seen by waiting for its end."""
        name = text(read_json(folder / RECORD) or {}, "container")
        return DockerRun(self, self._engine, folder, name) if name else None

    async def start(self, box: Box) -> DockerRun:
        """See `Driver.start`. A first pull may take minutes; the log `headrace.launch` tells of it."""
        name = f"headrace-{box.pod[:13]}-{box.name}-{uuid.uuid4().hex[:6]}"
        try:
            words, variables = create_words(box, name, self._fleet, self._docker, self._settings.log_bytes)
        except HeadraceError as error:
            raise CannotRun("CreateContainerConfigError", error.message) from None
        await self._image(box)
        # The engine does not stop making a container when its caller goes, so whoever is cancelled here waits for it.
        beginning = asyncio.ensure_future(self._begin(box, name, words, variables))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            await asyncio.wait([beginning])
            raise

    async def close(self) -> None:
        """See `Driver.close`."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    # What its containers need

    def reason_to_look(self, name: str) -> asyncio.Event:
        """Set when the engine says that a container has ended."""
        return self._ends.setdefault(name, asyncio.Event())

    def forget(self, name: str) -> None:
        """It is gone."""
        self._ends.pop(name, None)

    # Steps

    async def _image(self, box: Box) -> None:
        try:
            if text(box.spec, "imagePullPolicy") != "Never":
                await present_image(self._engine, box.image, self._docker)
            elif not await self._engine.inspect("image", box.image):
                said = f"the image {box.image} is not here, and imagePullPolicy says Never: load it with `docker load`"
                raise CannotRun("ErrImageNeverPull", said)
        except HeadraceError as error:
            raise CannotRun("ErrImagePull", error.message) from None

    async def _begin(self, box: Box, name: str, words: Sequence[str], variables: Mapping[str, str]) -> DockerRun:
        write_json(box.folder / RECORD, {"container": name})
        made = DockerRun(self, self._engine, box.folder, name)
        reason = "CreateContainerError"
        try:
            for step, more in ((words, variables), (("start", name), {})):
                done = await self._engine.run(*step, environment=more)
                if done.code != 0:
                    raise engine_error(done, f"container {box.name} of image {box.image} cannot be run")
                reason = "RunContainerError"
            await made.shown()
        except HeadraceError as error:
            with contextlib.suppress(HeadraceError):
                await made.clear()
            raise CannotRun(reason, error.message) from None
        return made

    async def _watch(self) -> None:
        """Hear of ends. What happens while nobody listens is told afterwards, from the moment when nobody did."""
        while True:
            since = f"{time.time() - 1:.0f}"
            words = ("events", "--since", since, "--filter", f"label={FLEET}={self._fleet}", "--filter", "event=die")
            try:
                lines = self._engine.lines(*words, "--format", "{{.Actor.Attributes.name}}", seconds=_FOREVER)
                async with contextlib.aclosing(lines):
                    async for line in lines:
                        if line in self._ends:
                            self._ends[line].set()
            except HeadraceError as error:
                log.warning("%s", error.message)
            for each in self._ends.values():
                each.set()
            await asyncio.sleep(_AGAIN_SECONDS)


class DockerRun:
    """See `driving.Running`."""

    def __init__(self, driver: DockerDriver, engine: Engine, folder: Path, name: str) -> None:
        self._driver = driver
        self._engine = engine
        self._folder = folder
        self._name = name
        self._pid: int | None = None

    @property
    def label(self) -> str:
        """See `Running.label`."""
        return f"container {self._name}"

    @property
    def session(self) -> int | None:
        """See `Running.session`: the first process of a container leads its session."""
        return self._pid

    async def ended(self) -> Ended:
        """See `Running.ended`. An engine that does not answer is waited for."""
        reason = self._driver.reason_to_look(self._name)
        while True:
            reason.clear()
            try:
                found = ended_of(await self.shown())
                if found is not None:
                    return found
            except HeadraceError as error:
                log.warning("%s: %s", self._name, error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await reason.wait()

    async def shown(self) -> dict[str, Any] | None:
        """As the engine shows it. Raises HeadraceError where that does not answer."""
        found = await self._engine.inspect("container", self._name)
        if found:
            self._pid = whole(part(found[0], "State"), "Pid") or None
        return found[0] if found else None

    async def end(self, grace_seconds: float) -> None:
        """See `Running.end`."""
        grace = max(0, math.ceil(grace_seconds))
        done = await self._engine.run("stop", "--time", str(grace), self._name, seconds=grace + 60.0)
        if done.code != 0 and not is_missing(done):
            log.warning("%s: %s", self._name, engine_error(done, "it cannot be stopped").message)

    async def clear(self) -> None:
        """See `Running.clear`. What it said is kept in its folder."""
        try:
            said = await self.said(_KEPT_LINES, 1 << 30)
            await asyncio.to_thread((self._folder / LOG).write_text, f"{said}\n" if said else "")
        except (HeadraceError, OSError) as error:
            log.debug("the log of %s is lost: %s", self._name, error)
        done = await self._engine.run("rm", "--force", "--volumes", self._name)
        if done.code != 0 and not is_missing(done) and "is already in progress" not in done.err:
            raise engine_error(done, f"{self._name} cannot be removed")
        (self._folder / RECORD).unlink(missing_ok=True)
        self._driver.forget(self._name)

    async def run(self, words: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
        """See `Running.run`. The container has its variables already."""
        return (await self._engine.run("exec", self._name, *words, seconds=seconds)).code == 0

    async def said(self, tail: int, most_bytes: int) -> str:
        """See `Running.said`."""
        kept: deque[str] = deque(maxlen=tail + 1)
        words = ("logs", "--tail", str(tail), self._name)
        async with contextlib.aclosing(self._engine.lines(*words, seconds=60.0)) as lines:
            async for line in lines:
                kept.append(line)
        if kept.pop() != "code 0":
            return ""
        return "\n".join(list(kept)[-tail:])[-most_bytes:]

    def is_ready(self) -> None:
        """See `Running.is_ready`: the engine shares the CPU out, and knows nobody's turn."""

    def let_go(self) -> None:
        """See `Running.let_go`: the engine keeps it."""
