# SPDX-License-Identifier: Apache-2.0
"""Bytes in the shared memory of this machine until somebody takes them, or for so long. Made by `hands`.

    /dev/shm/headrace-handing-<user>/key             what servers of this machine sign with, if they are told no other
    /dev/shm/headrace-handing-<user>/gate            held by who makes something in this folder, or removes what was left
    /dev/shm/headrace-handing-<user>/<server>/lock   held by a server as long as it lives
    /dev/shm/headrace-handing-<user>/<server>/<id>   the pages of one prompt

All of it is the owner's alone. Who takes a file removes it; what nobody takes goes after a while; what a server left that
was killed is removed by the next one that starts, which finds the lock free. Files are written and read, not mapped: a
full file system is then an error, and not the end of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import FailedPrecondition
from headrace.core.handing import LEAST_KEY_BYTES

log = logging.getLogger("headrace.backends.llm")

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the folder in it is the owner's alone, and checked
_KEY_BYTES = 32


class NoRoom(Exception):
    """There is no room for more."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The pages of one prompt."""

    id: str
    pages: int
    bytes: int
    until: float


def own_folder(root: Path = _SHARED_MEMORY) -> Path:
    """The folder of this user, made where it is not there. Raises FailedPrecondition if it is somebody else's."""
    folder = root / f"headrace-handing-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        raise FailedPrecondition(f"{folder} cannot be made: give this server a /dev/shm that it may write to") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise FailedPrecondition(f"{folder} is not a folder that only this user may use: remove it")
    return folder


def machine_key(folder: Path) -> bytes:
    """The key that all servers of this user on this machine find; made by the first."""
    path = folder / "key"
    try:
        with _alone_in(folder):
            key = path.read_bytes() if path.exists() else b""
            if len(key) < LEAST_KEY_BYTES:
                key, fresh = secrets.token_bytes(_KEY_BYTES), folder / "key.new"
                with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
                    stream.write(key)
                fresh.replace(path)
    except OSError:
        said = f"{path} cannot be written: make room in /dev/shm, or name a key with --handing-key-file"
        raise FailedPrecondition(said) from None
    return key


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One server at a time: so what another sees here is whole, and has its lock, or is of one that was killed."""
    gate = os.open(folder / "gate", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield
    finally:
        os.close(gate)


class Keeper:
    """What one server keeps. From any thread."""

    def __init__(self, folder: Path, *, most_bytes: int, seconds: float) -> None:
        """Raises FailedPrecondition where there is no place for it."""
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._most = most_bytes
        self._seconds = seconds
        self._folder = folder / self.name
        self._lock = threading.Lock()
        self._kept: dict[str, Kept] = {}
        self.bytes = 0
        try:
            with _alone_in(folder):
                _sweep_left(folder)
                self._folder.mkdir(mode=0o700)
                self._held = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = f"{self._folder} cannot be made: {os.strerror(error.errno or 0)}; make room in /dev/shm"
            raise FailedPrecondition(said) from None

    def keep(self, pieces: Iterable[memoryview], size: int, pages: int, now: float) -> Kept:
        """Keep these bytes, `size` of them in all; a piece is written before the next is asked for. Raises NoRoom."""
        self.sweep(now)
        kept = Kept(secrets.token_hex(16), pages, size, now + self._seconds)
        with self._lock:
            if self.bytes + kept.bytes > self._most:
                raise NoRoom(f"{self.bytes} bytes wait to be taken already")
            self.bytes += kept.bytes
        path = self._folder / kept.id
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as stream:
                for piece in pieces:
                    left = piece
                    while left:
                        left = left[stream.write(left) :]
        except BaseException as error:
            path.unlink(missing_ok=True)
            with self._lock:
                self.bytes -= kept.bytes
            if not isinstance(error, OSError):
                raise
            raise NoRoom(f"the shared memory of the machine takes no more: {os.strerror(error.errno or 0)}") from None
        with self._lock:
            self._kept[kept.id] = kept
        return kept

    def place(self, id: str) -> str:
        """What a ticket says of where it lies."""
        return f"{self.name}/{id}"

    def open(self, id: str, now: float) -> tuple[int, Kept] | None:
        """A descriptor of what is kept, which the caller closes; None if it is not any more."""
        kept = self._kept.get(id)
        if kept is None or now > kept.until:
            return None
        try:
            return os.open(self._folder / id, os.O_RDONLY | os.O_NOFOLLOW), kept
        except OSError:
            return None

    def remove(self, id: str) -> None:
        """It was taken, or is not wanted. More than once does no harm."""
        with self._lock:
            kept = self._kept.pop(id, None)
            if kept is not None:
                self.bytes -= kept.bytes
        (self._folder / id).unlink(missing_ok=True)

    def sweep(self, now: float) -> int:
        """Remove what nobody took in time, and account for what was taken by way of its file; how many were too old."""
        late = 0
        with self._lock:
            there = tuple(self._kept.values())
        for kept in there:
            over = now > kept.until
            if over or not (self._folder / kept.id).exists():
                late += over and (self._folder / kept.id).exists()
                self.remove(kept.id)
        return late

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._held)


def _sweep_left(folder: Path) -> None:
    """Remove what servers have left that are no more. Only while `_alone_in` it."""
    for each in folder.iterdir():
        if each.is_dir() and not _lives(each):
            log.info("removing pages that a server has left in %s", each)
            shutil.rmtree(each, ignore_errors=True)


def _lives(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False  # killed before it had one, or removed by its server at this moment
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
