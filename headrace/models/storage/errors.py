# SPDX-License-Identifier: Apache-2.0
"""Errors of downloads after which nothing is kept for another attempt."""

from __future__ import annotations

import shutil
from pathlib import Path

from headrace.core.errors import FailedPrecondition, NotFound, Unavailable


class NoSuchBucket(NotFound):
    """The bucket does not exist."""


class NoRoom(FailedPrecondition):
    """The disk is full."""


class DiskFull(Unavailable):
    """The disk is full; the message is for clients and names no local folder."""

    def __init__(self, text: str, size: int | None) -> None:
        super().__init__(text)
        self.size = size
        """Required bytes, if known."""


class DataDamaged(Unavailable):
    """The received data differs from what the store reports."""


def no_room(what: str, folder: Path | None, size: int | None) -> str:
    """Return the error for a full disk, with the required size."""
    needs = "" if not size else f": it needs {readable_bytes(size)}"
    try:
        free = "" if folder is None else f", and {folder} has {readable_bytes(shutil.disk_usage(folder).free)} free"
    except OSError:
        free = ""
    return f"there is no room for {what}{needs}{free}; make room or choose another folder"


def readable_bytes(size: float) -> str:
    """Format a size for people: 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
