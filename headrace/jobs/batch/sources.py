# SPDX-License-Identifier: Apache-2.0
"""What a job is to compute: the lines of a manifest, or the files of a folder.

Called by `app` and, in a thread, by `running`. A source counts its items and says which state of the input it is before the
first is read; an item is read when its turn comes, so that those that are done cost nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from headrace.core.errors import InvalidArgument, NotFound
from headrace.core.limits import MIB
from headrace.jobs.batch.shaping import IMAGES, VIDEOS, Item, Shape

LINE_BYTES = 64 * MIB
FILE_BYTES = 64 * MIB
_PIECE = MIB
_BOM = b"\xef\xbb\xbf"


class Source(Protocol):
    """An input."""

    @property
    def total(self) -> int:
        """How many items it has."""

    @property
    def fingerprint(self) -> str:
        """Another one when any of it has changed."""

    @property
    def skipped(self) -> int:
        """Files of a folder that are no items of this kind of model."""

    def entries(self) -> Iterator[tuple[int, Any]]:
        """Every item's index, from 0, with what `item` needs to read it."""

    def id_of(self, entry: Any) -> str | None:
        """What an item is called that cannot be read."""

    def item(self, index: int, entry: Any) -> Item:
        """Read one. Raises InvalidArgument that says where it is wrong."""


def open_source(path: Path, shape: Shape, base: str, *, brought: bool = False) -> Source:
    """The source at a local path. `base`: where paths of media begin in a manifest. `brought`: the path is a copy."""
    if path.is_dir():
        return FolderSource(path, shape, brought=brought)
    if not path.is_file():
        raise NotFound(f"the input {path} does not exist: give a folder, a .jsonl or a .parquet file")
    if path.suffix.lower() in (".parquet", ".pq"):
        from headrace.jobs.batch.parquet import ParquetSource

        return ParquetSource(path, shape, base)
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return LinesSource(path, shape, base)
    raise InvalidArgument(
        f"the input {path.name} is neither a folder nor a manifest: name a .jsonl (an item in each line) or a .parquet file"
    )


class LinesSource:
    """A file with an item in each line that is not empty."""

    skipped = 0

    def __init__(self, path: Path, shape: Shape, base: str) -> None:
        self._path = path
        self._shape = shape
        self._base = base
        digest = hashlib.sha256()
        self.total = 0
        with path.open("rb", buffering=_PIECE) as file:
            for line in _lines(file):
                digest.update(line)
                self.total += _is_item(line)
        self.fingerprint = f"lines:{digest.hexdigest()}"

    def entries(self) -> Iterator[tuple[int, tuple[int, bytes]]]:
        """See `Source.entries`."""
        index = 0
        with self._path.open("rb", buffering=_PIECE) as file:
            for number, line in enumerate(_lines(file), 1):
                # Most begin with what only an item begins with.
                if line[:1] == b"{" or _is_item(line):
                    yield index, (number, line)
                    index += 1

    def id_of(self, entry: tuple[int, bytes]) -> None:
        """See `Source.id_of`: errors name the line."""

    def item(self, index: int, entry: tuple[int, bytes]) -> Item:
        """See `Source.item`."""
        number, line = entry
        if len(line) > LINE_BYTES:
            raise InvalidArgument(f"line {number} has more than {LINE_BYTES} bytes: name large things by their paths")
        try:
            value = orjson.loads(line.removeprefix(_BOM) if number == 1 else line)
        except ValueError:
            raise InvalidArgument(f"line {number} is not JSON: write one object in each line") from None
        try:
            return self._shape.item(index, value, self._base)
        except InvalidArgument as error:
            raise InvalidArgument(f"line {number}: {error.message}") from None


def _lines(file: Any) -> Iterator[bytes]:
    """Lines, of which those that are too long come cut, and longer than LINE_BYTES."""
    while line := file.readline(LINE_BYTES + 1):
        yield line
        while len(line) > LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(LINE_BYTES + 1)


def _is_item(line: bytes) -> bool:
    return bool(line.strip(b" \t\r\n\xef\xbb\xbf"))


class FolderSource:
    """Every file below a folder that is of a known kind, in the order of their names. Hidden ones are none."""

    def __init__(self, path: Path, shape: Shape, *, brought: bool = False) -> None:
        self._path = path.absolute()
        self._shape = shape
        self._files: list[str] = []
        self.skipped = 0
        digest = hashlib.sha256()
        for name in sorted(_walk(self._path)):
            if Path(name).suffix[1:].lower() not in shape.extensions:
                self.skipped += 1
                continue
            found = os.stat(self._path / name)
            # A copy is as new as the copying.
            digest.update(f"{name}\0{found.st_size}\0{0 if brought else found.st_mtime_ns}\n".encode(errors="replace"))
            self._files.append(name)
        if not self._files and self.skipped:
            known = ", ".join(f".{each}" for each in sorted(shape.extensions))
            raise InvalidArgument(
                f"none of the {self.skipped} files in {path} is for a {shape.model_type}: use {known}"
            )
        self.total = len(self._files)
        self.fingerprint = f"folder:{digest.hexdigest()}"

    def entries(self) -> Iterator[tuple[int, str]]:
        """See `Source.entries`."""
        return enumerate(self._files)

    def id_of(self, entry: str) -> str:
        """See `Source.id_of`."""
        return _called(entry)

    def item(self, index: int, entry: str) -> Item:
        """See `Source.item`."""
        path = self._path / entry
        extension = path.suffix[1:].lower()
        if extension in IMAGES or extension in VIDEOS:
            return self._shape.file(index, path, _called(entry))
        try:
            return self._read(index, _called(entry), path, extension)
        except OSError as error:
            raise InvalidArgument(f"{_called(entry)} cannot be read: {error.strerror}") from None
        except InvalidArgument as error:
            raise InvalidArgument(f"{_called(entry)}: {error.message}") from None

    def _read(self, index: int, name: str, path: Path, extension: str) -> Item:
        if path.stat().st_size > FILE_BYTES:
            raise InvalidArgument(f"it has more than {FILE_BYTES} bytes")
        if extension == "npy":
            try:
                return self._shape.array(index, np.load(path, allow_pickle=False), name)
            except ValueError:
                raise InvalidArgument("it is not an array that numpy.save wrote") from None
        content = path.read_bytes()
        if extension == "txt":
            try:
                text = content.removeprefix(_BOM).decode()
            except UnicodeDecodeError:
                raise InvalidArgument("it is not UTF-8") from None
            return self._shape.item(index, text, str(path.parent), name)
        try:
            value = orjson.loads(content)
        except ValueError:
            raise InvalidArgument("it is not JSON") from None
        return self._shape.item(index, value, str(path.parent), name)


def _walk(top: Path) -> Iterator[str]:
    """Files below, by their paths from there. Links to folders are not followed: they may lead in circles."""
    for folder, folders, files in os.walk(top, onerror=_unreadable):
        folders[:] = [each for each in folders if not each.startswith(".")]
        below = os.path.relpath(folder, top)
        for each in files:
            if not each.startswith("."):
                yield each if below == "." else os.path.join(below, each)


def _called(name: str) -> str:
    """A file's name as text, also where its bytes are none."""
    return os.fsencode(name).decode(errors="replace")


def _unreadable(error: OSError) -> None:
    raise InvalidArgument(f"{error.filename} cannot be read: {error.strerror}; check its permissions")


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
