# SPDX-License-Identifier: Apache-2.0
"""Any place, as a path of this machine: `bring`.

Called in a thread by whoever loads a model. What is brought lies in a cache folder under a name that says where it came
from and which state of it this is (a commit, the marks of all objects), so that an entry never changes and is never half.
One process brings, others who want the same wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from headrace.core.errors import Cancelled, FailedPrecondition, InvalidArgument, NotFound
from headrace.core.limits import MIB
from headrace.storage.archives import UnpackLimits, is_archive, stem, unpack
from headrace.storage.credentials import CloudCredentials
from headrace.storage.fetching import FetchPolicy, fetch, never
from headrace.storage.hub import FILES, HubSource
from headrace.storage.locations import HubPlace, LocalPlace, ObjectPlace, Place, WebPlace, parse_location
from headrace.storage.objects import ObjectLimits, ObjectSource
from headrace.telemetry.progress import Progress, ProgressEvent, silent

log = logging.getLogger("headrace.storage")

_LOOK_AGAIN_SECONDS = 0.2
_REPORT_SECONDS = 0.2
_NO_CREDENTIALS = CloudCredentials()
Fill = Callable[[Path, Callable[[int], None]], None]


@dataclass(frozen=True, slots=True)
class BringSettings:
    """What may be brought."""

    max_bytes: int = 1024 * 1024 * MIB
    max_files: int = 100_000
    idle_seconds: float = 60.0
    """The longest silence of a server."""
    web_seconds: float = 6 * 3600.0
    """For one file behind an http(s) URL."""
    allow_hosts: tuple[str, ...] = ()
    """As of `FetchPolicy`, for http(s)."""
    private_hosts: tuple[str, ...] = ()
    """As of `FetchPolicy`, for http(s)."""
    hub_files: tuple[str, ...] = FILES
    """Which files of a model of the Hub."""


DEFAULT_SETTINGS = BringSettings()


def bring(
    place: Place | str,
    folder: Path,
    credentials: CloudCredentials | None = None,
    progress: Progress = silent,
    cancelled: Callable[[], bool] = never,
    settings: BringSettings = DEFAULT_SETTINGS,
) -> Path:
    """Bring what lies at a place into the cache `folder`, or find it there. A local path is returned as it is.

    Blocks, for hours if need be. Without credentials, object stores are asked with those of the environment. A .tar or
    .tar.gz is unpacked, and its folder returned. Raises errors whose texts hold no secrets.
    """
    if isinstance(place, str):
        place = parse_location(place)
    if isinstance(place, LocalPlace):
        return _local(place)
    cache = _Cache(folder, place, progress, cancelled, settings)
    if isinstance(place, HubPlace):
        return _from_hub(cache, place, credentials or _NO_CREDENTIALS)
    if isinstance(place, ObjectPlace):
        return _from_store(cache, place, credentials)
    return _from_web(cache, place)


def _local(place: LocalPlace) -> Path:
    if not place.path.exists():
        raise NotFound(f"{place.path} does not exist on this machine, or may not be read")
    return place.path


def _from_hub(cache: _Cache, place: HubPlace, credentials: CloudCredentials) -> Path:
    source = HubSource(place, credentials.hub_token, cache.settings.max_bytes, cache.settings.hub_files)
    listing = source.look()
    files = "\n".join(name for name, _ in listing.files)

    def fill(folder: Path, heard: Callable[[int], None]) -> None:
        source.download(listing, folder, heard, cache.cancelled)

    return cache.entry(place.repository, f"{place.repository}\n{listing.commit}\n{files}", listing.size, fill)


def _from_store(cache: _Cache, place: ObjectPlace, credentials: CloudCredentials | None) -> Path:
    settings = cache.settings
    limits = ObjectLimits(settings.max_bytes, settings.max_files, settings.idle_seconds)
    source = ObjectSource(place, credentials, limits)
    listing = source.look()
    name = place.key.rpartition("/")[2] or place.bucket
    packed = listing.is_file and is_archive(name)

    def fill(folder: Path, heard: Callable[[int], None]) -> None:
        source.download(listing, folder, heard, cache.cancelled)
        if packed:
            cache.unpack(folder, listing.objects[0].name)

    entry = cache.entry(stem(name) if packed else name, f"{place}\n{listing.digest}", listing.size, fill)
    return entry / listing.objects[0].name if listing.is_file and not packed else entry


def _from_web(cache: _Cache, place: WebPlace) -> Path:
    settings = cache.settings
    policy = FetchPolicy(
        max_bytes=settings.max_bytes,
        total_seconds=settings.web_seconds,
        idle_seconds=settings.idle_seconds,
        allow_hosts=settings.allow_hosts,
        private_hosts=settings.private_hosts,
    )
    try:
        path = urlsplit(place.url).path
    except ValueError:
        raise InvalidArgument(f"{place} is not a URL") from None
    name = _readable(unquote(path).rstrip("/").rpartition("/")[2]) or "file"
    packed = is_archive(name)

    def fill(folder: Path, heard: Callable[[int], None]) -> None:
        before = 0

        def so_far(size: int, _total: int | None) -> None:
            nonlocal before
            heard(size - before)
            before = size

        fetch(place.url, folder / name, policy, progress=so_far, cancelled=cache.cancelled)
        if packed:
            cache.unpack(folder, name)

    # A URL says nothing of the state of what it names: what was fetched once is not fetched again.
    entry = cache.entry(stem(name) if packed else name, place.url, None, fill)
    return entry if packed else entry / name


class _Cache:
    """The cache, for one who brings."""

    def __init__(
        self, folder: Path, place: Place, progress: Progress, cancelled: Callable[[], bool], settings: BringSettings
    ) -> None:
        self.settings = settings
        self.cancelled = cancelled
        self._folder = folder
        self._place = place
        self._progress = progress
        self._task = f"download {place}"

    def entry(self, name: str, state: str, size: int | None, fill: Fill) -> Path:
        """The folder of this name and state: there, or filled now."""
        digest = hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        entry = self._folder / f"{_readable(name) or 'entry'}-{digest}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("cache %s: %s", self._folder, error)
            raise FailedPrecondition(f"the cache folder {self._folder} cannot be made; choose another one") from None
        with self._alone(entry.name):
            if not entry.is_dir():
                self._check_room(size)
                self._fill(entry, size, fill)
        return entry

    def unpack(self, folder: Path, name: str) -> None:
        """Put what an archive holds in its place."""
        inside = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder))
        limits = UnpackLimits(self.settings.max_bytes, self.settings.max_files)
        unpack(folder / name, inside, limits, self.cancelled, str(self._place))
        (folder / name).unlink()
        for path in list(inside.iterdir()):
            path.rename(folder / path.name)
        inside.rmdir()

    def _fill(self, entry: Path, size: int | None, fill: Fill) -> None:
        told = _Told(self._progress, self._task, size)
        new = self._folder / f".bringing-{entry.name}"
        # Of a process that was killed: nobody else is at it, since we have the lock.
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            told.say("running")
            fill(new, told.heard)
            new.rename(entry)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            told.say("failed")
            raise
        told.say("finished")

    def _check_room(self, size: int | None) -> None:
        free = shutil.disk_usage(self._folder).free
        if size is not None and size > free:
            raise FailedPrecondition(
                f"{self._place} has {size} bytes and {self._folder} has room for {free}; make room or choose another"
            )

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """While nobody else, in this or another process, brings the same."""
        locks = self._folder / ".locks"
        locks.mkdir(exist_ok=True)
        waiting = False
        with (locks / name).open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self.cancelled():
                        raise Cancelled(f"waiting for {self._place} was cancelled") from None
                    if not waiting:
                        waiting = True
                        self._progress(ProgressEvent(self._task, message="another process is downloading it"))
                    time.sleep(_LOOK_AGAIN_SECONDS)
            yield


class _Told:
    """Progress of one download, from several threads, not too often."""

    def __init__(self, progress: Progress, task: str, total: int | None) -> None:
        self._progress = progress
        self._task = task
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._next = 0.0

    def heard(self, size: int) -> None:
        """So many bytes more."""
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + _REPORT_SECONDS
            self._progress(ProgressEvent(self._task, self._done, self._total, "bytes"))

    def say(self, state: Literal["running", "finished", "failed"]) -> None:
        """Begun, or over."""
        message = {"running": "downloading", "failed": "the download failed", "finished": "downloaded"}[state]
        with self._lock:
            self._progress(ProgressEvent(self._task, self._done, self._total, "bytes", message, state))


def _readable(name: str) -> str:
    """A name that can be a file's, as near as can be."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80]
