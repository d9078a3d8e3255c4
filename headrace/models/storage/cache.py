# SPDX-License-Identifier: Apache-2.0
"""The download cache: a folder that several processes share, with complete entries and eviction."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, Unavailable
from headrace.core.fault_points import fault_point
from headrace.core.files import FileLock
from headrace.core.telemetry.progress import Progress, ProgressEvent
from headrace.models.storage.errors import DataDamaged, DiskFull, NoRoom, no_room, readable_bytes

_REPORT_SECONDS = 0.2
_RATE_SECONDS = 5.0
"""Period over which the rate is measured."""


class DownloadProgress:
    """The progress of one download. Thread-safe."""

    def __init__(
        self, progress: Progress, task: str, total: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress
        self._task = task
        self._total = total
        self._clock = clock
        self._done = 0
        self._lock = threading.Lock()
        self._next = 0.0
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, size: int) -> None:
        """Count received bytes."""
        with self._lock:
            self._done += size
            now = self._clock()
            if not self._samples:
                # Bytes of an earlier attempt are reported first and do not count for the rate.
                self._samples.append((now, self._done))
            if now < self._next:
                return
            self._next = now + _REPORT_SECONDS
            self._progress(ProgressEvent(self._task, self._done, self._total, "bytes", self._rate_text(now)))

    def report(self, state: Literal["running", "finished", "failed"]) -> None:
        """Report the start or the end."""
        message = {"running": "downloading", "failed": "the download failed", "finished": "downloaded"}[state]
        with self._lock:
            self._progress(ProgressEvent(self._task, self._done, self._total, "bytes", message, state))

    def _rate_text(self, now: float) -> str:
        self._samples.append((now, self._done))
        while len(self._samples) > 2 and now - self._samples[0][0] > _RATE_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        if now <= since or self._done <= before:
            return "downloading"
        rate = (self._done - before) / (now - since)
        text = f"downloading at {readable_bytes(rate)}/s"
        if self._total is None or self._total < self._done:
            return text
        return f"{text}, {readable_seconds((self._total - self._done) / rate)} left"


def readable_seconds(seconds: float) -> str:
    """Format a duration for people: 12 s, 3 min 5 s, 2 h 10 min."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


log = logging.getLogger("headrace.storage")

LOCKS = ".locks"
USE = ".use"
INCOMPLETE = ".bringing-"
PARTS = ".parts"
_REMOVED = ".going-"
_CACHE_LOCK = ".cache"
_STALE_SECONDS = 7 * 24 * 3600.0
"""Age after which interrupted downloads are removed."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    bytes: int
    last_used: float
    """When it was last used."""


def make_room(folder: Path, what: str, name: str, size: int | None, existing: int, max_bytes: int) -> None:
    """Evict entries until one of `size` bytes (None: unknown) fits; `existing` bytes of it are on disk. 0: no limit.

    Raises NoRoom, a FailedPrecondition, with the size that is needed.
    """
    if max_bytes and size is not None and size > max_bytes:
        raise NoRoom(
            f"{what} has {readable_bytes(size)} and the cache {folder} may hold {readable_bytes(max_bytes)}; raise that"
        )
    with FileLock(folder / LOCKS / _CACHE_LOCK):
        others = [entry for entry in _list_entries(folder) if entry.name != name]
        now = time.time()
        for entry in list(others):
            unfinished = not (folder / entry.name).is_dir()
            if unfinished and now - entry.last_used > _STALE_SECONDS and _remove(folder, entry.name):
                others.remove(entry)
        needed = max(size or 0, existing)
        if max_bytes:
            _evict(folder, what, others, needed, existing, max_bytes)
        free = shutil.disk_usage(folder).free
        if needed - existing > free:
            raise NoRoom(no_room(what, folder, needed - existing))
        (folder / LOCKS / f"{name}{USE}").write_text(json.dumps({"bytes": needed}))


def _evict(folder: Path, what: str, others: list[_Entry], needed: int, existing: int, max_bytes: int) -> None:
    """Remove the least recently used entries until the new one fits into the limit and onto the disk."""
    total = sum(entry.bytes for entry in others)
    for entry in sorted(others, key=lambda entry: entry.last_used):
        if total + needed <= max_bytes and needed - existing <= shutil.disk_usage(folder).free:
            return
        if _remove(folder, entry.name):
            total -= entry.bytes
    if total + needed > max_bytes:
        raise NoRoom(
            f"there is no room for {what} in the cache {folder}: it needs {readable_bytes(needed)}, the cache may hold "
            f"{readable_bytes(max_bytes)}, and {readable_bytes(total)} of it are in use; raise that, or stop what uses them"
        )


def _list_entries(folder: Path) -> list[_Entry]:
    """Return every entry, including incomplete ones."""
    names: dict[str, Path] = {}
    for path in folder.iterdir():
        if path.name.startswith(INCOMPLETE) and not path.name.endswith(PARTS):
            names[path.name.removeprefix(INCOMPLETE)] = path
        elif path.name.startswith(_REMOVED):
            shutil.rmtree(path, ignore_errors=True)  # The process that removed it was killed.
        elif not path.name.startswith("."):
            names[path.name] = path
    entries = []
    for name, path in names.items():
        lock = folder / LOCKS / f"{name}{USE}"
        try:
            size = int(json.loads(lock.read_text())["bytes"])
            last_used = lock.stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            size, last_used = folder_bytes(path), 0.0
        entries.append(_Entry(name, size, last_used))
    return entries


def allocated_bytes(status: os.stat_result) -> int:
    """Return the disk usage of a file, without its holes."""
    return status.st_blocks * 512


def folder_bytes(folder: Path, measure: Callable[[os.stat_result], int] = lambda status: status.st_size) -> int:
    """Return the size of all files in a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += measure(os.lstat(os.path.join(parent, name)))
    return total


def _remove(folder: Path, name: str) -> bool:
    """Remove an entry unless it is being filled or used; return whether it is gone."""
    filling, using = FileLock(folder / LOCKS / name), FileLock(folder / LOCKS / f"{name}{USE}")
    try:
        if not filling.try_acquire() or not using.try_acquire():
            return False
        removed = folder / f"{_REMOVED}{name}"
        for path in (folder / name, folder / f"{INCOMPLETE}{name}"):
            with contextlib.suppress(FileNotFoundError):
                path.rename(removed)
                log.info("evicted %s from the cache to free space", name)
                shutil.rmtree(removed, ignore_errors=True)
        (folder / f"{INCOMPLETE}{name}{PARTS}").unlink(missing_ok=True)
        using.path.unlink(missing_ok=True)
        filling.path.unlink(missing_ok=True)
        return True
    finally:
        using.release()
        filling.release()


_POLL_SECONDS = 0.2


class CacheUse:
    """Cache entries in use: they are not evicted until this is closed or the process ends."""

    def __init__(self) -> None:
        self._locks: list[FileLock] = []

    def hold(self, lock: FileLock) -> None:
        """Keep a lock."""
        self._locks.append(lock)

    def close(self) -> None:
        """Release all locks."""
        while self._locks:
            self._locks.pop().release()

    def __enter__(self) -> CacheUse:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Filling:
    """An entry that is being filled."""

    folder: Path
    """The folder, with the files of an earlier attempt if it kept a journal."""
    journal: Path
    report_bytes: Callable[[int], None]
    """Called with the number of received bytes."""


Fill = Callable[[Filling], None]


class Cache:
    """A cache folder."""

    def __init__(
        self,
        folder: Path,
        what: str,
        progress: Progress,
        cancelled: Callable[[], bool],
        max_bytes: int = 0,
        use: CacheUse | None = None,
    ) -> None:
        self.cancelled = cancelled
        self._folder = folder
        self._what = what
        self._progress = progress
        self._task = f"download {what}"
        self._max_bytes = max_bytes
        self._use = use

    def entry(self, name: str, state: str, size: int | None, fill: Fill) -> Path:
        """Return the folder of an entry of this name and state, and fill it if it does not exist. Marks it as in use."""
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
        with self._locked(entry.name):
            # A process that removes an entry holds its lock only briefly.
            lock = FileLock(self._folder / LOCKS / f"{entry.name}{USE}", shared=True)
            lock.acquire()
            try:
                os.utime(lock.descriptor)
                if entry.is_dir():
                    # The journal of a process that was killed right after it had renamed the entry.
                    (self._folder / f"{INCOMPLETE}{entry.name}{PARTS}").unlink(missing_ok=True)
                else:
                    existing = _received_bytes(self._folder / f"{INCOMPLETE}{entry.name}", size)
                    make_room(self._folder, self._what, entry.name, size, existing, self._max_bytes)
                    self._fill(entry, size, fill)
                    self._record_size(entry)
            except BaseException:
                lock.release()
                raise
            if self._use is not None:
                self._use.hold(lock)
            # The operating system releases the lock when the process ends, also by a signal.
        return entry

    def _fill(self, entry: Path, size: int | None, fill: Fill) -> None:
        download = DownloadProgress(self._progress, self._task, size)
        incomplete = self._folder / f"{INCOMPLETE}{entry.name}"
        journal = self._folder / f"{INCOMPLETE}{entry.name}{PARTS}"
        if not journal.exists():
            # Without a journal nothing can be resumed.
            shutil.rmtree(incomplete, ignore_errors=True)
        try:
            incomplete.mkdir(exist_ok=True)
            download.report("running")
            fill(Filling(incomplete, journal, download.add))
            fault_point("storage.entry.rename")
            incomplete.rename(entry)
            fault_point("storage.entry.renamed")
            journal.unlink(missing_ok=True)
        except BaseException as error:
            if not _can_resume(error):
                shutil.rmtree(incomplete, ignore_errors=True)
                journal.unlink(missing_ok=True)
            download.report("failed")
            if isinstance(error, DiskFull):
                raise NoRoom(no_room(self._what, self._folder, error.size)) from None
            raise
        download.report("finished")

    def _record_size(self, entry: Path) -> None:
        """Record the unpacked size of an entry, and evict others if the size was unknown before."""
        size = folder_bytes(entry)
        (self._folder / LOCKS / f"{entry.name}{USE}").write_text(json.dumps({"bytes": size}))
        if self._max_bytes:
            with contextlib.suppress(FailedPrecondition):  # The entry is complete; the next one will be refused.
                make_room(self._folder, self._what, entry.name, 0, size, self._max_bytes)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold a lock against other threads and processes that fetch the same entry."""
        waiting = False
        lock = FileLock(self._folder / LOCKS / name)
        try:
            while not lock.try_acquire():
                if self.cancelled():
                    raise Cancelled(f"waiting for {self._what} was cancelled")
                if not waiting:
                    waiting = True
                    self._progress(ProgressEvent(self._task, message="another process is downloading it"))
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            lock.release()


def _can_resume(error: BaseException) -> bool:
    """Return whether a failed download can be resumed."""
    if isinstance(error, DataDamaged | DiskFull | NoRoom):
        return False
    return isinstance(error, Cancelled | Unavailable) or not isinstance(error, HeadraceError | OSError)


def _received_bytes(folder: Path, size: int | None) -> int:
    """Return the received bytes of an incomplete entry: the disk usage, because its files have holes."""
    received = folder_bytes(folder, allocated_bytes)
    return received if size is None else min(received, size)


def plain_name(name: str) -> str:
    """Return a valid file name similar to `name`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80]
