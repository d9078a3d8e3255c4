# SPDX-License-Identifier: Apache-2.0
"""A model whose files were on the node before the agent was: compared with what its source says it has, and taken over.

Called in a thread by `agent`, for models that say `downloadPolicy: ReuseIfExists`: of another agent, or of an image of the
node. Files are compared by size, and by checksum where the source tells one; nothing is downloaded or changed.
"""

from __future__ import annotations

from pathlib import Path

from headrace.core.errors import Cancelled, FailedPrecondition
from headrace.fleet.agent.fetching import Download
from headrace.fleet.agent.reading import read_model
from headrace.fleet.agent.records import Record
from headrace.fleet.agent.shelf import Shelf
from headrace.fleet.agent.sources import Source
from headrace.models.storage.archives import is_archive
from headrace.models.storage.bringing import BringSettings
from headrace.models.storage.checksums import Checksum, from_etag, from_hex
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.hub import HubSource
from headrace.models.storage.locations import HubPlace, ObjectPlace
from headrace.models.storage.objects import ObjectLimits, ObjectSource

_Wanted = dict[str, tuple[int, Checksum | None]]


def adopt_model(
    shelf: Shelf,
    download: Download,
    credentials: CloudCredentials | None,
    settings: BringSettings,
    *,
    reserved: bool,
) -> Record:
    """The record of the model that is there. Raises FailedPrecondition when it is another, or not whole."""
    source = download.source
    revision, wanted = _wanted(source, credentials, settings)
    folder = Path(source.path)
    wrong = [name for name, (size, checksum) in wanted.items() if not _is(folder / name, size, checksum, download)]
    if download.stopped():
        raise Cancelled(f"comparing {source.shown} was cancelled")
    if wrong:
        raise FailedPrecondition(
            f"{folder} has files that this agent did not bring, and {len(wrong)} of {len(wanted)} are not those of "
            f"{source.shown} ({', '.join(wrong[:3])}); move them away, and they are downloaded"
        )
    sizes = {name: size for name, (size, _) in wanted.items()}
    return shelf.adopt(download.key, source, sizes, revision, read_model(folder), reserved=reserved)


def _wanted(source: Source, credentials: CloudCredentials | None, settings: BringSettings) -> tuple[str, _Wanted]:
    place = source.place
    if isinstance(place, HubPlace):
        token = credentials.hub_token if credentials is not None else ""
        listing = HubSource(place, token, settings.max_bytes, source.files).look()
        hashes = dict(listing.hashes)
        return listing.commit, {name: (size, from_hex("sha256", hashes.get(name, ""))) for name, size in listing.files}
    if isinstance(place, ObjectPlace):
        limits = ObjectLimits(settings.max_bytes, settings.max_files, settings.idle_seconds)
        seen = ObjectSource(place, credentials, limits).look()
        if not (seen.is_file and is_archive(seen.objects[0].name)):
            tags = place.cloud in ("aws", "seaweedfs")
            found = {each.name: (each.size, from_etag(each.etag) if tags else None) for each in seen.objects}
            return seen.digest, found
    raise FailedPrecondition(
        f"{source.path} has files that this agent did not bring, and {source.shown} does not say which they should be; "
        "move them away"
    )


def _is(path: Path, size: int, checksum: Checksum | None, download: Download) -> bool:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
            return False
        return download.stopped() or checksum is None or checksum.fits(path, download.stopped)
    except OSError:
        return False
