# SPDX-License-Identifier: Apache-2.0
"""Rows of workspaces and experiments, with their encrypted secrets."""

from __future__ import annotations

import json
from dataclasses import asdict

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from headrace.core.errors import FailedPrecondition
from headrace.jobs.records import FINAL, Experiment, Workspace
from headrace.jobs.store.database import Database, experiments, jobs, workspaces
from headrace.jobs.store.jobs import delete_jobs


class WorkspaceRows:
    """Workspaces; `secret` and `fingerprint` are opaque."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert(self, workspace: Workspace, secret: str, fingerprint: str) -> tuple[Workspace, bool]:
        """Insert a workspace unless its organisation has one with this fingerprint; return the row and whether it is new."""
        same = select(workspaces).where(workspaces.c.org == workspace.org, workspaces.c.fingerprint == fingerprint)

        def find_same(connection: Connection) -> Workspace | None:
            row = connection.execute(same).first()
            return _workspace(row) if row is not None else None

        def work(connection: Connection) -> None:
            values = {**asdict(workspace), "secret": secret, "fingerprint": fingerprint}
            connection.execute(insert(workspaces).values(**values))

        existing = await self._database.read(find_same)
        if existing is not None:
            return existing, False
        try:
            await self._database.write(work)
        except IntegrityError:
            existing = await self._database.read(find_same)
            if existing is None:
                raise
            return existing, False
        return workspace, True

    async def all_of(self, org: str) -> list[Workspace]:
        """Return all of an organisation, newest first."""
        query = select(workspaces).where(workspaces.c.org == org).order_by(workspaces.c.created_on.desc())
        return await self._database.read(lambda connection: [_workspace(row) for row in connection.execute(query)])

    async def get(self, org: str, workspace_id: str) -> tuple[Workspace, str] | None:
        """Return one with its secret; None if there is none."""
        query = select(workspaces).where(workspaces.c.org == org, workspaces.c.id == workspace_id)

        def work(connection: Connection) -> tuple[Workspace, str] | None:
            row = connection.execute(query).first()
            return (_workspace(row), row.secret) if row is not None else None

        return await self._database.read(work)

    async def update(self, workspace: Workspace, secret: str, fingerprint: str) -> None:
        """Replace the row."""
        values = {**asdict(workspace), "secret": secret, "fingerprint": fingerprint}

        def work(connection: Connection) -> None:
            connection.execute(update(workspaces).where(workspaces.c.id == workspace.id).values(**values))

        try:
            await self._database.write(work)
        except IntegrityError:
            raise FailedPrecondition("another workspace has the same configuration; use that one") from None

    async def delete(self, ids: list[str]) -> None:
        """Delete all of them, or none if experiments use one."""

        def work(connection: Connection) -> None:
            uses = select(experiments.c.workspace, func.count()).where(experiments.c.workspace.in_(ids))
            used = connection.execute(uses.group_by(experiments.c.workspace)).first()
            if used is not None:
                which = "this workspace" if len(ids) == 1 else f"workspace {used[0]}"
                raise FailedPrecondition(f"{used[1]} experiments use {which}; delete them first")
            connection.execute(delete(workspaces).where(workspaces.c.id.in_(ids)))

        await self._database.write(work)


class ExperimentRows:
    """Experiments; `secret` holds their encrypted environment variables."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert(self, experiment: Experiment, secret: str) -> None:
        """Insert an experiment."""
        values = {**asdict(experiment), "details": json.dumps(experiment.details), "secret": secret}
        await self._database.write(lambda connection: connection.execute(insert(experiments).values(**values)).rowcount)

    async def all_of(self, org: str) -> list[Experiment]:
        """Return all of an organisation, newest first."""
        query = select(experiments).where(experiments.c.org == org).order_by(experiments.c.created_on.desc())
        return await self._database.read(lambda connection: [_experiment(row) for row in connection.execute(query)])

    async def get(self, org: str, experiment_id: str) -> tuple[Experiment, str] | None:
        """Return one with its secret; None if there is none."""
        query = select(experiments).where(experiments.c.org == org, experiments.c.id == experiment_id)

        def work(connection: Connection) -> tuple[Experiment, str] | None:
            row = connection.execute(query).first()
            return (_experiment(row), row.secret) if row is not None else None

        return await self._database.read(work)

    async def update(self, experiment: Experiment, secret: str) -> None:
        """Replace the row."""
        values = {**asdict(experiment), "details": json.dumps(experiment.details), "secret": secret}
        query = update(experiments).where(experiments.c.id == experiment.id).values(**values)
        await self._database.write(lambda connection: connection.execute(query).rowcount)

    async def delete(self, experiment_id: str) -> None:
        """Delete an experiment and its jobs; FailedPrecondition if a job is unfinished."""

        def work(connection: Connection) -> None:
            rows = connection.execute(select(jobs.c.id, jobs.c.status).where(jobs.c.experiment_id == experiment_id))
            job_rows = list(rows)
            if any(row.status not in FINAL for row in job_rows):
                raise FailedPrecondition("a job of this experiment is unfinished; stop or cancel it first")
            delete_jobs(connection, [row.id for row in job_rows])
            connection.execute(delete(experiments).where(experiments.c.id == experiment_id))

        await self._database.write(work)


def _workspace(row: Row[tuple[object, ...]]) -> Workspace:
    names = Workspace.__dataclass_fields__
    return Workspace(**{name: row._mapping[name] for name in names})


def _experiment(row: Row[tuple[object, ...]]) -> Experiment:
    values = {name: row._mapping[name] for name in Experiment.__dataclass_fields__}
    return Experiment(**{**values, "details": json.loads(values["details"])})
