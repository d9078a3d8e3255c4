# SPDX-License-Identifier: Apache-2.0
"""The driver `local-docker`: a service is a container, named by its job id, that outlives the process that started it.

Secrets are copied into the container after it is created and before it is started; its first line reads and removes them:
`docker inspect` never shows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

from headrace.core.errors import AlreadyExists, FailedPrecondition, Unavailable
from headrace.platforms.contract import Check, Handle, LaunchSpec, PlatformStatus, check_job_id, is_job_id
from headrace.platforms.docker.cli import (
    REMOVAL_IN_PROGRESS,
    DockerCli,
    engine_error,
    ensure_image,
    is_missing,
    lost_network,
    remote_host,
    run_preflight,
)
from headrace.platforms.docker.containers import (
    JOB_LABEL,
    MADE_LABEL,
    checked_container,
    container_status,
    create_args,
    is_tegra,
    is_user_network,
    published_port,
    secrets_tar,
    with_log_tail,
)
from headrace.platforms.docker.settings import DockerSettings

log = logging.getLogger("headrace.launch")

_REASON_LINES = 5
_POLL_SECONDS = 0.1
_REMOVE_POLLS = 300
_NETWORK_TRIES = 20
_INSPECT_BATCH = 100
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_ANY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  # compared with, not listened on


class DockerDriver:
    """Implements `contract.Driver`. Several drivers may share an engine."""

    name = "local-docker"

    def __init__(self, settings: DockerSettings | None = None) -> None:
        self._settings = settings or DockerSettings()
        self._docker = DockerCli(self._settings)
        self._network = Network(self._docker, self._settings.network)
        self.place = f"local-docker:{self._settings.host or 'default'}"

    # The contract

    async def preflight(self) -> list[Check]:
        """Check the engine, its version, the network and the GPUs."""
        return await run_preflight(self._docker, self._settings)

    async def start(self, spec: LaunchSpec) -> Handle:
        """Create and start the container. A first pull may take minutes; the log `headrace.launch` reports its progress."""
        container = checked_container(spec)
        is_user_network(self._settings.network)
        if await self._docker.inspect_container(spec.job_id) is not None:
            raise AlreadyExists(f"a container of job {spec.job_id} was started before; stop it first")
        image = await ensure_image(self._docker, container.image, self._settings)
        tegra = spec.gpus > 0 and await self._has_tegra()
        args = create_args(spec, container, image, self._settings, tegra=tegra)
        # The engine continues to create a container when its caller is cancelled: wait for the end, then undo it.
        starting = asyncio.create_task(self._create(spec, args))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                await self._remove(starting.result().data["container_id"])
                await self._network.remove_unused()
            raise

    async def status(self, handle: Handle) -> PlatformStatus:
        """Return the status. The reason of a failure ends with the last lines of the log."""
        document = await self._inspect(handle.job_id)
        if document is None:
            return PlatformStatus("gone")
        status = container_status(document)
        if status.phase != "ended" or status.pod_phase == "Succeeded":
            return status
        return with_log_tail(status, await self._log_tail(handle.job_id, _REASON_LINES))

    async def logs(self, handle: Handle, tail: int) -> str:
        """Return the last lines of the container's log."""
        check_job_id(handle.job_id)
        return "\n".join(await self._log_tail(handle.job_id, tail)) if tail > 0 else ""

    async def endpoint(self, handle: Handle) -> str | None:
        """Return the URL of the published port."""
        document = await self._inspect(handle.job_id)
        if document is None or container_status(document).phase != "running":
            return None
        port = published_port(document)
        return None if port is None else f"http://{self._url_host()}:{port}"

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """Stop and remove the container, and the network if no container uses it."""
        check_job_id(handle.job_id)
        done = await self._docker.stop(handle.job_id, grace_seconds)
        if done.code != 0 and not is_missing(done):
            log.warning("Job %s: %s", handle.job_id, engine_error(done, "its container cannot be stopped").message)
        await self._remove(handle.job_id)
        await self._network.remove_unused()

    async def list_services(self) -> dict[str, PlatformStatus]:
        """Return the status of every container with the job label."""
        args = ("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={JOB_LABEL}")
        ids = (await self._docker.must("containers cannot be listed", *args)).split()
        statuses: dict[str, PlatformStatus] = {}
        for first in range(0, len(ids), _INSPECT_BATCH):
            for document in await self._docker.inspect("container", *ids[first : first + _INSPECT_BATCH]):
                job_id = ((document.get("Config") or {}).get("Labels") or {}).get(JOB_LABEL, "")
                if is_job_id(job_id) and document.get("Name") == f"/{job_id}":
                    statuses[job_id] = container_status(document)
        return statuses

    async def close(self) -> None:
        """Do nothing: the driver keeps nothing open."""

    # Steps

    async def _create(self, spec: LaunchSpec, args: tuple[str, ...]) -> Handle:
        """Create the container, copy its secrets and start it; leave nothing behind if a step fails."""
        try:
            async with self._network.in_use():
                container_id = await self._docker.must(f"the container of job {spec.job_id} cannot be created", *args)
                try:
                    if spec.secret_environment:
                        what = "the service's secrets cannot be given to its container"
                        tar = secrets_tar(spec.secret_environment)
                        await self._docker.must(what, "cp", "-", f"{container_id}:/", input=tar)
                    await self._start(container_id, spec.job_id)
                except BaseException:
                    await self._remove(container_id)
                    raise
        except BaseException:
            with contextlib.suppress(Unavailable):
                await self._network.remove_unused()
            raise
        port = spec.host_port
        if port is None:
            document = await self._inspect(spec.job_id)
            port = published_port(document) if document is not None else None
        container = checked_container(spec)
        data: dict[str, Any] = {
            "container_id": container_id,
            "docker_url": f"http://{spec.job_id}:{container.port}",
            "image": container.image,
            "network": self._settings.network,
        }
        return Handle(spec.job_id, self.name, data if port is None else {**data, "host_port": port})

    async def _start(self, container_id: str, job_id: str) -> None:
        done = await self._docker.run("start", container_id)
        for _ in range(_NETWORK_TRIES):
            if not lost_network(done):
                break
            # Another process is removing the network with its last service, or creating it too.
            await asyncio.sleep(_POLL_SECONDS)
            await self._network.create()
            done = await self._docker.run("start", container_id)
        if done.code != 0:
            raise engine_error(done, f"the container of job {job_id} cannot be started")

    async def _remove(self, name: str) -> None:
        """Remove a container and wait until the engine does not know it any more."""
        done = await self._docker.remove(name)
        if done.code == 0 or is_missing(done):
            return
        if REMOVAL_IN_PROGRESS not in done.err:
            raise engine_error(done, f"the container {name} cannot be removed")
        for _ in range(_REMOVE_POLLS):
            if await self._docker.inspect_container(name) is None:
                return
            await asyncio.sleep(_POLL_SECONDS)
        raise Unavailable(f"the container {name} is still being removed; try again later")

    async def _inspect(self, job_id: str) -> dict[str, Any] | None:
        return await self._docker.inspect_container(check_job_id(job_id))

    async def _log_tail(self, job_id: str, tail: int) -> list[str]:
        lines, error = await self._docker.log_tail(job_id, tail)
        if error and await self._docker.inspect_container(job_id) is not None:
            raise FailedPrecondition(f"the log of job {job_id} cannot be read: {error}")
        return lines

    async def _has_tegra(self) -> bool:
        if self._settings.gpu_way != "auto":
            return self._settings.gpu_way == "tegra"
        return is_tegra(await self._docker.info())

    def _url_host(self) -> str:
        host = self._settings.url_host
        if not host:
            address = self._settings.address
            if address in _ANY_ADDRESS:
                host = remote_host(self._settings.host) or "localhost"
            else:
                host = "localhost" if address in _LOOPBACK else address
        return f"[{host}]" if ":" in host else host


class Network:
    """The network that services share: created by the first service, removed with the last one if a driver created it.

    Several drivers, in several processes, may do both at once.
    """

    def __init__(self, docker: DockerCli, name: str) -> None:
        self._docker = docker
        self._name = name
        self._lock = asyncio.Lock()
        self._users = 0
        """Number of starts in this process that use the network but have no container in it yet."""

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Create it, and keep this process from removing it."""
        self._users += 1
        try:
            await self.create()
            yield
        finally:
            self._users -= 1

    async def create(self) -> None:
        """Create it if it does not exist."""
        if not is_user_network(self._name):
            return
        async with self._lock:
            if await self._ids():
                return
            args = ("network", "create", "--label", f"{MADE_LABEL}=1", self._name)
            done = await self._docker.run(*args)
            if done.code != 0:
                if "already exists" not in done.err:
                    await self._docker.must(f"the network {self._name} cannot be created", *args)
                return
            await self._keep_oldest(done.out.strip())

    async def remove_unused(self) -> None:
        """Remove it if a driver created it and no container, running or not, is in it."""
        if not is_user_network(self._name):
            return
        async with self._lock:
            if self._users:
                return
            ids = await self._ids()
            for network in await self._docker.inspect("network", *ids) if ids else ():
                if MADE_LABEL not in (network.get("Labels") or {}):
                    continue
                containers = await self._docker.run("ps", "--all", "--quiet", "--filter", f"network={self._name}")
                if containers.code == 0 and not containers.out.strip():
                    # The engine refuses if a container has joined meanwhile.
                    await self._docker.run("network", "rm", network["Id"])

    async def _ids(self) -> list[str]:
        """Return the ids of all networks of this name: inspecting a name that two networks have fails."""
        args = ("network", "ls", "--no-trunc", "--quiet", "--filter", f"name=^{re.escape(self._name)}$")
        return (await self._docker.must("networks cannot be listed", *args)).split()

    async def _keep_oldest(self, created_id: str) -> None:
        """Remove the created network if it is a duplicate: engines allow two of one name, and then find neither."""
        ids = await self._ids()
        if len(ids) < 2:
            return
        networks = await self._docker.inspect("network", *ids)
        oldest = min(networks, key=lambda network: (str(network.get("Created", "")), network["Id"]))
        if oldest["Id"] != created_id:
            await self._docker.run("network", "rm", created_id)
