# SPDX-License-Identifier: Apache-2.0
"""Inference microservices: start, status, stop, and what a service itself reports. Inference is in `inference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.errors import InvalidArgument
from headrace.jobs.api.calls import Answer, Call, Calls, respond
from headrace.jobs.api.errors import fail
from headrace.jobs.api.gate import token_of
from headrace.jobs.api.reading import document, organisation_of, uuid_of
from headrace.jobs.api.writing import now_text
from headrace.jobs.records import Job
from headrace.jobs.service import JobService

if TYPE_CHECKING:
    from headrace.jobs.api.reach import Reach
    from headrace.net.http.exchange import Exchange

STOPPED = "Inference microservice stopped successfully"


class Services:
    """Work for `calls`: v1's, below an experiment."""

    def __init__(self, jobs: JobService, reach: Reach) -> None:
        self._jobs = jobs
        self._reach = reach

    async def start(self, call: Call) -> Answer:
        """Start one. The answer does not wait for its model."""
        experiment = uuid_of(call.ids[0], "Experiment")
        made = await self.started(call, experiment)
        return Answer({"job_id": made.id, "status": "pending", "message": "Inference microservice starting"})

    async def start_v2(self, call: Call) -> Answer:
        """v2: 201, and no experiment."""
        made = await self.started(call, None)
        text = f"Inference Microservice started with job_id: {made.id}"
        return Answer({"job_id": made.id, "id": made.id, "status": "starting", "message": text}, 201)

    async def started(self, call: Call, experiment: str | None) -> Job:
        """What both have in common."""
        fields = call.fields()
        parent = fields.uuid("Parent job", "parent_id", "parent_job_id")
        extra = {name: value for name, value in fields.rest("parent_id", "parent_job_id").items() if value is not None}
        if parent is None and not extra.get("model_path") and not extra.get("hf_model"):
            raise InvalidArgument(
                "parent_id is missing: give the id of the completed training job whose model to serve"
            )
        return await self._jobs.start(call.org, call.user_id, experiment, parent, extra)

    async def status(self, call: Call) -> Answer:
        """How it is: what the record, the service and the platform say."""
        found = await self._jobs.status(call.org, *_ids(call))
        return Answer(found.body)

    async def stop(self, call: Call) -> Answer:
        """Stop it for good."""
        experiment, job = _ids(call)
        self._reach.forget(job)
        await self._jobs.stop(call.org, call.user_id, experiment, job)
        self._reach.forget(job)
        return Answer({"status": "stopped", "message": STOPPED, "job_id": job})

    async def stop_v2(self, call: Call) -> Answer:
        """v2: the words that its client was written for."""
        told = (await self.stop(call)).body
        return Answer({**told, "status": "success", "timestamp": now_text(), "auto_deletion": False})


class Reports:
    """`:status_update`, by which a service asks to be deleted. The key is the service's own, not a user's."""

    def __init__(self, jobs: JobService, reach: Reach, calls: Calls) -> None:
        self._jobs = jobs
        self._reach = reach
        self._calls = calls

    def status_update(self, exchange: Exchange) -> None:
        """A handler."""
        self._calls.go(self._status_update(exchange))

    async def _status_update(self, exchange: Exchange) -> None:
        try:
            org, experiment, job = exchange.params
            organisation_of(org)
            experiment, job = uuid_of(experiment, "Experiment"), uuid_of(job, "Job")
            key = token_of(exchange.head)
            stopped = await self._jobs.status_update(org, experiment, job, document(exchange.body), key=key)
            if stopped:
                self._reach.forget(job)
            respond(exchange, Answer({"status": "success", "job_id": job, "auto_deletion": stopped}))
        except Exception as error:
            fail(exchange, error)


def _ids(call: Call) -> tuple[str | None, str]:
    if len(call.ids) == 1:
        return None, uuid_of(call.ids[0], "Job")
    return uuid_of(call.ids[0], "Experiment"), uuid_of(call.ids[1], "Job")
