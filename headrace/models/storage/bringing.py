# SPDX-License-Identifier: Apache-2.0
"""Any place, as a path of this machine: `bring`.

Called in a thread by whoever loads a model. What is brought lies in a cache folder under a name that says where it came
from and which state of it this is (a commit, the marks of all objects), so that an entry never changes and is never half.
One process brings, others who want the same wait for it (`cache`).
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
from headrace.models.storage.archives import is_archive, stem, unpack
from headrace.models.storage.cache import Cache, CacheUse, Filling, plain_name
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetching import FetchPolicy, fetch, never
from headrace.models.storage.hub import FILES, HubSource
from headrace.models.storage.locations import HubPlace, LocalPlace, ObjectPlace, Place, WebPlace, parse_location
from headrace.models.storage.objects import ObjectLimits, ObjectSource
from headrace.models.storage.unpacking import UnpackLimits

_NO_CREDENTIALS = CloudCredentials()


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
    cache_bytes: int = 0
    """The most that the cache may hold; what was not wanted for the longest time goes. 0: no bound."""
    part_bytes: int = 32 * MIB
    """As of `ObjectLimits`."""


DEFAULT_SETTINGS = BringSettings()


def bring(
    place: Place | str,
    folder: Path,
    credentials: CloudCredentials | None = None,
    progress: Progress = silent,
    cancelled: Callable[[], bool] = never,
    settings: BringSettings = DEFAULT_SETTINGS,
    use: CacheUse | None = None,
) -> Path:
    """Bring what lies at a place into the cache `folder`, or find it there. A local path is returned as it is.

    Blocks, for hours if need be. Without credentials, object stores are asked with those of the environment. A .tar,
    .tar.gz or .zip is unpacked, and its folder returned. What was cut off is continued. Nobody removes what was brought
    until `use` is closed or, without one, this process ends. Raises errors whose texts hold no secrets.
    """
    if isinstance(place, str):
        place = parse_location(place)
    if isinstance(place, LocalPlace):
        return _local(place)
    cache = Cache(folder, str(place), progress, cancelled, settings.cache_bytes, use)
    if isinstance(place, HubPlace):
        return _from_hub(cache, place, credentials or _NO_CREDENTIALS, settings)
    if isinstance(place, ObjectPlace):
        return _from_store(cache, place, credentials, settings)
    return _from_web(cache, place, settings)


def _local(place: LocalPlace) -> Path:
    if not place.path.exists():
        raise NotFound(f"{place.path} does not exist on this machine, or may not be read")
    return place.path


def _from_hub(cache: Cache, place: HubPlace, credentials: CloudCredentials, settings: BringSettings) -> Path:
    source = HubSource(place, credentials.hub_token, settings.max_bytes, settings.hub_files)
    listing = source.look()
    files = "\n".join(name for name, _ in listing.files)

    def fill(filling: Filling) -> None:
        filling.journal.touch()  # the Hub's library keeps its own, in the folder
        source.download(listing, filling.folder, filling.heard, cache.cancelled)

    return cache.entry(place.repository, f"{place.repository}\n{listing.commit}\n{files}", listing.size, fill)


def _from_store(
    cache: Cache, place: ObjectPlace, credentials: CloudCredentials | None, settings: BringSettings
) -> Path:
    limits = ObjectLimits(settings.max_bytes, settings.max_files, settings.idle_seconds, part_bytes=settings.part_bytes)
    source = ObjectSource(place, credentials, limits)
    listing = source.look()
    name = place.key.rpartition("/")[2] or place.bucket
    packed = listing.is_file and is_archive(name)

    def fill(filling: Filling) -> None:
        source.download(listing, filling.folder, filling.heard, cache.cancelled, filling.journal)
        if packed:
            _unpack(filling, listing.objects[0].name, place, cache, settings)

    entry = cache.entry(stem(name) if packed else name, f"{place}\n{listing.digest}", listing.size, fill)
    return entry / listing.objects[0].name if listing.is_file and not packed else entry


def _from_web(cache: Cache, place: WebPlace, settings: BringSettings) -> Path:
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
    name = plain_name(unquote(path).rstrip("/").rpartition("/")[2]) or "file"
    packed = is_archive(name)

    def fill(filling: Filling) -> None:
        before = 0

        def so_far(size: int, _total: int | None) -> None:
            nonlocal before
            filling.heard(size - before)
            before = size

        fetch(
            place.url,
            filling.folder / name,
            policy,
            progress=so_far,
            cancelled=cache.cancelled,
            journal=filling.journal,
        )
        if packed:
            _unpack(filling, name, place, cache, settings)

    # A URL says nothing of the state of what it names: what was fetched once is not fetched again.
    entry = cache.entry(stem(name) if packed else name, place.url, None, fill)
    return entry if packed else entry / name


def _unpack(filling: Filling, name: str, place: Place, cache: Cache, settings: BringSettings) -> None:
    """Put what an archive holds in its place."""
    # From here on there is nothing that another try could continue.
    filling.journal.unlink(missing_ok=True)
    folder = filling.folder
    inside = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder))
    unpack(folder / name, inside, UnpackLimits(settings.max_bytes, settings.max_files), cache.cancelled, str(place))
    (folder / name).unlink()
    for path in list(inside.iterdir()):
        path.rename(folder / path.name)
    inside.rmdir()
