# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a download besides what all of the server knows: after these, what has come is not kept.

Raised by the sources of this room, told apart by `cache` and `mirroring` from what the next try may continue.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from headrace.core.errors import FailedPrecondition, NotFound, Unavailable


class NoSuchBucket(NotFound):
    """The bucket itself is not there."""


class NoRoom(FailedPrecondition):
    """The disk is full."""


class DiskFull(Unavailable):
    """The same, in words for a client, who need not know of this machine's folders."""

    def __init__(self, text: str, size: int | None) -> None:
        super().__init__(text)
        self.size = size
        """How many bytes there would have been, if that is known."""


class DataDamaged(Unavailable):
    """What came is not what the store says it has."""


def no_room(what: str, folder: Path | None, size: int | None) -> str:
    """What to say when the disk was full, with how much is needed."""
    needs = "" if not size else f": it needs {readable_bytes(size)}"
    try:
        free = "" if folder is None else f", and {folder} has {readable_bytes(shutil.disk_usage(folder).free)} free"
    except OSError:
        free = ""
    return f"there is no room for {what}{needs}{free}; make room or choose another folder"


def readable_bytes(size: float) -> str:
    """For people: 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
