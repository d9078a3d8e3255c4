# SPDX-License-Identifier: Apache-2.0
"""The key that the servers and routers of one user on this machine share, unless they are given one.

    /dev/shm/headrace-handing-<user>/key      the key; the first program that needs it creates it
    /dev/shm/headrace-handing-<user>/gate     a lock, held to create the key or to clean up a server's folder

Only the owner can read the folder.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from headrace.core.errors import FailedPrecondition
from headrace.core.files import FileLock, write_atomically
from headrace.core.kv_transfer import MIN_KEY_BYTES

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the folder in it is checked and private to the owner
_KEY_BYTES = 32


def user_folder(root: Path = _SHARED_MEMORY) -> Path:
    """Return this user's folder, created if missing. Raises FailedPrecondition if it is not private to this user."""
    folder = root / f"headrace-handing-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        raise FailedPrecondition(
            f"{folder} cannot be created: give this server a /dev/shm that it may write to"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise FailedPrecondition(f"{folder} is not private to this user: remove it")
    return folder


def machine_key(folder: Path) -> bytes:
    """Return the key that all servers of this user on this machine share; the first one creates it."""
    path = folder / "key"
    try:
        with folder_lock(folder):
            key = path.read_bytes() if path.exists() else b""
            if len(key) < MIN_KEY_BYTES:
                key = secrets.token_bytes(_KEY_BYTES)
                write_atomically(path, key, durable=False)
    except OSError:
        message = f"{path} cannot be written: free space in /dev/shm, or name a key with --handing-key-file"
        raise FailedPrecondition(message) from None
    return key


def folder_lock(folder: Path) -> FileLock:
    """Return the lock that lets one program at a time create or remove what is in the folder."""
    return FileLock(folder / "gate")
