# SPDX-License-Identifier: Apache-2.0
"""The process runtime: containers as processes of this machine.

The kernel enforces their limits (`cgroups`) where this user may create control groups; otherwise `LimitWatcher` polls them,
and CPU limits are approximated by CPU affinity. Cores are not assigned to containers otherwise: the kernel uses idle cores
better than a fixed assignment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

from headrace.core.fault_points import fault_point
from headrace.core.files import read_json, write_json
from headrace.fleet.local.cgroups import CONTROLLERS, Cgroup, Cgroups, find_cgroups, parse_cgroup
from headrace.fleet.local.container_command import ContainerCommand, ContainerStartError
from headrace.fleet.local.container_runtime import LOG, RECORD, ContainerSpec, ExitStatus, ResourceLimits
from headrace.fleet.local.pod_status import OOM_KILLED
from headrace.fleet.local.probes import check_exec
from headrace.fleet.local.system import ResourceUsage, UsageReader
from headrace.platforms.log_files import last_lines
from headrace.platforms.processes import (
    Command,
    Process,
    headrace_command,
    inherited_environment,
    session_members,
    spawn,
)

log = logging.getLogger("headrace.fleet")

_LOW_PRIORITY_SECONDS = 60.0
_MEBIBYTE = 1 << 20
_MEMBERS_SECONDS = 1.0
_PRIORITY_PASSES = 5


class ProcessRuntime:
    """Implements `ContainerRuntime`."""

    runs_images = False

    def __init__(self, groups: Cgroups | None = None, watcher: LimitWatcher | None = None) -> None:
        self._groups = groups
        self._watcher = watcher or LimitWatcher()
        self._affinity: dict[Path, tuple[int, ...]] = {}
        """Cores of containers whose CPU limit is set by affinity, by their folders."""

    async def open(self, pods: Collection[str]) -> None:
        """Find the control groups. Every process of the fleet has a record, so there is nothing to remove."""
        if self._groups is None:
            self._groups = find_cgroups()
        controllers = [name for name in CONTROLLERS if name in self._groups.places]
        log.info(
            "Limits of containers are enforced by %s",
            f"cgroups ({', '.join(controllers)})" if controllers else "polling",
        )

    def adopt(self, folder: Path) -> ProcessContainer | None:
        """Return the process of a container's record, if it is alive."""
        record = read_json(folder / RECORD) or {}
        process, group = Process.from_record(record), parse_cgroup(record.get("groups"), record.get("weighing"))
        if process is None:
            if group is not None:
                group.remove()
            return None
        cores = record.get("cores")
        if isinstance(cores, list):
            self._affinity[folder] = tuple(core for core in cores if isinstance(core, int))
        weight = record.get("weight")
        return ProcessContainer(
            self,
            process,
            folder,
            group,
            _parse_limits(record.get("watched")),
            low_priority=bool(record.get("late")),
            weight=weight if isinstance(weight, str) else "",
        )

    async def start(self, spec: ContainerSpec) -> ProcessContainer:
        """Start the process in its control group; its record is written before it runs."""
        environment = inherited_environment(os.environ, "XDG_") | {
            "PYTHONUNBUFFERED": "1",
            **_temporary_directory(spec),
            **spec.command.environment,
        }
        command = Command(find_program(spec.command, environment), environment, spec.work_folder)
        group, watched = self._create_group(spec)
        cores = self._choose_cores(spec)
        weight = _lower_group_priority(group) if spec.low_priority else ""
        is_low = bool(weight)

        def record(identity: Mapping[str, Any]) -> None:
            nonlocal is_low
            by_policy = spec.low_priority and not weight and lower_priority(identity["pid"])
            is_low = is_low or by_policy
            if group is not None:
                group.join(identity["pid"], late=by_policy)
            kept = {"memory": watched.memory, "tasks": watched.tasks}
            content = {
                **identity,
                **_group_paths(group),
                "cores": cores,
                "watched": kept,
                "late": is_low,
                "weight": weight,
            }
            fault_point("fleet.container.record")
            write_json(spec.folder / RECORD, content, durable=False)
            if cores:
                os.sched_setaffinity(identity["pid"], cores)

        try:
            process = spawn(command, spec.folder / LOG, record)
        except BaseException:
            if group is not None:
                group.remove()
            self.release_cores(spec.folder)
            raise
        return ProcessContainer(self, process, spec.folder, group, watched, low_priority=is_low, weight=weight)

    async def close(self) -> None:
        """Stop polling, and remove empty control groups."""
        await self._watcher.close()
        if self._groups is not None:
            self._groups.close()

    def release_cores(self, folder: Path) -> None:
        """Release the cores of a container that has ended."""
        self._affinity.pop(folder, None)

    async def wait_exceeded(self, session: int, limits: ResourceLimits) -> ExitStatus:
        """Wait until a session exceeds its limits; see `LimitWatcher.wait_exceeded`."""
        return await self._watcher.wait_exceeded(session, limits)

    def _create_group(self, spec: ContainerSpec) -> tuple[Cgroup | None, ResourceLimits]:
        """Return its control group, and the limits that have to be polled."""
        limits, places = spec.limits, self._groups.places if self._groups is not None else {}
        group = None
        if limits and self._groups is not None and places:
            try:
                group = self._groups.create(f"{spec.pod}-{spec.name}", limits)
            except OSError as error:
                log.warning("Cannot create a cgroup for container %s: %s", spec.name, os.strerror(error.errno or 0))
                places = {}
        polled = replace(
            limits,
            memory=None if "memory" in places else limits.memory,
            tasks=None if "pids" in places else limits.tasks,
        )
        return group, polled

    def _choose_cores(self, spec: ContainerSpec) -> tuple[int, ...]:
        """Return the cores with the fewest containers, if only CPU affinity can limit it; else none."""
        available = sorted(os.sched_getaffinity(0))
        places = self._groups.places if self._groups is not None else {}
        if spec.limits.cores is None or "cpu" in places or spec.limits.cores >= len(available):
            return ()
        used = Counter(core for cores in self._affinity.values() for core in cores)
        chosen = sorted(available, key=lambda core: (used[core], core))[: max(1, ceil(spec.limits.cores))]
        self._affinity[spec.folder] = tuple(chosen)
        return tuple(chosen)


class ProcessContainer:
    """Implements `RunningContainer`."""

    def __init__(
        self,
        runtime: ProcessRuntime,
        process: Process,
        folder: Path,
        group: Cgroup | None,
        watched: ResourceLimits,
        *,
        low_priority: bool = False,
        weight: str = "",
    ) -> None:
        self._runtime = runtime
        self._process = process
        self._folder = folder
        self._group = group
        self._watched = watched
        self._low_priority = low_priority
        """Whether its CPU priority is lowered; limited in time, since a busy machine may have no idle CPU time."""
        self._weight = weight
        """The CPU weight of its group, restored when it is ready."""
        if low_priority:
            asyncio.get_running_loop().call_later(_LOW_PRIORITY_SECONDS, self.mark_ready)

    @property
    def label(self) -> str:
        """Its name in events."""
        return f"process {self._process.pid}"

    @property
    def session(self) -> int | None:
        """The session that the process leads."""
        return self._process.pid

    async def wait(self) -> ExitStatus:
        """Wait until it ends, or exceeds a polled limit and is killed."""
        if self._watched.memory is None and self._watched.tasks is None:
            return self._exit_status(await self._process.wait())
        ended = asyncio.ensure_future(self._process.wait())
        exceeded = asyncio.ensure_future(self._runtime.wait_exceeded(self._process.pid, self._watched))
        try:
            await asyncio.wait({ended, exceeded}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return self._exit_status(ended.result())
            await self._process.kill()
            return exceeded.result()
        finally:
            for task in (ended, exceeded):
                task.cancel()
            await asyncio.gather(ended, exceeded, return_exceptions=True)

    async def stop(self, grace_seconds: float) -> None:
        """Stop its session."""
        await self._process.stop(grace_seconds)

    async def remove(self) -> None:
        """Kill its session and remove its control group."""
        await self._process.kill()
        if self._group is not None:
            await asyncio.to_thread(self._group.remove)
        self._runtime.release_cores(self._folder)

    async def exec(self, args: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
        """Run a command beside it."""
        return await check_exec(args, variables, seconds)

    async def logs(self, tail: int, max_bytes: int) -> str:
        """Return the last lines of its log file."""
        return last_lines(self._folder / LOG, tail, max_bytes)

    def mark_ready(self) -> None:
        """Restore its CPU priority."""
        if self._low_priority and self._process.is_alive:
            restore_priority(self._process.pid)
            if self._group is not None:
                self._group.restore_priority(self._weight)
                self._group.join_all(lambda: [stat.pid for stat in session_members(self._process.pid)])
        self._low_priority = False

    def detach(self) -> None:
        """Leave it running when the daemon ends."""
        self._process.detach()

    def _exit_status(self, code: int | None) -> ExitStatus:
        if code != 0 and self._group is not None and self._group.out_of_memory():
            return ExitStatus(-9 if code is None else code, OOM_KILLED, "it used more memory than its limit")
        return ExitStatus(code)


def _lower_group_priority(group: Cgroup | None) -> str:
    """Lower the priority of a group, unless `lower_priority` can do it better; return its weight if it was lowered."""
    return group.lower_priority() if group is not None and not (group.weighing and can_restore_priority()) else ""


def _group_paths(group: Cgroup | None) -> dict[str, list[str]]:
    if group is None:
        return {"groups": [], "weighing": []}
    return {"groups": [*map(str, group.paths)], "weighing": [*map(str, group.weighing)]}


def find_program(command: ContainerCommand, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command line with the path of its program. Raises ContainerStartError if it is not on this machine."""
    if command.is_headrace:
        return (*headrace_command(), *command.args)
    name = command.args[0]
    path = shutil.which(name, path=environment.get("PATH"))
    if path is None and name in ("python", "python3"):
        path = sys.executable
    if path is None:
        raise ContainerStartError(
            "ErrImageNeverPull",
            f"{name} is not on this machine: install it, or run images by `headrace up --driver docker`",
        )
    return (path, *command.args[1:])


def _temporary_directory(spec: ContainerSpec) -> dict[str, str]:
    mounts = {mount.mount_path.rstrip("/"): mount.host_path for mount in spec.mounts}
    return {"TMPDIR": mounts.get("/tmp", str(spec.work_folder))}  # noqa: S108  the container's


def _parse_limits(content: object) -> ResourceLimits:
    limits: Mapping[str, Any] = content if isinstance(content, dict) else {}
    memory, tasks = limits.get("memory"), limits.get("tasks")
    return ResourceLimits(
        memory=memory if isinstance(memory, int) else None, tasks=tasks if isinstance(tasks, int) else None
    )


# Limits by polling


class LimitWatcher:
    """Polls the sessions that have limits which no control group enforces; does nothing while there are none.

    Resident memory counts shared pages twice, so a session that seems to exceed its limit is measured again by proportional
    set size. RLIMIT_NPROC is not an alternative: it counts all processes of the user.
    """

    def __init__(self, seconds: float = 0.25, proc: Path = Path("/proc")) -> None:
        self._seconds = seconds
        self._proc = proc
        self._usage = UsageReader(proc, _MEMBERS_SECONDS)
        self._watched: dict[int, tuple[ResourceLimits, asyncio.Future[ExitStatus]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait_exceeded(self, session: int, limits: ResourceLimits) -> ExitStatus:
        """Wait until a session exceeds its limits; return the exit status to report after it is killed."""
        exceeded: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self._watched[session] = (limits, exceeded)
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        try:
            return await exceeded
        finally:
            self._watched.pop(session, None)

    async def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        try:
            while self._watched:
                await asyncio.sleep(self._seconds)
                watched = dict(self._watched)
                limits = {session: limit for session, (limit, _) in watched.items()}
                for session, status in (await asyncio.to_thread(self._poll, limits)).items():
                    if not watched[session][1].done():
                        watched[session][1].set_result(status)
        finally:
            self._task = None

    def _poll(self, limits: dict[int, ResourceLimits]) -> dict[int, ExitStatus]:
        usage = self._usage.read(time.monotonic(), limits)
        statuses = {session: self._check(used, limits[session]) for session, used in usage.items()}
        return {session: status for session, status in statuses.items() if status is not None}

    def _check(self, used: ResourceUsage, limits: ResourceLimits) -> ExitStatus | None:
        if limits.tasks is not None and used.tasks > limits.tasks:
            message = f"it had {used.tasks} processes and threads, and may have {limits.tasks}: raise --max-processes"
            return ExitStatus(-9, "Error", message)
        if limits.memory is None or used.memory <= limits.memory:
            return None
        memory = self._proportional_memory(pid for pid, _ in used.ticks)
        if memory is None:
            memory = used.memory
        if memory <= limits.memory:
            return None
        message = f"it used {_mebibytes(memory)} of memory, and its limit is {_mebibytes(limits.memory)}"
        return ExitStatus(-9, OOM_KILLED, message)

    def _proportional_memory(self, pids: Iterable[int]) -> int | None:
        """Return the proportional set size of processes; None if the kernel does not report it."""
        total = None
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                for line in (self._proc / str(pid) / "smaps_rollup").read_bytes().splitlines():
                    if line.startswith(b"Pss:"):
                        total = (total or 0) + int(line.split()[1]) * 1024
        return total


def _mebibytes(amount: int) -> str:
    return f"{amount / _MEBIBYTE:.0f} MiB"


# CPU priority
#
# The new replica of a rolling update loads libraries and a model for seconds, which would slow down requests to the other
# replicas on a busy machine. Until it is ready it gets the CPU time that others leave. A process in a CPU control group is
# lowered by its group (`cgroups`), which is what the kernel compares then. Others are lowered by scheduling policy, but only
# if this user can restore it: most users may lower a priority and not raise it. The policy is better where both work: to
# processes outside, an idle group still weighs as much as its parent group. So a process whose group only has a weight joins
# the group when it is ready. SCHED_IDLE rather than nice: other processes preempt it at once, not at the end of its slice.


def lower_priority(pid: int) -> bool:
    """Give a new process the lowest CPU priority; return whether that is possible."""
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(pid) == os.SCHED_OTHER and can_restore_priority():
            _set_policy(pid, os.SCHED_IDLE)
            return True
    return False


def restore_priority(session: int) -> None:
    """Restore the normal priority of all threads of a session."""
    for _ in range(_PRIORITY_PASSES):
        lowered = [thread for thread in _threads(session) if _is_lowered(thread)]
        if not lowered:
            return
        for thread in lowered:  # threads that it starts meanwhile inherit the policy; the next pass finds them
            with contextlib.suppress(OSError):
                _set_policy(thread, os.SCHED_OTHER)


def _set_policy(thread: int, policy: int) -> None:
    os.sched_setscheduler(thread, policy, os.sched_param(0))


def _is_lowered(thread: int) -> bool:
    with contextlib.suppress(OSError):
        return os.sched_getscheduler(thread) == os.SCHED_IDLE
    return False


def _threads(session: int) -> Iterator[int]:
    for member in session_members(session):
        with contextlib.suppress(OSError):
            yield from map(int, os.listdir(f"/proc/{member.pid}/task"))


@lru_cache(maxsize=1)
def can_restore_priority() -> bool:
    """Whether this user may raise a priority again. Tried in a thread: in a container the capabilities do not show it."""
    restored = []

    def lower_and_restore() -> None:
        with contextlib.suppress(OSError):
            for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
                _set_policy(threading.get_native_id(), policy)
            restored.append(True)

    thread = threading.Thread(target=lower_and_restore, name="headrace-priority")
    thread.start()
    thread.join()
    return bool(restored)
