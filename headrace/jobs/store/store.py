# SPDX-License-Identifier: Apache-2.0
"""`Store`: all tables of one database."""

from __future__ import annotations

from sqlalchemy import select

from headrace.jobs.records import Organisation
from headrace.jobs.store.database import Database, organisations
from headrace.jobs.store.jobs import JobRows, LeaseRows
from headrace.jobs.store.users import UserRows
from headrace.jobs.store.workspaces import ExperimentRows, WorkspaceRows
from headrace.platforms.processes import is_dead


class Store:
    """One attribute per kind of record."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.jobs = JobRows(database)
        self.workspaces = WorkspaceRows(database)
        self.experiments = ExperimentRows(database)
        self.leases = LeaseRows(database, is_dead)
        self.users = UserRows(database)
        """Users, keys and revoked tokens, for `api.access`."""

    @classmethod
    async def open(cls, url: str) -> Store:
        """Connect and migrate the schema."""
        return cls(await Database.open(url))

    async def organisations(self) -> list[Organisation]:
        """Return all organisations by name."""
        query = select(organisations).order_by(organisations.c.name)
        return await self.database.read(
            lambda connection: [Organisation(row.name, row.created_on) for row in connection.execute(query)]
        )

    async def close(self) -> None:
        """Disconnect."""
        await self.database.close()
