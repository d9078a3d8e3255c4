# SPDX-License-Identifier: Apache-2.0
"""Unpacks .zip as `archives` does .tar, with the same refusals: plain files and folders, relative names, bounded sizes.

Called by `archives`. What the directory of a zip says of sizes is not believed: bytes are counted as they come out.
"""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from headrace.core.errors import Cancelled, InvalidArgument
from headrace.core.limits import MIB
from headrace.models.storage.unpacking import UnpackLimits, inside

_PIECE = MIB
_DIRECTORY_BYTES = 32 * MIB
"""The most that zipfile may read at once: the directory of an archive."""
_DIRECTORY_ENTRY = b"PK\x01\x02"
_ENCRYPTED = 0x1


def unpack_zip(file: IO[bytes], folder: Path, limits: UnpackLimits, cancelled: Callable[[], bool], name: str) -> None:
    """Unpack into an empty folder. Raises what `archives.unpack` turns into its errors."""
    bounded = cast("IO[bytes]", _Bounded(file, limits, name))
    try:
        with zipfile.ZipFile(bounded) as archive:
            _take_all(archive, folder, limits, cancelled, name)
    except (NotImplementedError, RuntimeError):
        raise InvalidArgument(f"{name} is packed in a way that is not read here; use plain zip (deflate)") from None


class _Bounded:
    """A file of which not too much is read at once, nor a directory of too many files."""

    def __init__(self, file: IO[bytes], limits: UnpackLimits, name: str) -> None:
        self._file = file
        self._limits = limits
        self._name = name

    def read(self, size: int = -1) -> bytes:
        if size > _DIRECTORY_BYTES:
            raise self._limits.too_much(self._name)
        data = self._file.read(_DIRECTORY_BYTES if size < 0 else size)
        if data.startswith(_DIRECTORY_ENTRY) and data.count(_DIRECTORY_ENTRY) > self._limits.max_files:
            raise self._limits.too_much(self._name)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True


def _take_all(
    archive: zipfile.ZipFile, folder: Path, limits: UnpackLimits, cancelled: Callable[[], bool], name: str
) -> None:
    left = limits.max_bytes
    members = archive.infolist()
    if len(members) > limits.max_files:
        raise limits.too_much(name)
    for member in members:
        target = _target(member, folder, name)
        if member.filename.endswith("/"):  # as `is_dir`, which fails for a name without letters
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # zipfile checks the CRC-32 when the last byte was read.
        with archive.open(member) as source, target.open("xb") as file:
            while piece := source.read(_PIECE):
                if cancelled():
                    raise Cancelled(f"unpacking {name} was cancelled")
                left -= len(piece)
                if left < 0:
                    raise limits.too_much(name)
                file.write(piece)


def _target(member: zipfile.ZipInfo, folder: Path, name: str) -> Path:
    if member.flag_bits & _ENCRYPTED:
        raise InvalidArgument(f"{name} is encrypted; pack it without a password")
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
        raise InvalidArgument(f"{name} holds a link, device or other special file; pack plain files and folders only")
    # zipfile has cut the name at a NUL, and the original still has it.
    return inside(folder, member.orig_filename if "\0" in member.orig_filename else member.filename, name)
