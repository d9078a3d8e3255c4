# SPDX-License-Identifier: Apache-2.0
"""Routes of inference microservices: start, status, stop, and status updates from services."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.errors import InvalidArgument
from headrace.jobs.api.handlers import Call, Handlers, Response, respond, token_of
from headrace.jobs.api.requests import parse_body, parse_organisation, parse_uuid
from headrace.jobs.api.responses import fail, now_text
from headrace.jobs.records import Job
from headrace.jobs.service import JobService

if TYPE_CHECKING:
    from headrace.jobs.api.connections import ServiceConnections
    from headrace.net.http.exchange import Exchange

STOPPED = "Inference microservice stopped successfully"


class ServiceRoutes:
    """Actions for inference microservices; on v1 they are below an experiment."""

    def __init__(self, jobs: JobService, connections: ServiceConnections) -> None:
        self._jobs = jobs
        self._connections = connections

    async def start(self, call: Call) -> Response:
        """Start a service. The response does not wait for the model."""
        experiment = parse_uuid(call.ids[0], "Experiment")
        job = await self._start(call, experiment)
        return Response({"job_id": job.id, "status": "pending", "message": "Inference microservice starting"})

    async def start_v2(self, call: Call) -> Response:
        """Start a service on v2: 201, and no experiment."""
        job = await self._start(call, None)
        text = f"Inference Microservice started with job_id: {job.id}"
        return Response({"job_id": job.id, "id": job.id, "status": "starting", "message": text}, 201)

    async def _start(self, call: Call, experiment: str | None) -> Job:
        """Start a service for v1 or v2."""
        fields = call.fields()
        parent = fields.uuid("Parent job", "parent_id", "parent_job_id")
        extra = {name: value for name, value in fields.rest("parent_id", "parent_job_id").items() if value is not None}
        if parent is None and not extra.get("model_path") and not extra.get("hf_model"):
            raise InvalidArgument(
                "parent_id is missing: give the id of the completed training job whose model to serve"
            )
        return await self._jobs.start(call.org, call.user_id, experiment, parent, extra)

    async def status(self, call: Call) -> Response:
        """Return the status from the record, the service and the platform."""
        status = await self._jobs.status(call.org, *_ids(call))
        return Response(status.body)

    async def stop(self, call: Call) -> Response:
        """Stop a service for good."""
        experiment, job = _ids(call)
        self._connections.close_job(job)
        await self._jobs.stop(call.org, call.user_id, experiment, job)
        self._connections.close_job(job)
        return Response({"status": "stopped", "message": STOPPED, "job_id": job})

    async def stop_v2(self, call: Call) -> Response:
        """Stop a service, with the fields that the v2 client expects."""
        body = (await self.stop(call)).body
        return Response({**body, "status": "success", "timestamp": now_text(), "auto_deletion": False})


class StatusUpdateRoute:
    """`:status_update`, by which a service asks to be stopped. It authenticates with the service's own key."""

    def __init__(self, jobs: JobService, connections: ServiceConnections, handlers: Handlers) -> None:
        self._jobs = jobs
        self._connections = connections
        self._handlers = handlers

    def status_update(self, exchange: Exchange) -> None:
        """Handle a status update."""
        self._handlers.spawn(self._status_update(exchange))

    async def _status_update(self, exchange: Exchange) -> None:
        try:
            org, experiment, job = exchange.params
            parse_organisation(org)
            experiment, job = parse_uuid(experiment, "Experiment"), parse_uuid(job, "Job")
            key = token_of(exchange.head)
            stopped = await self._jobs.status_update(org, experiment, job, parse_body(exchange.body), key=key)
            if stopped:
                self._connections.close_job(job)
            respond(exchange, Response({"status": "success", "job_id": job, "auto_deletion": stopped}))
        except Exception as error:
            fail(exchange, error)


def _ids(call: Call) -> tuple[str | None, str]:
    if len(call.ids) == 1:
        return None, parse_uuid(call.ids[0], "Job")
    return parse_uuid(call.ids[0], "Experiment"), parse_uuid(call.ids[1], "Job")
