# SPDX-License-Identifier: Apache-2.0
"""Create, read, update and delete workspaces, experiments and job records: the base class of `service.JobService`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy.exc import IntegrityError

from headrace.core.clock import Clock
from headrace.core.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from headrace.jobs.backups import BackupLocation, backup_location
from headrace.jobs.clouds import check_access, check_details
from headrace.jobs.launch_plan import LaunchPlanner
from headrace.jobs.records import (
    SERVICE,
    TRANSITIONS,
    Experiment,
    ExperimentChange,
    ExperimentSpec,
    Job,
    JobPage,
    JobSpec,
    Workspace,
    WorkspaceSpec,
)
from headrace.jobs.secrets import Vault
from headrace.jobs.settings import JobSettings
from headrace.jobs.store.jobs import Change
from headrace.jobs.store.store import Store
from headrace.jobs.validation import (
    MAX_NAME,
    check_arch,
    check_id,
    check_json,
    check_org,
    check_text,
    check_variables,
    check_version,
)
from headrace.models.storage.locations import LocalLocation, parse_location

_MAX_GPUS = 1024
_MAX_PAGE = 1 << 40


class RecordService:
    """Records of all organisations; every method checks that a record belongs to the given organisation."""

    def __init__(self, store: Store, vault: Vault, settings: JobSettings, planner: LaunchPlanner, clock: Clock) -> None:
        self.store = store
        self.settings = settings
        self._vault = vault
        self._clock = clock
        self._planner = planner

    # Workspaces

    async def create_workspace(self, org: str, user_id: str, spec: WorkspaceSpec) -> tuple[Workspace, bool]:
        """Return the workspace and whether it is new: an equal configuration returns the existing workspace."""
        check_org(org)
        details = dict(spec.cloud_specific_details or {})
        cloud_type = check_text(spec.cloud_type, "cloud_type", 64)
        bucket = check_details(cloud_type, details)
        await asyncio.to_thread(check_access, cloud_type, details)
        now = self._clock.wall()
        workspace = Workspace(
            str(uuid.uuid4()),
            org,
            user_id,
            check_text(spec.name, "name", MAX_NAME) or "My Workspace",
            bool(spec.shared),
            check_version(spec.version or "1.0.0"),
            cloud_type,
            bucket,
            now,
            now,
        )
        fingerprint = self._fingerprint(workspace, details, force_new=spec.force_create)
        return await self.store.workspaces.insert(workspace, self._encrypt(workspace, details), fingerprint)

    async def list_workspaces(self, org: str) -> list[Workspace]:
        """Return all, newest first."""
        return await self.store.workspaces.all_of(check_org(org))

    async def get_workspace(self, org: str, workspace_id: str) -> Workspace:
        """Return one, or raise NotFound."""
        return (await self._workspace(org, workspace_id))[0]

    async def update_workspace(self, org: str, workspace_id: str, spec: WorkspaceSpec) -> Workspace:
        """Change the fields that the spec gives; credentials are replaced as a whole."""
        old, secret = await self._workspace(org, workspace_id)
        details: dict[str, Any] = self._vault.decrypt(secret, f"workspace {old.id}")
        if spec.cloud_specific_details is not None:
            details = dict(spec.cloud_specific_details)
        cloud_type = check_text(spec.cloud_type, "cloud_type", 64) or old.cloud_type
        bucket = check_details(cloud_type, details)
        await asyncio.to_thread(check_access, cloud_type, details)
        new = replace(
            old,
            name=check_text(spec.name, "name", MAX_NAME) or old.name,
            shared=old.shared if spec.shared is None else bool(spec.shared),
            version=check_version(spec.version or old.version),
            cloud_type=cloud_type,
            bucket=bucket,
            last_modified=self._clock.wall(),
        )
        await self.store.workspaces.update(new, self._encrypt(new, details), self._fingerprint(new, details))
        return new

    async def delete_workspace(self, org: str, workspace_id: str) -> Workspace:
        """Delete a workspace; FailedPrecondition while experiments use it."""
        workspace = await self.get_workspace(org, workspace_id)
        await self.store.workspaces.delete([workspace.id])
        return workspace

    async def delete_workspaces(self, org: str, ids: Sequence[str]) -> list[Workspace]:
        """Delete all of them, or none if one is missing or used."""
        workspaces = [await self.get_workspace(org, workspace_id) for workspace_id in dict.fromkeys(ids)]
        await self.store.workspaces.delete([workspace.id for workspace in workspaces])
        return workspaces

    async def backup_location(self, org: str, workspace_id: str) -> BackupLocation:
        """Return the bucket of a workspace, for a backup."""
        workspace, secret = await self._workspace(org, workspace_id)
        return backup_location(workspace.cloud_type, self._vault.decrypt(secret, f"workspace {workspace.id}"))

    async def _workspace(self, org: str, workspace_id: str) -> tuple[Workspace, str]:
        checked_id = check_id(workspace_id, "Workspace")
        row = await self.store.workspaces.get(check_org(org), checked_id)
        if row is None:
            raise NotFound(f"Workspace {checked_id} not found")
        return row

    def _encrypt(self, workspace: Workspace, details: Mapping[str, Any]) -> str:
        return self._vault.encrypt(details, f"workspace {workspace.id}")

    def _fingerprint(self, workspace: Workspace, details: Mapping[str, Any], *, force_new: bool = False) -> str:
        content = {"name": workspace.name, "cloud_type": workspace.cloud_type, "details": dict(details)}
        return self._vault.fingerprint({**content, "again": workspace.id} if force_new else content)

    # Experiments

    async def create_experiment(self, org: str, user_id: str, spec: ExperimentSpec) -> Experiment:
        """Create an experiment; NotFound if its workspace is not the organisation's."""
        check_org(org)
        now = self._clock.wall()
        experiment = Experiment(
            str(uuid.uuid4()),
            org,
            user_id,
            check_text(spec.name, "name", MAX_NAME),
            check_text(spec.description, "description"),
            check_arch(spec.network_arch),
            (await self.get_workspace(org, spec.workspace)).id if spec.workspace else "",
            dict(spec.details),
            now,
            now,
        )
        check_json(spec.details, "the experiment")
        variables = check_variables(spec.docker_env_vars)
        await self.store.experiments.insert(experiment, self._vault.encrypt(variables, f"experiment {experiment.id}"))
        return experiment

    async def list_experiments(self, org: str) -> list[Experiment]:
        """Return all, newest first."""
        return await self.store.experiments.all_of(check_org(org))

    async def get_experiment(self, org: str, experiment_id: str) -> Experiment:
        """Return one, or raise NotFound."""
        return (await self._experiment(org, experiment_id))[0]

    async def update_experiment(self, org: str, experiment_id: str, change: ExperimentChange) -> Experiment:
        """Change the given fields. Running services keep the settings they were started with."""
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
            name=old.name if change.name is None else check_text(change.name, "name", MAX_NAME),
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
        """Delete an experiment and its jobs; FailedPrecondition while one of them is unfinished."""
        experiment = await self.get_experiment(org, experiment_id)
        await self.store.experiments.delete(experiment.id)
        return experiment

    # Jobs

    async def create_job(
        self,
        org: str,
        user_id: str,
        experiment_id: str,
        spec: JobSpec,
        *,
        trusted: bool = False,
        place: str = "",
        work: Mapping[str, Any] | None = None,
    ) -> Job:
        """Register a trained model as a completed job (Done), or record work for a runner (Pending).

        `trusted`: the caller is the operator, who may name any local path. `place`: where the job runs; "" for an external
        runner. `work`: details for the runner.
        """
        experiment = await self.get_experiment(org, experiment_id)
        status, reason = self._initial_status(spec, experiment)
        parent = (await self.get_job(org, spec.parent_id)).id if spec.parent_id else ""
        if not isinstance(spec.num_gpu, int) or not -1 <= spec.num_gpu <= _MAX_GPUS:
            raise InvalidArgument(f"num_gpu must be an integer from -1 to {_MAX_GPUS}")
        now = self._clock.wall()
        job = Job(
            id=check_id(spec.id, "Job") if spec.id else str(uuid.uuid4()),
            org=org,
            experiment_id=experiment.id,
            user_id=user_id,
            parent_id=parent,
            action=check_text(spec.action, "action", 64),
            status=status,
            reason=reason,
            name=check_text(spec.name, "name", MAX_NAME),
            description=check_text(spec.description, "description"),
            network_arch=check_arch(spec.network_arch or experiment.network_arch),
            num_gpu=spec.num_gpu,
            checkpoint=await asyncio.to_thread(self._checkpoint, spec.checkpoint, trusted),
            specs_json=check_json(spec.specs, "specs"),
            details_json=check_json({"backend_details": dict(spec.backend_details), **(work or {})}, "backend_details"),
            place=place,
            created_on=now,
            last_modified=now,
            stopped_on=None,
            version=1,
        )
        try:
            await self.store.jobs.insert(job, user_id)
        except IntegrityError:
            raise AlreadyExists(f"a job with the id {job.id} already exists; omit the id to get a new one") from None
        return job

    async def register(
        self, org: str, user_id: str, path: str, arch: str, workspace_id: str = "", name: str = ""
    ) -> tuple[Experiment, Job]:
        """Register a model at a path or URL, for the operator: an experiment with one completed training job."""
        if isinstance(location := parse_location(path), LocalLocation):
            await asyncio.to_thread(self._planner.check_local, location.path, trusted=True)
        experiment = await self.create_experiment(org, user_id, ExperimentSpec(arch, name, workspace=workspace_id))
        spec = JobSpec("train", name=name, checkpoint=path)
        return experiment, await self.create_job(org, user_id, experiment.id, spec, trusted=True)

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
        """Return jobs, newest first: `size` of them after `skip`, or all without a size."""
        if not 0 <= skip <= _MAX_PAGE or (size is not None and not 0 <= size <= _MAX_PAGE):
            raise InvalidArgument("skip and size must be integers of 0 or more")
        experiment = (await self.get_experiment(org, experiment_id)).id if experiment_id is not None else ""
        filters = check_text(status, "status", 64), check_text(action, "action", 64)
        return await self.store.jobs.page(check_org(org), experiment, *filters, skip, size)

    async def get_job(self, org: str, job_id: str, experiment_id: str | None = None) -> Job:
        """Return one job, or raise NotFound. The record of a stopped service stays."""
        checked_id = check_id(job_id, "Job")
        job = await self.store.jobs.get(checked_id)
        experiment = check_id(experiment_id, "Experiment") if experiment_id is not None else None
        if job is None or job.org != org or experiment not in (None, job.experiment_id):
            raise NotFound(f"Job {checked_id} not found")
        return job

    async def delete_job(self, org: str, job_id: str, experiment_id: str | None = None) -> Job:
        """Delete a job with its events and log; FailedPrecondition while it is unfinished."""
        job = await self.get_job(org, job_id, experiment_id)
        if not job.is_final:
            raise FailedPrecondition(f"job {job.id} is {job.status}; stop or cancel it first")
        await self.store.jobs.delete(job.id)
        return job

    async def set_job_status(
        self, job_id: str, status: str, reason: str, *, actor: str, details: Mapping[str, Any] | None = None
    ) -> Job:
        """Set the status of a job that is not a service, for runners. FailedPrecondition for an invalid transition."""
        if status not in TRANSITIONS:
            raise InvalidArgument(f"unknown job status {status!a}: use one of {', '.join(TRANSITIONS)}")
        change = Change(status, reason, actor, details or {})

        def decide(job: Job) -> Change | None:
            if job.is_service:
                raise FailedPrecondition("the status of a service cannot be set: stop the service instead")
            return change

        return await self.store.jobs.change(check_id(job_id, "Job"), decide, self._clock.wall())

    async def _experiment(self, org: str, experiment_id: str) -> tuple[Experiment, str]:
        checked_id = check_id(experiment_id, "Experiment")
        row = await self.store.experiments.get(check_org(org), checked_id)
        if row is None:
            raise NotFound(f"Experiment {checked_id} not found")
        return row

    def _initial_status(self, spec: JobSpec, experiment: Experiment) -> tuple[str, str]:
        """Return the first status of a job and its reason."""
        if not spec.action:
            raise InvalidArgument("action is required")
        if spec.action == SERVICE:
            raise InvalidArgument(
                "an inference microservice is started by its own route: .../inference_microservice/start"
            )
        if spec.action in self.settings.runner_actions:
            return "Pending", "waiting for a runner"
        if spec.action != "train" and not spec.checkpoint:
            raise Unimplemented(f"this server does not run the action {spec.action[:64]!a}; it serves trained models")
        if not spec.checkpoint and not experiment.workspace:
            raise InvalidArgument(
                "this server does not train: register a trained model with `checkpoint` (a path or a URL), or in an "
                "experiment whose workspace has results/{job id}"
            )
        return "Done", "registered as completed"

    def _checkpoint(self, text: str | None, trusted: bool) -> str:
        """Check a checkpoint's location; a local one must exist. Blocks."""
        checked = check_text(text, "checkpoint")
        if not checked:
            return ""
        location = parse_location(checked)
        return (
            str(self._planner.check_local(Path(location.path), trusted=trusted))
            if isinstance(location, LocalLocation)
            else checked
        )
