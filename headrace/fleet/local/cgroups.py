# SPDX-License-Identifier: Apache-2.0
"""Control groups of the kernel: memory, cores and processes of a container are held to its limits. For `process_driver`.

Version 2 and version 1, also both on one machine, one hierarchy for each controller. Groups lie below our own, or below the
nearest folder above it that we may write to: root may everywhere, others where systemd has delegated it. What may not be
done is found out at the start, and is left to `watching`.
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

from headrace.fleet.local.limits import Limits

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
class Group:
    """The group of one container: a folder in each hierarchy."""

    paths: tuple[Path, ...]
    weighing: tuple[Path, ...] = ()
    """Those of them that limit nothing, and only say what it counts beside others: it can do without until it is ready."""

    def join(self, pid: int, *, late: bool = False) -> None:
        """A process and what it will start; where it weighs, only after `join_all` if it is late. Raises OSError."""
        for each in self.paths:
            if not (late and each in self.weighing):
                (each / "cgroup.procs").write_text(f"{pid}")

    def join_all(self, pids: Callable[[], Iterable[int]]) -> None:
        """All that were late. They may start others meanwhile, which the next pass finds."""
        for _ in range(_JOIN_PASSES):
            missing = [(each, pid) for each in self.weighing for pid in sorted(set(pids()) - _members(each))]
            if not missing:
                return
            for each, pid in missing:
                with contextlib.suppress(OSError):
                    (each / "cgroup.procs").write_text(f"{pid}")

    def members(self) -> set[int]:
        """Who is in it, those too that left their session."""
        return set[int]().union(*map(_members, self.paths))

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed one of it for its memory."""
        for each in self.paths:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    said = dict(
                        line.split() for line in (each / name).read_text().splitlines() if len(line.split()) == 2
                    )
                    if int(said.get("oom_kill", "0")):
                        return True
        return False

    def step_back(self) -> str:
        """Have its members come after those of other groups (`priority`). The weight it had; "" where that is impossible."""
        for file in self._weights():
            with contextlib.suppress(OSError):
                weight = file.read_text().strip()
                (file.parent / _IDLE).write_text("1")
                return weight
        return ""

    def step_up(self, weight: str) -> None:
        """Have it its weight back."""
        for file in self._weights() if weight else ():
            with contextlib.suppress(OSError):
                (file.parent / _IDLE).write_text("0")
                file.write_text(weight)  # which the kernel has forgotten over it

    def _weights(self) -> Iterator[Path]:
        for each in self.paths:
            yield from (each / name for name in _WEIGHTS if (each / name).exists())

    def remove(self) -> None:
        """Who is left in it is killed. Blocking, for a second at most: the kernel takes a moment to forget the dead."""
        for _ in range(_REMOVE_TRIES):
            for pid in self.members():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if all(_gone(each) for each in self.paths):
                return
            time.sleep(_REMOVE_SECONDS)
        log.warning("%s cannot be removed", self.paths[0])


class Cgroups:
    """Where groups can be made."""

    def __init__(self, places: Mapping[str, Path], unified: frozenset[str] = frozenset()) -> None:
        self.places = dict(places)
        """By controller."""
        self._unified = unified
        """Controllers of version 2."""

    def make(self, name: str, limits: Limits) -> Group:
        """A group with these limits, as far as there are controllers for them. Raises OSError; then nothing is left."""
        wanted = _files(limits, self._unified)
        paths = {place / name: None for controller, place in self.places.items() if wanted.get(controller)}
        limited = {
            place / name for controller, place in self.places.items() if any(must for _, _, must in wanted[controller])
        }
        group = Group(tuple(paths), tuple(each for each in paths if each not in limited))
        try:
            for each in group.paths:
                each.mkdir(parents=True, exist_ok=True)
                if (each / _IDLE).exists():  # it may be there from a run that never got ready, and could not be removed
                    _write(each / _IDLE, "0", must=False)
            for controller, files in wanted.items():
                for file, value, must in files if controller in self.places else ():
                    _write(self.places[controller] / name / file, value, must)
        except OSError:
            group.remove()
            raise
        return group

    def close(self) -> None:
        """Remove our own folders, if nothing is in them."""
        for each in set(self.places.values()):
            with contextlib.suppress(OSError):
                each.rmdir()


def _files(limits: Limits, unified: frozenset[str]) -> dict[str, list[tuple[str, str, bool]]]:
    """By controller: files, what to write, and whether a failure counts."""
    made: dict[str, list[tuple[str, str, bool]]] = {"memory": [], "cpu": [], "pids": []}
    if limits.memory is not None:
        memory = str(limits.memory)
        # Without swap, or a leak is found when the machine crawls. The kernel may have no swap to account for.
        if "memory" in unified:
            made["memory"] = [
                ("memory.max", memory, True),
                ("memory.swap.max", "0", False),
                ("memory.oom.group", "1", False),
            ]
        else:
            made["memory"] = [("memory.limit_in_bytes", memory, True), ("memory.memsw.limit_in_bytes", memory, False)]
    if limits.cores is not None:
        quota = max(1000, int(limits.cores * _PERIOD))
        if "cpu" in unified:
            made["cpu"] = [("cpu.max", f"{quota} {_PERIOD}", True)]
        else:
            made["cpu"] = [("cpu.cfs_period_us", str(_PERIOD), True), ("cpu.cfs_quota_us", str(quota), True)]
    if limits.share is not None:
        shares = min(max(2, int(limits.share * _SHARES)), 262_144)
        weight = 1 + (shares - 2) * 9999 // 262_142
        made["cpu"].append(
            ("cpu.weight", str(weight), False) if "cpu" in unified else ("cpu.shares", str(shares), False)
        )
    if limits.tasks is not None:
        made["pids"] = [("pids.max", str(limits.tasks), True)]
    return made


def find_cgroups(mounts: Path = Path("/proc/self/mounts"), own: Path = Path("/proc/self/cgroup")) -> Cgroups:
    """What this process may use of the kernel's groups; empty where that is nothing."""
    try:
        lines = [line.split(" ") for line in mounts.read_text().splitlines()]
        mine = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return Cgroups({})
    paths = {name: path for _, names, path in (each for each in mine if len(each) == 3) for name in names.split(",")}
    places: dict[str, Path] = {}
    unified: frozenset[str] = frozenset()
    for fields in lines:
        if len(fields) < 4 or not fields[2].startswith("cgroup"):
            continue
        mount = Path(fields[1].replace("\\040", " "))
        if fields[2] == "cgroup2":
            found, unified = _delegated(mount, paths.get("", "/"))
            places |= dict.fromkeys(unified, found)
            continue
        for name in set(fields[3].split(",")) & set(CONTROLLERS):
            places[name] = _below(mount, paths.get(name, "/")) / PARENT
    return Cgroups({name: place for name, place in places.items() if _usable(place)}, unified)


def _below(mount: Path, path: str) -> Path:
    """Our own group. In a container its path may be that of the machine, which is not to be seen here."""
    found = mount / path.lstrip("/")
    return found if found.is_dir() and ".." not in path else mount


def _delegated(mount: Path, path: str) -> tuple[Path, frozenset[str]]:
    """The nearest folder whose groups may have limits, and for which controllers."""
    own = _below(mount, path)
    for folder in (own, *(each for each in own.parents if each.is_relative_to(mount))):
        found = _enabled(folder)
        if not found and folder == own != mount and _alone(folder):
            # Who has processes may not have groups with limits: we step aside, into a group of our own.
            with contextlib.suppress(OSError):
                (folder / _OWN_LEAF).mkdir(exist_ok=True)
                (folder / _OWN_LEAF / "cgroup.procs").write_text(f"{os.getpid()}")
                found = _enabled(folder)
        if found:
            parent = folder / PARENT
            with contextlib.suppress(OSError):
                parent.mkdir(exist_ok=True)
                return parent, _enabled(parent) & found
    return mount, frozenset()


def _enabled(folder: Path) -> frozenset[str]:
    """The controllers that groups below a folder have, after they were asked for."""
    control = folder / "cgroup.subtree_control"
    there = _words(folder / "cgroup.controllers") & set(CONTROLLERS)
    if not os.access(folder, os.W_OK):
        return frozenset()
    for each in there - _words(control):
        with contextlib.suppress(OSError), control.open("a") as file:
            file.write(f"+{each} ")
    return frozenset(each for each in there if {each, f"+{each}"} & _words(control))


def _members(path: Path) -> set[int]:
    return {int(word) for word in _words(path / "cgroup.procs")}


def _gone(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return not path.exists()
    return True


def _alone(folder: Path) -> bool:
    return _words(folder / "cgroup.procs") == {f"{os.getpid()}"}


def _usable(place: Path) -> bool:
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
        log.debug("%s does not take %s", path, value)


def _words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()


def read_group(paths: object, weighing: object) -> Group | None:
    """Of a record: only folders of ours."""
    found = _ours(paths)
    return Group(found, _ours(weighing)) if found else None


def _ours(said: object) -> tuple[Path, ...]:
    paths: Sequence[object] = said if isinstance(said, list) else []
    return tuple(Path(each) for each in paths if isinstance(each, str) and Path(each).parent.name == PARENT)
