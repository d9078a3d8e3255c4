# SPDX-License-Identifier: Apache-2.0
"""Unpacks .tar, .tar.gz and .zip into a folder, trusting nothing in them: `unpack`.

Called by `bringing`. Takes plain files and folders only. Links, devices, absolute names and `..` are refused rather than
skipped: an archive that has them is not what its owner thinks it is. A compressed archive is never inflated further than
the limit, and no header makes us read much at once.
"""

from __future__ import annotations

import errno
import gzip
import logging
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from headrace.core.errors import Cancelled, FailedPrecondition, InvalidArgument
from headrace.core.limits import MIB
from headrace.models.storage.fetching import never
from headrace.models.storage.unpacking import UnpackLimits, inside
from headrace.models.storage.zips import unpack_zip

log = logging.getLogger("headrace.storage")

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
_PIECE = MIB
_ZIP_HEADS = (b"PK\x03\x04", b"PK\x05\x06")
_READ_BYTES = 4 * MIB
"""The most a header may make tarfile read at once: names and attributes, which are short."""


def is_archive(name: str) -> bool:
    """Whether a file's name says that it is one we unpack."""
    return name.lower().endswith(SUFFIXES)


def stem(name: str) -> str:
    """The name without the suffix of an archive."""
    lower = name.lower()
    return next((name[: -len(suffix)] for suffix in SUFFIXES if lower.endswith(suffix)), name)


def unpack(
    archive: Path,
    folder: Path,
    limits: UnpackLimits,
    cancelled: Callable[[], bool] = never,
    name: str = "",
) -> None:
    """Unpack into an empty folder. Raises InvalidArgument; what was written until then is the caller's to remove.

    `name` is how errors call the archive, where it lies under another one.
    """
    name = name or archive.name
    try:
        with archive.open("rb") as file:
            head = file.read(4)
            file.seek(0)
            if head in _ZIP_HEADS:
                unpack_zip(file, folder, limits, cancelled, name)
                return
            compressed = head[:2] == b"\x1f\x8b"
            source = cast("IO[bytes]", gzip.GzipFile(fileobj=file, mode="rb")) if compressed else file
            bounded = cast("IO[bytes]", _Bounded(source, limits.max_bytes + 64 * MIB, name))
            with tarfile.open(fileobj=bounded, mode="r:") as members:
                _take_all(members, folder, limits, cancelled, name)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError) as error:
        log.info("unpacking %s failed: %s", name, error)
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise FailedPrecondition(f"there is no room to unpack {name} in {folder.parent}; make room") from None
        raise InvalidArgument(
            f"{name} is not a whole .tar, .tar.gz or .zip archive, or could not be written here"
        ) from None


class _Bounded:
    """A file that does not yield more than it may. tarfile reads, tells and seeks forward."""

    def __init__(self, file: IO[bytes], most: int, name: str) -> None:
        self._file = file
        self._most = most
        self._name = name

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > _READ_BYTES:
            raise InvalidArgument(f"{self._name} has a header of more than {_READ_BYTES} bytes")
        data = self._file.read(size)
        self._check(self._file.tell())
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0:
            self._check(offset)
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def _check(self, position: int) -> None:
        if position > self._most:
            raise InvalidArgument(f"{self._name} unpacks to more than {self._most} bytes")


def _take_all(
    members: tarfile.TarFile, folder: Path, limits: UnpackLimits, cancelled: Callable[[], bool], name: str
) -> None:
    size = count = 0
    while (member := members.next()) is not None:
        if cancelled():
            raise Cancelled(f"unpacking {name} was cancelled")
        members.members = []  # type: ignore[attr-defined]  # tarfile would remember every one
        count += 1
        size += max(member.size, 0)
        if count > limits.max_files or size > limits.max_bytes:
            raise InvalidArgument(f"{name} unpacks to more than {limits.max_files} files or {limits.max_bytes} bytes")
        target = _target(member, folder, name)
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            _take(members, member, target)


def _target(member: tarfile.TarInfo, folder: Path, name: str) -> Path:
    if not (member.isdir() or member.type in {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}):
        raise InvalidArgument(f"{name} holds a link, device or other special file; pack plain files and folders only")
    return inside(folder, member.name, name)


def _take(members: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = members.extractfile(member)
    if source is None:
        raise tarfile.TarError("no data")
    left = member.size
    with source, target.open("xb") as file:
        while left:
            piece = source.read(min(left, _PIECE))
            if not piece:
                raise EOFError
            file.write(piece)
            left -= len(piece)
