# SPDX-License-Identifier: Apache-2.0
"""Who may act on a job just now: a row with its owner and its end, so that of several gateways one acts.

Used by `jobs.acting`. The lease of an owner that is known to be dead is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, delete, insert, select, update

from headrace.jobs.store.database import Database
from headrace.jobs.store.tables import leases


class LeaseRows:
    """All leases."""

    def __init__(self, database: Database, is_dead: Callable[[str], bool]) -> None:
        self._database = database
        self._is_dead = is_dead

    async def take(self, job_id: str, owner: str, now: float, seconds: float) -> bool:
        """Whether the owner has it now: it was free, over, its own, or a dead one's."""
        from sqlalchemy.exc import IntegrityError

        def work(connection: Connection) -> bool:
            row = connection.execute(select(leases).where(leases.c.job_id == job_id).with_for_update()).first()
            mine = {"owner": owner, "expires": now + seconds}
            if row is None:
                connection.execute(insert(leases).values(job_id=job_id, **mine))
                return True
            if row.owner != owner and row.expires > now and not self._is_dead(row.owner):
                return False
            connection.execute(update(leases).where(leases.c.job_id == job_id).values(**mine))
            return True

        try:
            return await self._database.write(work)
        except IntegrityError:
            return False  # PostgreSQL: another one inserted it between our look and our insert

    async def give_back(self, job_id: str, owner: str) -> None:
        """Let others have it."""
        await self._database.write(
            lambda connection: (
                connection.execute(delete(leases).where(leases.c.job_id == job_id, leases.c.owner == owner)).rowcount
            )
        )

    async def drop_stale(self, now: float) -> None:
        """Remove those that are nobody's any more."""

        def look(connection: Connection) -> list[tuple[str, str]]:
            rows = connection.execute(select(leases)).all()
            return [(row.job_id, row.owner) for row in rows if row.expires <= now or self._is_dead(row.owner)]

        for job_id, owner in await self._database.read(look):
            await self.give_back(job_id, owner)
