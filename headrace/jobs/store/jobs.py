# SPDX-License-Identifier: Apache-2.0
"""Rows of jobs, their events and their last log. Every change of a job is one transaction with the event that tells it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, Select, Text, and_, delete, func, insert, select, update
from sqlalchemy import cast as as_type

from headrace.core.errors import FailedPrecondition, NotFound, Unavailable
from headrace.jobs.records import FINAL, MOVES, SERVICE, Event, Job, JobPage
from headrace.jobs.store.database import Database
from headrace.jobs.store.tables import events, experiments, job_logs, jobs

MOST_REASON = 1000
MOST_REMEMBERED = 20_000
_MOST_WHOLE = 4
_FEW = 500
_Mark = tuple[str, int, float]
"""Id, version and birth: as long as these are the same, all of a job is."""
_Seen = tuple[int, float | None, str | None]
"""How many jobs a list has, when they were born, the id and version of each: as long as these are the same, the list is."""
_SEEN = (
    func.count(),
    func.sum(jobs.c.created_on),
    func.aggregate_strings(jobs.c.id + as_type(jobs.c.version, Text), ","),
)
_NAMES = [column.name for column in jobs.columns]


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a job."""

    status: str
    reason: str
    by: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """Put over those that are there."""
    stopped_on: float | None = None


Decide = Callable[[Job], Change | None]


class JobRows:
    """Jobs of all organisations; who may see which is for `service` to ask."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._memory: dict[_Mark, Job] = {}
        self._wholes: dict[tuple[str, ...], tuple[_Seen, JobPage]] = {}
        """Whole lists that were asked for, by what they are of."""

    async def insert(self, job: Job, by: str) -> None:
        """A new job, with its first event."""

        def work(connection: Connection) -> None:
            connection.execute(insert(jobs).values(dict(zip(_NAMES, job, strict=True))))
            _tell(connection, job, by)

        await self._database.write(work)

    async def get(self, job_id: str) -> Job | None:
        """By id."""

        def work(connection: Connection) -> Job | None:
            row = connection.execute(select(jobs).where(jobs.c.id == job_id)).first()
            return Job._make(row) if row is not None else None

        return await self._database.read(work)

    async def page(
        self, org: str, experiment_id: str, status: str, action: str, skip: int, size: int | None
    ) -> JobPage:
        """Newest first; "" for any. A whole list that has not changed is the very same one."""
        wanted = {"org": org, "experiment_id": experiment_id, "status": status, "action": action}
        where = and_(*(jobs.c[name] == value for name, value in wanted.items() if value))
        query = select(jobs.c.id, jobs.c.version, jobs.c.created_on).where(where)
        query = query.order_by(jobs.c.created_on.desc(), jobs.c.id.desc()).offset(skip)
        if size is not None:
            query = query.limit(size)

        def work(connection: Connection) -> JobPage:
            if size is None and not skip:
                return self._whole(connection, tuple(wanted.values()), where, query)
            found = self._known(connection, where, _tuples(connection, query))
            return JobPage(found, connection.execute(select(func.count()).select_from(jobs).where(where)).scalar_one())

        return await self._database.read(work)

    def _whole(
        self, connection: Connection, of: tuple[str, ...], where: ColumnElement[bool], query: Select[Any]
    ) -> JobPage:
        """One text from the database tells whether anything of it has changed: ten thousand rows take twice as long."""
        seen = _seen(connection, where)
        if (known := self._wholes.get(of)) is not None and known[0] == seen:
            return known[1]
        found = self._known(connection, where, _tuples(connection, query))
        page = JobPage(found, len(found))
        # Others may have changed something between the two questions: such a list is given out once.
        if len(found) <= MOST_REMEMBERED and _seen(connection, where) == seen:
            if len(self._wholes) >= _MOST_WHOLE:
                self._wholes.clear()
            self._wholes[of] = seen, page
        return page

    def _known(self, connection: Connection, where: ColumnElement[bool], marks: list[_Mark]) -> list[Job]:
        """The jobs of these marks, as they were read before or are now: reading whole rows is what makes lists slow."""
        memory = self._memory
        found = list(map(memory.get, marks))
        if None not in found:
            return cast("list[Job]", found)
        missing = [mark[0] for mark, known in zip(marks, found, strict=True) if known is None]
        if len(memory) + len(missing) > MOST_REMEMBERED:
            memory = self._memory = {}
            missing = [mark[0] for mark in marks]
        these = jobs.c.id.in_(missing) if len(missing) <= _FEW else where
        for row in _tuples(connection, select(jobs).where(these)):
            job = Job._make(row)
            memory[job.id, job.version, job.created_on] = job
        return [memory[mark] for mark in marks if mark in memory]

    async def newest(self, count: int) -> list[Job]:
        """The last that were made, whosever they are; lists that are asked for find them in memory."""

        def work(connection: Connection) -> list[Job]:
            rows = _tuples(connection, select(jobs).order_by(jobs.c.created_on.desc()).limit(count))
            found = [Job._make(row) for row in rows]
            if len(self._memory) + len(found) <= MOST_REMEMBERED:
                self._memory.update({(job.id, job.version, job.created_on): job for job in found})
            return found

        return await self._database.read(work)

    async def unfinished(self, place: str, action: str = SERVICE) -> list[Job]:
        """Services, or other jobs, of a place whose status is not final."""
        where = and_(jobs.c.place == place, jobs.c.action == action, jobs.c.status.not_in(sorted(FINAL)))

        def work(connection: Connection) -> list[Job]:
            return [Job._make(row) for row in connection.execute(select(jobs).where(where))]

        return await self._database.read(work)

    async def among(self, ids: list[str]) -> dict[str, Job]:
        """Those of the ids that there are."""
        if not ids:
            return {}

        def work(connection: Connection) -> dict[str, Job]:
            return {row.id: Job._make(row) for row in connection.execute(select(jobs).where(jobs.c.id.in_(ids)))}

        return await self._database.read(work)

    async def change(self, job_id: str, decide: Decide, now: float) -> Job:
        """Let `decide` look at the job and say what becomes of it; None for nothing. Returns what the job is then.

        `decide` runs in a thread, and nobody else changes the job meanwhile.
        """

        def work(connection: Connection) -> Job:
            row = connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).first()
            if row is None:
                raise NotFound(f"Job {job_id} not found")
            job = Job._make(row)
            change = decide(job)
            return job if change is None else _changed(connection, job, change, now)

        return await self._database.write(work)

    async def delete(self, job_id: str) -> bool:
        """With its events and its log, and the experiment that was made for it alone (v2): that has the same id."""
        others = select(jobs.c.id).where(jobs.c.experiment_id == job_id).exists()

        def work(connection: Connection) -> bool:
            found = delete_jobs(connection, [job_id]) > 0
            connection.execute(delete(experiments).where(experiments.c.id == job_id, ~others))
            return found

        return await self._database.write(work)

    async def events(self, job_id: str) -> list[Event]:
        """Oldest first."""
        query = select(events).where(events.c.job_id == job_id).order_by(events.c.number)

        def work(connection: Connection) -> list[Event]:
            return [
                Event(row.job_id, row.time, row.status, row.reason, row.by_whom) for row in connection.execute(query)
            ]

        return await self._database.read(work)

    async def keep_log(self, job_id: str, text: str) -> None:
        """What a service said last, for when its log is gone."""

        def work(connection: Connection) -> None:
            connection.execute(delete(job_logs).where(job_logs.c.job_id == job_id))
            if text and connection.execute(select(jobs.c.id).where(jobs.c.id == job_id)).first() is not None:
                connection.execute(insert(job_logs).values(job_id=job_id, log=text))

        await self._database.write(work)

    async def kept_log(self, job_id: str) -> str:
        """See `keep_log`."""

        def work(connection: Connection) -> str:
            return connection.execute(select(job_logs.c.log).where(job_logs.c.job_id == job_id)).scalar() or ""

        return await self._database.read(work)


def _seen(connection: Connection, where: ColumnElement[bool]) -> _Seen:
    count, births, versions = connection.execute(select(*_SEEN).where(where)).one()
    return count, births, versions


def _tuples(connection: Connection, query: Select[Any]) -> list[Any]:
    """What the driver gives, without SQLAlchemy's rows around it: of texts and numbers there is nothing to convert."""
    cursor = connection.execute(query).cursor
    return [] if cursor is None else list(cursor.fetchall())


def delete_jobs(connection: Connection, ids: list[str]) -> int:
    """Rows of jobs and all that hangs on them."""
    for table in (events, job_logs):
        connection.execute(delete(table).where(table.c.job_id.in_(ids)))
    return connection.execute(delete(jobs).where(jobs.c.id.in_(ids))).rowcount


def _changed(connection: Connection, job: Job, change: Change, now: float) -> Job:
    if change.status != job.status and change.status not in MOVES[job.status]:
        raise FailedPrecondition(f"job {job.id} is {job.status} and cannot become {change.status}")
    new = job._replace(
        status=change.status,
        reason=change.reason[:MOST_REASON],
        details_json=json.dumps({**job.details, **change.details}) if change.details else job.details_json,
        stopped_on=job.stopped_on if change.stopped_on is None else change.stopped_on,
        last_modified=now,
        version=job.version + 1,
    )
    made = connection.execute(
        update(jobs)
        .where(jobs.c.id == job.id, jobs.c.version == job.version)
        .values(dict(zip(_NAMES, new, strict=True)))
    )
    if made.rowcount != 1:
        raise Unavailable(f"job {job.id} was changed by somebody else at the same moment; try again")
    _tell(connection, new, change.by)
    return new


def _tell(connection: Connection, job: Job, by: str) -> None:
    told = {"job_id": job.id, "number": job.version, "time": job.last_modified, "status": job.status}
    connection.execute(insert(events).values(**told, reason=job.reason, by_whom=by))
