# SPDX-License-Identifier: Apache-2.0
"""What this process may use of its machine: memory and CPU, with the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_ALLOCATED = ("RssAnon:", "RssShmem:", "VmSwap:")


def available_memory(proc: Path = _PROC, within: Iterable[Path] | None = None) -> int | None:
    """Return the bytes that this process can still allocate; None where the kernel does not say."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    limit = memory_limit(control_groups() if within is None else within)
    return free if limit is None else min(free, max(0, limit[0] - limit[1]))


def process_memory(pid: int, proc: Path = _PROC) -> int:
    """Return the bytes that a process has allocated, also those in swap; 0 if it has ended.

    Mapped files do not count: the kernel drops their pages when it needs memory.
    """
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_ALLOCATED))
    except (OSError, ValueError, IndexError):
        return 0


def control_groups(root: Path = _CGROUP, proc: Path = _PROC) -> list[Path]:
    """Return the folders of this process's control group and its parents; in a container only the root."""
    folders = [root]
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return folders
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    for part in filter(None, path.split("/")):
        if part == ".." or not (folders[-1] / part).is_dir():  # The path belongs to another namespace.
            break
        folders.append(folders[-1] / part)
    return folders


def cpu_quota(within: Iterable[Path]) -> float | None:
    """Return the smallest CPU quota in cores; None if there is none."""
    return min((quota for quota in map(_quota, within) if quota is not None), default=None)


def memory_limit(within: Iterable[Path]) -> tuple[int, int] | None:
    """Return limit and usage of the control group with the least memory left; None without a limit.

    Cached files do not count: the kernel drops them when it needs memory. A downloaded model may be most of them.
    """
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
    for most, used, details, prefix in (
        ("memory.max", "memory.current", "memory.stat", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
    ):
        try:
            text = (group / most).read_text().strip()
            if text == "max":
                return None
            cached = _cached_files(group / details, prefix)
            return int(text), max(0, int((group / used).read_text()) - cached)
        except (OSError, ValueError):
            continue
    return None


def _cached_files(details: Path, prefix: str) -> int:
    try:
        lines = details.read_text().splitlines()
    except OSError:
        return 0
    names = (f"{prefix}inactive_file ", f"{prefix}active_file ")
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))
