# SPDX-License-Identifier: Apache-2.0
"""Which process this is, beyond its number, which the kernel gives to another one later. Linux's /proc.

Used by `process`, by `fleet.local`, and by `jobs.leases` to see whether another gateway of this machine still lives.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_ZOMBIE = "ZX"


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc tells of a process."""

    pid: int
    state: str
    session: int
    started: int
    """In clock ticks since the machine's start: with the pid and the boot, this names one process forever."""

    @property
    def lives(self) -> bool:
        """Whether it still does anything; a zombie does not."""
        return self.state not in _ZOMBIE


def stat_of(pid: int) -> Stat | None:
    """None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may hold anything, parentheses and spaces too.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(pid, fields[0].decode(), int(fields[3]), int(fields[19]))


def command_of(pid: int) -> list[str]:
    """The words it was started with; none if it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in raw.split(b"\0")[:-1]]


def variables_of(pid: int) -> list[bytes]:
    """`NAME=value` as it was started with; none if it is gone, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def session_members(session: int) -> list[Stat]:
    """All living processes of a session, by looking at every process of the machine."""
    found = (stat_of(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in found if stat is not None and stat.session == session and stat.lives]


@lru_cache(maxsize=1)
def boot() -> str:
    """This start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def own_name(extra: str = "") -> str:
    """This process, for others of this machine and elsewhere."""
    pid = os.getpid()
    found = stat_of(pid)
    return f"{socket.gethostname()}/{boot()}/{pid}/{found.started if found else 0}/{extra}"


def is_surely_dead(name: str) -> bool:
    """Whether a process that called itself by `own_name` has ended; False where that cannot be told from here."""
    parts = name.split("/")
    if len(parts) < 4 or parts[0] != socket.gethostname() or not parts[2].isdigit():
        return False
    if parts[1] != boot():
        return True
    found = stat_of(int(parts[2]))
    return found is None or not found.lives or str(found.started) != parts[3]
