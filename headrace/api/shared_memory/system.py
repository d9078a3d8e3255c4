# SPDX-License-Identifier: Apache-2.0
"""POSIX shared memory: a file in /dev/shm that a client made and named.

Made by `regions`. The file is read and written by calls of the kernel and never mapped: a client may shrink it at any
time, and a process that touches mapped memory beyond the end of a file is killed (SIGBUS). A call just says how much it
found. It costs one copy, which would be made anyway, so that nobody can change a tensor after it was checked.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from headrace.core.errors import InvalidArgument, Unavailable
from headrace.core.tensors import Buffer

RESERVED_PREFIX = "triton_python_backend_shm_region_"
_KEY_BYTES = 255
_MOST = (1 << 63) - 1


class SystemRegion:
    """A part of one file, open for as long as anyone refers to it."""

    def __init__(self, name: str, key: str, offset: int, byte_size: int, folder: Path) -> None:
        self._file = -1
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        if offset < 0 or byte_size <= 0 or offset + byte_size > _MOST:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': 'byte_size' must be over 0 and 'offset' 0 or more"
            )
        self._file = _open(name, key, folder)
        size = os.fstat(self._file).st_size
        if offset + byte_size > size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': offset {offset} and {byte_size} bytes are over the "
                f"{size} bytes that '{key}' has"
            )

    def __del__(self) -> None:
        # Not when it is unregistered: a request in flight may write its answer here yet, and a number that was closed
        # may by then be another file's.
        if self._file >= 0:
            os.close(self._file)

    def read_into(self, offset: int, target: memoryview) -> None:
        """See `Region.read_into`."""
        position, size = 0, len(target)
        while position < size:
            got = os.preadv(self._file, [target[position:]], self.offset + offset + position)
            if not got:
                raise self._shrunk()
            position += got

    def write(self, offset: int, data: Buffer) -> None:
        """See `Region.write`."""
        view = memoryview(data)
        start = self.offset + offset
        # Writing beyond the end would make the file longer, which is not for us to do.
        if os.fstat(self._file).st_size < start + len(view):
            raise self._shrunk()
        position = 0
        while position < len(view):
            try:
                position += os.pwrite(self._file, view[position:], start + position)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise Unavailable(f"there is no room in /dev/shm for shared memory region '{self.name}'") from None
                raise

    def _shrunk(self) -> InvalidArgument:
        return InvalidArgument(
            f"shared memory region '{self.name}' is shorter than it was when it was registered: register it again"
        )


def _open(name: str, key: str, folder: Path) -> int:
    file_name = _file_name(name, key)
    try:
        # Not through a link, which could lead out of the folder; and without waiting for the other end of a pipe.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(folder / file_name, flags)
    except OSError as error:
        raise InvalidArgument(
            f"Unable to open shared memory region: '{key}' ({os.strerror(error.errno or 0)}): make it before you "
            "register it, with rights for the server's user"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise InvalidArgument(f"Unable to open shared memory region: '{key}': it is not shared memory")
    return file


def _file_name(name: str, key: str) -> str:
    """What shm_open would open for this key: leading slashes do not count, and there are no folders."""
    shown = key[:_KEY_BYTES]
    file_name = key.lstrip("/")
    if file_name.startswith(RESERVED_PREFIX):
        raise InvalidArgument(
            f"cannot register shared memory region '{name}' with key '{shown}' as the key contains the reserved prefix "
            f"'{RESERVED_PREFIX}'"
        )
    try:
        length = len(file_name.encode())
    except UnicodeEncodeError:
        length = 0
    if not 0 < length <= _KEY_BYTES or file_name in (".", "..") or "/" in file_name or "\0" in file_name:
        raise InvalidArgument(
            f"failed to register shared memory region '{name}': invalid key {shown!a}: use the name that was given to "
            "shm_open, such as '/my_region'"
        )
    return file_name
