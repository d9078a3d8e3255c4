# SPDX-License-Identifier: Apache-2.0
"""Files that several threads write in parts. Used by `objects`."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path
from typing import Any

_RESERVED = 1024 * 1024
"""Files from this size on."""


def make_file(path: Path, size: int, *, anew: bool) -> None:
    """A file of this length, with room on the disk where the file system can promise it. `anew`: it may be there already.

    So a disk that is too full is found out before the download, not in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if anew else os.O_EXCL)
    file = os.open(path, flags, 0o666)
    try:
        os.ftruncate(file, size)
        if size >= _RESERVED:
            _reserve(file, size)
    finally:
        os.close(file)


def _reserve(file: int, size: int) -> None:
    # Not os.posix_fallocate: where the file system cannot, that writes all of the file.
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(file, 0, 0, size) != 0 and ctypes.get_errno() in {errno.ENOSPC, errno.EDQUOT}:
        raise OSError(ctypes.get_errno(), "No room")


def write_at(file: int, piece: Any, at: int) -> None:
    """All of a piece: a write may take less than it was given."""
    view = memoryview(piece)
    while view:
        count = os.pwrite(file, view, at)
        view, at = view[count:], at + count


def empty(folder: Path) -> None:
    """Of what another download has left."""
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def is_whole(path: Path, size: int) -> bool:
    """Whether a file of an earlier try is there, as long as it will be."""
    try:
        return path.is_file() and not path.is_symlink() and path.stat().st_size == size
    except OSError:
        return False
