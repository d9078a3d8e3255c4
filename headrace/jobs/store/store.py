# SPDX-License-Identifier: Apache-2.0
"""`Store`: all rows of one database."""

from __future__ import annotations

from sqlalchemy import select

from headrace.jobs.records import Organisation
from headrace.jobs.store.database import Database
from headrace.jobs.store.jobs import JobRows
from headrace.jobs.store.leases import LeaseRows
from headrace.jobs.store.tables import organisations
from headrace.jobs.store.users import UserRows
from headrace.jobs.store.workspaces import ExperimentRows, WorkspaceRows
from headrace.platforms.identity import is_surely_dead


class Store:
    """One attribute for each kind of rows."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.jobs = JobRows(database)
        self.workspaces = WorkspaceRows(database)
        self.experiments = ExperimentRows(database)
        self.leases = LeaseRows(database, is_surely_dead)
        self.users = UserRows(database)
        """For `headrace.access`: users, keys, revoked tokens."""

    @classmethod
    async def open(cls, url: str) -> Store:
        """Connect; the tables are brought up to date."""
        return cls(await Database.open(url))

    async def organisations(self) -> list[Organisation]:
        """By name."""
        query = select(organisations).order_by(organisations.c.name)
        return await self.database.read(
            lambda connection: [Organisation(row.name, row.created_on) for row in connection.execute(query)]
        )

    async def close(self) -> None:
        """Disconnect."""
        await self.database.close()
