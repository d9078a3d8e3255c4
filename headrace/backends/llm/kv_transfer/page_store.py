# SPDX-License-Identifier: Apache-2.0
"""The page store of a prefill server: KV pages in shared memory until a decode server fetches them, or they expire.

    /dev/shm/headrace-handing-<user>/key             the key of all servers of this user, unless one is configured
    /dev/shm/headrace-handing-<user>/gate            a lock, held to create or clean up a server's folder
    /dev/shm/headrace-handing-<user>/<server>/lock   held by a server while it runs
    /dev/shm/headrace-handing-<user>/<server>/<id>   the pages of one prompt

Only the owner can read the folder. The process that reads a file removes it; a file that is not read expires; the next
server that starts removes the files of a killed server, whose lock is free. Files are written and read, not mapped: a full
file system is then an error, not a crash.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import FailedPrecondition
from headrace.core.files import FileLock
from headrace.core.fleet_key import folder_lock

log = logging.getLogger("headrace.backends.llm")


class StoreFull(Exception):
    """The store has no space for more pages."""


@dataclass(frozen=True, slots=True)
class StoredPages:
    """The pages of one prompt."""

    id: str
    pages: int
    bytes: int
    expires: float


class PageStore:
    """The pages that one server keeps. Thread-safe."""

    def __init__(self, folder: Path, *, max_bytes: int, seconds: float) -> None:
        """Create the server's folder. Raises FailedPrecondition if that fails."""
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._folder = folder / self.name
        self._lock = threading.Lock()
        self._stored: dict[str, StoredPages] = {}
        self.bytes = 0
        try:
            with folder_lock(folder):
                _remove_stale(folder)
                self._folder.mkdir(mode=0o700)
                self._running = FileLock(self._folder / "lock")
                self._running.acquire()
        except OSError as error:
            message = f"{self._folder} cannot be created: {os.strerror(error.errno or 0)}; free space in /dev/shm"
            raise FailedPrecondition(message) from None

    def put(self, chunks: Iterable[memoryview], size: int, pages: int, now: float) -> StoredPages:
        """Store `size` bytes; each chunk is written before the next is requested. Raises StoreFull."""
        self.evict_expired(now)
        stored = StoredPages(secrets.token_hex(16), pages, size, now + self._seconds)
        with self._lock:
            if self.bytes + stored.bytes > self._max_bytes:
                raise StoreFull(f"{self.bytes} bytes are waiting to be fetched")
            self.bytes += stored.bytes
        path = self._folder / stored.id
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as stream:
                for chunk in chunks:
                    left = chunk
                    while left:
                        left = left[stream.write(left) :]
        except BaseException as error:
            path.unlink(missing_ok=True)
            with self._lock:
                self.bytes -= stored.bytes
            if not isinstance(error, OSError):
                raise
            raise StoreFull(f"shared memory is full: {os.strerror(error.errno or 0)}") from None
        with self._lock:
            self._stored[stored.id] = stored
        return stored

    def token_path(self, id: str) -> str:
        """Return the path of stored pages as a transfer token names it."""
        return f"{self.name}/{id}"

    def open(self, id: str, now: float) -> tuple[int, StoredPages] | None:
        """Return a file descriptor, which the caller closes; None if the pages are gone."""
        stored = self._stored.get(id)
        if stored is None or now > stored.expires:
            return None
        try:
            return os.open(self._folder / id, os.O_RDONLY | os.O_NOFOLLOW), stored
        except OSError:
            return None

    def remove(self, id: str) -> None:
        """Remove stored pages. Idempotent."""
        with self._lock:
            stored = self._stored.pop(id, None)
            if stored is not None:
                self.bytes -= stored.bytes
        (self._folder / id).unlink(missing_ok=True)

    def evict_expired(self, now: float) -> int:
        """Remove expired pages, and account for files that were fetched; return how many had expired."""
        evicted = 0
        with self._lock:
            all_stored = tuple(self._stored.values())
        for stored in all_stored:
            expired = now > stored.expires
            if expired or not (self._folder / stored.id).exists():
                evicted += expired and (self._folder / stored.id).exists()
                self.remove(stored.id)
        return evicted

    def close(self) -> None:
        """Remove the server's folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._running.release()


def _remove_stale(folder: Path) -> None:
    """Remove the folders of servers that no longer run. Call with `folder_lock` held."""
    for server_folder in folder.iterdir():
        if server_folder.is_dir() and not _is_running(server_folder):
            log.info("Removing KV pages of a server that no longer runs: %s", server_folder)
            shutil.rmtree(server_folder, ignore_errors=True)


def _is_running(folder: Path) -> bool:
    lock = FileLock(folder / "lock")
    if not lock.path.exists():
        return False  # killed before it created the lock, or its server is removing it now
    try:
        return not lock.try_acquire()
    except OSError:
        return False
    finally:
        lock.release()
