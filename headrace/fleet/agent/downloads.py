# SPDX-License-Identifier: Apache-2.0
"""Download one model into the model store, or adopt files that are already on the node. Both run in a thread."""

from __future__ import annotations

import errno
import logging
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from headrace.core.errors import Cancelled, FailedPrecondition
from headrace.core.telemetry.progress import ProgressEvent
from headrace.fleet.agent.model_keys import ModelKey
from headrace.fleet.agent.model_metadata import read_metadata
from headrace.fleet.agent.model_sources import ModelSource
from headrace.fleet.agent.model_store import ModelStore, Record
from headrace.models.storage.archives import is_archive
from headrace.models.storage.cache import CacheUse
from headrace.models.storage.checksums import Checksum, from_etag, from_hex
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.errors import NoRoom, no_room
from headrace.models.storage.fetch import FetchSettings, fetch_location
from headrace.models.storage.hugging_face import HubSource
from headrace.models.storage.locations import HubLocation, Location, ObjectLocation
from headrace.models.storage.object_stores import ObjectLimits, ObjectSource

log = logging.getLogger("headrace.agent")


class Download:
    """A running download. Its attributes and methods may be used from any thread."""

    def __init__(self, key: ModelKey, source: ModelSource) -> None:
        self.key = key
        self.source = source
        self.done = 0
        self.total: int | None = None
        self._stop = threading.Event()

    def stop(self) -> None:
        """Stop the download soon; the bytes that have arrived stay."""
        self._stop.set()

    def stopped(self) -> bool:
        """Whether the download has been stopped."""
        return self._stop.is_set()


@dataclass(frozen=True)
class _SourceState:
    place: Location
    size: int | None
    revision: str


def download_model(
    store: ModelStore,
    record: Record,
    download: Download,
    credentials: CloudCredentials | None,
    settings: FetchSettings,
) -> Record:
    """Download a model and return its record.

    Raises HeadraceError; Cancelled when the download was stopped.
    """
    source = download.source
    if source.place is None:
        raise FailedPrecondition(f"{source.shown} cannot be downloaded")
    settings = replace(settings, hub_files=source.files)
    try:
        state = _source_state(source.place, credentials, settings)
        record = structs.replace(record, revision=state.revision)
        store.reserve(record, state.size)

        def on_progress(event: ProgressEvent) -> None:
            download.done = max(download.done, int(event.done))
            download.total = state.size if state.size is not None else None
            if state.size is not None and event.done:
                store.update_reservation(record.key, max(1, state.size - int(event.done)))

        download.total = state.size
        with CacheUse() as use:
            downloaded = fetch_location(
                state.place,
                store.cache_folder(record),
                credentials,
                on_progress,
                download.stopped,
                settings=settings,
                use=use,
            )
            if download.stopped():
                raise Cancelled(f"downloading {source.shown} was cancelled")
            config = read_metadata(downloaded if downloaded.is_dir() else downloaded.parent)
            return store.install(structs.replace(record, config=config), downloaded)
    except OSError as error:
        log.warning("%s: %s", source.path, error)
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise NoRoom(no_room(source.shown, store.root, None)) from None
        raise FailedPrecondition(
            f"{source.path} cannot be written to: {os.strerror(error.errno or 0)}; check the node's folder"
        ) from None
    finally:
        store.update_reservation(record.key, 0)


def _source_state(place: Location, credentials: CloudCredentials | None, settings: FetchSettings) -> _SourceState:
    """Return the size and the current revision of a source."""
    if isinstance(place, HubLocation):
        token = credentials.hub_token if credentials is not None else ""
        listing = HubSource(place, token, settings.max_bytes, settings.hub_files).read_listing()
        # Download the commit that was listed, even if the branch moves meanwhile.
        return _SourceState(HubLocation(place.repository, listing.commit), listing.size, listing.commit)
    if isinstance(place, ObjectLocation):
        limits = ObjectLimits(settings.max_bytes, settings.max_files, settings.idle_seconds)
        objects = ObjectSource(place, credentials, limits).read_listing()
        return _SourceState(place, objects.size, objects.digest)
    return _SourceState(place, None, "")


_ExpectedFiles = dict[str, tuple[int, Checksum | None]]


def adopt_model(
    store: ModelStore,
    download: Download,
    credentials: CloudCredentials | None,
    settings: FetchSettings,
    *,
    reserved: bool,
) -> Record:
    """Adopt the files that are already on the node, without downloading. Return the model's record.

    For models with `downloadPolicy: ReuseIfExists`. Files are compared by size, and by checksum if the source has one.
    Raises FailedPrecondition if files are missing or differ.
    """
    source = download.source
    revision, expected = _expected_files(source, credentials, settings)
    folder = Path(source.path)
    different = [
        name
        for name, (size, checksum) in expected.items()
        if not _matches_file(folder / name, size, checksum, download)
    ]
    if download.stopped():
        raise Cancelled(f"comparing {source.shown} was cancelled")
    if different:
        raise FailedPrecondition(
            f"{folder} has files that this agent did not download, and {len(different)} of {len(expected)} differ from "
            f"those of {source.shown} ({', '.join(different[:3])}); move them away to have the model downloaded"
        )
    sizes = {name: size for name, (size, _) in expected.items()}
    return store.adopt(download.key, source, sizes, revision, read_metadata(folder), reserved=reserved)


def _expected_files(
    source: ModelSource, credentials: CloudCredentials | None, settings: FetchSettings
) -> tuple[str, _ExpectedFiles]:
    place = source.place
    if isinstance(place, HubLocation):
        token = credentials.hub_token if credentials is not None else ""
        listing = HubSource(place, token, settings.max_bytes, source.files).read_listing()
        hashes = dict(listing.hashes)
        return listing.commit, {name: (size, from_hex("sha256", hashes.get(name, ""))) for name, size in listing.files}
    if isinstance(place, ObjectLocation):
        limits = ObjectLimits(settings.max_bytes, settings.max_files, settings.idle_seconds)
        bucket = ObjectSource(place, credentials, limits).read_listing()
        if not (bucket.is_file and is_archive(bucket.objects[0].name)):
            tags = place.cloud in ("aws", "seaweedfs")
            files = {item.name: (item.size, from_etag(item.etag) if tags else None) for item in bucket.objects}
            return bucket.digest, files
    raise FailedPrecondition(
        f"{source.path} has files that this agent did not download, and {source.shown} does not list its files to compare; "
        "move them away"
    )


def _matches_file(path: Path, size: int, checksum: Checksum | None, download: Download) -> bool:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
            return False
        return download.stopped() or checksum is None or checksum.fits(path, download.stopped)
    except OSError:
        return False
