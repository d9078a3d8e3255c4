# SPDX-License-Identifier: Apache-2.0
"""The Docker runtime: containers of the Docker engine of this machine, for `headrace up --driver docker`.

Containers outlive the daemon. The name of a container is recorded in its folder before it is created, so that the next
daemon finds it; labels identify the pod, so that containers without a folder are removed. The engine's events report their
ends. Containers share the network of the machine: 127.0.0.1 is the same for all containers of a pod, the leader of a group,
routers and probes. Ports are replaced as for processes; folders are mounted, and paths stay unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.core.files import read_json, write_json
from headrace.fleet.local.container_command import ContainerStartError
from headrace.fleet.local.container_runtime import LOG, RECORD, ContainerSpec, ExitStatus, ResourceLimits
from headrace.fleet.local.pod_status import OOM_KILLED
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.planning.context import digest_of
from headrace.platforms.commands import run_to_end
from headrace.platforms.contract import Mount
from headrace.platforms.docker.cli import (
    REMOVAL_IN_PROGRESS,
    DockerCli,
    engine_error,
    ensure_image,
    is_missing,
    remote_host,
    run_preflight,
)
from headrace.platforms.docker.containers import ContainerState, check_image, gpu_args, log_args, mount_args
from headrace.platforms.docker.settings import DockerSettings
from headrace.platforms.kubernetes_client.objects import get_int, get_str

log = logging.getLogger("headrace.fleet")

FLEET_LABEL, POD_LABEL, CONTAINER_LABEL = "headrace.fleet", "headrace.pod", "headrace.container"
_FOREVER = 10.0 * 365 * 86_400
_POLL_SECONDS = 10.0
_RECONNECT_SECONDS = 1.0
_KEPT_LINES = 10_000
_CPU_SHARES = 1024
_MIN_MEMORY = 6 << 20
_DOCKER_VARIABLES = ("PATH", "HOME", "LD_", "DOCKER_", "GO", "SSL_", "HTTP_", "HTTPS_", "NO_", "http_", "https_", "no_")
"""Prefixes of variables that the docker program itself reads."""


class DockerRuntime:
    """Implements `ContainerRuntime`."""

    runs_images = True

    def __init__(self, docker: DockerSettings, settings: LocalSettings) -> None:
        self._docker_settings = docker
        self._settings = settings
        self._fleet = digest_of(str(settings.root))
        self._docker = DockerCli(docker)
        self._watcher: asyncio.Task[None] | None = None
        self._ended: dict[str, asyncio.Event] = {}
        """By container: set when it may have ended."""

    async def open(self, pods: Collection[str]) -> None:
        """Check the engine, remove containers without a pod, and watch the engine's events."""
        if remote_host(self._docker_settings.host):
            raise FailedPrecondition("DOCKER_HOST names another machine: --driver docker needs the engine of this one")
        for check in await run_preflight(self._docker, self._docker_settings):
            if not check.passed:
                raise FailedPrecondition(f"--driver docker cannot be used: {check.message}")
        listing = await self._docker.must(
            "containers cannot be listed",
            *("ps", "--all", "--no-trunc", "--filter", f"label={FLEET_LABEL}={self._fleet}"),
            *("--format", f'{{{{.ID}}}} {{{{.Label "{POD_LABEL}"}}}}'),
        )
        orphans = [line.split()[0] for line in listing.splitlines() if line.split()[1:2] not in [[pod] for pod in pods]]
        if orphans:
            log.info("Removing %d containers of pods that no longer exist", len(orphans))
            await self._docker.must("containers cannot be removed", "rm", "--force", "--volumes", *orphans)
        self._watcher = asyncio.ensure_future(self._watch_events())

    def adopt(self, folder: Path) -> DockerContainer | None:
        """Return the container of a record; `wait` finds out whether it runs."""
        name = get_str(read_json(folder / RECORD) or {}, "container")
        return DockerContainer(self, self._docker, folder, name) if name else None

    async def start(self, spec: ContainerSpec) -> DockerContainer:
        """Create and start the container. A first pull may take minutes; the log `headrace.launch` reports its progress."""
        name = f"headrace-{spec.pod[:13]}-{spec.name}-{uuid.uuid4().hex[:6]}"
        try:
            args, variables = create_args(spec, name, self._fleet, self._docker_settings, self._settings.log_bytes)
        except HeadraceError as error:
            raise ContainerStartError("CreateContainerConfigError", error.message) from None
        await self._ensure_image(spec)
        # The engine continues to create a container when its caller is cancelled, so a cancelled caller waits for it.
        return await run_to_end(self._create(spec, name, args, variables))

    async def close(self) -> None:
        """Stop watching events."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    # For its containers

    def ended_event(self, name: str) -> asyncio.Event:
        """Return an event that is set when a container may have ended."""
        return self._ended.setdefault(name, asyncio.Event())

    def forget(self, name: str) -> None:
        """Drop the event of a removed container."""
        self._ended.pop(name, None)

    # Steps

    async def _ensure_image(self, spec: ContainerSpec) -> None:
        try:
            if get_str(spec.document, "imagePullPolicy") != "Never":
                await ensure_image(self._docker, spec.image, self._docker_settings)
            elif not await self._docker.inspect("image", spec.image):
                message = (
                    f"the image {spec.image} is not here, and imagePullPolicy is Never: load it with `docker load`"
                )
                raise ContainerStartError("ErrImageNeverPull", message)
        except HeadraceError as error:
            raise ContainerStartError("ErrImagePull", error.message) from None

    async def _create(
        self, spec: ContainerSpec, name: str, args: Sequence[str], variables: Mapping[str, str]
    ) -> DockerContainer:
        write_json(spec.folder / RECORD, {"container": name})
        container = DockerContainer(self, self._docker, spec.folder, name)
        reason = "CreateContainerError"
        try:
            for step, environment in ((args, variables), (("start", name), {})):
                done = await self._docker.run(*step, environment=environment)
                if done.code != 0:
                    raise engine_error(done, f"container {spec.name} of image {spec.image} cannot be run")
                reason = "RunContainerError"
            await container.inspect()
        except HeadraceError as error:
            with contextlib.suppress(HeadraceError):
                await container.remove()
            raise ContainerStartError(reason, error.message) from None
        return container

    async def _watch_events(self) -> None:
        """Watch the engine's `die` events. After a reconnect the engine sends the events since the connection was lost."""
        while True:
            since = f"{time.time() - 1:.0f}"
            args = ("--since", since, "--filter", f"label={FLEET_LABEL}={self._fleet}", "--filter", "event=die")
            try:
                names = self._docker.stream("events", *args, "--format", "{{.Actor.Attributes.name}}", seconds=_FOREVER)
                async with contextlib.aclosing(names):
                    async for name in names:
                        if name in self._ended:
                            self._ended[name].set()
            except HeadraceError as error:
                log.warning("%s", error.message)
            for event in self._ended.values():
                event.set()
            await asyncio.sleep(_RECONNECT_SECONDS)


class DockerContainer:
    """Implements `RunningContainer`."""

    def __init__(self, runtime: DockerRuntime, docker: DockerCli, folder: Path, name: str) -> None:
        self._runtime = runtime
        self._docker = docker
        self._folder = folder
        self._name = name
        self._pid: int | None = None

    @property
    def label(self) -> str:
        """Its name in events."""
        return f"container {self._name}"

    @property
    def session(self) -> int | None:
        """The session that its first process leads."""
        return self._pid

    async def wait(self) -> ExitStatus:
        """Wait until it ends; an engine that does not answer is asked again."""
        event = self._runtime.ended_event(self._name)
        while True:
            event.clear()
            try:
                status = exit_status(await self.inspect())
                if status is not None:
                    return status
            except HeadraceError as error:
                log.warning("%s: %s", self._name, error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await event.wait()

    async def inspect(self) -> ContainerState | None:
        """Return its state; None if it does not exist. Raises HeadraceError if the engine does not answer."""
        document = await self._docker.inspect_container(self._name)
        if document is None:
            return None
        state = ContainerState.parse(document)
        self._pid = state.pid
        return state

    async def stop(self, grace_seconds: float) -> None:
        """Stop it; a failure is logged."""
        done = await self._docker.stop(self._name, grace_seconds)
        if done.code != 0 and not is_missing(done):
            log.warning("%s: %s", self._name, engine_error(done, "it cannot be stopped").message)

    async def remove(self) -> None:
        """Remove it; its log is kept in its folder."""
        try:
            text = await self.logs(_KEPT_LINES, 1 << 30)
            await asyncio.to_thread((self._folder / LOG).write_text, f"{text}\n" if text else "")
        except (HeadraceError, OSError) as error:
            log.debug("Lost the log of %s: %s", self._name, error)
        done = await self._docker.remove(self._name)
        if done.code != 0 and not is_missing(done) and REMOVAL_IN_PROGRESS not in done.err:
            raise engine_error(done, f"{self._name} cannot be removed")
        (self._folder / RECORD).unlink(missing_ok=True)
        self._runtime.forget(self._name)

    async def exec(self, args: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
        """Run a command in it; the container has its variables already."""
        return (await self._docker.run("exec", self._name, *args, seconds=seconds)).code == 0

    async def logs(self, tail: int, max_bytes: int) -> str:
        """Return the last lines of its log; "" if it cannot be read."""
        lines, _ = await self._docker.log_tail(self._name, tail)
        return "\n".join(lines)[-max_bytes:]

    def mark_ready(self) -> None:
        """Do nothing: the engine shares the CPU, without priorities."""

    def detach(self) -> None:
        """Do nothing: the engine keeps it running."""


# Arguments and state


def create_args(
    spec: ContainerSpec, name: str, fleet: str, settings: DockerSettings, log_bytes: int
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the arguments of `docker create`, and the variables that docker copies from its own environment.

    The values of those are not on a command line. Raises InvalidArgument, ResourceExhausted.
    """
    check_image(spec.image)
    args = ["create", "--name", name, "--network", "host"]
    for label, value in ((FLEET_LABEL, fleet), (POD_LABEL, spec.pod), (CONTAINER_LABEL, spec.name)):
        args += ["--label", f"{label}={value}"]
    args += ["--shm-size", str(spec.shared_memory or settings.shm_bytes), *log_args(log_bytes)]
    args += _limit_args(spec.limits)
    variables = dict(spec.command.environment)
    if spec.gpus:
        flags, more = gpu_args(len(spec.gpus), spec.gpus, tegra=settings.gpu_way == "tegra")
        args += flags
        variables = {**more, **variables}
    copied: dict[str, str] = {}
    for variable, value in variables.items():
        if variable.startswith(_DOCKER_VARIABLES) or "\0" in value or "=" in variable:
            args += ["--env", f"{variable}={value}"]
        else:
            args += ["--env", variable]
            copied[variable] = value
    for mount in spec.mounts:
        args += mount_args(Mount(mount.host_path, mount.mount_path.rstrip("/")), read_only=mount.read_only)
    args += _user_args(spec.document)
    count = spec.command.entrypoint_args
    entrypoint, rest = spec.command.args[:count], spec.command.args[count:]
    if entrypoint:
        args += ["--entrypoint", entrypoint[0]]
    return (*args, spec.image, *entrypoint[1:], *rest), copied


def _limit_args(limits: ResourceLimits) -> list[str]:
    args: list[str] = []
    if limits.memory is not None:
        # The same limit with swap as without: no swap.
        memory = str(max(limits.memory, _MIN_MEMORY))
        args += ["--memory", memory, "--memory-swap", memory]
    if limits.cores is not None:
        args += ["--cpus", f"{max(limits.cores, 0.01):.2f}"]
    if limits.share is not None:
        args += ["--cpu-shares", str(min(max(2, int(limits.share * _CPU_SHARES)), 262_144))]
    if limits.tasks is not None:
        args += ["--pids-limit", str(limits.tasks)]
    return args


def _user_args(container: Mapping[str, Any]) -> list[str]:
    """Return the options for its user and its working directory."""
    args: list[str] = []
    user = get_int(container, "securityContext", "runAsUser")
    group = get_int(container, "securityContext", "runAsGroup")
    if user is not None:
        args += ["--user", f"{user}" if group is None else f"{user}:{group}"]
    if get_str(container, "workingDir"):
        args += ["--workdir", get_str(container, "workingDir")]
    return args


def exit_status(state: ContainerState | None) -> ExitStatus | None:
    """Return how a container ended; None while it runs."""
    if state is None:
        return ExitStatus(None)
    if state.status in ("running", "paused", "restarting"):
        return None
    if state.status == "created":
        return ExitStatus(None, message=state.error or "it was created, and never started")
    if state.out_of_memory:
        code = 137 if state.exit_code is None else state.exit_code
        return ExitStatus(code, OOM_KILLED, "it used more memory than its limit")
    return ExitStatus(state.exit_code, message=state.error)
