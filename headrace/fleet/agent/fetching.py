# SPDX-License-Identifier: Apache-2.0
"""One model from its source to its folder: look, make sure of the room, bring, place, read. `fetch_model`, in a thread.

Called by `agent`. It may be killed at any point: the next call goes on from what has come.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from dataclasses import dataclass, replace

from headrace.core.errors import Cancelled, FailedPrecondition
from headrace.core.telemetry.progress import ProgressEvent
from headrace.fleet.agent.marks import ModelKey
from headrace.fleet.agent.reading import read_model
from headrace.fleet.agent.records import Record
from headrace.fleet.agent.shelf import Shelf
from headrace.fleet.agent.sources import Source
from headrace.models.storage.bringing import BringSettings, bring
from headrace.models.storage.cache import CacheUse
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.hub import HubSource
from headrace.models.storage.locations import HubPlace, ObjectPlace, Place
from headrace.models.storage.objects import ObjectLimits, ObjectSource
from headrace.models.storage.problems import NoRoom, no_room

log = logging.getLogger("headrace.agent")


class Download:
    """A download under way. `stop` may be called in any thread, and what is told be read in any."""

    def __init__(self, key: ModelKey, source: Source) -> None:
        self.key = key
        self.source = source
        self.done = 0
        self.total: int | None = None
        self._stop = threading.Event()

    def stop(self) -> None:
        """End it soon; what has come stays."""
        self._stop.set()

    def stopped(self) -> bool:
        """Whether it is to end."""
        return self._stop.is_set()


@dataclass(frozen=True)
class _Found:
    place: Place
    size: int | None
    revision: str


def fetch_model(
    shelf: Shelf,
    record: Record,
    download: Download,
    credentials: CloudCredentials | None,
    settings: BringSettings,
) -> Record:
    """The record of the model that is there now.

    Raises HeadraceError with what to do; Cancelled when the download was stopped.
    """
    source = download.source
    if source.place is None:
        raise FailedPrecondition(f"{source.shown} is nothing to download")
    settings = replace(settings, hub_files=source.files)
    try:
        found = _look(source.place, credentials, settings)
        record = replace(record, revision=found.revision)
        shelf.promise(record, found.size)

        def heard(event: ProgressEvent) -> None:
            download.done = max(download.done, int(event.done))
            download.total = found.size if found.size is not None else None
            if found.size is not None and event.done:
                shelf.came(record.key, max(1, found.size - int(event.done)))

        download.total = found.size
        with CacheUse() as use:
            brought = bring(
                found.place, shelf.cache(record), credentials, heard, download.stopped, settings=settings, use=use
            )
            if download.stopped():
                raise Cancelled(f"downloading {source.shown} was cancelled")
            config = read_model(brought if brought.is_dir() else brought.parent)
            return shelf.place(replace(record, config=config), brought)
    except OSError as error:
        log.warning("%s: %s", source.path, error)
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise NoRoom(no_room(source.shown, shelf.root, None)) from None
        raise FailedPrecondition(
            f"{source.path} cannot be written to: {os.strerror(error.errno or 0)}; look at the node's folder"
        ) from None
    finally:
        shelf.came(record.key, 0)


def _look(place: Place, credentials: CloudCredentials | None, settings: BringSettings) -> _Found:
    """How large it is, and which state of it is there today."""
    if isinstance(place, HubPlace):
        token = credentials.hub_token if credentials is not None else ""
        listing = HubSource(place, token, settings.max_bytes, settings.hub_files).look()
        # What was looked at is what is brought, also if the branch moves meanwhile.
        return _Found(HubPlace(place.repository, listing.commit), listing.size, listing.commit)
    if isinstance(place, ObjectPlace):
        limits = ObjectLimits(settings.max_bytes, settings.max_files, settings.idle_seconds)
        seen = ObjectSource(place, credentials, limits).look()
        return _Found(place, seen.size, seen.digest)
    return _Found(place, None, "")
