# SPDX-License-Identifier: Apache-2.0
"""Fetch a model or file from any location into the local cache.

An entry's name includes its source and its state (a commit, the ETags of all objects), so that entries never change and
are never incomplete. One process downloads; others that need the same entry wait for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headrace.core.errors import InvalidArgument, NotFound
from headrace.core.limits import MIB
from headrace.core.telemetry.progress import Progress, silent
from headrace.models.storage.archives import UnpackLimits, is_archive, stem, unpack
from headrace.models.storage.cache import Cache, CacheUse, Filling, plain_name
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.http_download import FetchPolicy, fetch, never_cancelled
from headrace.models.storage.hugging_face import FILES, HubSource
from headrace.models.storage.locations import (
    HubLocation,
    LocalLocation,
    Location,
    ObjectLocation,
    WebLocation,
    parse_location,
)
from headrace.models.storage.object_stores import ObjectLimits, ObjectSource

_NO_CREDENTIALS = CloudCredentials()


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Limits and options of downloads."""

    max_bytes: int = 1024 * 1024 * MIB
    max_files: int = 100_000
    idle_seconds: float = 60.0
    """Time limit without any received byte."""
    web_seconds: float = 6 * 3600.0
    """Time limit for a file behind an http(s) URL."""
    allow_hosts: tuple[str, ...] = ()
    """As in `FetchPolicy`, for http(s)."""
    private_hosts: tuple[str, ...] = ()
    """As in `FetchPolicy`, for http(s)."""
    hub_files: tuple[str, ...] = FILES
    """Files of a Hub model to download."""
    cache_bytes: int = 0
    """Maximum size of the cache; the least recently used entries are evicted. 0: no limit."""
    part_bytes: int = 32 * MIB
    """As in `ObjectLimits`."""


DEFAULT_SETTINGS = FetchSettings()


def fetch_location(
    location: Location | str,
    folder: Path,
    credentials: CloudCredentials | None = None,
    progress: Progress = silent,
    cancelled: Callable[[], bool] = never_cancelled,
    settings: FetchSettings = DEFAULT_SETTINGS,
    use: CacheUse | None = None,
) -> Path:
    """Fetch a location into the cache `folder`, or find it there. A local path is returned as it is.

    Blocks, possibly for hours. Without credentials, object stores use those of the environment. Archives are unpacked,
    and their folder is returned. Interrupted downloads are resumed. The entry is not evicted until `use` is closed or,
    without one, the process ends. Error texts have no secrets.
    """
    if isinstance(location, str):
        location = parse_location(location)
    if isinstance(location, LocalLocation):
        return _local(location)
    cache = Cache(folder, str(location), progress, cancelled, settings.cache_bytes, use)
    if isinstance(location, HubLocation):
        return _from_hub(cache, location, credentials or _NO_CREDENTIALS, settings)
    if isinstance(location, ObjectLocation):
        return _from_store(cache, location, credentials, settings)
    return _from_web(cache, location, settings)


def _local(location: LocalLocation) -> Path:
    if not location.path.exists():
        raise NotFound(f"{location.path} does not exist on this machine, or may not be read")
    return location.path


def _from_hub(cache: Cache, location: HubLocation, credentials: CloudCredentials, settings: FetchSettings) -> Path:
    source = HubSource(location, credentials.hub_token, settings.max_bytes, settings.hub_files)
    listing = source.read_listing()
    files = "\n".join(name for name, _ in listing.files)

    def fill(filling: Filling) -> None:
        filling.journal.touch()  # The Hub's library keeps its own journal in the folder.
        source.download(listing, filling.folder, filling.report_bytes, cache.cancelled)

    return cache.entry(location.repository, f"{location.repository}\n{listing.commit}\n{files}", listing.size, fill)


def _from_store(
    cache: Cache, location: ObjectLocation, credentials: CloudCredentials | None, settings: FetchSettings
) -> Path:
    limits = ObjectLimits(settings.max_bytes, settings.max_files, settings.idle_seconds, part_bytes=settings.part_bytes)
    source = ObjectSource(location, credentials, limits)
    listing = source.read_listing()
    name = location.key.rpartition("/")[2] or location.bucket
    is_packed = listing.is_file and is_archive(name)

    def fill(filling: Filling) -> None:
        source.download(listing, filling.folder, filling.report_bytes, cache.cancelled, filling.journal)
        if is_packed:
            _unpack(filling, listing.objects[0].name, location, cache, settings)

    entry = cache.entry(stem(name) if is_packed else name, f"{location}\n{listing.digest}", listing.size, fill)
    return entry / listing.objects[0].name if listing.is_file and not is_packed else entry


def _from_web(cache: Cache, location: WebLocation, settings: FetchSettings) -> Path:
    policy = FetchPolicy(
        max_bytes=settings.max_bytes,
        total_seconds=settings.web_seconds,
        idle_seconds=settings.idle_seconds,
        allow_hosts=settings.allow_hosts,
        private_hosts=settings.private_hosts,
    )
    try:
        path = urlsplit(location.url).path
    except ValueError:
        raise InvalidArgument(f"{location} is not a URL") from None
    name = plain_name(unquote(path).rstrip("/").rpartition("/")[2]) or "file"
    is_packed = is_archive(name)

    def fill(filling: Filling) -> None:
        reported = 0

        def report(size: int, _total: int | None) -> None:
            nonlocal reported
            filling.report_bytes(size - reported)
            reported = size

        fetch(
            location.url,
            filling.folder / name,
            policy,
            progress=report,
            cancelled=cache.cancelled,
            journal=filling.journal,
        )
        if is_packed:
            _unpack(filling, name, location, cache, settings)

    # A URL does not identify a version of its content: a URL is downloaded only once.
    entry = cache.entry(stem(name) if is_packed else name, location.url, None, fill)
    return entry if is_packed else entry / name


def _unpack(filling: Filling, name: str, location: Location, cache: Cache, settings: FetchSettings) -> None:
    """Replace an archive by its content."""
    # From here on nothing can be resumed.
    filling.journal.unlink(missing_ok=True)
    folder = filling.folder
    unpacked = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder))
    unpack(
        folder / name, unpacked, UnpackLimits(settings.max_bytes, settings.max_files), cache.cancelled, str(location)
    )
    (folder / name).unlink()
    for path in list(unpacked.iterdir()):
        path.rename(folder / path.name)
    unpacked.rmdir()
