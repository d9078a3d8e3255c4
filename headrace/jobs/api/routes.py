# SPDX-License-Identifier: Apache-2.0
"""The job API: all routes, each with the operation that the role of a user must allow.

A path that is a prefix of another (`{job}` and `{job}:cancel`) comes after it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError
from headrace.jobs.api.connections import ServiceConnections
from headrace.jobs.api.handlers import Action, Authorisation, Handlers
from headrace.jobs.api.inference import InferenceRoutes
from headrace.jobs.api.jobs import JobRoutes
from headrace.jobs.api.login import ConsoleRoutes, LoginRoutes
from headrace.jobs.api.openapi import OpenApiRoutes
from headrace.jobs.api.responses import JobListEncoder
from headrace.jobs.api.services import ServiceRoutes, StatusUpdateRoute
from headrace.jobs.api.workspaces import ExperimentRoutes, WorkspaceRoutes
from headrace.jobs.settings import JobsApiSettings
from headrace.net.http.routes import Routes

if TYPE_CHECKING:
    from headrace.api.access.authenticator import Access
    from headrace.core.telemetry.metrics import Registry
    from headrace.jobs.service import JobService
    from headrace.net.http.exchange import Handler

log = logging.getLogger("headrace.api")

_V1, _V2 = "/api/v1/orgs/{org}", "/api/v2/orgs/{org}"
_WARM_JOBS = 10_000
Route = tuple[str, str, str, Action]
"""The operation that the user's role must allow, the method, the path and the action."""


class JobsApi:
    """Adds all routes to a server; `start` and `close` it in the loop."""

    def __init__(
        self, jobs: JobService, access: Access, registry: Registry, settings: JobsApiSettings | None = None
    ) -> None:
        settings = settings or JobsApiSettings()
        seconds = registry.histogram(
            "headrace_gateway_inference_seconds", "Time from an inference request to the end of its service's response."
        ).labels()
        self.connections = ServiceConnections(jobs, settings, seconds)
        authorisation = Authorisation(access)
        self._handlers = Handlers(authorisation)
        self.login = LoginRoutes(authorisation, self._handlers)
        self._inference = InferenceRoutes(authorisation, self.connections)
        self._status_update = StatusUpdateRoute(jobs, self.connections, self._handlers)
        self._jobs = jobs
        self._encoder = JobListEncoder()
        self._routes = [*_routes(jobs, self.connections, self._encoder), *_console_routes(ConsoleRoutes(access.audit))]
        registry.callback(
            "headrace_gateway_inference_in_flight", "Inference requests in flight to services.", self._in_flight
        )
        registry.callback(
            "headrace_gateway_services_reached",
            "Services with recent inference requests.",
            lambda: len(self.connections.by_target),
        )

    def add_to(self, routes: Routes) -> None:
        """Add all routes; the inference routes are the fallback for unknown paths."""
        described = Routes()

        def add(method: str, path: str, handler: Handler) -> None:
            routes.add(method, path, handler)
            described.add(method, path, handler)

        for operation, method, path, action in self._routes:
            add(method, path, self._handlers.handler(operation, action))
        job = f"{_V1}/experiments/{{experiment}}/jobs/{{job}}"
        add("POST", f"{job}:status_update", self._status_update.status_update)
        for table in (routes, described):
            self.login.add_to(table)
        self._inference.add_to(routes, described)
        OpenApiRoutes(described).add_to(routes)

    def start(self) -> None:
        """Start the timer of the connections, in the loop."""
        self.connections.start()

    async def warm(self) -> None:
        """Encode the newest jobs, so that the first long list is as fast as the next."""
        try:
            newest = await self._jobs.newest_jobs(_WARM_JOBS)
            for record in newest:
                self._encoder.encode(record)
            for last in newest[:1]:
                # This list is the likeliest first request, and it runs all code of a list once.
                self._encoder.page(await self._jobs.list_jobs(last.org, last.experiment_id), 0, None)
        except HeadraceError as error:
            log.warning("Could not warm the job lists: %s", error.message)

    def drain(self) -> None:
        """Report not ready: the gateway is about to stop."""
        self.login.ready = False

    async def close(self) -> None:
        """Finish running operations and close all connections."""
        await self._handlers.finish()
        await self.connections.close()

    def _in_flight(self) -> float:
        return self.connections.in_flight


def _routes(jobs: JobService, connections: ServiceConnections, encoder: JobListEncoder) -> list[Route]:
    services = ServiceRoutes(jobs, connections)
    experiment = f"{_V1}/experiments/{{experiment}}"
    v1_service = f"{experiment}/jobs/{{job}}/inference_microservice"
    v2_service = f"{_V2}/inference_microservices/{{job}}"
    experiments = ExperimentRoutes(jobs)
    return [
        *_workspace_routes(f"{_V1}/workspaces", WorkspaceRoutes(jobs)),
        *_workspace_routes(f"{_V2}/workspaces", WorkspaceRoutes(jobs, created_status=201)),
        ("experiments.read", "GET", f"{_V1}/experiments", experiments.list),
        ("experiments.write", "POST", f"{_V1}/experiments", experiments.create),
        ("experiments.read", "GET", experiment, experiments.show),
        ("experiments.write", "PUT", experiment, experiments.change),
        ("experiments.write", "PATCH", experiment, experiments.change),
        ("experiments.write", "DELETE", experiment, experiments.delete),
        ("experiments.read", "GET", f"{_V1}/experiments:base", experiments.base),
        ("experiments.read", "GET", f"{_V2}/jobs:list_base_experiments", experiments.base),
        *_job_routes(f"{experiment}/jobs", JobRoutes(jobs, encoder, nested=True)),
        *_job_routes(f"{_V2}/jobs", JobRoutes(jobs, encoder, nested=False)),
        ("services.start", "POST", f"{experiment}/inference_microservice/start", services.start),
        ("services.read", "GET", f"{v1_service}/status", services.status),
        ("services.stop", "POST", f"{v1_service}/stop", services.stop),
        ("services.start", "POST", f"{_V2}/inference_microservices:start", services.start_v2),
        ("services.read", "GET", f"{v2_service}:status", services.status),
        ("services.stop", "DELETE", f"{v2_service}:stop", services.stop_v2),
        ("services.stop", "POST", f"{v2_service}:stop", services.stop_v2),
    ]


def _console_routes(console: ConsoleRoutes) -> list[Route]:
    return [
        ("session.read", "GET", f"{_V2}/session", console.session),
        ("audit.read", "GET", f"{_V2}/audit", console.audit),
    ]


def _workspace_routes(path: str, workspaces: WorkspaceRoutes) -> list[Route]:
    workspace = f"{path}/{{workspace}}"
    return [
        ("workspaces.read", "GET", path, workspaces.list),
        ("workspaces.write", "POST", path, workspaces.create),
        ("workspaces.write", "DELETE", path, workspaces.delete_many),
        *(
            ("workspaces.backup", "POST", f"{prefix}{verb}", action)
            for prefix in (
                f"{path}:",
                f"{workspace}:",
                f"{workspace}/",
            )  # the last is what NVIDIA's v1 command line sends
            for verb, action in (("backup", workspaces.backup), ("restore", workspaces.restore))
        ),
        ("workspaces.read", "GET", workspace, workspaces.show),
        ("workspaces.write", "PUT", workspace, workspaces.change),
        ("workspaces.write", "PATCH", workspace, workspaces.change),
        ("workspaces.write", "DELETE", workspace, workspaces.delete),
    ]


def _job_routes(path: str, jobs: JobRoutes) -> list[Route]:
    job = f"{path}/{{job}}"
    return [
        ("jobs.read", "GET", path, jobs.list),
        ("jobs.write", "POST", path, jobs.create),
        ("jobs.write", "POST", f"{job}:cancel", jobs.cancel),
        ("jobs.write", "POST", f"{job}:pause", jobs.pause),
        ("jobs.write", "POST", f"{job}:resume", jobs.resume),
        ("jobs.write", "POST", f"{job}:retry", jobs.retry),
        ("jobs.read", "GET", f"{job}/logs", jobs.logs),
        ("jobs.read", "GET", f"{job}:logs", jobs.logs),
        ("jobs.read", "GET", f"{job}:events", jobs.events),
        ("jobs.read", "GET", job, jobs.show),
        ("jobs.write", "DELETE", job, jobs.delete),
    ]
