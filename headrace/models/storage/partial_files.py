# SPDX-License-Identifier: Apache-2.0
"""Files that are downloaded in parts and can be resumed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import http.client
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from headrace.core.errors import Cancelled, Unavailable
from headrace.core.fault_points import fault_point
from headrace.models.storage.errors import DiskFull

Range = tuple[int, int]
"""First byte, and the one after the last."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Journal:
    """The record of a resumable download: which bytes are on disk. Thread-safe; `close` it at the end."""

    def __init__(self, path: Path, state: str) -> None:
        self.path = path
        self._head = json.dumps({"state": state, "boot": boot_id()})
        self._lock = threading.Lock()
        self._had = self._read()
        self._file: IO[str] = path.open("a" if self._had is not None else "w", encoding="utf-8")
        if self._had is None:
            self._write(self._head)
        else:
            self._write("")  # ends a line that was cut off

    @property
    def continues(self) -> bool:
        """Whether a record of this very download existed."""
        return self._had is not None

    def had(self, name: str) -> list[Range]:
        """Return the ranges of a file that were written before: in order, without overlaps."""
        return _joined((self._had or {}).get(name, ()))

    def wrote(self, name: str, start: int, end: int) -> None:
        """Record that these bytes of a file are written."""
        self._write(json.dumps([name, start, end]))

    def close(self) -> None:
        """Close the record, and keep it for the next attempt."""
        self._file.close()

    def _write(self, line: str) -> None:
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def _read(self) -> dict[str, list[Range]] | None:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return None
        if not lines or lines[0] != self._head:
            return None
        ranges: dict[str, list[Range]] = {}
        for line in lines[1:]:
            try:
                name, start, end = json.loads(line)
                ranges.setdefault(str(name), []).append((int(start), int(end)))
            except (ValueError, TypeError):
                continue  # Cut off while it was written.
        return ranges


def missing(had: Iterable[Range], size: int, most: int) -> Iterator[Range]:
    """Return the missing ranges of a file, each of at most `most` bytes."""
    at = 0
    for start, end in (*had, (size, size)):
        while at < start:
            upto = min(start, at + most)
            yield at, upto
            at = upto
        at = max(at, end)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start >= 0:
            joined.append((start, end))
    return joined


def boot_id() -> str:
    """Return an id of the machine's current boot; "" if unknown."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")


class PartialFile:
    """A download to the file `to`."""

    def __init__(self, to: Path, journal: Path | None) -> None:
        self._to = to
        self._journal = journal
        self._part = to.with_name(f".fetch-part-{to.name}")
        self._mark = self._read_mark()

    def range_headers(self) -> dict[str, str]:
        """Return the headers that request the rest; none if there is nothing to resume."""
        size = self._size()
        return {"Range": f"bytes={size}-", "If-Range": self._mark} if self._mark and size else {}

    def begins_at(self, answer: http.client.HTTPResponse) -> int | None:
        """Return where an answer begins in the file; None if it is not the requested rest."""
        if answer.status != http.client.PARTIAL_CONTENT:
            return 0 if answer.status == http.client.OK else None
        match = _RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
        requested = self.range_headers()
        return int(match[1]) if requested and match and int(match[1]) == self._size() else None

    def forget(self) -> None:
        """Discard what was downloaded."""
        self._mark = ""
        self._part.unlink(missing_ok=True)
        if self._journal is not None:
            self._journal.unlink(missing_ok=True)

    @contextlib.contextmanager
    def written(self, answer: http.client.HTTPResponse, start: int) -> Iterator[IO[bytes]]:
        """Open the file for writing. It is removed unless it is complete or resumable."""
        mark = self._mark if start else _mark_of(answer)
        if self._journal is None:
            handle, name = tempfile.mkstemp(prefix=".fetch-", dir=self._to.parent)
            path, file = Path(name), os.fdopen(handle, "wb")
        else:
            if not start:
                self.forget()
                self._journal.write_text(json.dumps({"mark": mark, "boot": boot_id()}))
            path, file = self._part, self._part.open("ab" if start else "wb")
        try:
            with file:
                yield file
            fault_point("storage.file.rename")
            path.replace(self._to)
        except BaseException as error:
            continued = isinstance(error, Unavailable | Cancelled | OSError) and not isinstance(error, DiskFull)
            if self._journal is None or not mark or not continued:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise

    def _size(self) -> int:
        try:
            return self._part.stat().st_size
        except OSError:
            return 0

    def _read_mark(self) -> str:
        try:
            record = json.loads(self._journal.read_text()) if self._journal is not None else {}
        except (OSError, ValueError):
            return ""
        return str(record.get("mark", "")) if isinstance(record, dict) and record.get("boot") == boot_id() else ""


def _mark_of(answer: http.client.HTTPResponse) -> str:
    """Return a strong validator (ETag or date) of the answer; "" if there is none."""
    etag = answer.headers.get("ETag", "").strip()
    if etag:
        return etag if etag.startswith('"') and etag.isprintable() else ""
    changed = answer.headers.get("Last-Modified", "").strip()
    return changed if changed.isprintable() else ""


_RESERVED = 1024 * 1024
"""Larger files are preallocated."""


def make_file(path: Path, size: int, *, exist_ok: bool) -> None:
    """Make a file of this length, and reserve its disk space where the file system can. `exist_ok`: the file may exist.

    So a full disk is detected before the download.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if exist_ok else os.O_EXCL)
    file = os.open(path, flags, 0o666)
    try:
        os.ftruncate(file, size)
        if size >= _RESERVED:
            _reserve(file, size)
    finally:
        os.close(file)


def _reserve(file: int, size: int) -> None:
    # Not os.posix_fallocate: if the file system cannot reserve, that writes the whole file.
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(file, 0, 0, size) != 0 and ctypes.get_errno() in {errno.ENOSPC, errno.EDQUOT}:
        raise OSError(ctypes.get_errno(), "No room")


def write_at(file: int, piece: Any, at: int) -> None:
    """Write all of a piece: one write may take less."""
    view = memoryview(piece)
    while view:
        count = os.pwrite(file, view, at)
        view, at = view[count:], at + count


def empty_folder(folder: Path) -> None:
    """Empty the folder of an earlier download."""
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def is_whole(path: Path, size: int) -> bool:
    """Return whether a file of an earlier attempt exists with its final size."""
    try:
        return path.is_file() and not path.is_symlink() and path.stat().st_size == size
    except OSError:
        return False
