# SPDX-License-Identifier: Apache-2.0
"""The server of a replica: the command of the service's container, as a child process on the replica's node.

The container's command, its volumes and its probes are those of `headrace up`. The kernel sends the process SIGTERM when the
replica's process ends, even by SIGKILL, so that no server keeps a GPU which Ray gives to another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Final

from headrace.core import child_stub
from headrace.core.errors import FailedPrecondition, HeadraceError, NotFound, Unavailable
from headrace.core.exit_status import describe_exit
from headrace.fleet.agent.model_sources import credentials_from, parse_source
from headrace.fleet.local.container_command import (
    ADDRESS,
    CommandContext,
    ContainerStartError,
    build_command,
    container_ports,
    localize_args,
)
from headrace.fleet.local.probes import Probe, ProbeFailed, check_exec, check_tcp, probe_check, wait_started
from headrace.fleet.local.process_runtime import find_program
from headrace.fleet.local.settings import state_dir
from headrace.fleet.local.volumes import volume_mounts
from headrace.fleet.planning.pod_templates import main_container
from headrace.fleet.ray_serve.replica_spec import GroupMember, ReplicaSpec
from headrace.models.storage.fetch import FetchSettings, fetch_location
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_list, get_mapping, get_str, name_of
from headrace.platforms.log_files import last_lines, truncate_log
from headrace.platforms.node_resources import free_port
from headrace.platforms.processes import Command, Process, inherited_environment, spawn

log = logging.getLogger("headrace.ray")

LOG = "server.log"
_LOG_BYTES = 16 << 20
_TAIL_LINES, _TAIL_BYTES = 20, 8192
_POLL_SECONDS = 0.05
_START_SECONDS: Final = 900.0
"""Time limit of a start, for a container without a startup probe."""


class ServerProcess:
    """One server: a process, its port, and the folder of its log and volumes. Used from the loop's thread only."""

    def __init__(self, spec: ReplicaSpec, folder: Path, port: int, process: Process, context: CommandContext) -> None:
        self._spec = spec
        self._folder = folder
        self._process = process
        self._context = context
        self._container = main_container(get_mapping(spec.pod, "spec"))
        self.port = port

    @property
    def ports(self) -> Mapping[int, int]:
        """The ports of the container, and those of this node in their place."""
        return self._context.ports

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """The file with its output."""
        return self._folder / LOG

    async def wait(self) -> int | None:
        """Wait for its end; return the exit code, negative for a signal."""
        return await self._process.wait()

    async def wait_ready(self) -> None:
        """Wait until its startup probe, or else its readiness probe, succeeds. Raises FailedPrecondition."""
        ended = asyncio.ensure_future(self.wait())
        started = asyncio.ensure_future(self._wait_probe())
        try:
            await asyncio.wait({ended, started}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise FailedPrecondition(
                    f"{self._title} {self._ending(ended.result())} before it was ready{self._tail()}"
                )
            try:
                started.result()
            except ProbeFailed:
                raise FailedPrecondition(f"{self._title} did not become ready in time{self._tail()}") from None
        finally:
            for task in (ended, started):
                task.cancel()
            await asyncio.gather(ended, started, return_exceptions=True)

    async def check(self) -> None:
        """Raise Unavailable if it has ended, or its readiness probe fails."""
        if not self._process.is_alive:
            raise Unavailable(f"{self._title} {self._ending(self._process.exit_code())}{self._tail()}")
        with contextlib.suppress(OSError):
            truncate_log(self.log_path, _LOG_BYTES)
        if not await self._probe("readinessProbe").check():
            raise Unavailable(f"{self._title} is not ready: its readiness probe fails")

    def end_message(self, code: int | None) -> str:
        """Return how it ended, with its last lines, for the log."""
        return f"{self._title} {self._ending(code)}{self._tail()}"

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, then SIGKILL to its whole session; remove its folder."""
        await self._process.stop(grace_seconds)
        await asyncio.to_thread(shutil.rmtree, self._folder, True)

    @property
    def _title(self) -> str:
        return f"the server of {self._spec.name} on {self._context.node} (process {self.pid})"

    @staticmethod
    def _ending(code: int | None) -> str:
        return "has ended" if code is None else f"has ended ({describe_exit(code)})"

    def _tail(self) -> str:
        lines = last_lines(self.log_path, _TAIL_LINES, _TAIL_BYTES)
        return f"; its last lines:\n{lines}" if lines else ""

    async def _wait_probe(self) -> None:
        if get_mapping(self._container, "startupProbe"):
            await wait_started(self._probe("startupProbe"), _POLL_SECONDS)
            return
        probe = self._probe("readinessProbe")
        await wait_started(replace(probe, failures=ceil(_START_SECONDS / probe.period)), _POLL_SECONDS)

    def _probe(self, name: str) -> Probe:
        """Return a probe of the container; without one, whether the server accepts connections."""
        document = get_mapping(self._container, name)
        names = {
            get_str(port, "name"): get_int(port, "containerPort") or 0 for port in get_list(self._container, "ports")
        }
        check = probe_check(document, self._context.ports, names, self._exec)
        return Probe.parse(document, check or (lambda: check_tcp(self.port, 1.0)))

    async def _exec(self, args: list[str], seconds: float) -> bool:
        environment = inherited_environment(os.environ, "XDG_") | dict(self._context.environment)
        return await check_exec(localize_args(args, self._context), environment, seconds)


async def start_server(
    spec: ReplicaSpec, member: GroupMember | None = None, environ: Mapping[str, str] = os.environ
) -> ServerProcess:
    """Start the server of a service on this node; it is not ready yet. `member`: its place, if it is one of a group.

    Raises HeadraceError: the model is not here, or the program is not installed.
    """
    node = socket.gethostname()
    path = await asyncio.to_thread(find_model, spec, node) if spec.model is not None else ""
    folder = Path(tempfile.mkdtemp(prefix=f"headrace-{spec.name}-"))
    try:
        # In the loop's thread, which lives as long as the replica: see `child_stub`.
        return _start(spec, member, node, path, folder, environ)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _start(
    spec: ReplicaSpec, member: GroupMember | None, node: str, model: str, folder: Path, environ: Mapping[str, str]
) -> ServerProcess:
    container = main_container(get_mapping(spec.pod, "spec"))
    ports = {number: free_port() for number in container_ports(spec.pod)}
    port = next(iter(ports.values()))
    try:
        models = {get_str(spec.model, "spec", "storage", "path"): model} if model else {}
        mounts = volume_mounts(spec.pod, container, folder, _find_nothing, models)
        paths = [
            (mount.mount_path, mount.host_path) for mount in mounts if mount.host_path != mount.mount_path.rstrip("/")
        ]
        context = CommandContext(spec.pod, node, ports, paths=paths)
        if member is not None:
            context = replace(
                context,
                leader_ports=member.leader_ports,
                leader_address=member.leader_address,
                environment=member.environment(),
            )
        command = build_command(context, container)
        environment = inherited_environment(environ, "XDG_") | {
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": dict(paths).get("/tmp", str(folder)),  # noqa: S108  the container's
            **command.environment,
        }
        program = find_program(command, environment)
    except ContainerStartError as error:
        raise FailedPrecondition(f"{spec.name} cannot start on {node}: {error.message}") from None
    argv = (sys.executable, "-I", "-S", child_stub.__file__, str(os.getpid()), *program)
    try:
        process = spawn(Command(argv, environment, folder), folder / LOG, lambda _: None)
    except OSError as error:
        raise FailedPrecondition(f"{spec.name} cannot start on {node}: {os.strerror(error.errno or 0)}") from None
    log.info("%s: process %d, port %d of %s, log in %s", spec.name, process.pid, port, ADDRESS, folder / LOG)
    return ServerProcess(spec, folder, port, process, context)


def find_model(spec: ReplicaSpec, node: str, fetch: Callable[..., Path] = fetch_location) -> str:
    """Return the folder of a service's model on this node; downloads it if it comes from elsewhere. Blocking.

    Raises NotFound with the name of the model and of the node, and what a download raises.
    """
    model: Document = spec.model or {}
    source = parse_source(model)
    local = source.uri.partition("://")[2] if source.kind == "here" else ""
    for path in (source.path, local):
        if path.startswith("/") and Path(path).exists():
            return path
    if source.kind != "download" or source.place is None:
        raise NotFound(
            f"model {name_of(model)}: {source.path or source.shown} is not on node {node}: put the model's files there, on "
            "every node of the cluster"
        )
    folder = state_dir() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        credentials = credentials_from(source, None)
        return str(fetch(source.place, folder, credentials, settings=FetchSettings(hub_files=source.files)))
    except HeadraceError as error:
        raise type(error)(f"model {name_of(model)} on node {node}: {error.message}") from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise FailedPrecondition(f"model {name_of(model)} cannot be written to {folder} of {node}: {reason}") from None


def _find_nothing(_kind: str, _name: str) -> None:
    """Return None: Ray has no ConfigMaps and Secrets."""
