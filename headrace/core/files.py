# SPDX-License-Identifier: Apache-2.0
"""Files that several processes share: written atomically, locked, read and written as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition
from headrace.core.fault_points import fault_point

_POLL_SECONDS = 0.005
_ASYNC_POLL_SECONDS = 0.02


def write_atomically(path: Path, content: bytes, *, mode: int | None = 0o600, durable: bool = True) -> None:
    """Replace a file: a reader sees the old content or the new content, never a part. Raises OSError.

    `mode`: the permissions, whatever the umask; None: those of any new file. `durable`: the content survives a power
    failure. Without it the content survives a killed process only, and the caller does not wait for the disk.
    """
    # The name is random and must be new: in a shared folder another user could put a link there.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666 if mode is None else 0o600), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        fault_point("files.replace")
        temporary.replace(path)
        if durable:
            _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def remove_temporary_files(folder: Path, name: str = "") -> None:
    """Remove the temporary files of processes that were killed in `write_atomically`. Raises OSError.

    Those of the file `name` in the folder, or of all files in and below it. Only for a caller that is their only writer.
    """
    temporary = f".{glob.escape(name) or '*'}.{'[0-9a-f]' * 16}.new"
    for path in list(folder.glob(temporary) if name else folder.rglob(temporary)):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a new or renamed file survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any, *, indent: int | None = None, durable: bool = True) -> None:
    """Write JSON atomically, readable by its owner alone; creates the folder. Raises FailedPrecondition with the cause."""
    encoded = json.dumps(content, indent=indent).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, encoded, durable=durable)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room on its disk" if is_full else "check its permissions"
        raise FailedPrecondition(f"{path} cannot be written: {os.strerror(error.errno or 0)}; {advice}") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file; None without a file, or if it has no JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def list_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders in a folder, sorted by name; none if it does not exist."""
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if path.is_dir())


class FileLock:
    """A `flock` on a file or folder, among threads and processes. The file is created, and never removed here.

    It is exclusive, or `shared` with other shared locks. It is released when the process ends, however it ends. A lock
    file may be removed by its holder: a process that waited for the removed file tries again with the new one.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self._operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """The open lock file. Opens it on first use, without locking it; raises OSError."""
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_RDONLY | os.O_DIRECTORY if self.path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        return self._descriptor

    def acquire(self, seconds: float | None = None) -> None:
        """Lock it, waiting at most `seconds` (None: no limit). Raises TimeoutError, or OSError if it cannot be opened."""
        limit = None if seconds is None else time.monotonic() + seconds
        while not self.try_acquire(wait=limit is None):
            if limit is None:
                continue
            # Polled rather than blocked in the kernel: the holder may be stopped by a debugger or by Ctrl-Z.
            if time.monotonic() >= limit:
                self.release()
                raise TimeoutError(f"{self.path} is locked by another process")
            time.sleep(_POLL_SECONDS)

    def try_acquire(self, *, wait: bool = False) -> bool:
        """Lock it if it is free; return whether it is locked now. `wait`: until its holder releases it. Raises OSError."""
        try:
            descriptor = self.descriptor
            fcntl.flock(descriptor, self._operation if wait else self._operation | fcntl.LOCK_NB)
            if os.stat(self.path).st_ino == os.fstat(descriptor).st_ino:
                return True
        except BlockingIOError:
            return False
        except FileNotFoundError:
            pass
        self.release()  # the file was removed, or replaced, by the process that held the lock
        return False

    def release(self) -> None:
        """Unlock it; does nothing if it is not locked."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextlib.asynccontextmanager
    async def hold(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Hold it without blocking the event loop. Raises TimeoutError, OSError."""
        async with asyncio.timeout(seconds):
            try:
                while not self.try_acquire():  # noqa: ASYNC110  # another process holds it
                    await asyncio.sleep(_ASYNC_POLL_SECONDS)
            except BaseException:
                self.release()
                raise
        try:
            yield
        finally:
            self.release()


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this user's downloads and mirrors."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
