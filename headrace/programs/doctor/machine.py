# SPDX-License-Identifier: Apache-2.0
"""Cores, memory and limits of this process, as the kernel and the control group tell of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from headrace.programs.doctor.finding import Finding, ok, problem, size, warning

_MIB = 1024 * 1024
_FILES = 4096
"""Fewer open files than this are soon used up: one for each connection, and some for each model."""
_LOCKED = 64 * _MIB
_MEMORY_LOW, _MEMORY_LEAST = 1024 * _MIB, 128 * _MIB
_THREADS = "OMP_NUM_THREADS"
_CGROUP, _PROC = Path("/sys/fs/cgroup"), Path("/proc")


def check_limits(gpus: int) -> Iterator[Finding]:
    """Open files, and with GPUs memory that stays where it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    if unlimited or soft >= _FILES:
        yield ok("open files", "no limit" if unlimited else f"{soft} at most")
    else:
        more = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        fix = f"ulimit -n {more}" if more > soft else "sudo prlimit --nofile=65536:65536 --pid $$"
        yield warning("open files", f"{soft} at most; each connection takes one, and more than that are refused", fix)
    locked, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield ok("locked memory", "no limit")
    elif not gpus or locked >= _LOCKED:
        yield ok("locked memory", f"{size(locked)} at most" + ("" if gpus else "; only GPUs want more"))
    else:
        fix = "ulimit -l unlimited" if most == resource.RLIM_INFINITY else "sudo prlimit --memlock=unlimited --pid $$"
        yield warning("locked memory", f"{size(locked)} at most; NCCL and GPU copies may want more", fix)


def check_memory(proc: Path = _PROC, within: Iterable[Path] | None = None) -> Iterator[Finding]:
    """What is free of the machine's memory, or of the control group's."""
    told = {
        name: rest for name, _, rest in (line.partition(":") for line in (proc / "meminfo").read_text().splitlines())
    }
    total, free = (int(told[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    whose = "the machine's"
    limit = memory_limit(groups() if within is None else within)
    if limit is not None and limit[0] < total:
        total, free, whose = limit[0], min(free, max(0, limit[0] - limit[1])), "the control group's"
    message = f"{size(free)} of {whose} {size(total)} are free"
    if free >= _MEMORY_LOW:
        yield ok("memory", message)
        return
    state = problem if free < _MEMORY_LEAST else warning
    yield state(
        "memory", f"{message}: a model may not fit, and its process be killed", "ps -eo rss,pid,args --sort=-rss | head"
    )


def check_cores(environ: Mapping[str, str], within: Iterable[Path] | None = None) -> Iterator[Finding]:
    """Threads of computing libraries are as many as the cores they see; a quota is nothing they look at."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(groups() if within is None else within)
    if quota is None or quota >= cores:
        yield ok("cores", f"{cores}, and no quota on them")
        return
    wanted = max(1, int(quota))
    message = f"{cores} are seen, and the control group's quota is {quota:g}"
    threads = environ.get(_THREADS, "")
    if threads.isdigit() and int(threads) <= max(1, round(quota)):
        yield ok("cores", f"{message}; {_THREADS} is {threads}")
    else:
        told = f"{message}: libraries start {cores} threads, which are then held up"
        yield warning("cores", told, f"export {_THREADS}={wanted}")


def groups(root: Path = _CGROUP, proc: Path = _PROC) -> list[Path]:
    """The folders of this process's control group and of those around it; in a container there is one, the root."""
    found = [root]
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return found
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    for part in filter(None, path.split("/")):
        if part == ".." or not (found[-1] / part).is_dir():  # it is told as another namespace sees it
            break
        found.append(found[-1] / part)
    return found


def cpu_quota(within: Iterable[Path]) -> float | None:
    """Cores' worth of time that control groups give, the least of all; None for as much as there is."""
    return min((quota for quota in map(_quota, within) if quota is not None), default=None)


def memory_limit(within: Iterable[Path]) -> tuple[int, int] | None:
    """What control groups may have, and what they have, of the one with the least left; None without a limit."""
    limits = [limit for limit in map(_limit, within) if limit is not None]
    return min(limits, key=lambda limit: limit[0] - limit[1], default=None)


def _quota(group: Path) -> float | None:
    try:
        most, period = (group / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota, period_us = (int((group / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota / period_us if quota > 0 and period_us > 0 else None


def _limit(group: Path) -> tuple[int, int] | None:
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            text = (group / most).read_text().strip()
            return None if text == "max" else (int(text), int((group / used).read_text()))
        except (OSError, ValueError):
            continue
    return None
