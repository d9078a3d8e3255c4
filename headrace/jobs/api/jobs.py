# SPDX-License-Identifier: Apache-2.0
"""Jobs: registered, listed, shown, cancelled, deleted, and their logs. On v1 they are below an experiment, on v2 not."""

from __future__ import annotations

from dataclasses import replace

from headrace.core.errors import InvalidArgument
from headrace.jobs.api.calls import Answer, Call, Text
from headrace.jobs.api.reading import Fields, number_of, uuid_of
from headrace.jobs.api.workspaces import experiment_wish
from headrace.jobs.api.writing import JobTexts, event, whole_job
from headrace.jobs.records import BATCH, Job, JobWish
from headrace.jobs.service import JobService

_MOST_NAME = 255
_MOST_LINES = 100_000
_LINES = 1000
_JOB = (
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


class Jobs:
    """Work for `calls`. `nested`: below an experiment, as on v1."""

    def __init__(self, jobs: JobService, texts: JobTexts, *, nested: bool) -> None:
        self._jobs = jobs
        self._nested = nested
        self._texts = texts

    async def create(self, call: Call) -> Answer:
        """Register a trained model, or have a model run once over many inputs. v1 answers with the bare id."""
        fields = call.fields()
        wish = _job_wish(fields)
        if self._nested:
            experiment = uuid_of(call.ids[0], "Experiment")
            made = await self._made(call, experiment, wish)
            return Answer(made.id)
        kind = fields.text("kind") or "experiment"
        if kind != "experiment":
            raise InvalidArgument("kind must be experiment: this server has no jobs of datasets")
        wished = experiment_wish(fields, *_JOB)
        found = await self._jobs.create_experiment(call.org, call.user_id, wished)
        try:
            # One id for both: they go together.
            made = await self._made(call, found.id, replace(wish, id=found.id))
        except BaseException:
            await self._jobs.delete_experiment(call.org, found.id)
            raise
        return Answer(whole_job(made), 201)

    async def _made(self, call: Call, experiment: str, wish: JobWish) -> Job:
        make = self._jobs.create_batch if wish.action == BATCH else self._jobs.create_job
        return await make(call.org, call.user_id, experiment, wish)

    async def list(self, call: Call) -> Answer:
        """The newest first; `skip` and `size` cut a part out."""
        query = call.query()
        skip, size = number_of(query, "skip") or 0, number_of(query, "size")
        experiment = uuid_of(call.ids[0], "Experiment") if self._nested else None
        found = await self._jobs.list_jobs(
            call.org, experiment, skip=skip, size=size, status=query.get("status"), action=query.get("action")
        )
        return Answer(self._texts.page(found, skip, size))

    async def show(self, call: Call) -> Answer:
        """All that is known of one."""
        experiment, job = self._ids(call)
        return Answer(whole_job(await self._jobs.look_at_job(call.org, job, experiment)))

    async def cancel(self, call: Call) -> Answer:
        """End one that is not over."""
        experiment, job = self._ids(call)
        made = await self._jobs.cancel_job(call.org, call.user_id, job, experiment)
        return Answer({"message": f"job {job} is {made.status}", **whole_job(made)})

    async def pause(self, call: Call) -> Answer:
        """Have one wait; what it has done is kept."""
        experiment, job = self._ids(call)
        made = await self._jobs.pause_job(call.org, call.user_id, job, experiment)
        return Answer({"message": f"job {job} is {made.status}", **whole_job(made)})

    async def resume(self, call: Call) -> Answer:
        """Have it go on."""
        experiment, job = self._ids(call)
        specs = call.fields().object("specs")
        made = await self._jobs.resume_job(call.org, call.user_id, job, experiment, specs)
        return Answer({"message": f"job {job} is {made.status}", **whole_job(made)})

    async def retry(self, call: Call) -> Answer:
        """A new job like one that failed. Both versions answer with the bare id of the new one."""
        experiment, job = self._ids(call)
        made = await self._jobs.retry_job(call.org, call.user_id, job, experiment)
        return Answer(made.id, 200 if self._nested else 201)

    async def delete(self, call: Call) -> Answer:
        """Remove one that is over."""
        experiment, job = self._ids(call)
        return Answer(whole_job(await self._jobs.delete_job(call.org, job, experiment)))

    async def logs(self, call: Call) -> Answer:
        """The last lines, as text; `tail` says how many."""
        experiment, job = self._ids(call)
        tail = number_of(call.query(), "tail")
        lines = _LINES if tail is None else min(tail, _MOST_LINES)
        return Answer(Text(await self._jobs.job_logs(call.org, job, experiment, lines)))

    async def events(self, call: Call) -> Answer:
        """Every change, with its reason."""
        experiment, job = self._ids(call)
        found = await self._jobs.job_events(call.org, job, experiment)
        return Answer({"events": [event(each) for each in found]})

    def _ids(self, call: Call) -> tuple[str | None, str]:
        if self._nested:
            return uuid_of(call.ids[0], "Experiment"), uuid_of(call.ids[1], "Job")
        return None, uuid_of(call.ids[0], "Job")


def _job_wish(fields: Fields) -> JobWish:
    action = fields.text("action", most=_MOST_NAME)
    if not action:
        raise InvalidArgument('action is missing: "train" registers a trained model, "inference" runs one once')
    number = fields.number("num_gpu", -1, 1024)
    return JobWish(
        action,
        fields.uuid("Parent job", "parent_job_id", "parent_id") or "",
        fields.text("name", most=_MOST_NAME) or "",
        fields.text("description") or "",
        -1 if number is None else number,
        fields.object("specs") or {},
        fields.object("backend_details") or {},
        fields.text("checkpoint"),
        fields.text("network_arch", most=_MOST_NAME) or "",
    )
