# SPDX-License-Identifier: Apache-2.0
"""The folder that several processes bring things into: whole entries, each under a name that says which state of what it is.

Used by `bringing`. An entry is filled in a hidden folder and renamed; one that was cut off is kept for the next try. Locks
are files below `.locks`, two for each entry: `NAME` is held by whoever fills it, `NAME.use` is shared by all who use it and
says how large it is and, by its time, when it was last wanted. Both go with the process that holds them, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, Unavailable
from headrace.core.telemetry.progress import Progress, ProgressEvent
from headrace.models.storage.cache_room import BRINGING, LOCKS, PARTS, USE, bytes_below, make_room, on_disk
from headrace.models.storage.problems import DataDamaged, DiskFull, NoRoom, no_room
from headrace.models.storage.telling import Told

log = logging.getLogger("headrace.storage")

_LOOK_AGAIN_SECONDS = 0.2


class CacheUse:
    """What someone uses of caches: nobody removes it until this is closed, or the process ends."""

    def __init__(self) -> None:
        self._files: list[int] = []

    def hold(self, file: int) -> None:
        """Keep a lock that was taken."""
        self._files.append(file)

    def close(self) -> None:
        """Let go of everything."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> CacheUse:
        return self

    def __exit__(self, *_ended: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Filling:
    """Where an entry is being filled."""

    folder: Path
    """With what an earlier try has left, where it kept a journal."""
    journal: Path
    heard: Callable[[int], None]
    """Takes the number of bytes that have come."""


Fill = Callable[[Filling], None]


class Cache:
    """A cache folder, for one who brings."""

    def __init__(
        self,
        folder: Path,
        what: str,
        progress: Progress,
        cancelled: Callable[[], bool],
        most_bytes: int = 0,
        use: CacheUse | None = None,
    ) -> None:
        self.cancelled = cancelled
        self._folder = folder
        self._what = what
        self._progress = progress
        self._task = f"download {what}"
        self._most_bytes = most_bytes
        self._use = use

    def entry(self, name: str, state: str, size: int | None, fill: Fill) -> Path:
        """The folder of this name and state: there, or filled now. It is in use from here on."""
        try:
            return self._entry(name, state, size, fill)
        except OSError as error:
            log.warning("cache %s: %s", self._folder, error)
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise NoRoom(no_room(self._what, self._folder, size)) from None
            raise FailedPrecondition(
                f"{self._what} cannot be written into {self._folder}: {os.strerror(error.errno or 0)}"
            ) from None

    def _entry(self, name: str, state: str, size: int | None, fill: Fill) -> Path:
        digest = hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        entry = self._folder / f"{plain_name(name) or 'entry'}-{digest}"
        try:
            (self._folder / LOCKS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("cache %s: %s", self._folder, error)
            raise FailedPrecondition(f"the cache folder {self._folder} cannot be made; choose another one") from None
        with self._alone(entry.name):
            lock = self._lock_use(entry.name)
            try:
                if not entry.is_dir():
                    had = _bytes_come(self._folder / f"{BRINGING}{entry.name}", size)
                    make_room(self._folder, self._what, entry.name, size, had, self._most_bytes)
                    self._fill(entry, size, fill)
                    self._note(entry)
            except BaseException:
                os.close(lock)
                raise
            if self._use is not None:
                self._use.hold(lock)
            # Else it is not closed: the system lets go of it when the process ends, also by a signal.
        return entry

    def _fill(self, entry: Path, size: int | None, fill: Fill) -> None:
        told = Told(self._progress, self._task, size)
        new = self._folder / f"{BRINGING}{entry.name}"
        journal = self._folder / f"{BRINGING}{entry.name}{PARTS}"
        if not journal.exists():
            # Of one who kept no journal: nobody else is at it, since we have the lock.
            shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir(exist_ok=True)
            told.say("running")
            fill(Filling(new, journal, told.heard))
            new.rename(entry)
            journal.unlink(missing_ok=True)
        except BaseException as error:
            if not _may_continue(error):
                shutil.rmtree(new, ignore_errors=True)
                journal.unlink(missing_ok=True)
            told.say("failed")
            if isinstance(error, DiskFull):
                raise NoRoom(no_room(self._what, self._folder, error.size)) from None
            raise
        told.say("finished")

    def _note(self, entry: Path) -> None:
        """What the entry takes now, unpacked; and let others go if that was not known before."""
        size = bytes_below(entry)
        (self._folder / LOCKS / f"{entry.name}{USE}").write_text(json.dumps({"bytes": size}))
        if self._most_bytes:
            with contextlib.suppress(FailedPrecondition):  # it is here; the next one will be refused
                make_room(self._folder, self._what, entry.name, 0, size, self._most_bytes)

    def _lock_use(self, name: str) -> int:
        """Say that the entry is in use, as long as the file that this returns is open."""
        path = self._folder / LOCKS / f"{name}{USE}"
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_SH)  # who removes holds it for a moment only
            if _is_the_file(file, path):
                os.utime(file)
                return file
            os.close(file)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """While nobody else, in this or another process, brings the same."""
        waiting = False
        path = self._folder / LOCKS / name
        while True:
            with path.open("ab") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if self.cancelled():
                        raise Cancelled(f"waiting for {self._what} was cancelled") from None
                    if not waiting:
                        waiting = True
                        self._progress(ProgressEvent(self._task, message="another process is downloading it"))
                else:
                    if _is_the_file(file.fileno(), path):
                        yield
                        return
            time.sleep(_LOOK_AGAIN_SECONDS)


def _may_continue(error: BaseException) -> bool:
    """Whether what has come is good, and the next try may go on from there."""
    if isinstance(error, DataDamaged | DiskFull | NoRoom):
        return False
    return isinstance(error, Cancelled | Unavailable) or not isinstance(error, HeadraceError | OSError)


def _is_the_file(file: int, path: Path) -> bool:
    """Whether an open file is still the one of this name: a lock on one that was removed locks nothing."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    mine = os.fstat(file)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def _bytes_come(folder: Path, size: int | None) -> int:
    """What has come of an entry that was cut off: its files have holes, so what they take on the disk."""
    come = bytes_below(folder, on_disk)
    return come if size is None else min(come, size)


def plain_name(name: str) -> str:
    """A name that can be a file's, as near as can be."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80]
