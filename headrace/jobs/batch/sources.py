# SPDX-License-Identifier: Apache-2.0
"""The input of a batch job: items from JSON Lines, Parquet files and folders.

A source counts its items and takes a fingerprint of the input before the first item is read; an item is read when it is its
turn, so finished items cost nothing. `RequestShape` turns a line, a row or a file into an `Item`.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import orjson

from headrace.core.errors import InvalidArgument, NotFound
from headrace.core.extras import MissingExtra
from headrace.core.limits import MIB
from headrace.models.storage.locations import public_text, scheme_of

LINE_BYTES = 64 * MIB
FILE_BYTES = 64 * MIB
_CHUNK_BYTES = MIB
_BOM = b"\xef\xbb\xbf"

_ROWS_PER_READ = 1024
_BYTES_PER_READ = 16 * MIB
"""Approximate size of the rows that are read at once; a row may contain an image."""
_TEXT_KEYS: Mapping[str, str] = {"llm": "prompt", "vlm": "prompt", "video": "prompt", "embedding": "input"}
_MEDIA_KEYS = ("media", "files", "images", "image", "videos", "video")
_IMAGE_KINDS = ("classifier", "detector")
IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff"})
VIDEOS = frozenset({"mp4", "avi", "webm", "mkv", "mov"})


class Source(Protocol):
    """The input of a batch job."""

    @property
    def total(self) -> int:
        """Return the number of items."""

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint, which changes with the input."""

    @property
    def skipped(self) -> int:
        """Return the number of files that the model kind cannot use."""

    def entries(self) -> Iterator[tuple[int, Any]]:
        """Yield the index of every item, from 0, with the entry that `item` reads."""

    def id_of(self, entry: Any) -> str | None:
        """Return the id of an item that cannot be read."""

    def item(self, index: int, entry: Any) -> Item:
        """Read an item. InvalidArgument says where it is wrong."""


def open_source(path: Path, shape: RequestShape, base: str, *, is_copy: bool = False) -> Source:
    """Open the source at a local path. `base`: base of media paths in a manifest. `is_copy`: the path is a download."""
    if path.is_dir():
        return FolderSource(path, shape, is_copy=is_copy)
    if not path.is_file():
        raise NotFound(f"the input {path} does not exist: use a folder, a .jsonl or a .parquet file")
    if path.suffix.lower() in (".parquet", ".pq"):
        return ParquetSource(path, shape, base)
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return LinesSource(path, shape, base)
    raise InvalidArgument(
        f"the input {path.name} is neither a folder nor a manifest: use a .jsonl (one item per line) or a .parquet file"
    )


class LinesSource:
    """A JSON Lines file: one item per line; empty lines are skipped."""

    skipped = 0

    def __init__(self, path: Path, shape: RequestShape, base: str) -> None:
        self._path = path
        self._shape = shape
        self._base = base
        digest = hashlib.sha256()
        self.total = 0
        with path.open("rb", buffering=_CHUNK_BYTES) as file:
            for line in _lines(file):
                digest.update(line)
                self.total += _is_item(line)
        self.fingerprint = f"lines:{digest.hexdigest()}"

    def entries(self) -> Iterator[tuple[int, tuple[int, bytes]]]:
        """Yield the entries."""
        index = 0
        with self._path.open("rb", buffering=_CHUNK_BYTES) as file:
            for number, line in enumerate(_lines(file), 1):
                # Fast check first: most lines start with a brace.
                if line[:1] == b"{" or _is_item(line):
                    yield index, (number, line)
                    index += 1

    def id_of(self, entry: tuple[int, bytes]) -> None:
        """Return None: errors name the line."""

    def item(self, index: int, entry: tuple[int, bytes]) -> Item:
        """Read an item."""
        line_number, line = entry
        if len(line) > LINE_BYTES:
            raise InvalidArgument(f"line {line_number} has more than {LINE_BYTES} bytes: refer to large data by path")
        try:
            value = orjson.loads(line.removeprefix(_BOM) if line_number == 1 else line)
        except ValueError:
            raise InvalidArgument(f"line {line_number} is not JSON: write one object per line") from None
        try:
            return self._shape.item(index, value, self._base)
        except InvalidArgument as error:
            raise InvalidArgument(f"line {line_number}: {error.message}") from None


def _lines(file: Any) -> Iterator[bytes]:
    """Yield lines; a line that is too long is cut at LINE_BYTES + 1."""
    while line := file.readline(LINE_BYTES + 1):
        yield line
        while len(line) > LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(LINE_BYTES + 1)


def _is_item(line: bytes) -> bool:
    return bool(line.strip(b" \t\r\n\xef\xbb\xbf"))


class FolderSource:
    """All files below a folder with a known extension, sorted by name; hidden files are skipped."""

    def __init__(self, path: Path, shape: RequestShape, *, is_copy: bool = False) -> None:
        self._path = path.absolute()
        self._shape = shape
        self._files: list[str] = []
        self.skipped = 0
        digest = hashlib.sha256()
        for name in sorted(_walk(self._path)):
            if Path(name).suffix[1:].lower() not in shape.extensions:
                self.skipped += 1
                continue
            info = os.stat(self._path / name)
            # The times of a download say nothing.
            digest.update(f"{name}\0{info.st_size}\0{0 if is_copy else info.st_mtime_ns}\n".encode(errors="replace"))
            self._files.append(name)
        if not self._files and self.skipped:
            known = ", ".join(f".{extension}" for extension in sorted(shape.extensions))
            raise InvalidArgument(
                f"none of the {self.skipped} files in {path} is for a {shape.model_type} model: use {known}"
            )
        self.total = len(self._files)
        self.fingerprint = f"folder:{digest.hexdigest()}"

    def entries(self) -> Iterator[tuple[int, str]]:
        """Yield the entries."""
        return enumerate(self._files)

    def id_of(self, entry: str) -> str:
        """Return the id of an entry."""
        return _display_name(entry)

    def item(self, index: int, entry: str) -> Item:
        """Read an item."""
        path = self._path / entry
        extension = path.suffix[1:].lower()
        if extension in IMAGES or extension in VIDEOS:
            return self._shape.file(index, path, _display_name(entry))
        try:
            return self._read(index, _display_name(entry), path, extension)
        except OSError as error:
            raise InvalidArgument(f"{_display_name(entry)} cannot be read: {error.strerror}") from None
        except InvalidArgument as error:
            raise InvalidArgument(f"{_display_name(entry)}: {error.message}") from None

    def _read(self, index: int, name: str, path: Path, extension: str) -> Item:
        if path.stat().st_size > FILE_BYTES:
            raise InvalidArgument(f"it has more than {FILE_BYTES} bytes")
        if extension == "npy":
            try:
                return self._shape.array(index, np.load(path, allow_pickle=False), name)
            except ValueError:
                raise InvalidArgument("it is not a numpy array file") from None
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
    """Yield relative paths of all files below. Symbolic links to folders are not followed: they may be cyclic."""
    for folder, folders, files in os.walk(top, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        relative = os.path.relpath(folder, top)
        for name in files:
            if not name.startswith("."):
                yield name if relative == "." else os.path.join(relative, name)


def _display_name(name: str) -> str:
    """Return a file name as valid text."""
    return os.fsencode(name).decode(errors="replace")


def _raise_unreadable(error: OSError) -> None:
    raise InvalidArgument(f"{error.filename} cannot be read: {error.strerror}; check its permissions")


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def pyarrow_for(feature: str) -> Any:
    """Return the modules `pyarrow` and `pyarrow.parquet`; the error says how to install them."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise MissingExtra(feature, "parquet", "use JSON Lines (a name that ends in .jsonl)") from None


class ParquetSource:
    """A Parquet file: one item per row, one column per request field, and an optional `id`."""

    skipped = 0

    def __init__(self, path: Path, shape: RequestShape, base: str) -> None:
        self._arrow = pyarrow_for(f"the input {path.name}")
        self._path = path
        self._shape = shape
        self._base = base
        with self._open() as file:
            self.total = int(file.metadata.num_rows)
            groups = (file.metadata.row_group(n) for n in range(file.metadata.num_row_groups))
            row_bytes = sum(group.total_byte_size for group in groups) // max(1, self.total)
        self._rows = max(1, min(_ROWS_PER_READ, _BYTES_PER_READ // max(1, row_bytes)))
        self.fingerprint = f"parquet:{file_digest(path)}"

    def entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the entries."""
        for first, part in self.parts():
            yield from enumerate(part.to_pylist(), first)

    def parts(self, multiple: int = 1) -> Iterator[tuple[int, Any]]:
        """Yield record batches of pyarrow with the index of their first row, in multiples of `multiple` if possible."""
        first = 0
        with self._open() as file:
            for part in file.iter_batches(batch_size=max(1, self._rows // multiple) * multiple):
                yield first, part
                first += part.num_rows

    def id_of(self, entry: dict[str, Any]) -> str | None:
        """Return the id of an entry."""
        item_id = entry.get("id")
        return None if item_id is None else str(item_id)

    def item(self, index: int, entry: dict[str, Any]) -> Item:
        """Read an item."""
        fields = {name: value for name, value in entry.items() if value is not None}
        try:
            return self._shape.item(index, fields, self._base)
        except InvalidArgument as error:
            raise InvalidArgument(f"row {index + 1}: {error.message}") from None

    def _open(self) -> Any:
        try:
            return self._arrow.parquet.ParquetFile(self._path)
        except (self._arrow.ArrowException, OSError):
            raise InvalidArgument(f"the input {self._path.name} is not a Parquet file") from None


@dataclass(slots=True)  # not frozen: that costs a microsecond per item
class Item:
    """One item to compute."""

    index: int
    id: str | int | None
    body: Mapping[str, Any]
    """The inference request; for a tensor model {"inputs": {name: values}}."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of media in results, by the URLs they are read from."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The form of a model's requests."""

    model_type: str
    """See `ModelKind.model_type`."""
    inputs: tuple[str, ...] = ()
    """Names of the required inputs of a tensor model."""
    takes_text: bool = False
    """Whether a tensor model has one input, of type BYTES."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Default request parameters; an item overrides them."""

    @property
    def extensions(self) -> frozenset[str]:
        """Return the file extensions of items in a folder."""
        extensions = {"json"}
        if self.model_type in _IMAGE_KINDS:
            extensions |= IMAGES
        elif self.model_type in ("vlm", "video"):
            extensions |= IMAGES | VIDEOS | {"txt"}
        elif self.model_type == "tensors":
            extensions |= {"npy", "txt"} if self.takes_text else {"npy"}
        else:
            extensions.add("txt")
        return frozenset(extensions)

    def item(self, index: int, value: Any, base: str, default_id: str | None = None) -> Item:
        """Turn a JSON value, which it may modify, into an item. Relative media paths refer to `base`."""
        item_id: str | int | None = default_id
        if isinstance(value, dict):
            body = value
            if "id" in body and "id" not in self.inputs:
                given_id = body.pop("id")
                if given_id is not None and (isinstance(given_id, bool) or not isinstance(given_id, str | int)):
                    raise InvalidArgument("'id' must be a string or an integer")
                item_id = default_id if given_id is None else given_id
            if self.model_type == "tensors" and "inputs" not in body:
                body = {"inputs": body}
        elif isinstance(value, str):
            body = self._text_body(value)
        elif isinstance(value, list | int | float) and self.model_type == "tensors":
            body = self._values_body(value)
        else:
            raise InvalidArgument("an item must be a JSON object, or a string if the model takes text")
        return self._complete(index, item_id, body, base)

    def file(self, index: int, path: Path, id: str) -> Item:
        """Turn an image or video file into an item."""
        url = path.as_uri()
        return Item(index, id, {**self.parameters, "media": [url]}, {public_text(url): id})

    def array(self, index: int, values: Any, id: str) -> Item:
        """Turn a numpy array into an item."""
        return Item(index, id, self._values_body(values))

    def _text_body(self, text: str) -> dict[str, Any]:
        if self.model_type in _IMAGE_KINDS:
            return {"media": [text]}
        return self._values_body(text) if self.model_type == "tensors" else {_TEXT_KEYS[self.model_type]: text}

    def _values_body(self, values: Any) -> dict[str, Any]:
        if len(self.inputs) != 1:
            raise InvalidArgument(f"the model takes {', '.join(self.inputs)}: use an object with all of them")
        return {"inputs": {self.inputs[0]: values}}

    def _complete(self, index: int, id: str | int | None, body: dict[str, Any], base: str) -> Item:
        if self.model_type == "tensors":
            return Item(index, id, body)
        names: dict[str, str] = {}
        for key in _MEDIA_KEYS:
            value = body.get(key)
            if isinstance(value, str):
                body[key] = _media_url(value, base, names)
            elif isinstance(value, list):
                body[key] = [_media_url(item, base, names) if isinstance(item, str) else item for item in value]
        return Item(index, id, {**self._defaults(body), **body}, names)

    def _defaults(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the default parameters, without the default prompt if the item has one."""
        prompts = {"prompt", "text", "question"} & body.keys()
        return {key: value for key, value in self.parameters.items() if not (prompts and key in ("prompt", "text"))}


def _media_url(text: str, base: str, names: dict[str, str]) -> str:
    """Return the URL of a media path."""
    if scheme_of(text) or text[:5].lower() == "data:":
        return text
    in_cloud = scheme_of(base) and not text.startswith("/")
    url = f"{base}/{text}" if in_cloud else "file://" + quote(str(Path(base, text)))
    names[public_text(url)] = text
    return url
