# SPDX-License-Identifier: Apache-2.0
"""The machine's CPUs and memory, and this process, as Linux tells of them in /proc. Read by `sampler` and `collector`.

Names are Triton's for the machine and those of Prometheus's own clients for the process. Blocks for as long as the kernel
takes, so not in the loop's thread. What cannot be read is left out.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from pathlib import Path

from headrace.core.telemetry.families import Kind
from headrace.core.telemetry.samples import Samples, Together

_PROC = Path("/proc")

CPU: tuple[tuple[str, str, Together], ...] = (
    ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", "max"),
    ("nv_cpu_memory_total_bytes", "CPU total memory (RAM) in bytes", "max"),
    ("nv_cpu_memory_used_bytes", "CPU used memory (RAM) in bytes", "max"),
)
PROCESS: tuple[tuple[Kind, str, str, Together], ...] = (
    ("counter", "process_cpu_seconds_total", "Total user and system CPU time spent in seconds", "sum"),
    ("gauge", "process_resident_memory_bytes", "Resident memory size in bytes", "sum"),
    ("gauge", "process_virtual_memory_bytes", "Virtual memory size in bytes", "sum"),
    ("gauge", "process_open_fds", "Number of open file descriptors", "sum"),
    ("gauge", "process_max_fds", "Maximum number of open file descriptors", "sum"),
    ("gauge", "process_start_time_seconds", "Start time of the process since unix epoch in seconds", "min"),
)
COLLECTIONS = ("python_gc_collections_total", "Number of times this generation was collected")


class CpuMeter:
    """How busy the CPUs were since the last look; for the first, since the machine was started."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._before = (0, 0)
        self._utilization: float | None = None

    def read(self) -> list[Samples]:
        """Utilisation since the last call, and memory now."""
        found: dict[str, float] = {}
        self._look()
        if self._utilization is not None:
            found["nv_cpu_utilization"] = self._utilization
        memory = self._memory()
        if memory is not None:
            found["nv_cpu_memory_total_bytes"], found["nv_cpu_memory_used_bytes"] = memory
        return [
            Samples("gauge", name, words, together, {"": found[name]}) for name, words, together in CPU if name in found
        ]

    def _look(self) -> None:
        now = self._times()
        if now is None:
            self._utilization = None
        elif now[1] > self._before[1]:  # else it is as it was: the kernel counts in ticks, and looks may be closer
            busy, total = now[0] - self._before[0], now[1] - self._before[1]
            self._utilization, self._before = min(1.0, max(0.0, busy / total)), now

    def _times(self) -> tuple[int, int] | None:
        """Ticks in which the CPUs worked, and all ticks."""
        try:
            words = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, idle, waiting, *others = map(int, words)
        except (OSError, ValueError):
            return None
        busy = user + nice + system + sum(others)
        return busy, busy + idle + waiting

    def _memory(self) -> tuple[int, int] | None:
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
            sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
            total = sizes["MemTotal"]
            return total, total - sizes["MemAvailable"]
        except (OSError, ValueError, KeyError, IndexError):
            return None


def process_samples(proc: Path = _PROC) -> list[Samples]:
    """This process now."""
    found: dict[str, float] = {"process_cpu_seconds_total": time.process_time()}
    own = proc / "self"
    try:
        found["process_open_fds"] = len(os.listdir(own / "fd"))
        found["process_max_fds"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # The name, in parentheses, may have anything in it.
        words = (own / "stat").read_text().rpartition(")")[2].split()
        found["process_virtual_memory_bytes"] = int(words[20])
        found["process_resident_memory_bytes"] = int(words[21]) * resource.getpagesize()
        started_ticks, booted = int(words[19]), _boot_time(proc)
        found["process_start_time_seconds"] = booted + started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        pass
    samples = [
        Samples(kind, name, words_, together, {"": found[name]})
        for kind, name, words_, together in PROCESS
        if name in found
    ]
    collections = {f'generation="{n}"': stats["collections"] for n, stats in enumerate(gc.get_stats())}
    samples.append(Samples("counter", *COLLECTIONS, "sum", dict(collections)))
    return samples


def _boot_time(proc: Path) -> float:
    for line in (proc / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise ValueError("no boot time")
