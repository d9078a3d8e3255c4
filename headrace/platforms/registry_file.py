# SPDX-License-Identifier: Apache-2.0
"""The registry's file: read and replaced whole, by one process at a time, for its owner alone. Called by `registry`.

It lies in /tmp, where everybody may put files and links: what is not a plain file of this user is refused. What cannot be
read as JSON is put aside and told of, since somebody may want to look for lost services in it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, PermissionDenied, TooLarge, Unavailable

log = logging.getLogger("headrace.launch")

_MOST_BYTES = 16 * 1024 * 1024
_LOCK_PAUSE_SECONDS = 0.005


@contextmanager
def alone(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock file beside it. Raises Unavailable when others hold it for longer than `seconds`."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refused(lock_path, error) from None
    try:
        _check_ours(lock_path, lock)
        _wait_for(lock, lock_path, time.monotonic() + seconds)
        yield
    finally:
        os.close(lock)


def read(path: Path) -> dict[str, Any]:
    """The document; an empty one where there is none. To be called `alone`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _refused(path, error) from None
    try:
        _check_ours(path, descriptor)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            text = file.read(_MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > _MOST_BYTES:
        raise TooLarge(f"{path} has more than {_MOST_BYTES} bytes: it is no registry of services; name another file")
    if not text.strip():
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return document
    aside = path.with_name(f"{path.name}.broken-{time.time_ns()}")
    path.rename(aside)
    log.warning("%s could not be read and is now %s: services that it knew are not known any more", path, aside)
    return {}


def write(path: Path, document: dict[str, Any]) -> None:
    """Replace it, whole or not at all. To be called `alone`, after `read`."""
    # A name that nobody can guess: in a shared folder a link could wait under one.
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except BaseException:
            with suppress(OSError):
                fresh.unlink()
            raise
    except OSError as error:
        raise _refused(path, error) from None


def _wait_for(lock: int, path: Path, until: float) -> None:
    # Not a call that blocks: whoever holds the lock may have been stopped by a debugger or by Ctrl-Z.
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise Unavailable(
                    f"another process keeps the registry locked: `fuser {path}` tells which one", retry_after_seconds=1
                ) from None
            time.sleep(_LOCK_PAUSE_SECONDS)


def _check_ours(path: Path, descriptor: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise PermissionDenied(f"{path} is not a plain file: name another one by --registry")
    if found.st_uid != os.geteuid():
        raise PermissionDenied(f"{path} belongs to another user: name a file of your own by --registry")
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.fchmod(descriptor, 0o600)


def _refused(path: Path, error: OSError) -> Exception:
    if error.errno == errno.ELOOP:
        return PermissionDenied(
            f"{path} is a symbolic link, which may lead anywhere: name the file itself by --registry"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(f"{path} may not be used by you: name a file of your own by --registry")
    return FailedPrecondition(f"{path} cannot be used as the registry: {error.strerror}")
