# SPDX-License-Identifier: Apache-2.0
"""An organisation's records in a bucket of its own: `:backup` and `:restore` of workspaces. Called by `service`.

A backup is one object, encrypted with the gateway's key file and bound to the organisation: who can read the bucket learns
nothing from it, and who can write there cannot make one up, which could name any file of this machine as a model. So the
key file has to be kept, too; without it a backup is of no use.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.core.limits import MIB
from headrace.jobs.clouds import KINDS, check_details, cloud_metadata
from headrace.jobs.secrets import Vault
from headrace.jobs.store.backups import put_back, rows_of
from headrace.jobs.store.database import Database
from headrace.jobs.store.tables import metadata as tables
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import CLOUD_SCHEMES, Cloud, ObjectPlace
from headrace.models.storage.objects import ObjectLimits, ObjectSource
from headrace.models.storage.uploading import upload

FOLDER = "headrace-backups"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_FORMAT = 1
_MOST_BYTES = 512 * MIB
_KINDS = ("workspaces", "experiments", "jobs", "events")


@dataclass(frozen=True, slots=True)
class BackupPlace:
    """A bucket and what opens it."""

    cloud: Cloud
    bucket: str
    credentials: CloudCredentials

    def object(self, name: str) -> ObjectPlace:
        """One backup in it."""
        return ObjectPlace(self.cloud, self.bucket, f"{FOLDER}/{name}")


def backup_place(cloud_type: str, details: Mapping[str, Any]) -> BackupPlace:
    """Of a workspace. Raises InvalidArgument for one that has no bucket."""
    bucket = check_details(cloud_type, details)
    if not KINDS[cloud_type].stores or not bucket:
        raise InvalidArgument(
            f"a workspace of the kind {cloud_type} has no bucket to keep a backup in: name one of aws, seaweedfs, azure or "
            "gcp, with cloud_bucket_name"
        )
    keys = CloudCredentials.from_metadata(cloud_metadata(cloud_type, details))
    return BackupPlace(CLOUD_SCHEMES.get(cloud_type, "gcp"), bucket, keys)


class Backups:
    """Writes and reads them."""

    def __init__(self, database: Database, vault: Vault, clock: Clock) -> None:
        self._database = database
        self._vault = vault
        self._clock = clock

    async def backup(self, org: str, place: BackupPlace, name: str) -> dict[str, Any]:
        """Write one; "" for a name of ours. Says what it is called, and how much of what is in it."""
        if not name:
            name = f"{org[:200]}-{datetime.fromtimestamp(self._clock.wall(), UTC):%Y%m%dT%H%M%SZ}.backup"
        where = place.object(_checked(name))
        rows = await rows_of(self._database, org)
        content = {"format": _FORMAT, "rows": rows}

        def write() -> None:
            upload(where, self._vault.encrypt(content, _about(org)).encode(), place.credentials)

        await asyncio.to_thread(write)
        return {"backup_file_name": name, **{kind: len(rows[kind]) for kind in _KINDS[:-1]}}

    async def restore(self, org: str, place: BackupPlace, name: str) -> dict[str, Any]:
        """Put back what a backup has and the database has not. Says how much that was."""
        if not name:
            raise InvalidArgument("backup_file_name is missing: say which backup, by the name that `:backup` answered")
        where = place.object(_checked(name))
        content = await asyncio.to_thread(self._read, where, place, org)
        return {"backup_file_name": name, **await put_back(self._database, org, content)}

    def _read(self, where: ObjectPlace, place: BackupPlace, org: str) -> dict[str, list[dict[str, Any]]]:
        source = ObjectSource(where, place.credentials, ObjectLimits(max_bytes=_MOST_BYTES))
        listing = source.look()
        if not listing.is_file:
            raise NotFound(f"there is no backup {where.key.rpartition('/')[2]} in this bucket")
        with tempfile.TemporaryDirectory(prefix="headrace-restore-") as folder:
            source.download(listing, Path(folder))
            text = (Path(folder) / listing.objects[0].name).read_text("utf-8", "replace")
        try:
            content = self._vault.decrypt(text.strip(), _about(org))
        except FailedPrecondition:
            raise FailedPrecondition(
                "this is no backup of this organisation that was made with this gateway's key file (jobs.key of the data "
                "directory): restore with the key file of the gateway that made it"
            ) from None
        rows = content.get("rows")
        if content.get("format") != _FORMAT or not isinstance(rows, dict) or not _fits(rows):
            raise FailedPrecondition("the backup was made by another version of headrace: restore it with that one")
        return rows


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            "backup_file_name must be 1 to 255 letters, digits, '.', '_' and '-', and begin with a letter or a digit"
        )
    return name


def _about(org: str) -> str:
    return f"backup of {org}"


def _fits(rows: Mapping[str, Any]) -> bool:
    """Whether every row has the columns of its table."""
    wanted = {kind: {column.name for column in tables.tables[kind].columns} for kind in _KINDS}
    return all(kind in rows and all(row.keys() == wanted[kind] for row in rows[kind]) for kind in _KINDS)
