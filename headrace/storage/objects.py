# SPDX-License-Identifier: Apache-2.0
"""Objects of S3, Google and Azure stores, as local files: `ObjectSource`.

Called in threads by `bringing` (models) and `media` (one file). A source lists what a place means, then downloads all of it
or leaves nothing. Keys come from whoever may write to the bucket, so none may lead out of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import (
    Cancelled,
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from headrace.core.limits import MIB
from headrace.storage.credentials import CloudCredentials
from headrace.storage.fetching import never
from headrace.storage.locations import ObjectPlace
from headrace.storage.object_stores import open_store
from headrace.storage.together import Stopped, together

log = logging.getLogger("headrace.storage")

_PIECE = 4 * MIB
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class ObjectLimits:
    """How much may be downloaded, and how long a store may be silent."""

    max_bytes: int = 1024 * 1024 * MIB
    max_files: int = 100_000
    idle_seconds: float = 60.0
    retry_seconds: float = 30.0
    """How long errors of the store's and of the network are tried again."""
    part_bytes: int = 64 * MIB
    """Larger objects come in parts of this size, several at once."""


DEFAULT_LIMITS = ObjectLimits()


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object, and where it goes in the folder."""

    key: str
    name: str
    size: int
    etag: str = ""
    """The store's mark of this content; "" if it gives none."""
    changed: str = ""
    """When it was last written."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a place means today."""

    objects: tuple[StoredObject, ...]
    is_file: bool
    """One object of exactly this key, rather than those below it."""

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(entry.size for entry in self.objects)

    @property
    def digest(self) -> str:
        """Changes when any of it does."""
        text = "\n".join(f"{entry.key}\t{entry.size}\t{entry.etag or entry.changed}" for entry in self.objects)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def unheard(size: int) -> None:
    """Let bytes go uncounted."""


class ObjectSource:
    """One place of a store. Without credentials those of the environment are used, as the clouds' own tools do."""

    def __init__(
        self, place: ObjectPlace, credentials: CloudCredentials | None, limits: ObjectLimits = DEFAULT_LIMITS
    ) -> None:
        self._place = place
        self._limits = limits
        keys = None if credentials is None else credentials.keys_of(place.cloud, place.bucket)
        with self._told():
            self._store = open_store(place, keys, limits.idle_seconds, limits.retry_seconds)

    def look(self) -> Listing:
        """Look: the object of this key, or all below it. Raises NotFound when there is neither."""
        key = self._place.key
        with self._told():
            if key:
                try:
                    meta = self._store.head(key)
                except FileNotFoundError:
                    pass
                else:
                    return self._checked([_entry(meta, key.rpartition("/")[0])], is_file=True)
            found: list[StoredObject] = []
            for page in self._store.list(prefix=key or None):
                found += [_entry(meta, key) for meta in page]
                if len(found) > self._limits.max_files:
                    raise InvalidArgument(f"{self._place} has more than {self._limits.max_files} objects")
        found = _without_markers(found, key)
        if not found:
            raise NotFound(f"there is nothing at {self._place}; check the bucket, the key and the region")
        return self._checked(sorted(found, key=lambda entry: entry.key), is_file=False)

    def download(
        self,
        listing: Listing,
        folder: Path,
        progress: Callable[[int], None] = unheard,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        """Download all of a listing into an empty folder, several at once. `progress` hears of bytes, in any thread.

        What was written when it raises is the caller's to remove.
        """
        for entry in listing.objects:
            self._make(folder / entry.name, entry)
        part = self._limits.part_bytes
        works = [
            functools.partial(self._download_part, folder, entry, start, min(start + part, entry.size), progress)
            for entry in listing.objects
            # None of no bytes: a marker of an empty folder cannot be had by the name it is shown under.
            for start in range(0, entry.size, part)
        ]
        together(works, _AT_ONCE, cancelled)

    def _make(self, path: Path, entry: StoredObject) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(exist_ok=False)
            os.truncate(path, entry.size)
        except OSError as error:
            log.warning("cannot write %s: %s", path, error)
            raise FailedPrecondition(f"{entry.name} cannot be written into {path.parent}; is there room?") from None

    def _download_part(
        self, folder: Path, entry: StoredObject, start: int, end: int, progress: Callable[[int], None], stopped: Stopped
    ) -> None:
        """Bytes `start` to `end` of an object, into their place in its file."""
        at = start
        with self._told(), (folder / entry.name).open("r+b") as file:
            file.seek(start)
            if not stopped():
                for piece in self._store.get(entry.key, options=_asked(entry, start, end)).stream(
                    min_chunk_size=_PIECE
                ):
                    at += len(piece)
                    if stopped() or at > end:
                        break
                    file.write(piece)
                    progress(len(piece))
        if stopped():
            raise Cancelled(f"downloading {self._place} was cancelled")
        if at != end:
            raise self._changed()

    def _changed(self) -> Unavailable:
        return Unavailable(f"{self._place} changed or was cut off while it was downloaded; try again")

    def _checked(self, found: list[StoredObject], *, is_file: bool) -> Listing:
        listing = Listing(tuple(found), is_file)
        if listing.size > self._limits.max_bytes:
            raise InvalidArgument(
                f"{self._place} has more than {self._limits.max_bytes} bytes, the most that are taken"
            )
        names = {entry.name for entry in found}
        for entry in found:
            parts = entry.name.split("/")
            if any(part in {"", ".", ".."} for part in parts) or any(c in entry.name for c in "\\\0"):
                raise InvalidArgument(
                    f"{self._place} has an object whose key cannot be a file's name: {entry.key!r:.200}"
                )
            above = ["/".join(parts[:count]) for count in range(1, len(parts))]
            if len(names) != len(found) or any(name in names for name in above):
                raise InvalidArgument(f"{self._place} has objects that would be file and folder of the same name")
        return listing

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What obstore says, in our words; its own, which hold addresses and requests, go to the log."""
        place = self._place
        try:
            from obstore import exceptions
        except ImportError:
            raise FailedPrecondition(f"{place} needs obstore; install it with `pip install headrace[cloud]`") from None
        try:
            yield
        except HeadraceError:
            raise
        except FileNotFoundError:
            raise NotFound(f"there is nothing at {place}; check the bucket, the key and the region") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
            raise PermissionDenied(f"{place} may not be read with these credentials") from None
        except exceptions.PreconditionError:
            raise self._changed() from None
        except exceptions.InvalidPathError:
            raise InvalidArgument(
                f"{place} has an object whose key cannot be a file's name (`..`, `.`, `//`)"
            ) from None
        except (exceptions.BaseError, ValueError, OSError) as error:
            log.warning("%s: %s", place, _without_secrets(str(error)))
            if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise FailedPrecondition(f"there is no room for {place} on this machine; make room") from None
            raise Unavailable(
                f"{place} could not be read: the store did not answer as expected; check the endpoint, the region and the "
                "network (the server's log has more)"
            ) from None


def _asked(entry: StoredObject, start: int, end: int) -> Any:
    """A part is of the state that was listed, or not at all; the whole is measured when it has come."""
    if (start, end) == (0, entry.size):
        return None
    return {"range": (start, end), **({"if_match": entry.etag} if entry.etag else {})}


def _entry(meta: Any, above: str) -> StoredObject:
    key = str(meta["path"])
    name = key.removeprefix(f"{above}/") if above else key
    return StoredObject(key, name, int(meta["size"]), meta.get("e_tag") or "", str(meta.get("last_modified") or ""))


def _without_markers(found: list[StoredObject], above: str) -> list[StoredObject]:
    """A store's "folder" is often an object of no bytes whose key ends in a slash; obstore shows it without."""
    folders = {above} | {entry.key[:i] for entry in found for i, char in enumerate(entry.key) if char == "/"}
    return [entry for entry in found if entry.size or entry.key not in folders]


def _without_secrets(text: str) -> str:
    """The first line, and nothing after a query's beginning: signed URLs are in there."""
    return text.splitlines()[0].partition("?")[0][:300] if text else ""
