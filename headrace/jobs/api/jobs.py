# SPDX-License-Identifier: Apache-2.0
"""Routes of jobs: create, list, show, cancel, pause, resume, retry, delete, logs and events."""

from __future__ import annotations

from dataclasses import replace

from headrace.core.errors import InvalidArgument
from headrace.jobs.api.handlers import Call, Response, Text
from headrace.jobs.api.requests import Fields, parse_number, parse_uuid
from headrace.jobs.api.responses import JobListEncoder, event, job_with_details
from headrace.jobs.api.workspaces import experiment_spec
from headrace.jobs.records import BATCH, Job, JobSpec
from headrace.jobs.service import JobService

_MAX_NAME = 255
_MAX_LINES = 100_000
_DEFAULT_LINES = 1000
_JOB_FIELDS = (
    "action",
    "parent_id",
    "parent_job_id",
    "num_gpu",
    "specs",
    "backend_details",
    "checkpoint",
    "kind",
    "timeout_minutes",
)


class JobRoutes:
    """Actions for jobs. `nested`: below an experiment, as on v1."""

    def __init__(self, jobs: JobService, encoder: JobListEncoder, *, nested: bool) -> None:
        self._jobs = jobs
        self._nested = nested
        self._encoder = encoder

    async def create(self, call: Call) -> Response:
        """Register a trained model, or create a batch job. v1 responds with the bare id."""
        fields = call.fields()
        spec = _job_spec(fields)
        if self._nested:
            experiment = parse_uuid(call.ids[0], "Experiment")
            job = await self._create_job(call, experiment, spec)
            return Response(job.id)
        kind = fields.text("kind") or "experiment"
        if kind != "experiment":
            raise InvalidArgument("kind must be experiment: this server has no dataset jobs")
        experiment_fields = experiment_spec(fields, *_JOB_FIELDS)
        experiment_record = await self._jobs.create_experiment(call.org, call.user_id, experiment_fields)
        try:
            # One id for both: they are deleted together.
            job = await self._create_job(call, experiment_record.id, replace(spec, id=experiment_record.id))
        except BaseException:
            await self._jobs.delete_experiment(call.org, experiment_record.id)
            raise
        return Response(job_with_details(job), 201)

    async def _create_job(self, call: Call, experiment: str, spec: JobSpec) -> Job:
        create = self._jobs.create_batch if spec.action == BATCH else self._jobs.create_job
        return await create(call.org, call.user_id, experiment, spec)

    async def list(self, call: Call) -> Response:
        """List jobs, newest first, with `skip` and `size`."""
        query = call.query()
        skip, size = parse_number(query, "skip") or 0, parse_number(query, "size")
        experiment = parse_uuid(call.ids[0], "Experiment") if self._nested else None
        page = await self._jobs.list_jobs(
            call.org, experiment, skip=skip, size=size, status=query.get("status"), action=query.get("action")
        )
        return Response(self._encoder.page(page, skip, size))

    async def show(self, call: Call) -> Response:
        """Return one job with its details."""
        experiment, job = self._ids(call)
        return Response(job_with_details(await self._jobs.refresh_job(call.org, job, experiment)))

    async def cancel(self, call: Call) -> Response:
        """Cancel an unfinished job."""
        experiment, job = self._ids(call)
        changed = await self._jobs.cancel_job(call.org, call.user_id, job, experiment)
        return Response({"message": f"job {job} is {changed.status}", **job_with_details(changed)})

    async def pause(self, call: Call) -> Response:
        """Pause a batch job."""
        experiment, job = self._ids(call)
        changed = await self._jobs.pause_job(call.org, call.user_id, job, experiment)
        return Response({"message": f"job {job} is {changed.status}", **job_with_details(changed)})

    async def resume(self, call: Call) -> Response:
        """Resume a batch job."""
        experiment, job = self._ids(call)
        specs = call.fields().object("specs")
        changed = await self._jobs.resume_job(call.org, call.user_id, job, experiment, specs)
        return Response({"message": f"job {job} is {changed.status}", **job_with_details(changed)})

    async def retry(self, call: Call) -> Response:
        """Create a job like one that failed. Both versions respond with the bare id of the new job."""
        experiment, job = self._ids(call)
        changed = await self._jobs.retry_job(call.org, call.user_id, job, experiment)
        return Response(changed.id, 200 if self._nested else 201)

    async def delete(self, call: Call) -> Response:
        """Delete a finished job."""
        experiment, job = self._ids(call)
        return Response(job_with_details(await self._jobs.delete_job(call.org, job, experiment)))

    async def logs(self, call: Call) -> Response:
        """Return the last `tail` lines of the log as text."""
        experiment, job = self._ids(call)
        tail = parse_number(call.query(), "tail")
        lines = _DEFAULT_LINES if tail is None else min(tail, _MAX_LINES)
        return Response(Text(await self._jobs.job_logs(call.org, job, experiment, lines)))

    async def events(self, call: Call) -> Response:
        """Return every change with its reason."""
        experiment, job = self._ids(call)
        events = await self._jobs.job_events(call.org, job, experiment)
        return Response({"events": [event(record) for record in events]})

    def _ids(self, call: Call) -> tuple[str | None, str]:
        if self._nested:
            return parse_uuid(call.ids[0], "Experiment"), parse_uuid(call.ids[1], "Job")
        return None, parse_uuid(call.ids[0], "Job")


def _job_spec(fields: Fields) -> JobSpec:
    action = fields.text("action", max_chars=_MAX_NAME)
    if not action:
        raise InvalidArgument('action is missing: "train" registers a trained model, "inference" runs a batch job')
    num_gpu = fields.number("num_gpu", -1, 1024)
    return JobSpec(
        action,
        fields.uuid("Parent job", "parent_job_id", "parent_id") or "",
        fields.text("name", max_chars=_MAX_NAME) or "",
        fields.text("description") or "",
        -1 if num_gpu is None else num_gpu,
        fields.object("specs") or {},
        fields.object("backend_details") or {},
        fields.text("checkpoint"),
        fields.text("network_arch", max_chars=_MAX_NAME) or "",
    )
