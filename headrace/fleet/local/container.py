# SPDX-License-Identifier: Apache-2.0
"""One container of a pod: start, probes, restarts with back-off, stop.

Its folder has `process.json`, which identifies what runs, `state.json`, its state, and `log`, its output. The next daemon
reads them and continues without a restart. A `ContainerRuntime` runs the container.
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
from headrace.fleet.local.container_command import (
    CommandContext,
    ContainerStartError,
    container_environment,
    localize_args,
)
from headrace.fleet.local.container_runtime import (
    LOG,
    PREVIOUS,
    ContainerRuntime,
    ContainerSpec,
    ExitStatus,
    RunningContainer,
)
from headrace.fleet.local.pod_status import (
    CRASH_LOOP,
    ContainerState,
    ContainerStatus,
    Role,
    load_state,
    terminated_state,
    update_state,
)
from headrace.fleet.local.probes import Probe, ProbeFailed, probe_check, wait_started, watch_liveness, watch_readiness
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import System
from headrace.fleet.status.conditions import format_time, parse_time
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_list, get_mapping, get_str
from headrace.platforms.log_files import last_lines, truncate_log

log = logging.getLogger("headrace.fleet")

_TAIL_LINES, _TAIL_BYTES = 20, 2048
_RETRY_DOUBLINGS = 5


class PodInterface(Protocol):
    """The interface of a pod that a container uses."""

    @property
    def system(self) -> System:
        """The operating system."""

    @property
    def ports(self) -> Mapping[int, int]:
        """Container ports, and the ports of this machine in their place."""

    @property
    def grace_seconds(self) -> float:
        """Seconds between SIGTERM and SIGKILL."""

    @property
    def restart_policy(self) -> str:
        """Always, OnFailure or Never."""

    def container_spec(self, container: Document, folder: Path) -> ContainerSpec:
        """Return what to run. Raises ContainerStartError, OSError, HeadraceError; ResourceExhausted while it must wait."""

    def command_context(self, container: Document) -> CommandContext:
        """Return the context of a probe's command. Raises as `container_spec`."""

    def changed(self) -> None:
        """Handle a changed state of a container."""

    def container_ended(self, container: Container) -> None:
        """Handle the end of a container that will be restarted."""

    def record_event(self, kind: str, reason: str, message: str) -> None:
        """Record an event of the pod."""


class Container:
    """A container and the task that runs it. Used from the loop's thread only."""

    def __init__(
        self,
        folder: Path,
        document: Document,
        role: Role,
        pod: PodInterface,
        settings: LocalSettings,
        runtime: ContainerRuntime,
    ) -> None:
        self.folder = folder
        self.role = role
        self.state = load_state(folder, ContainerState())
        self._document = document
        self._pod = pod
        self._settings = settings
        self._runtime = runtime
        self._running: RunningContainer | None = runtime.adopt(folder)
        self._restart_requested = asyncio.Event()
        self._retry_requested = asyncio.Event()
        self._backoff_reset = asyncio.Event()
        self._started = asyncio.Event()
        if self.state.started:
            self._started.set()

    @property
    def name(self) -> str:
        """Its name in the pod."""
        return get_str(self._document, "name")

    @property
    def status(self) -> ContainerStatus:
        """Its part of the pod's status."""
        return ContainerStatus(self._document, self.role, self.state)

    @property
    def running(self) -> RunningContainer | None:
        """The current run of the container; None while it does not run."""
        return self._running

    async def wait_started(self) -> None:
        """Wait until its startup probe has succeeded once."""
        await self._started.wait()

    async def logs(self, tail: int, previous: bool = False) -> str:
        """Return the last lines of its log."""
        if self._running is not None and not previous:
            return await self._running.logs(tail, 2 * self._settings.log_bytes)
        return last_lines(self.folder / (PREVIOUS if previous else LOG), tail, 2 * self._settings.log_bytes)

    def restart(self) -> None:
        """Restart it: another container of its group has ended."""
        if self._running is not None:
            self._restart_requested.set()

    def retry(self, *, reset_backoff: bool = False) -> None:
        """Try again to start it, if it waits. `reset_backoff`: also if it is in a crash loop, whose cause may be fixed."""
        if reset_backoff:
            self._backoff_reset.set()
        self._retry_requested.set()

    def rotate_log(self) -> None:
        """Drop the beginning of a long log."""
        with contextlib.suppress(OSError):
            truncate_log(self.folder / LOG, self._settings.log_bytes)

    def detach(self) -> None:
        """Leave it running when the daemon ends."""
        if self._running is not None:
            self._running.detach()

    async def stop(self) -> None:
        """Stop and remove it."""
        self.state.ready = False
        running = self._running or self._runtime.adopt(self.folder)  # its start may have been interrupted
        if running is not None:
            await running.stop(self._pod.grace_seconds)
            await running.remove()
            self._running = None

    # The task

    async def run(self) -> None:
        """Keep it running until it has ended for good."""
        failures = 0
        if self._running is None and self.state.started_at:  # the container ended while no daemon ran
            self._record_end(ExitStatus(None), last_lines(self.folder / LOG, _TAIL_LINES, _TAIL_BYTES))
            self._pod.container_ended(self)
            self.state.restarts += not self.state.ended
        if self._running is not None and not self.state.started_at:  # the last daemon could not record its start
            self._update(started_at=format_time(self._now()))
        while not self.state.ended:
            self._restart_requested.clear()
            if self._running is None:
                self._retry_requested.clear()
                self._running = await self._start()
            if self._running is None:
                seconds = self._settings.retry_seconds * 2.0 ** min(failures, _RETRY_DOUBLINGS)
                await self._wait_event(self._retry_requested, seconds)
                failures += 1
                continue
            failures = 0
            restarted = await self._watch(self._running)
            if self.state.ended:
                break
            if restarted:
                self.state.restarts += 1
                continue
            self._pod.container_ended(self)
            await self._back_off()

    async def _start(self) -> RunningContainer | None:
        try:
            spec = self._pod.container_spec(self._document, self.folder)
            spec = replace(spec, low_priority=spec.low_priority and not self.state.restarts)
            self._keep_previous_log()
            running = await self._runtime.start(spec)
        except ResourceExhausted as error:
            self._update(reason="", message=error.message)
        except ContainerStartError as error:
            if self.state.message != error.message:
                self._pod.record_event("Warning", "Failed", error.message)
            self._update(reason=error.reason, message=error.message)
        except (OSError, HeadraceError) as error:
            message = error.message if isinstance(error, HeadraceError) else os.strerror(error.errno or 0)
            if not self.state.message.startswith(message):
                self._pod.record_event("Warning", "Failed", message)
            self._update(reason="CreateContainerError", message=f"{message}; its folder is {self.folder}")
        else:
            self._update(reason="", message="", started_at=format_time(self._now()), started=False, ready=False)
            self._pod.record_event("Normal", "Started", f"{self.name}: {running.label}")
            return running
        return None

    async def _watch(self, running: RunningContainer) -> bool:
        """Wait until it ends, fails a probe, or `restart` is called; return whether a restart was requested."""
        ended = asyncio.ensure_future(running.wait())
        probing = asyncio.ensure_future(self._probe())
        restarted = asyncio.ensure_future(self._restart_requested.wait())
        try:
            await asyncio.wait({ended, probing, restarted}, return_when=asyncio.FIRST_COMPLETED)
            by_itself, message = ended.done(), ""
            self._update(ready=False)
            if not by_itself:
                failure = probing.exception() if probing.done() else None
                if isinstance(failure, ProbeFailed):
                    message = f"{failure}; it was stopped"
                    self._pod.record_event("Warning", "Unhealthy", f"{self.name}: {failure}")
                elif failure is not None:
                    log.error("Cannot run the probes of %s", self.name, exc_info=failure)
                await running.stop(self._pod.grace_seconds)
            exit_status = await ended
            message = message or exit_status.message or await running.logs(_TAIL_LINES, _TAIL_BYTES)
            await running.remove()
            self._running = None
            self._record_end(exit_status, message)
            return restarted.done() and not by_itself
        finally:
            for task in (ended, probing, restarted):
                task.cancel()
            await asyncio.gather(ended, probing, restarted, return_exceptions=True)

    async def _probe(self) -> None:
        """Run its probes. Raises ProbeFailed when it has to be restarted."""
        if self.role == "init":
            await asyncio.get_running_loop().create_future()
        startup, readiness, liveness = (
            self._probe_of(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        quick = self._settings.quick_seconds
        if startup is not None and not self.state.started:
            await wait_started(startup, quick)
        if not self.state.started:
            self._update(started=True)
        self._started.set()
        probes: list[asyncio.Future[None]] = []
        if liveness is not None:
            probes.append(asyncio.ensure_future(watch_liveness(liveness)))
        if readiness is None:
            self._set_ready(True)
        else:
            watch = watch_readiness(readiness, quick, self._set_ready, self.state.ready)
            probes.append(asyncio.ensure_future(watch))
        try:
            await asyncio.gather(*probes, asyncio.get_running_loop().create_future())
        finally:
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    def _probe_of(self, name: str) -> Probe | None:
        document = get_mapping(self._document, name)
        ports = get_list(self._document, "ports")
        port_names = {get_str(port, "name"): get_int(port, "containerPort") or 0 for port in ports}
        check = probe_check(document, self._pod.ports, port_names, self._exec)
        return Probe.parse(document, check) if check is not None else None

    async def _exec(self, args: list[str], seconds: float) -> bool:
        """Run the command of a probe; return whether it succeeds."""
        if self._running is None:
            return False
        try:
            context = self._pod.command_context(self._document)
            variables = {**container_environment(self._document, context), **context.environment}
            return await self._running.exec(localize_args(args, context), variables, seconds)
        except (ContainerStartError, OSError, HeadraceError):
            return False

    async def _back_off(self) -> None:
        """Wait before the next start. The first restart is immediate; a long run resets the back-off."""
        doublings = self.state.crashes - 1
        self.state.restarts += 1
        self.state.crashes += 1
        if doublings < 0:
            return
        limit = self._settings.back_off_most_seconds
        seconds = min(self._settings.back_off_seconds * 2.0 ** min(doublings, 16), limit)
        message = f"back-off {seconds:g} s restarting failed container {self.name}"
        self._update(reason=CRASH_LOOP, message=message)
        self._pod.record_event("Warning", "BackOff", message)
        self._backoff_reset.clear()
        await self._wait_event(self._backoff_reset, seconds)

    # Helpers

    def _record_end(self, exit_status: ExitStatus, message: str) -> None:
        state = self.state
        seconds = (self._now() - parse_time(state.started_at)).total_seconds() if state.started_at else 0.0
        if seconds >= self._settings.healthy_seconds:
            state.crashes = 0
        succeeded = exit_status.code == 0 and not exit_status.reason
        last = terminated_state(
            exit_status.code,
            state.started_at,
            format_time(self._now()),
            "" if succeeded else message,
            exit_status.reason,
        )
        policy = "Always" if self.role == "sidecar" else self._pod.restart_policy
        if policy == "Never" or (succeeded and (self.role == "init" or policy == "OnFailure")):
            self._update(reason="", message="", started_at="", started=False, ready=False, ended=last)
        else:
            restarting = {"reason": CRASH_LOOP, "message": "it is restarted"}
            self._update(**restarting, started_at="", started=False, ready=False, last=last)
        if not succeeded:
            reason = f" ({last['reason']})" if exit_status.reason else ""
            self._pod.record_event("Warning", "Ended", f"{self.name} ended with {last['exitCode']}{reason}")

    def _set_ready(self, ready: bool) -> None:
        if ready and self._running is not None:
            self._running.mark_ready()
        self._update(ready=ready)

    def _update(self, **changes: Any) -> None:
        def on_write_error(message: str) -> None:
            self._pod.record_event("Warning", "DiskPressure", message)

        if update_state(self.state, self.folder, changes, on_write_error):
            self._pod.changed()

    def _now(self) -> datetime:
        return self._pod.system.now()

    def _keep_previous_log(self) -> None:
        self.rotate_log()
        with contextlib.suppress(FileNotFoundError):
            (self.folder / LOG).replace(self.folder / PREVIOUS)

    async def _wait_event(self, event: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
