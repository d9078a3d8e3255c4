# SPDX-License-Identifier: Apache-2.0
"""Remembers, from one start of the server to the next, which model files were checked and what came of it.

Used by `remembering`; knows files, and no models. Each entry is one file in a folder that only this user may enter,
`$XDG_CACHE_HOME/headrace/checked`: a digest of all that follows, what is to be known of the model, and what the library is
to read in place of the model's file, where that is another text. Its name is made of everything that the verdict depends on.

An entry is trusted as far as the folder is: who may write there is this user already. The digest is against disks that
were full and machines that stopped. Entries appear whole or not at all, so processes need no lock; what was not wanted for
the longest time goes first. Whatever fails here is a line in the log, and costs the time that it would have saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SWITCH = "HEADRACE_CHECKED_FILES"
"""An environment variable: 0 remembers nothing, for all models of a server."""
MOST_BYTES = 2 << 30
LONGEST_SECONDS = 30 * 24 * 3600.0
"""An entry goes when nobody has wanted it for so long."""

_SUFFIX = ".checked"
_NEW = ".new-"
_STALE_SECONDS = 3600.0
_LEAST_ON_DISK = 4096
_SEAL_BYTES = 32
_LENGTH = struct.Struct(">Q")
_ONLY_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_ANEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

log = logging.getLogger("headrace.backends")


@dataclass(frozen=True, slots=True)
class Remembered:
    """An entry, as it was written."""

    facts: Mapping[str, Any]
    content: memoryview


def usual_folder(environment: Mapping[str, str]) -> Path | None:
    """Where this user's entries are; None where there is no such place, or none is wanted."""
    if environment.get(SWITCH, "1").lower() in ("0", "false", "off", "no"):
        return None
    base = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    # It is not where the user has no home.
    return Path(base, "headrace", "checked") if os.path.isabs(base) else None


class CheckedFiles:
    """The entries of one user."""

    def __init__(self, folder: Path, *, most_bytes: int = MOST_BYTES, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._longest_seconds = longest_seconds

    def find(self, key: Mapping[str, str]) -> Remembered | None:
        """What was kept for this, if it is whole."""
        name = _name(key)
        try:
            with self._opened() as folder:
                data = _read(folder, name)
                found = _unsealed(data, key)
                if found is None:
                    log.warning("%s is damaged; the model's file is checked again", self._folder / name)
                    os.unlink(name, dir_fd=folder)
                return found
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("what was checked before is not known: %s: %s", self._folder, error.strerror)
            return None

    def keep(self, key: Mapping[str, str], facts: Mapping[str, Any], content: bytes | bytearray = b"") -> None:
        """Write an entry, and let others go if it needs their room."""
        told = json.dumps({"key": dict(key), "facts": dict(facts)}).encode()
        front = _LENGTH.pack(len(told)) + told
        size = _SEAL_BYTES + len(front) + len(content)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened() as folder:
                if self._make_room(folder, size):
                    seal = hashlib.sha256(front)
                    seal.update(content)
                    _write(folder, _name(key), seal.digest() + front, content)
        except OSError as error:
            log.info("what was checked is not kept for the next time: %s: %s", self._folder, error.strerror)

    def forget(self, key: Mapping[str, str]) -> None:
        """Remove an entry that is of no use."""
        with contextlib.suppress(OSError), self._opened() as folder:
            os.unlink(_name(key), dir_fd=folder)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder, held open, so that nobody can put another in its place."""
        folder = os.open(self._folder, _ONLY_READ | os.O_DIRECTORY)
        try:
            found = os.fstat(folder)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(
                    0, "others may enter this folder, or it is another user's; chmod 700, or remove it"
                )
            yield folder
        finally:
            os.close(folder)

    def _make_room(self, folder: int, size: int) -> bool:
        """Remove what is too old or too much; whether an entry of this size may be written."""
        disk = os.statvfs(folder)
        # A cache that fills the disk, or holds nothing but one file, is worse than none.
        if size > self._most_bytes // 2 or 2 * size > disk.f_bavail * disk.f_frsize:
            log.info("what was checked is not kept for the next time: %s has no room for %d bytes", self._folder, size)
            return False
        now, kept = time.time(), []
        for name, found in _all(folder):
            unfinished = name.startswith(_NEW)
            if now - found.st_mtime > (_STALE_SECONDS if unfinished else self._longest_seconds):
                _remove(folder, name)
            elif not unfinished:
                kept.append((found.st_mtime, max(found.st_size, _LEAST_ON_DISK), name))
        total = sum(bytes_ for _, bytes_, _ in kept) + size
        for _, bytes_, name in sorted(kept):
            if total <= self._most_bytes:
                break
            _remove(folder, name)
            total -= bytes_
        return True


def _name(key: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest() + _SUFFIX


def _read(folder: int, name: str) -> bytes:
    # A pipe of this name would otherwise wait for somebody to write.
    file = os.open(name, _ONLY_READ | os.O_NONBLOCK, dir_fd=folder)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        os.close(file)
        raise PermissionError(0, f"{name} is no file of this user's alone; remove it")
    with os.fdopen(file, "rb", buffering=0) as opened:
        # When it was last wanted.
        with contextlib.suppress(OSError):
            os.utime(file)
        return opened.readall()


def _unsealed(data: bytes, key: Mapping[str, str]) -> Remembered | None:
    """What an entry says, if it is one, whole, and for this key."""
    view = memoryview(data)
    behind = _SEAL_BYTES + _LENGTH.size
    if len(data) < behind or hashlib.sha256(view[_SEAL_BYTES:]).digest() != data[:_SEAL_BYTES]:
        return None
    (length,) = _LENGTH.unpack_from(data, _SEAL_BYTES)
    if length > len(data) - behind:
        return None
    try:
        told = json.loads(data[behind : behind + length])
        facts = told["facts"]
        fits = told["key"] == dict(key) and isinstance(facts, dict)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return Remembered(facts, view[behind + length :]) if fits else None


def _write(folder: int, name: str, front: bytes, content: bytes | bytearray) -> None:
    new = f"{_NEW}{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(new, _ANEW, 0o600, dir_fd=folder)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(front)
            opened.write(content)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _remove(folder, new)
        raise


def _all(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """Our files, and nobody else's."""
    for name in os.listdir(folder):
        if name.endswith(_SUFFIX) or name.startswith(_NEW):
            with contextlib.suppress(OSError):
                yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)


def _remove(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
