# SPDX-License-Identifier: Apache-2.0
"""The driver `local-docker`: a service is a container, named by its job's id, that outlives whoever started it.

By the docker program's words alone, so that DOCKER_HOST, contexts and ssh:// work by themselves. Secrets are copied into
the container between its making and its start, and its first line takes them and removes them: `docker inspect` never
shows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from typing import Any

from headrace.core.errors import AlreadyExists, FailedPrecondition, InvalidArgument, Unavailable
from headrace.platforms.contract import Check, Handle, LaunchSpec, Observed
from headrace.platforms.docker.checking import checks_of, machine_of
from headrace.platforms.docker.engine import Engine
from headrace.platforms.docker.looking import host_port_of, is_tegra, observed_of, with_last_words
from headrace.platforms.docker.networks import Network
from headrace.platforms.docker.pulling import present_image
from headrace.platforms.docker.settings import DockerSettings
from headrace.platforms.docker.troubles import engine_error, is_missing, lost_network
from headrace.platforms.docker.words import JOB_LABEL, container_of, create_words, network_to_make, secrets_tar
from headrace.platforms.folders import is_id

log = logging.getLogger("headrace.launch")

_LAST_WORDS = 5
_POLL_SECONDS = 0.1
_REMOVE_LOOKS = 300
_NETWORK_TRIES = 20
_AT_ONCE = 100
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_EVERYWHERE = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  # compared with, not listened on


class DockerDriver:
    """See `contract.Driver`. Several may share an engine."""

    name = "local-docker"

    def __init__(self, settings: DockerSettings | None = None) -> None:
        self._settings = settings or DockerSettings()
        self._engine = Engine(self._settings)
        self._network = Network(self._engine, self._settings.network)
        self.place = f"local-docker:{self._settings.host or 'default'}"

    # The contract

    async def preflight(self) -> list[Check]:
        """See `contract.Driver.preflight`."""
        return await checks_of(self._engine, self._settings)

    async def start(self, spec: LaunchSpec) -> Handle:
        """See `contract.Driver.start`. A first pull may take minutes; the log `headrace.launch` tells of it."""
        box = container_of(spec)
        network_to_make(self._settings.network)
        if await self._engine.inspect("container", spec.job_id):
            raise AlreadyExists(f"a container of job {spec.job_id} was started before; stop it first")
        image = await present_image(self._engine, box.image, self._settings)
        tegra = spec.gpus > 0 and await self._has_tegra()
        words = create_words(spec, box, image, self._settings, tegra=tegra)
        # The engine does not stop making a container when its caller goes, so whoever is cancelled here waits and undoes.
        beginning = asyncio.create_task(self._begin(spec, words))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            await asyncio.wait([beginning])
            if not beginning.cancelled() and beginning.exception() is None:
                await self._remove(beginning.result().data["container_id"])
                await self._network.drop_unused()
            raise

    async def status(self, handle: Handle) -> Observed:
        """See `contract.Driver.status`. The reason of a failure ends with the last lines of its log."""
        shown = await self._shown(handle.job_id)
        if shown is None:
            return Observed("gone")
        observed = observed_of(shown)
        if observed.phase != "ended" or observed.word == "Succeeded":
            return observed
        return with_last_words(observed, await self._last_lines(handle.job_id, _LAST_WORDS))

    async def logs(self, handle: Handle, tail: int) -> str:
        """See `contract.Driver.logs`."""
        _check_id(handle.job_id)
        return "\n".join(await self._last_lines(handle.job_id, tail)) if tail > 0 else ""

    async def endpoint(self, handle: Handle) -> str | None:
        """See `contract.Driver.endpoint`."""
        shown = await self._shown(handle.job_id)
        if shown is None or observed_of(shown).phase != "running":
            return None
        port = host_port_of(shown)
        return None if port is None else f"http://{self._url_host()}:{port}"

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """See `contract.Driver.stop`."""
        _check_id(handle.job_id)
        grace = max(0, math.ceil(grace_seconds))
        seconds = grace + self._settings.command_seconds
        done = await self._engine.run("stop", "--time", str(grace), handle.job_id, seconds=seconds)
        if done.code != 0 and not is_missing(done):
            log.warning("job %s: %s", handle.job_id, engine_error(done, "its container cannot be stopped").message)
        await self._remove(handle.job_id)
        await self._network.drop_unused()

    async def found(self) -> dict[str, Observed]:
        """See `contract.Driver.found`."""
        words = ("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={JOB_LABEL}")
        ids = (await self._engine.must("containers cannot be listed", *words)).split()
        seen: dict[str, Observed] = {}
        for first in range(0, len(ids), _AT_ONCE):
            for shown in await self._engine.inspect("container", *ids[first : first + _AT_ONCE]):
                job_id = ((shown.get("Config") or {}).get("Labels") or {}).get(JOB_LABEL, "")
                if is_id(job_id) and shown.get("Name") == f"/{job_id}":
                    seen[job_id] = observed_of(shown)
        return seen

    async def close(self) -> None:
        """See `contract.Driver.close`: there is nothing to let go of."""

    # Steps

    async def _begin(self, spec: LaunchSpec, words: tuple[str, ...]) -> Handle:
        """From nothing to a running container, or to nothing again."""
        try:
            async with self._network.held():
                made = await self._engine.must(f"the container of job {spec.job_id} cannot be made", *words)
                try:
                    if spec.secret_environment:
                        what = "the service's secrets cannot be given to its container"
                        tar = secrets_tar(spec.secret_environment)
                        await self._engine.must(what, "cp", "-", f"{made}:/", input=tar)
                    await self._start(made, spec.job_id)
                except BaseException:
                    await self._remove(made)
                    raise
        except BaseException:
            with contextlib.suppress(Unavailable):
                await self._network.drop_unused()
            raise
        port = spec.host_port
        if port is None:
            shown = await self._shown(spec.job_id)
            port = host_port_of(shown) if shown is not None else None
        box = container_of(spec)
        data: dict[str, Any] = {
            "container_id": made,
            "docker_url": f"http://{spec.job_id}:{box.port}",
            "image": box.image,
            "network": self._settings.network,
        }
        return Handle(spec.job_id, self.name, data if port is None else {**data, "host_port": port})

    async def _start(self, container_id: str, job_id: str) -> None:
        done = await self._engine.run("start", container_id)
        for _ in range(_NETWORK_TRIES):
            if not lost_network(done):
                break
            # Another process stopped the last service in it, or makes it too, at this very moment.
            await asyncio.sleep(_POLL_SECONDS)
            await self._network.make()
            done = await self._engine.run("start", container_id)
        if done.code != 0:
            raise engine_error(done, f"the container of job {job_id} cannot be started")

    async def _remove(self, name: str) -> None:
        """A container and its nameless volumes; returns when the engine no longer knows it."""
        done = await self._engine.run("rm", "--force", "--volumes", name)
        if done.code == 0 or is_missing(done):
            return
        if "is already in progress" not in done.err:
            raise engine_error(done, f"the container {name} cannot be removed")
        for _ in range(_REMOVE_LOOKS):
            if not await self._engine.inspect("container", name):
                return
            await asyncio.sleep(_POLL_SECONDS)
        raise Unavailable(f"the container {name} is still being removed; try again later")

    async def _shown(self, job_id: str) -> dict[str, Any] | None:
        _check_id(job_id)
        found = await self._engine.inspect("container", job_id)
        return found[0] if found else None

    async def _last_lines(self, job_id: str, tail: int) -> list[str]:
        kept: deque[str] = deque(maxlen=tail + 1)
        words = ("logs", "--tail", str(tail), job_id)
        async with contextlib.aclosing(self._engine.lines(*words, seconds=self._settings.command_seconds)) as lines:
            async for line in lines:
                kept.append(line)
        code = kept.pop()
        if code == "code 0":
            return list(kept)[-tail:]
        if await self._engine.inspect("container", job_id):
            raise FailedPrecondition(f"the log of job {job_id} cannot be read: {kept[-1] if kept else code}")
        return []

    async def _has_tegra(self) -> bool:
        if self._settings.gpu_way != "auto":
            return self._settings.gpu_way == "tegra"
        return is_tegra(await self._engine.info())

    def _url_host(self) -> str:
        host = self._settings.url_host
        if not host:
            address = self._settings.address
            if address in _EVERYWHERE:
                host = machine_of(self._settings.host) or "localhost"
            else:
                host = "localhost" if address in _LOOPBACK else address
        return f"[{host}]" if ":" in host else host


def _check_id(job_id: str) -> None:
    if not is_id(job_id):
        raise InvalidArgument("a service's job id is a UUID, written in lower case")
