# SPDX-License-Identifier: Apache-2.0
"""Unpack .tar, .tar.gz and .zip archives safely."""

from __future__ import annotations

import errno
import gzip
import logging
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from headrace.core.errors import Cancelled, FailedPrecondition, InvalidArgument
from headrace.core.limits import MIB
from headrace.models.storage.http_download import never_cancelled


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """Limits for unpacking one archive."""

    max_bytes: int = 1024 * 1024 * MIB
    max_files: int = 100_000

    def limit_error(self, name: str) -> InvalidArgument:
        """Return the error for an archive that exceeds the limits."""
        return InvalidArgument(f"{name} unpacks to more than {self.max_files} files or {self.max_bytes} bytes")


def member_path(folder: Path, member: str, name: str) -> Path:
    """Return the path of a member below the folder. Raises InvalidArgument if it would be outside."""
    parts = [part for part in member.split("/") if part not in {"", "."}]
    if member.startswith("/") or ".." in parts or "\\" in member or "\0" in member:
        raise InvalidArgument(f"{name} holds a name that leads out of its folder; pack it with relative names")
    return folder.joinpath(*parts)


_PIECE_BYTES = MIB
_DIRECTORY_BYTES = 32 * MIB
"""Maximum bytes that zipfile may read at once: the central directory."""
_DIRECTORY_ENTRY = b"PK\x01\x02"
_ENCRYPTED = 0x1


def unpack_zip(file: IO[bytes], folder: Path, limits: UnpackLimits, cancelled: Callable[[], bool], name: str) -> None:
    """Unpack a zip into an empty folder. `unpack` converts the exceptions."""
    bounded = cast("IO[bytes]", _BoundedZip(file, limits, name))
    try:
        with zipfile.ZipFile(bounded) as archive:
            _extract_zip(archive, folder, limits, cancelled, name)
    except (NotImplementedError, RuntimeError):
        raise InvalidArgument(f"{name} is packed in a way that is not read here; use plain zip (deflate)") from None


class _BoundedZip:
    """A file that limits reads, and the number of entries of the central directory."""

    def __init__(self, file: IO[bytes], limits: UnpackLimits, name: str) -> None:
        self._file = file
        self._limits = limits
        self._name = name

    def read(self, size: int = -1) -> bytes:
        if size > _DIRECTORY_BYTES:
            raise self._limits.limit_error(self._name)
        data = self._file.read(_DIRECTORY_BYTES if size < 0 else size)
        if data.startswith(_DIRECTORY_ENTRY) and data.count(_DIRECTORY_ENTRY) > self._limits.max_files:
            raise self._limits.limit_error(self._name)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True


def _extract_zip(
    archive: zipfile.ZipFile, folder: Path, limits: UnpackLimits, cancelled: Callable[[], bool], name: str
) -> None:
    budget = limits.max_bytes
    members = archive.infolist()
    if len(members) > limits.max_files:
        raise limits.limit_error(name)
    for member in members:
        target = _zip_target(member, folder, name)
        if member.filename.endswith("/"):  # like `is_dir`, which fails for an empty name
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # zipfile checks the CRC-32 after the last byte.
        with archive.open(member) as source, target.open("xb") as file:
            while piece := source.read(_PIECE_BYTES):
                if cancelled():
                    raise Cancelled(f"unpacking {name} was cancelled")
                budget -= len(piece)
                if budget < 0:
                    raise limits.limit_error(name)
                file.write(piece)


def _zip_target(member: zipfile.ZipInfo, folder: Path, name: str) -> Path:
    if member.flag_bits & _ENCRYPTED:
        raise InvalidArgument(f"{name} is encrypted; pack it without a password")
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
        raise InvalidArgument(f"{name} holds a link, device or other special file; pack plain files and folders only")
    # zipfile cuts a name at NUL; the original still has it.
    return member_path(folder, member.orig_filename if "\0" in member.orig_filename else member.filename, name)


log = logging.getLogger("headrace.storage")

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
_ZIP_HEADS = (b"PK\x03\x04", b"PK\x05\x06")
_READ_BYTES = 4 * MIB
"""Maximum bytes that tarfile may read for one header: names and attributes are short."""


def is_archive(name: str) -> bool:
    """Return whether a file name has the suffix of a supported archive."""
    return name.lower().endswith(SUFFIXES)


def stem(name: str) -> str:
    """Return a name without its archive suffix."""
    lower = name.lower()
    return next((name[: -len(suffix)] for suffix in SUFFIXES if lower.endswith(suffix)), name)


def unpack(
    archive: Path,
    folder: Path,
    limits: UnpackLimits,
    cancelled: Callable[[], bool] = never_cancelled,
    name: str = "",
) -> None:
    """Unpack into an empty folder. Raises InvalidArgument; the caller removes what was written.

    `name` is the archive's name in errors, if the file has another one.
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
            bounded = cast("IO[bytes]", _BoundedTar(source, limits.max_bytes + 64 * MIB, name))
            with tarfile.open(fileobj=bounded, mode="r:") as members:
                _extract_tar(members, folder, limits, cancelled, name)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError) as error:
        log.info("unpacking %s failed: %s", name, error)
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise FailedPrecondition(f"there is no room to unpack {name} in {folder.parent}; make room") from None
        raise InvalidArgument(
            f"{name} is not a whole .tar, .tar.gz or .zip archive, or could not be written here"
        ) from None


class _BoundedTar:
    """A file that raises after a maximum of bytes. tarfile calls `read`, `tell` and `seek`."""

    def __init__(self, file: IO[bytes], max_bytes: int, name: str) -> None:
        self._file = file
        self._max_bytes = max_bytes
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
        if position > self._max_bytes:
            raise InvalidArgument(f"{self._name} unpacks to more than {self._max_bytes} bytes")


def _extract_tar(
    members: tarfile.TarFile, folder: Path, limits: UnpackLimits, cancelled: Callable[[], bool], name: str
) -> None:
    size = count = 0
    while (member := members.next()) is not None:
        if cancelled():
            raise Cancelled(f"unpacking {name} was cancelled")
        members.members = []  # type: ignore[attr-defined]  # tarfile would keep all of them
        count += 1
        size += max(member.size, 0)
        if count > limits.max_files or size > limits.max_bytes:
            raise InvalidArgument(f"{name} unpacks to more than {limits.max_files} files or {limits.max_bytes} bytes")
        target = _tar_target(member, folder, name)
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            _extract_member(members, member, target)


def _tar_target(member: tarfile.TarInfo, folder: Path, name: str) -> Path:
    if not (member.isdir() or member.type in {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}):
        raise InvalidArgument(f"{name} holds a link, device or other special file; pack plain files and folders only")
    return member_path(folder, member.name, name)


def _extract_member(members: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = members.extractfile(member)
    if source is None:
        raise tarfile.TarError("no data")
    remaining = member.size
    with source, target.open("xb") as file:
        while remaining:
            piece = source.read(min(remaining, _PIECE_BYTES))
            if not piece:
                raise EOFError
            file.write(piece)
            remaining -= len(piece)
