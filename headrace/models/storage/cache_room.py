# SPDX-License-Identifier: Apache-2.0
"""Room in a cache: what was not wanted for the longest time goes, but never what is in use. Used by `cache`.

Several processes share the folder, so one at a time makes room, and writes down what it is going to fill before another
looks. What is in use is what someone holds the lock of; who holds it may be any process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.models.storage.problems import NoRoom, no_room, readable_bytes

log = logging.getLogger("headrace.storage")

LOCKS = ".locks"
USE = ".use"
BRINGING = ".bringing-"
PARTS = ".parts"
_GOING = ".going-"
_CACHE_LOCK = ".cache"
_STALE_SECONDS = 7 * 24 * 3600.0
"""After so long nobody will continue what was cut off."""


@dataclass(frozen=True, slots=True)
class _Kept:
    name: str
    bytes: int
    wanted: float
    """When it was last asked for."""


def make_room(folder: Path, what: str, name: str, size: int | None, had: int, most_bytes: int) -> None:
    """See to it that an entry of `size` bytes (None: not known) fits, of which `had` are there. 0 bounds nothing.

    Raises NoRoom, a FailedPrecondition, with how much is needed.
    """
    if most_bytes and size is not None and size > most_bytes:
        raise NoRoom(
            f"{what} has {readable_bytes(size)} and the cache {folder} may hold {readable_bytes(most_bytes)}; raise that"
        )
    with _one_at_a_time(folder):
        kept = [entry for entry in _all(folder) if entry.name != name]
        now = time.time()
        for entry in list(kept):
            unfinished = not (folder / entry.name).is_dir()
            if unfinished and now - entry.wanted > _STALE_SECONDS and _remove(folder, entry.name):
                kept.remove(entry)
        wanted = max(size or 0, had)
        if most_bytes:
            _evict(folder, what, kept, wanted, had, most_bytes)
        free = shutil.disk_usage(folder).free
        if wanted - had > free:
            raise NoRoom(no_room(what, folder, wanted - had))
        (folder / LOCKS / f"{name}{USE}").write_text(json.dumps({"bytes": wanted}))


def _evict(folder: Path, what: str, kept: list[_Kept], wanted: int, had: int, most_bytes: int) -> None:
    """Remove the longest unwanted until the new one fits, both into the bound and onto the disk."""
    total = sum(entry.bytes for entry in kept)
    for entry in sorted(kept, key=lambda entry: entry.wanted):
        if total + wanted <= most_bytes and wanted - had <= shutil.disk_usage(folder).free:
            return
        if _remove(folder, entry.name):
            total -= entry.bytes
    if total + wanted > most_bytes:
        raise NoRoom(
            f"there is no room for {what} in the cache {folder}: it needs {readable_bytes(wanted)}, the cache may hold "
            f"{readable_bytes(most_bytes)}, and {readable_bytes(total)} of it are in use; raise that, or stop what uses them"
        )


def _all(folder: Path) -> list[_Kept]:
    """Every entry, also those that are being filled or were cut off."""
    names: dict[str, Path] = {}
    for path in folder.iterdir():
        if path.name.startswith(BRINGING) and not path.name.endswith(PARTS):
            names[path.name.removeprefix(BRINGING)] = path
        elif path.name.startswith(_GOING):
            shutil.rmtree(path, ignore_errors=True)  # its remover was killed
        elif not path.name.startswith("."):
            names[path.name] = path
    found = []
    for name, path in names.items():
        lock = folder / LOCKS / f"{name}{USE}"
        try:
            size = int(json.loads(lock.read_text())["bytes"])
            wanted = lock.stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            size, wanted = bytes_below(path), 0.0
        found.append(_Kept(name, size, wanted))
    return found


def on_disk(found: os.stat_result) -> int:
    """What a file takes, without its holes."""
    return found.st_blocks * 512


def bytes_below(folder: Path, measure: Callable[[os.stat_result], int] = lambda found: found.st_size) -> int:
    """What all its files have."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += measure(os.lstat(os.path.join(above, name)))
    return total


def _remove(folder: Path, name: str) -> bool:
    """Remove an entry, unless someone fills or uses it; whether it is gone."""
    locks = folder / LOCKS
    filling, using = locks / name, locks / f"{name}{USE}"
    with filling.open("ab") as one, using.open("ab") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        going = folder / f"{_GOING}{name}"
        for path in (folder / name, folder / f"{BRINGING}{name}"):
            with contextlib.suppress(FileNotFoundError):
                path.rename(going)
                log.info("%s leaves the cache: others need the room", name)
                shutil.rmtree(going, ignore_errors=True)
        (folder / f"{BRINGING}{name}{PARTS}").unlink(missing_ok=True)
        using.unlink(missing_ok=True)
        filling.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    with (folder / LOCKS / _CACHE_LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
