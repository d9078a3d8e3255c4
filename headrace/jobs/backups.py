# SPDX-License-Identifier: Apache-2.0
"""Back up an organisation's records to a bucket and restore them: `:backup` and `:restore` of workspaces.

A backup is one object, encrypted with the gateway's key file and bound to the organisation. Readers of the bucket learn
nothing from it, and writers cannot forge one that names local files as models. A backup is useless without the key file.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, insert, select

from headrace.core.clock import Clock
from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.core.limits import MIB
from headrace.jobs.clouds import CLOUD_TYPES, check_details, cloud_metadata
from headrace.jobs.records import FINAL
from headrace.jobs.secrets import Vault
from headrace.jobs.store.database import Database, events, experiments, jobs, workspaces
from headrace.jobs.store.database import metadata as tables
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import CLOUD_SCHEMES, Cloud, ObjectLocation
from headrace.models.storage.object_stores import ObjectLimits, ObjectSource, upload

FOLDER = "headrace-backups"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_FORMAT = 1
_MAX_BYTES = 512 * MIB
_KINDS = ("workspaces", "experiments", "jobs", "events")

Content = Mapping[str, list[dict[str, Any]]]
"""Rows by the names of their tables."""
_ROWS_PER_STATEMENT = 500


@dataclass(frozen=True, slots=True)
class BackupLocation:
    """A bucket and its credentials."""

    cloud: Cloud
    bucket: str
    credentials: CloudCredentials

    def object(self, name: str) -> ObjectLocation:
        """Return the location of one backup."""
        return ObjectLocation(self.cloud, self.bucket, f"{FOLDER}/{name}")


def backup_location(cloud_type: str, details: Mapping[str, Any]) -> BackupLocation:
    """Return the bucket of a workspace; InvalidArgument if it has none."""
    bucket = check_details(cloud_type, details)
    if not CLOUD_TYPES[cloud_type].stores or not bucket:
        raise InvalidArgument(
            f"a workspace of type {cloud_type} has no bucket for a backup: use aws, seaweedfs, azure or gcp, with "
            "cloud_bucket_name"
        )
    keys = CloudCredentials.from_metadata(cloud_metadata(cloud_type, details))
    return BackupLocation(CLOUD_SCHEMES.get(cloud_type, "gcp"), bucket, keys)


class Backups:
    """Writes and restores backups."""

    def __init__(self, database: Database, vault: Vault, clock: Clock) -> None:
        self._database = database
        self._vault = vault
        self._clock = clock

    async def backup(self, org: str, location: BackupLocation, name: str) -> dict[str, Any]:
        """Write a backup; "" picks a name. Return its name and the number of records of each kind."""
        if not name:
            name = f"{org[:200]}-{datetime.fromtimestamp(self._clock.wall(), UTC):%Y%m%dT%H%M%SZ}.backup"
        target = location.object(_check_name(name))
        rows = await export_rows(self._database, org)
        content = {"format": _FORMAT, "rows": rows}

        def write() -> None:
            upload(target, self._vault.encrypt(content, _context(org)).encode(), location.credentials)

        await asyncio.to_thread(write)
        return {"backup_file_name": name, **{kind: len(rows[kind]) for kind in _KINDS[:-1]}}

    async def restore(self, org: str, location: BackupLocation, name: str) -> dict[str, Any]:
        """Restore records that the database lacks. Return their number by kind."""
        if not name:
            raise InvalidArgument("backup_file_name is missing: use the name that `:backup` returned")
        target = location.object(_check_name(name))
        content = await asyncio.to_thread(self._read, target, location, org)
        return {"backup_file_name": name, **await import_rows(self._database, org, content)}

    def _read(self, target: ObjectLocation, location: BackupLocation, org: str) -> dict[str, list[dict[str, Any]]]:
        source = ObjectSource(target, location.credentials, ObjectLimits(max_bytes=_MAX_BYTES))
        listing = source.read_listing()
        if not listing.is_file:
            raise NotFound(f"backup {target.key.rpartition('/')[2]} not found in this bucket")
        with tempfile.TemporaryDirectory(prefix="headrace-restore-") as folder:
            source.download(listing, Path(folder))
            text = (Path(folder) / listing.objects[0].name).read_text("utf-8", "replace")
        try:
            content = self._vault.decrypt(text.strip(), _context(org))
        except FailedPrecondition:
            raise FailedPrecondition(
                "the object is not a backup of this organisation made with this gateway's key file (jobs.key in the data "
                "directory): restore with the key file of the gateway that made it"
            ) from None
        rows = content.get("rows")
        if content.get("format") != _FORMAT or not isinstance(rows, dict) or not _has_valid_columns(rows):
            raise FailedPrecondition("the backup was made by another version of headrace: restore it with that one")
        return rows


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            "backup_file_name must be 1 to 255 letters, digits, '.', '_' and '-', and start with a letter or a digit"
        )
    return name


def _context(org: str) -> str:
    return f"backup of {org}"


def _has_valid_columns(rows: Mapping[str, Any]) -> bool:
    """Return whether every row has the columns of its table."""
    columns = {kind: {column.name for column in tables.tables[kind].columns} for kind in _KINDS}
    return all(kind in rows and all(row.keys() == columns[kind] for row in rows[kind]) for kind in _KINDS)


async def export_rows(database: Database, org: str) -> Content:
    """Return all rows of an organisation, except unfinished jobs. Secrets stay encrypted."""

    def work(connection: Connection) -> Content:
        done = (jobs.c.org == org) & jobs.c.status.in_(sorted(FINAL))
        queries = {
            "workspaces": select(workspaces).where(workspaces.c.org == org),
            "experiments": select(experiments).where(experiments.c.org == org),
            "jobs": select(jobs).where(done),
            "events": select(events).join(jobs, jobs.c.id == events.c.job_id).where(done),
        }
        return {name: [dict(row._mapping) for row in connection.execute(query)] for name, query in queries.items()}

    return await database.read(work)


async def import_rows(database: Database, org: str, content: Content) -> dict[str, int]:
    """Insert missing rows and leave existing rows unchanged. Return the number of inserted rows by kind."""

    def work(connection: Connection) -> dict[str, int]:
        new_workspaces, existing_ids = _new_workspaces(connection, org, content["workspaces"])
        counts = {"workspaces": _insert(connection, workspaces, new_workspaces)}
        new = _missing(connection, experiments, content["experiments"])
        for row in new:
            row["workspace"] = existing_ids.get(row["workspace"], row["workspace"])
        counts["experiments"] = _insert(connection, experiments, new)
        # An experiment id may belong to another organisation by now: skip its jobs.
        own_experiments = set(connection.execute(select(experiments.c.id).where(experiments.c.org == org)).scalars())
        new = [row for row in _missing(connection, jobs, content["jobs"]) if row["experiment_id"] in own_experiments]
        counts["jobs"] = _insert(connection, jobs, new)
        ids = {row["id"] for row in new}
        _insert(connection, events, [row for row in content["events"] if row["job_id"] in ids])
        return counts

    return await database.write(work)


def _new_workspaces(
    connection: Connection, org: str, rows: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the missing workspaces, and for equal ones under another id: old id to existing id."""
    query = select(workspaces.c.fingerprint, workspaces.c.id).where(workspaces.c.org == org)
    existing = {row[0]: row[1] for row in connection.execute(query)}
    existing_ids = {row["id"]: existing[row["fingerprint"]] for row in rows if row["fingerprint"] in existing}
    return _missing(connection, workspaces, [row for row in rows if row["id"] not in existing_ids]), existing_ids


def _missing(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    existing: set[str] = set()
    for ids in _chunks([row["id"] for row in rows]):
        existing.update(connection.execute(select(table.c.id).where(table.c.id.in_(ids))).scalars())
    return [dict(row) for row in rows if row["id"] not in existing]


def _insert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> int:
    for chunk in _chunks(rows):
        connection.execute(insert(table), chunk)
    return len(rows)


def _chunks(items: list[Any]) -> Iterable[list[Any]]:
    for start in range(0, len(items), _ROWS_PER_STATEMENT):
        yield items[start : start + _ROWS_PER_STATEMENT]
