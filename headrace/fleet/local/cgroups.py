# SPDX-License-Identifier: Apache-2.0
"""Control groups of the kernel that limit the memory, CPU and processes of a container.

Versions 1 and 2, also both on one machine, with one hierarchy per controller. Groups are created below this process's own
group, or below the nearest parent that this user may write to: root may everywhere, others where systemd has delegated a
subtree. Controllers that cannot be used are found at the start; `process_runtime.LimitWatcher` polls their limits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.fleet.local.container_runtime import ResourceLimits

log = logging.getLogger("headrace.fleet")

CONTROLLERS = ("memory", "cpu", "pids")
PARENT = "headrace-fleet"
_PERIOD = 100_000
_SHARES = 1024
_WEIGHTS = ("cpu.weight", "cpu.shares")
_IDLE = "cpu.idle"
_OWN_LEAF = "headrace-up"
_REMOVE_TRIES, _REMOVE_SECONDS = 50, 0.02
_JOIN_PASSES = 5


@dataclass(frozen=True)
class Cgroup:
    """The control group of one container: a folder in each hierarchy."""

    paths: tuple[Path, ...]
    weighing: tuple[Path, ...] = ()
    """The folders that set a weight and no limit: a low-priority container joins them when it is ready."""

    def join(self, pid: int, *, late: bool = False) -> None:
        """Add a process and its future children. `late`: not to weight folders, see `join_all`. Raises OSError."""
        for path in self.paths:
            if not (late and path in self.weighing):
                (path / "cgroup.procs").write_text(f"{pid}")

    def join_all(self, pids: Callable[[], Iterable[int]]) -> None:
        """Add all processes of a container to the weight folders. The next pass finds processes that start meanwhile."""
        for _ in range(_JOIN_PASSES):
            missing = [(path, pid) for path in self.weighing for pid in sorted(set(pids()) - _members(path))]
            if not missing:
                return
            for path, pid in missing:
                with contextlib.suppress(OSError):
                    (path / "cgroup.procs").write_text(f"{pid}")

    def members(self) -> set[int]:
        """Return the processes of the group, also those that left their session."""
        return set[int]().union(*map(_members, self.paths))

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of the group for its memory."""
        for path in self.paths:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    events = dict(
                        line.split() for line in (path / name).read_text().splitlines() if len(line.split()) == 2
                    )
                    if int(events.get("oom_kill", "0")):
                        return True
        return False

    def lower_priority(self) -> str:
        """Lower its CPU priority below that of other groups. Return its weight; "" if that is impossible."""
        for file in self._weights():
            with contextlib.suppress(OSError):
                weight = file.read_text().strip()
                (file.parent / _IDLE).write_text("1")
                return weight
        return ""

    def restore_priority(self, weight: str) -> None:
        """Restore its weight."""
        for file in self._weights() if weight else ():
            with contextlib.suppress(OSError):
                (file.parent / _IDLE).write_text("0")
                file.write_text(weight)  # the kernel has reset it

    def _weights(self) -> Iterator[Path]:
        for path in self.paths:
            yield from (path / name for name in _WEIGHTS if (path / name).exists())

    def remove(self) -> None:
        """Kill what is left in it and remove it. Blocking for a second at most: the kernel needs a moment after a kill."""
        for _ in range(_REMOVE_TRIES):
            for pid in self.members():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if all(_is_removed(path) for path in self.paths):
                return
            time.sleep(_REMOVE_SECONDS)
        log.warning("Cannot remove %s", self.paths[0])


class Cgroups:
    """The places where groups can be created."""

    def __init__(self, places: Mapping[str, Path], unified: frozenset[str] = frozenset()) -> None:
        self.places = dict(places)
        """By controller."""
        self._unified = unified
        """Controllers of version 2."""

    def create(self, name: str, limits: ResourceLimits) -> Cgroup:
        """Create a group with these limits, as far as there are controllers. Raises OSError; then nothing is left."""
        wanted = _files(limits, self._unified)
        paths = {place / name: None for controller, place in self.places.items() if wanted.get(controller)}
        limited = {
            place / name for controller, place in self.places.items() if any(must for _, _, must in wanted[controller])
        }
        group = Cgroup(tuple(paths), tuple(path for path in paths if path not in limited))
        try:
            for path in group.paths:
                path.mkdir(parents=True, exist_ok=True)
                if (path / _IDLE).exists():  # left by a container that never became ready, and could not be removed
                    _write(path / _IDLE, "0", must=False)
            for controller, files in wanted.items():
                for file, value, must in files if controller in self.places else ():
                    _write(self.places[controller] / name / file, value, must)
        except OSError:
            group.remove()
            raise
        return group

    def close(self) -> None:
        """Remove the parent folders, if they are empty."""
        for place in set(self.places.values()):
            with contextlib.suppress(OSError):
                place.rmdir()


def _files(limits: ResourceLimits, unified: frozenset[str]) -> dict[str, list[tuple[str, str, bool]]]:
    """Return by controller: (file, value, whether a failure is an error)."""
    files: dict[str, list[tuple[str, str, bool]]] = {"memory": [], "cpu": [], "pids": []}
    if limits.memory is not None:
        memory = str(limits.memory)
        # No swap: otherwise a leak slows down the machine before it is noticed. The kernel may not account for swap.
        if "memory" in unified:
            files["memory"] = [
                ("memory.max", memory, True),
                ("memory.swap.max", "0", False),
                ("memory.oom.group", "1", False),
            ]
        else:
            files["memory"] = [("memory.limit_in_bytes", memory, True), ("memory.memsw.limit_in_bytes", memory, False)]
    if limits.cores is not None:
        quota = max(1000, int(limits.cores * _PERIOD))
        if "cpu" in unified:
            files["cpu"] = [("cpu.max", f"{quota} {_PERIOD}", True)]
        else:
            files["cpu"] = [("cpu.cfs_period_us", str(_PERIOD), True), ("cpu.cfs_quota_us", str(quota), True)]
    if limits.share is not None:
        shares = min(max(2, int(limits.share * _SHARES)), 262_144)
        weight = 1 + (shares - 2) * 9999 // 262_142
        files["cpu"].append(
            ("cpu.weight", str(weight), False) if "cpu" in unified else ("cpu.shares", str(shares), False)
        )
    if limits.tasks is not None:
        files["pids"] = [("pids.max", str(limits.tasks), True)]
    return files


def find_cgroups(mounts: Path = Path("/proc/self/mounts"), own_group: Path = Path("/proc/self/cgroup")) -> Cgroups:
    """Return the control groups that this process may use; empty if there are none."""
    try:
        lines = [line.split(" ") for line in mounts.read_text().splitlines()]
        mine = [line.split(":", 2) for line in own_group.read_text().splitlines()]
    except OSError:
        return Cgroups({})
    paths = {name: path for _, names, path in (entry for entry in mine if len(entry) == 3) for name in names.split(",")}
    places: dict[str, Path] = {}
    unified: frozenset[str] = frozenset()
    for fields in lines:
        if len(fields) < 4 or not fields[2].startswith("cgroup"):
            continue
        mount = Path(fields[1].replace("\\040", " "))
        if fields[2] == "cgroup2":
            folder, unified = _find_delegated(mount, paths.get("", "/"))
            places |= dict.fromkeys(unified, folder)
            continue
        for name in set(fields[3].split(",")) & set(CONTROLLERS):
            places[name] = _own_group(mount, paths.get(name, "/")) / PARENT
    return Cgroups({name: place for name, place in places.items() if _is_usable(place)}, unified)


def _own_group(mount: Path, path: str) -> Path:
    """Return this process's own group. In a container its path may be that of the machine, which is not visible."""
    group = mount / path.lstrip("/")
    return group if group.is_dir() and ".." not in path else mount


def _find_delegated(mount: Path, path: str) -> tuple[Path, frozenset[str]]:
    """Return the nearest folder whose groups may have limits, and the controllers."""
    own_group = _own_group(mount, path)
    for folder in (own_group, *(parent for parent in own_group.parents if parent.is_relative_to(mount))):
        controllers = _enable_controllers(folder)
        if not controllers and folder == own_group != mount and _is_alone(folder):
            # A group with processes may not have children with limits: this process moves to a child group.
            with contextlib.suppress(OSError):
                (folder / _OWN_LEAF).mkdir(exist_ok=True)
                (folder / _OWN_LEAF / "cgroup.procs").write_text(f"{os.getpid()}")
                controllers = _enable_controllers(folder)
        if controllers:
            parent = folder / PARENT
            with contextlib.suppress(OSError):
                parent.mkdir(exist_ok=True)
                return parent, _enable_controllers(parent) & controllers
    return mount, frozenset()


def _enable_controllers(folder: Path) -> frozenset[str]:
    """Enable the controllers for groups below a folder; return those that are enabled."""
    control = folder / "cgroup.subtree_control"
    available = _read_words(folder / "cgroup.controllers") & set(CONTROLLERS)
    if not os.access(folder, os.W_OK):
        return frozenset()
    for controller in available - _read_words(control):
        with contextlib.suppress(OSError), control.open("a") as file:
            file.write(f"+{controller} ")
    return frozenset(controller for controller in available if {controller, f"+{controller}"} & _read_words(control))


def _members(path: Path) -> set[int]:
    return {int(word) for word in _read_words(path / "cgroup.procs")}


def _is_removed(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return not path.exists()
    return True


def _is_alone(folder: Path) -> bool:
    return _read_words(folder / "cgroup.procs") == {f"{os.getpid()}"}


def _is_usable(place: Path) -> bool:
    probe = place / f"probe-{os.getpid()}"
    try:
        probe.mkdir(parents=True, exist_ok=True)
        probe.rmdir()
    except OSError:
        return False
    return True


def _write(path: Path, value: str, must: bool) -> None:
    try:
        path.write_text(value)
    except OSError:
        if must:
            raise
        log.debug("Cannot write %s to %s", value, path)


def _read_words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()


def parse_cgroup(paths: object, weighing: object) -> Cgroup | None:
    """Return the group of a record; ignores folders that are not below our parent folder."""
    own_paths = _own_paths(paths)
    return Cgroup(own_paths, _own_paths(weighing)) if own_paths else None


def _own_paths(content: object) -> tuple[Path, ...]:
    items: Sequence[object] = content if isinstance(content, list) else []
    return tuple(Path(path) for path in items if isinstance(path, str) and Path(path).parent.name == PARENT)
