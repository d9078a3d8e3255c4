# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of a server and all processes that it started, from /proc.

A process belongs to the server when its parent chain or its session leads to the process we started.
"""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class MachineCpu:
    """Seconds of CPU the whole machine has used since boot, and those the hypervisor took away."""

    busy_seconds: float
    stolen_seconds: float


@dataclass(frozen=True)
class Memory:
    """Megabytes (10^6 bytes) over a set of processes; PSS counts shared pages once."""

    rss_mb: float
    pss_mb: float


def server_processes(root_pid: int) -> dict[int, float]:
    """The live processes of the server started as root_pid, with the CPU seconds each has used so far."""
    table = {int(entry): _stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    members = {root_pid}
    grown = True
    while grown:
        joining = {
            pid
            for pid, stat in table.items()
            if stat is not None and pid not in members and (stat.parent in members or stat.session == root_pid)
        }
        members |= joining
        grown = bool(joining)
    return {pid: stat.cpu_seconds for pid in members if (stat := table.get(pid)) is not None}


def server_cpu_seconds(root_pid: int) -> float:
    """User and system time of the server's processes, those that have ended in the meantime included."""
    return sum(server_processes(root_pid).values())


def memory_of(pids: list[int]) -> Memory:
    """Resident and proportional memory of these processes, added up."""
    rss_kb = pss_kb = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            if name == "Rss":
                rss_kb += int(rest.split()[0])
            elif name == "Pss":
                pss_kb += int(rest.split()[0])
    return Memory(rss_kb * 1024 / 1e6, pss_kb * 1024 / 1e6)


def machine_cpu() -> MachineCpu:
    """The first line of /proc/stat; used to see whether anything else ran during a measurement."""
    with open("/proc/stat") as lines:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, lines.readline().split()[1:9])
    return MachineCpu((user + nice + system + irq + softirq) / TICKS_PER_SECOND, steal / TICKS_PER_SECOND)


@dataclass(frozen=True)
class _Stat:
    parent: int
    session: int
    cpu_seconds: float


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name, field 2, may hold spaces and brackets; everything after its last ")" is plain numbers.
    fields = text.rpartition(")")[2].split()
    # utime and stime, and cutime and cstime for children that have ended: fields 14 to 17 of proc(5).
    ticks = sum(int(field) for field in fields[11:15])
    return _Stat(parent=int(fields[1]), session=int(fields[3]), cpu_seconds=ticks / TICKS_PER_SECOND)
