# SPDX-License-Identifier: Apache-2.0
"""An organisation's rows as plain data, and back: workspaces, experiments, finished jobs and their events.

Called by `jobs.backups`. What is secret in a row stays encrypted, as it lies in the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Table, insert, select

from headrace.jobs.records import FINAL
from headrace.jobs.store.database import Database
from headrace.jobs.store.tables import events, experiments, jobs, workspaces

Content = Mapping[str, list[dict[str, Any]]]
"""Rows by the names of their tables."""

_AT_ONCE = 500


async def rows_of(database: Database, org: str) -> Content:
    """All that is kept of an organisation, apart from jobs that are not finished."""

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


async def put_back(database: Database, org: str, content: Content) -> dict[str, int]:
    """Insert what is missing; what is there stays as it is. Returns how many of each kind were missing."""

    def work(connection: Connection) -> dict[str, int]:
        spaces, same = _new_workspaces(connection, org, content["workspaces"])
        made = {"workspaces": _insert(connection, workspaces, spaces)}
        new = _missing(connection, experiments, content["experiments"])
        for row in new:
            row["workspace"] = same.get(row["workspace"], row["workspace"])
        made["experiments"] = _insert(connection, experiments, new)
        # An id may be another organisation's by now: nothing is put below it.
        ours = set(connection.execute(select(experiments.c.id).where(experiments.c.org == org)).scalars())
        new = [row for row in _missing(connection, jobs, content["jobs"]) if row["experiment_id"] in ours]
        made["jobs"] = _insert(connection, jobs, new)
        ids = {row["id"] for row in new}
        _insert(connection, events, [row for row in content["events"] if row["job_id"] in ids])
        return made

    return await database.write(work)


def _new_workspaces(
    connection: Connection, org: str, rows: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Those that are missing; and of those that are there under another id, which one that is."""
    query = select(workspaces.c.fingerprint, workspaces.c.id).where(workspaces.c.org == org)
    there = {row[0]: row[1] for row in connection.execute(query)}
    same = {row["id"]: there[row["fingerprint"]] for row in rows if row["fingerprint"] in there}
    return _missing(connection, workspaces, [row for row in rows if row["id"] not in same]), same


def _missing(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    there: set[str] = set()
    for some in _parts([row["id"] for row in rows]):
        there.update(connection.execute(select(table.c.id).where(table.c.id.in_(some))).scalars())
    return [dict(row) for row in rows if row["id"] not in there]


def _insert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> int:
    for some in _parts(rows):
        connection.execute(insert(table), some)
    return len(rows)


def _parts(items: list[Any]) -> Iterable[list[Any]]:
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]
