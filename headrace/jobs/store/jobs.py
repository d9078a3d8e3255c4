# SPDX-License-Identifier: Apache-2.0
"""Rows of jobs, their events, logs and leases.

Every change of a job is one transaction with the event that records it. A lease lets one of several gateways act on a job;
the lease of an owner that is known to be dead is free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, Select, Text, and_, delete, func, insert, select, update
from sqlalchemy import cast as as_type
from sqlalchemy.exc import IntegrityError

from headrace.core.errors import FailedPrecondition, NotFound, Unavailable
from headrace.jobs.records import FINAL, SERVICE, TRANSITIONS, Event, Job, JobPage
from headrace.jobs.store.database import Database, events, experiments, job_logs, jobs, leases

MAX_REASON = 1000
MAX_CACHED = 20_000
_MAX_CACHED_LISTS = 4
_MAX_IDS_IN_QUERY = 500
_JobKey = tuple[str, int, float]
"""Id, version and creation time: as long as these are equal, the whole row is."""
_ListState = tuple[int, float | None, str | None]
"""Number of jobs, sum of creation times, ids and versions: as long as these are equal, the list is."""
_LIST_STATE = (
    func.count(),
    func.sum(jobs.c.created_on),
    func.aggregate_strings(jobs.c.id + as_type(jobs.c.version, Text), ","),
)
_NAMES = [column.name for column in jobs.columns]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a job."""

    status: str
    reason: str
    by: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the job's details."""
    stopped_on: float | None = None


Decide = Callable[[Job], Change | None]


class JobRows:
    """Jobs of all organisations; `service` checks who may see them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: dict[_JobKey, Job] = {}
        self._lists: dict[tuple[str, ...], tuple[_ListState, JobPage]] = {}
        """Cached complete lists, by their filters."""

    async def insert(self, job: Job, actor: str) -> None:
        """Insert a job and its first event."""

        def work(connection: Connection) -> None:
            connection.execute(insert(jobs).values(dict(zip(_NAMES, job, strict=True))))
            _insert_event(connection, job, actor)

        await self._database.write(work)

    async def get(self, job_id: str) -> Job | None:
        """Return a job; None if there is none."""

        def work(connection: Connection) -> Job | None:
            row = connection.execute(select(jobs).where(jobs.c.id == job_id)).first()
            return Job._make(row) if row is not None else None

        return await self._database.read(work)

    async def page(
        self, org: str, experiment_id: str, status: str, action: str, skip: int, size: int | None
    ) -> JobPage:
        """Return jobs, newest first; "" matches any value. An unchanged complete list is the same object."""
        filters = {"org": org, "experiment_id": experiment_id, "status": status, "action": action}
        condition = and_(*(jobs.c[name] == value for name, value in filters.items() if value))
        query = select(jobs.c.id, jobs.c.version, jobs.c.created_on).where(condition)
        query = query.order_by(jobs.c.created_on.desc(), jobs.c.id.desc()).offset(skip)
        if size is not None:
            query = query.limit(size)

        def work(connection: Connection) -> JobPage:
            if size is None and not skip:
                return self._complete_list(connection, tuple(filters.values()), condition, query)
            page_jobs = self._jobs_of(connection, condition, _tuples(connection, query))
            return JobPage(
                page_jobs, connection.execute(select(func.count()).select_from(jobs).where(condition)).scalar_one()
            )

        return await self._database.read(work)

    def _complete_list(
        self, connection: Connection, filters: tuple[str, ...], condition: ColumnElement[bool], query: Select[Any]
    ) -> JobPage:
        """Return a complete list. One aggregate shows whether it changed: reading ten thousand rows takes twice as long."""
        state = _list_state(connection, condition)
        if (cached := self._lists.get(filters)) is not None and cached[0] == state:
            return cached[1]
        listed = self._jobs_of(connection, condition, _tuples(connection, query))
        page = JobPage(listed, len(listed))
        # Do not cache a list that changed between the two queries.
        if len(listed) <= MAX_CACHED and _list_state(connection, condition) == state:
            if len(self._lists) >= _MAX_CACHED_LISTS:
                self._lists.clear()
            self._lists[filters] = state, page
        return page

    def _jobs_of(self, connection: Connection, where: ColumnElement[bool], keys: list[_JobKey]) -> list[Job]:
        """Return the jobs of these keys from the cache or the database: reading complete rows is slow."""
        cache = self._cache
        cached = list(map(cache.get, keys))
        if None not in cached:
            return cast("list[Job]", cached)
        missing = [key[0] for key, job in zip(keys, cached, strict=True) if job is None]
        if len(cache) + len(missing) > MAX_CACHED:
            cache = self._cache = {}
            missing = [key[0] for key in keys]
        condition = jobs.c.id.in_(missing) if len(missing) <= _MAX_IDS_IN_QUERY else where
        for row in _tuples(connection, select(jobs).where(condition)):
            job = Job._make(row)
            cache[job.id, job.version, job.created_on] = job
        return [cache[key] for key in keys if key in cache]

    async def newest(self, count: int) -> list[Job]:
        """Return the newest jobs of all organisations, and cache them."""

        def work(connection: Connection) -> list[Job]:
            rows = _tuples(connection, select(jobs).order_by(jobs.c.created_on.desc()).limit(count))
            newest = [Job._make(row) for row in rows]
            if len(self._cache) + len(newest) <= MAX_CACHED:
                self._cache.update({(job.id, job.version, job.created_on): job for job in newest})
            return newest

        return await self._database.read(work)

    async def unfinished(self, place: str, action: str = SERVICE) -> list[Job]:
        """Return the unfinished services, or other jobs, of a place."""
        condition = and_(jobs.c.place == place, jobs.c.action == action, jobs.c.status.not_in(sorted(FINAL)))

        def work(connection: Connection) -> list[Job]:
            return [Job._make(row) for row in connection.execute(select(jobs).where(condition))]

        return await self._database.read(work)

    async def among(self, ids: list[str]) -> dict[str, Job]:
        """Return the existing jobs among these ids."""
        if not ids:
            return {}

        def work(connection: Connection) -> dict[str, Job]:
            return {row.id: Job._make(row) for row in connection.execute(select(jobs).where(jobs.c.id.in_(ids)))}

        return await self._database.read(work)

    async def change(self, job_id: str, decide: Decide, now: float) -> Job:
        """Apply the change that `decide` returns for the job; None for no change. Return the job after it.

        `decide` runs in a thread, within the transaction.
        """

        def work(connection: Connection) -> Job:
            row = connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).first()
            if row is None:
                raise NotFound(f"Job {job_id} not found")
            job = Job._make(row)
            change = decide(job)
            return job if change is None else _apply(connection, job, change, now)

        return await self._database.write(work)

    async def delete(self, job_id: str) -> bool:
        """Delete a job with its events and log, and its v2 experiment, which has the same id."""
        others = select(jobs.c.id).where(jobs.c.experiment_id == job_id).exists()

        def work(connection: Connection) -> bool:
            deleted = delete_jobs(connection, [job_id]) > 0
            connection.execute(delete(experiments).where(experiments.c.id == job_id, ~others))
            return deleted

        return await self._database.write(work)

    async def events(self, job_id: str) -> list[Event]:
        """Return the events of a job, oldest first."""
        query = select(events).where(events.c.job_id == job_id).order_by(events.c.number)

        def work(connection: Connection) -> list[Event]:
            return [
                Event(row.job_id, row.time, row.status, row.reason, row.by_whom) for row in connection.execute(query)
            ]

        return await self._database.read(work)

    async def save_log(self, job_id: str, text: str) -> None:
        """Save the last log lines of a job, for when its process is gone."""

        def work(connection: Connection) -> None:
            connection.execute(delete(job_logs).where(job_logs.c.job_id == job_id))
            if text and connection.execute(select(jobs.c.id).where(jobs.c.id == job_id)).first() is not None:
                connection.execute(insert(job_logs).values(job_id=job_id, log=text))

        await self._database.write(work)

    async def load_log(self, job_id: str) -> str:
        """Return the saved log of a job; "" if there is none."""

        def work(connection: Connection) -> str:
            return connection.execute(select(job_logs.c.log).where(job_logs.c.job_id == job_id)).scalar() or ""

        return await self._database.read(work)


def _list_state(connection: Connection, condition: ColumnElement[bool]) -> _ListState:
    count, creation_times, versions = connection.execute(select(*_LIST_STATE).where(condition)).one()
    return count, creation_times, versions


def _tuples(connection: Connection, query: Select[Any]) -> list[Any]:
    """Return the driver's tuples without SQLAlchemy's row objects: strings and numbers need no conversion."""
    cursor = connection.execute(query).cursor
    return [] if cursor is None else list(cursor.fetchall())


def delete_jobs(connection: Connection, ids: list[str]) -> int:
    """Delete jobs with their events and logs; return the number of jobs."""
    for table in (events, job_logs):
        connection.execute(delete(table).where(table.c.job_id.in_(ids)))
    return connection.execute(delete(jobs).where(jobs.c.id.in_(ids))).rowcount


def _apply(connection: Connection, job: Job, change: Change, now: float) -> Job:
    if change.status != job.status and change.status not in TRANSITIONS[job.status]:
        raise FailedPrecondition(f"job {job.id} is {job.status} and cannot become {change.status}")
    new = job._replace(
        status=change.status,
        reason=change.reason[:MAX_REASON],
        details_json=json.dumps({**job.details, **change.details}) if change.details else job.details_json,
        stopped_on=job.stopped_on if change.stopped_on is None else change.stopped_on,
        last_modified=now,
        version=job.version + 1,
    )
    updated = connection.execute(
        update(jobs)
        .where(jobs.c.id == job.id, jobs.c.version == job.version)
        .values(dict(zip(_NAMES, new, strict=True)))
    )
    if updated.rowcount != 1:
        raise Unavailable(f"job {job.id} was changed at the same time by another gateway; try again")
    _insert_event(connection, new, change.by)
    return new


def _insert_event(connection: Connection, job: Job, actor: str) -> None:
    values = {"job_id": job.id, "number": job.version, "time": job.last_modified, "status": job.status}
    connection.execute(insert(events).values(**values, reason=job.reason, by_whom=actor))


class LeaseRows:
    """Leases of jobs."""

    def __init__(self, database: Database, is_dead: Callable[[str], bool]) -> None:
        self._database = database
        self._is_dead = is_dead

    async def acquire(self, job_id: str, owner: str, now: float, seconds: float) -> bool:
        """Acquire or renew a lease; return False if a live owner holds it."""

        def work(connection: Connection) -> bool:
            row = connection.execute(select(leases).where(leases.c.job_id == job_id).with_for_update()).first()
            values = {"owner": owner, "expires": now + seconds}
            if row is None:
                connection.execute(insert(leases).values(job_id=job_id, **values))
                return True
            if row.owner != owner and row.expires > now and not self._is_dead(row.owner):
                return False
            connection.execute(update(leases).where(leases.c.job_id == job_id).values(**values))
            return True

        try:
            return await self._database.write(work)
        except IntegrityError:
            return False  # PostgreSQL: another gateway inserted it between our select and our insert

    async def release(self, job_id: str, owner: str) -> None:
        """Release a lease."""
        await self._database.write(
            lambda connection: (
                connection.execute(delete(leases).where(leases.c.job_id == job_id, leases.c.owner == owner)).rowcount
            )
        )

    async def delete_expired(self, now: float) -> None:
        """Delete expired leases and those of dead owners."""

        def find_expired(connection: Connection) -> list[tuple[str, str]]:
            rows = connection.execute(select(leases)).all()
            return [(row.job_id, row.owner) for row in rows if row.expires <= now or self._is_dead(row.owner)]

        for job_id, owner in await self._database.read(find_expired):
            await self.release(job_id, owner)
