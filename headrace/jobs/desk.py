# SPDX-License-Identifier: Apache-2.0
"""Workspaces, experiments and records of jobs: made, listed, found, changed, deleted. See `JobService`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy.exc import IntegrityError

from headrace.core.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from headrace.jobs.checks import (
    MOST_NAME,
    check_arch,
    check_id,
    check_json,
    check_org,
    check_text,
)
from headrace.jobs.environment import check_variables
from headrace.jobs.records import (
    MOVES,
    SERVICE,
    Experiment,
    ExperimentChange,
    ExperimentWish,
    Job,
    JobPage,
    JobWish,
)
from headrace.jobs.store.jobs import Change
from headrace.jobs.workspace_desk import WorkspaceDesk
from headrace.models.storage.locations import LocalPlace, parse_location

_MOST_GPUS = 1024
_MOST_SKIP = 1 << 40


class Desk(WorkspaceDesk):
    """See `JobService`."""

    # Experiments

    async def create_experiment(self, org: str, user_id: str, wish: ExperimentWish) -> Experiment:
        """NotFound for a workspace that is not the organisation's."""
        check_org(org)
        now = self._clock.wall()
        experiment = Experiment(
            str(uuid.uuid4()),
            org,
            user_id,
            check_text(wish.name, "name", MOST_NAME),
            check_text(wish.description, "description"),
            check_arch(wish.network_arch),
            (await self.get_workspace(org, wish.workspace)).id if wish.workspace else "",
            dict(wish.details),
            now,
            now,
        )
        check_json(wish.details, "the experiment")
        variables = check_variables(wish.docker_env_vars)
        await self.store.experiments.insert(experiment, self._vault.encrypt(variables, f"experiment {experiment.id}"))
        return experiment

    async def list_experiments(self, org: str) -> list[Experiment]:
        """Newest first."""
        return await self.store.experiments.all_of(check_org(org))

    async def get_experiment(self, org: str, experiment_id: str) -> Experiment:
        """Raises NotFound."""
        return (await self._experiment(org, experiment_id))[0]

    async def update_experiment(self, org: str, experiment_id: str, change: ExperimentChange) -> Experiment:
        """Change what is named. Services that run keep what they were started with."""
        old, secret = await self._experiment(org, experiment_id)
        merged = {**old.details, **change.details}
        details = {name: value for name, value in merged.items() if value is not None}
        check_json(details, "the experiment")
        workspace = old.workspace
        if change.workspace is not None:
            workspace = (await self.get_workspace(org, change.workspace)).id if change.workspace else ""
        if change.docker_env_vars is not None:
            secret = self._vault.encrypt(check_variables(change.docker_env_vars), f"experiment {old.id}")
        new = replace(
            old,
            name=old.name if change.name is None else check_text(change.name, "name", MOST_NAME),
            description=old.description
            if change.description is None
            else check_text(change.description, "description"),
            workspace=workspace,
            details=details,
            last_modified=self._clock.wall(),
        )
        await self.store.experiments.update(new, secret)
        return new

    async def delete_experiment(self, org: str, experiment_id: str) -> Experiment:
        """With its jobs; FailedPrecondition while one of them is not finished."""
        experiment = await self.get_experiment(org, experiment_id)
        await self.store.experiments.delete(experiment.id)
        return experiment

    # Jobs

    async def create_job(
        self,
        org: str,
        user_id: str,
        experiment_id: str,
        wish: JobWish,
        *,
        trusted: bool = False,
        place: str = "",
        work: Mapping[str, Any] | None = None,
    ) -> Job:
        """Register a trained model as a completed job (Done), or record work for a runner (Pending).

        `trusted`: of the operator, who may name any path of this machine. `place`: where it is to run, with what its
        runner has to know in `work`; "" for a runner that is not ours.
        """
        experiment = await self.get_experiment(org, experiment_id)
        status, reason = self._fate(wish, experiment)
        parent = (await self.get_job(org, wish.parent_id)).id if wish.parent_id else ""
        if not isinstance(wish.num_gpu, int) or not -1 <= wish.num_gpu <= _MOST_GPUS:
            raise InvalidArgument(f"num_gpu must be a whole number from -1 to {_MOST_GPUS}")
        now = self._clock.wall()
        job = Job(
            id=check_id(wish.id, "Job") if wish.id else str(uuid.uuid4()),
            org=org,
            experiment_id=experiment.id,
            user_id=user_id,
            parent_id=parent,
            action=check_text(wish.action, "action", 64),
            status=status,
            reason=reason,
            name=check_text(wish.name, "name", MOST_NAME),
            description=check_text(wish.description, "description"),
            network_arch=check_arch(wish.network_arch or experiment.network_arch),
            num_gpu=wish.num_gpu,
            checkpoint=await asyncio.to_thread(self._checkpoint, wish.checkpoint, trusted),
            specs_json=check_json(wish.specs, "specs"),
            details_json=check_json({"backend_details": dict(wish.backend_details), **(work or {})}, "backend_details"),
            place=place,
            created_on=now,
            last_modified=now,
            stopped_on=None,
            version=1,
        )
        try:
            await self.store.jobs.insert(job, user_id)
        except IntegrityError:
            raise AlreadyExists(
                f"a job with the id {job.id} exists already; leave the id out to get a new one"
            ) from None
        return job

    async def register(
        self, org: str, user_id: str, path: str, arch: str, workspace_id: str = "", name: str = ""
    ) -> tuple[Experiment, Job]:
        """For the operator: a model at a path or URL, as an experiment with one completed training job."""
        if isinstance(place := parse_location(path), LocalPlace):
            await asyncio.to_thread(self._models.check_local, place.path, trusted=True)
        experiment = await self.create_experiment(org, user_id, ExperimentWish(arch, name, workspace=workspace_id))
        wish = JobWish("train", name=name, checkpoint=path)
        return experiment, await self.create_job(org, user_id, experiment.id, wish, trusted=True)

    async def list_jobs(
        self,
        org: str,
        experiment_id: str | None = None,
        *,
        skip: int = 0,
        size: int | None = None,
        status: str | None = None,
        action: str | None = None,
    ) -> JobPage:
        """Newest first, `size` of them after `skip`; all without a size."""
        if not 0 <= skip <= _MOST_SKIP or (size is not None and not 0 <= size <= _MOST_SKIP):
            raise InvalidArgument("skip and size must be whole numbers of 0 or more")
        experiment = (await self.get_experiment(org, experiment_id)).id if experiment_id is not None else ""
        wanted = check_text(status, "status", 64), check_text(action, "action", 64)
        return await self.store.jobs.page(check_org(org), experiment, *wanted, skip, size)

    async def get_job(self, org: str, job_id: str, experiment_id: str | None = None) -> Job:
        """Raises NotFound. Stopped services are still there, as a record."""
        wanted = check_id(job_id, "Job")
        job = await self.store.jobs.get(wanted)
        experiment = check_id(experiment_id, "Experiment") if experiment_id is not None else None
        if job is None or job.org != org or experiment not in (None, job.experiment_id):
            raise NotFound(f"Job {wanted} not found")
        return job

    async def delete_job(self, org: str, job_id: str, experiment_id: str | None = None) -> Job:
        """The record, its events and its log; FailedPrecondition while it is not finished."""
        job = await self.get_job(org, job_id, experiment_id)
        if not job.is_final:
            raise FailedPrecondition(f"job {job.id} is {job.status}; stop or cancel it first")
        await self.store.jobs.delete(job.id)
        return job

    async def move_job(
        self, job_id: str, status: str, reason: str, *, by: str, details: Mapping[str, Any] | None = None
    ) -> Job:
        """For runners: what became of a job that is no service. Raises FailedPrecondition for a move that cannot be."""
        if status not in MOVES:
            raise InvalidArgument(f"{status!a} is no status of a job")
        change = Change(status, reason, by, details or {})

        def decide(job: Job) -> Change | None:
            if job.is_service:
                raise FailedPrecondition("a service's status is what it is; stop it, and it will be Done")
            return change

        return await self.store.jobs.change(check_id(job_id, "Job"), decide, self._clock.wall())

    async def _experiment(self, org: str, experiment_id: str) -> tuple[Experiment, str]:
        wanted = check_id(experiment_id, "Experiment")
        row = await self.store.experiments.get(check_org(org), wanted)
        if row is None:
            raise NotFound(f"Experiment {wanted} not found")
        return row

    def _fate(self, wish: JobWish, experiment: Experiment) -> tuple[str, str]:
        """The first status of a job, and why."""
        if not wish.action:
            raise InvalidArgument("action is required")
        if wish.action == SERVICE:
            raise InvalidArgument(
                "an inference microservice is started by its own route: .../inference_microservice/start"
            )
        if wish.action in self.settings.runner_actions:
            return "Pending", "waits for a runner"
        if wish.action != "train" and not wish.checkpoint:
            raise Unimplemented(f"this server does not run the action {wish.action[:64]!a}; it serves trained models")
        if not wish.checkpoint and not experiment.workspace:
            raise InvalidArgument(
                "this server does not train: register a trained model with `checkpoint` (a path or a URL), or in an "
                "experiment whose workspace has results/{job id}"
            )
        return "Done", "registered as completed"

    def _checkpoint(self, text: str | None, trusted: bool) -> str:
        """Blocks. A local one is looked for; one in a bucket when a service is started."""
        checked = check_text(text, "checkpoint")
        if not checked:
            return ""
        place = parse_location(checked)
        return (
            str(self._models.check_local(Path(place.path), trusted=trusted))
            if isinstance(place, LocalPlace)
            else checked
        )
