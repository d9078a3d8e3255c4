# SPDX-License-Identifier: Apache-2.0
"""What the processes of pods use: cores and resident memory, by /proc. For `autoscaling` and `watching`; blocking.

A pod is a session. Whose processes they are is looked up once in a while, as that means a look at every process of the
machine; what they use is read each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_MEMBERS_SECONDS = 10.0
_Process = tuple[int, int]
"""Its number, and when it started."""


@dataclass(frozen=True)
class Used:
    """By a pod, at one moment."""

    ticks: dict[_Process, int] = field(default_factory=dict)
    """Of a core's time, by process."""
    memory: int = 0
    tasks: int = 0
    """Processes and threads."""


class Usage:
    """See the module. Not for two threads at once."""

    def __init__(self, proc: Path = Path("/proc"), members_seconds: float = _MEMBERS_SECONDS) -> None:
        self._proc = proc
        self._members_seconds = members_seconds
        self._members: dict[int, set[int]] = {}
        self._looked = -members_seconds
        self._tick = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")

    def read(self, now: float, sessions: Iterable[int]) -> dict[int, Used]:
        """What each session uses."""
        wanted = set(sessions)
        if now - self._looked >= self._members_seconds or not wanted <= self._members.keys():
            self._looked, self._members = now, self._sessions(wanted)
        return {session: self._used(session) for session in wanted}

    def cores(self, before: Used, after: Used, seconds: float) -> float:
        """Busy between two looks. A process that was not there before counts from the next look on."""
        grown = sum(max(0, ticks - before.ticks[each]) for each, ticks in after.ticks.items() if each in before.ticks)
        return grown / self._tick / seconds if seconds > 0 else 0.0

    def _used(self, session: int) -> Used:
        ticks: dict[_Process, int] = {}
        memory = tasks = 0
        for pid in self._members[session]:
            found = self._fields(pid)
            if found is not None and int(found[3]) == session:
                ticks[(pid, int(found[19]))] = int(found[11]) + int(found[12])
                memory += int(found[21]) * self._page
                tasks += int(found[17])
        return Used(ticks, memory, tasks)

    def _sessions(self, wanted: set[int]) -> dict[int, set[int]]:
        members: dict[int, set[int]] = {each: set() for each in wanted}
        for name in os.listdir(self._proc):
            found = self._fields(int(name)) if name.isdecimal() else None
            if found is not None and int(found[3]) in members:
                members[int(found[3])].add(int(name))
        return members

    def _fields(self, pid: int) -> list[bytes] | None:
        """What stands behind the name in `stat`; None if it is gone."""
        try:
            said = (self._proc / str(pid) / "stat").read_bytes()
        except OSError:
            return None
        found = said[said.rindex(b")") + 2 :].split()
        return found if len(found) > 21 else None
