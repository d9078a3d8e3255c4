# SPDX-License-Identifier: Apache-2.0
"""Objects of S3, Google and Azure stores, as local files: `ObjectSource`.

Called in threads by `bringing` and `mirroring` (models) and `media` (one file). A source lists what a place means, then
downloads all of it, or keeps a journal of what it has. Keys come from whoever may write to the bucket, so none may lead out
of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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
from headrace.models.storage.checksums import etag_is_md5, from_etag, from_headers
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetching import never
from headrace.models.storage.journal import Journal, Range, missing
from headrace.models.storage.locations import ObjectPlace
from headrace.models.storage.object_heads import headers_of
from headrace.models.storage.object_stores import open_store
from headrace.models.storage.part_files import empty, is_whole, make_file, write_at
from headrace.models.storage.problems import DataDamaged, NoRoom, NoSuchBucket, no_room
from headrace.models.storage.splicing import splicer_for
from headrace.models.storage.together import Stopped, together

log = logging.getLogger("headrace.storage")

_PIECE = 64 * 1024  # larger ones are put together first, which is one copy more
_CHECKS_AT_ONCE = 4
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")


@dataclass(frozen=True, slots=True)
class ObjectLimits:
    """How much may be downloaded, and how long a store may be silent."""

    max_bytes: int = 1024 * 1024 * MIB
    max_files: int = 100_000
    idle_seconds: float = 60.0
    retry_seconds: float = 30.0
    """How long errors of the store's and of the network are tried again."""
    part_bytes: int = 32 * MIB
    """Larger objects come in parts of this size, several at once."""
    at_once: int = 8
    """How many requests are under way at the same time."""


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
        self._logged = ""
        self._keys = None if credentials is None else credentials.keys_of(place.cloud, place.bucket)
        with self._told():
            self._store = open_store(place, self._keys, limits.idle_seconds, limits.retry_seconds)
        self._splicer = splicer_for(self._store, place, self._keys, limits.idle_seconds)

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
        journal: Path | None = None,
    ) -> None:
        """Download all of a listing into a folder, large objects in parts, several at once; then check what can be.

        `progress` hears of bytes, in any thread. Without `journal` the folder is empty, and what was written when this
        raises is the caller's to remove. With one, what an earlier try of the same listing has left is kept, and heard of
        at once.
        """
        book = None
        if journal is not None:
            with self._told(folder, listing.size):
                book = Journal(journal, listing.digest)
                if not book.continues:
                    empty(folder)
        try:
            works = self._works(listing, folder, book, progress)
            together(works, self._limits.at_once, cancelled)
        finally:
            if self._splicer is not None:
                self._splicer.close()
            if book is not None:
                book.close()
        checks = [functools.partial(self._check, folder, entry) for entry in listing.objects if entry.size]
        together(checks, _CHECKS_AT_ONCE, cancelled)

    def _works(
        self, listing: Listing, folder: Path, book: Journal | None, progress: Callable[[int], None]
    ) -> list[Callable[[Stopped], None]]:
        """What is left to do."""
        works: list[Callable[[Stopped], None]] = []
        come = 0
        for entry in listing.objects:
            path = folder / entry.name
            had: list[Range] = []
            if book is not None and is_whole(path, entry.size):
                had = book.had(entry.name)
            if not had:
                self._make(path, entry, anew=book is not None)
            come += sum(end - start for start, end in had)
            # None of no bytes: a marker of an empty folder cannot be had by the name it is shown under.
            for start, end in missing(had, entry.size, self._limits.part_bytes):
                works.append(functools.partial(self._download_part, path, entry, start, end, book, progress))
        if come:
            progress(come)
        return works

    def _make(self, path: Path, entry: StoredObject, *, anew: bool) -> None:
        try:
            make_file(path, entry.size, anew=anew)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise NoRoom(no_room(str(self._place), path.parent, entry.size)) from None
            log.warning("cannot write %s: %s", path, error)
            raise FailedPrecondition(f"{entry.name} cannot be written into {path.parent}; is there room?") from None

    def _download_part(
        self,
        path: Path,
        entry: StoredObject,
        start: int,
        end: int,
        book: Journal | None,
        progress: Callable[[int], None],
        stopped: Stopped,
    ) -> None:
        """Bytes `start` to `end` of an object, into their place in its file."""
        at = start
        beyond = False
        try:
            with self._told(path.parent, entry.size), path.open("r+b", buffering=0) as file:
                if self._splicer is not None and not stopped():
                    at = self._splicer.part(entry.key, entry.etag, file.fileno(), start, end, progress, stopped)
                pieces = () if stopped() or at == end else self._pieces(entry, at, end)
                for piece in pieces:
                    beyond = at + len(piece) > end
                    if beyond or stopped():
                        break
                    write_at(file.fileno(), piece, at)
                    at += len(piece)
                    progress(len(piece))
        finally:
            if book is not None and at > start:
                book.wrote(entry.name, start, at)
        if stopped():
            raise Cancelled(f"downloading {self._place} was cancelled")
        if beyond or at != end:
            raise self._changed()

    def _pieces(self, entry: StoredObject, start: int, end: int) -> Iterable[Any]:
        answer = self._store.get(entry.key, options=_asked(entry, start, end))
        if not _is_same(entry.etag, answer.meta.get("e_tag") or ""):
            raise self._changed()
        return cast("Iterable[Any]", answer.stream(min_chunk_size=_PIECE))

    def _check(self, folder: Path, entry: StoredObject, stopped: Stopped) -> None:
        """Compare a file with what its store says of it. Raises DataDamaged."""
        from_tag = from_etag(entry.etag) if self._place.cloud in {"aws", "seaweedfs"} else None
        wanted = from_tag
        if from_tag is None and not stopped():
            headers = headers_of(self._store, self._place, self._keys, entry.key)
            same = headers is not None and _is_same(entry.etag, headers.get("etag", ""))
            wanted = from_headers(headers) if headers is not None and same else None
        if wanted is None or wanted.fits(folder / entry.name, stopped):
            return
        if from_tag is not None:
            headers = headers_of(self._store, self._place, self._keys, entry.key)
            if headers is not None and not etag_is_md5(headers):
                return
        raise DataDamaged(
            f"{entry.name} of {self._place} came with another {wanted.kind} than its store says it has; try again, and "
            "if that does not help, upload it anew"
        )

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

    def _log(self, text: str) -> None:
        """Once, not every time that it is so again."""
        if text != self._logged:
            log.warning("%s: %s", self._place, text)
        self._logged = text

    @contextlib.contextmanager
    def _told(self, folder: Path | None = None, size: int = 0) -> Iterator[None]:
        """What obstore says, in our words; its own, which hold addresses and requests, go to the log.

        `folder` and `size`: where bytes are written meanwhile, and how many.
        """
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
            if any(name in str(error) for name in _NO_BUCKET):
                raise NoSuchBucket(
                    f"there is no bucket {place.bucket} for {place}; check its name and the region"
                ) from None
            self._log(_without_secrets(str(error)))
            if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise NoRoom(no_room(str(place), folder, size)) from None
            raise Unavailable(
                f"{place} could not be read: the store did not answer as expected; check the endpoint, the region and the "
                "network (the server's log has more)"
            ) from None


def _asked(entry: StoredObject, start: int, end: int) -> Any:
    """A part is of the state that was listed, or not at all; of the whole, its answer says which state it is."""
    if (start, end) == (0, entry.size):
        return None
    return {"range": (start, end), **({"if_match": entry.etag} if entry.etag else {})}


def _is_same(listed: str, said: str) -> bool:
    """Whether two ETags are of one state: stores put quotes around them or do not. Who says none is believed."""
    return not listed or not said or listed.strip('"') == said.strip('"')


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
