# SPDX-License-Identifier: Apache-2.0
"""The operating system as the fleet uses it: time, processes, listening sockets, resource usage.

Passed to all parts that read a clock or start routers and jobs; a `ContainerRuntime` runs containers. Tests pass a simulated
system, so that minutes of a fleet take milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.core.clock import Clock
from headrace.net.sockets import Address, Listener
from headrace.platforms.processes import Command, Process, spawn

_MEMBERS_SECONDS = 10.0
_ProcessKey = tuple[int, int]
"""The pid and the start time of a process."""


class System:
    """The system of this machine."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def now(self) -> datetime:
        """Return the date and time, in UTC."""
        return datetime.fromtimestamp(self.clock.wall(), UTC)

    def spawn(self, command: Command, log: Path, record: Callable[[Mapping[str, Any]], None]) -> Process:
        """Start a process; see `processes.spawn`."""
        return spawn(command, log, record)

    def find_process(self, record: Mapping[str, Any] | None) -> Process | None:
        """Return the process of a record, if it is alive."""
        return Process.from_record(record)

    def listen(self, address: Address) -> Listener:
        """Listen on an address, for another process to accept. Raises FailedPrecondition."""
        return Listener(address)

    def usage(self) -> UsageReader:
        """Return a reader of the CPU time and memory of processes."""
        return UsageReader()


@dataclass(frozen=True)
class ResourceUsage:
    """The resource usage of a session at one moment."""

    ticks: dict[_ProcessKey, int] = field(default_factory=dict)
    """CPU time in clock ticks, by process."""
    memory: int = 0
    """Resident bytes."""
    tasks: int = 0
    """Processes and threads."""


class UsageReader:
    """Reads the usage of sessions from /proc. Blocking; not for two threads at once.

    The members of sessions are looked up rarely, as that reads every process of the machine; their usage is read each time.
    """

    def __init__(self, proc: Path = Path("/proc"), members_seconds: float = _MEMBERS_SECONDS) -> None:
        self._proc = proc
        self._members_seconds = members_seconds
        self._members: dict[int, set[int]] = {}
        self._members_read = -members_seconds
        self._tick = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")

    def read(self, now: float, sessions: Iterable[int]) -> dict[int, ResourceUsage]:
        """Return the usage of each session."""
        wanted = set(sessions)
        if now - self._members_read >= self._members_seconds or not wanted <= self._members.keys():
            self._members_read, self._members = now, self._find_members(wanted)
        return {session: self._read_session(session) for session in wanted}

    def cores(self, before: ResourceUsage, after: ResourceUsage, seconds: float) -> float:
        """Return the busy cores between two readings. A new process counts from the next reading on."""
        ticks = sum(max(0, count - before.ticks[key]) for key, count in after.ticks.items() if key in before.ticks)
        return ticks / self._tick / seconds if seconds > 0 else 0.0

    def _read_session(self, session: int) -> ResourceUsage:
        ticks: dict[_ProcessKey, int] = {}
        memory = tasks = 0
        for pid in self._members[session]:
            fields = self._read_stat(pid)
            if fields is not None and int(fields[3]) == session:
                ticks[(pid, int(fields[19]))] = int(fields[11]) + int(fields[12])
                memory += int(fields[21]) * self._page
                tasks += int(fields[17])
        return ResourceUsage(ticks, memory, tasks)

    def _find_members(self, sessions: set[int]) -> dict[int, set[int]]:
        members: dict[int, set[int]] = {session: set() for session in sessions}
        for name in os.listdir(self._proc):
            fields = self._read_stat(int(name)) if name.isdecimal() else None
            if fields is not None and int(fields[3]) in members:
                members[int(fields[3])].add(int(name))
        return members

    def _read_stat(self, pid: int) -> list[bytes] | None:
        """Return the fields after the name in `stat`; None if the process is gone."""
        try:
            content = (self._proc / str(pid) / "stat").read_bytes()
        except OSError:
            return None
        fields = content[content.rindex(b")") + 2 :].split()
        return fields if len(fields) > 21 else None
