# SPDX-License-Identifier: Apache-2.0
"""The routes of the job API, put together. Made by `gateway`, started and closed in its loop.

Where one path is the beginning of another (`{job}` and `{job}:cancel`), the longer one comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.api.jobs.calls import Calls, Work
from headrace.api.jobs.described import Described
from headrace.api.jobs.entrance import Entrance
from headrace.api.jobs.gate import Gate
from headrace.api.jobs.inference import Inference
from headrace.api.jobs.jobs import Jobs
from headrace.api.jobs.reach import Reach
from headrace.api.jobs.services import Reports, Services
from headrace.api.jobs.settings import JobsApiSettings
from headrace.api.jobs.workspaces import Experiments, Workspaces
from headrace.wire.http.routes import Routes

if TYPE_CHECKING:
    from headrace.access.logins import Access
    from headrace.jobs.service import JobService
    from headrace.telemetry.registry import Registry
    from headrace.wire.http.exchange import Handler

_V1, _V2 = "/api/v1/orgs/{org}", "/api/v2/orgs/{org}"
Row = tuple[str, str, str, Work]
"""Operation, method, path and work."""


class JobsHttp:
    """See the module."""

    def __init__(
        self, jobs: JobService, access: Access, registry: Registry, settings: JobsApiSettings | None = None
    ) -> None:
        settings = settings or JobsApiSettings()
        seconds = registry.histogram(
            "headrace_gateway_inference_seconds", "Time from an inference request to the end of its service's answer."
        ).labels()
        self.reach = Reach(jobs, settings, seconds)
        gate = Gate(access)
        self._calls = Calls(gate)
        self.entrance = Entrance(gate, self._calls)
        self._inference = Inference(gate, self.reach)
        self._reports = Reports(jobs, self.reach, self._calls)
        self._rows = _rows(jobs, self.reach)
        registry.callback(
            "headrace_gateway_inference_in_flight", "Inference requests that wait for a service.", self._in_flight
        )
        registry.callback(
            "headrace_gateway_services_reached", "Services that were asked lately.", lambda: len(self.reach.known)
        )

    def add_to(self, routes: Routes) -> None:
        """Take all paths there are."""
        described = Routes()

        def add(method: str, path: str, handler: Handler) -> None:
            routes.add(method, path, handler)
            described.add(method, path, handler)

        for operation, method, path, work in self._rows:
            add(method, path, self._calls.handler(operation, work))
        job = f"{_V1}/experiments/{{experiment}}/jobs/{{job}}"
        add("POST", f"{job}:status_update", self._reports.status_update)
        for table in (routes, described):
            self.entrance.add_to(table)
        self._inference.add_to(routes, described)
        Described(described).add_to(routes)

    def start(self) -> None:
        """Keep time. In the loop."""
        self.reach.start()

    def stop_being_ready(self) -> None:
        """The gateway is about to end."""
        self.entrance.ready = False

    async def close(self) -> None:
        """Finish what is under way and let go of all connections."""
        await self._calls.finish()
        await self.reach.close()

    def _in_flight(self) -> float:
        return self.reach.in_flight


def _rows(jobs: JobService, reach: Reach) -> list[Row]:
    services = Services(jobs, reach)
    experiment = f"{_V1}/experiments/{{experiment}}"
    of_job = f"{experiment}/jobs/{{job}}/inference_microservice"
    v2_service = f"{_V2}/inference_microservices/{{job}}"
    experiments = Experiments(jobs)
    return [
        *_workspace_rows(f"{_V1}/workspaces", Workspaces(jobs)),
        *_workspace_rows(f"{_V2}/workspaces", Workspaces(jobs, made=201)),
        ("experiments.read", "GET", f"{_V1}/experiments", experiments.list),
        ("experiments.write", "POST", f"{_V1}/experiments", experiments.create),
        ("experiments.read", "GET", experiment, experiments.show),
        ("experiments.write", "DELETE", experiment, experiments.delete),
        *_job_rows(f"{experiment}/jobs", Jobs(jobs, nested=True)),
        *_job_rows(f"{_V2}/jobs", Jobs(jobs, nested=False)),
        ("services.start", "POST", f"{experiment}/inference_microservice/start", services.start),
        ("services.read", "GET", f"{of_job}/status", services.status),
        ("services.stop", "POST", f"{of_job}/stop", services.stop),
        ("services.start", "POST", f"{_V2}/inference_microservices:start", services.start_v2),
        ("services.read", "GET", f"{v2_service}:status", services.status),
        ("services.stop", "DELETE", f"{v2_service}:stop", services.stop_v2),
        ("services.stop", "POST", f"{v2_service}:stop", services.stop_v2),
    ]


def _workspace_rows(path: str, work: Workspaces) -> list[Row]:
    one = f"{path}/{{workspace}}"
    return [
        ("workspaces.read", "GET", path, work.list),
        ("workspaces.write", "POST", path, work.create),
        ("workspaces.read", "GET", one, work.show),
        ("workspaces.write", "PUT", one, work.change),
        ("workspaces.write", "PATCH", one, work.change),
        ("workspaces.write", "DELETE", one, work.delete),
    ]


def _job_rows(path: str, work: Jobs) -> list[Row]:
    one = f"{path}/{{job}}"
    return [
        ("jobs.read", "GET", path, work.list),
        ("jobs.write", "POST", path, work.create),
        ("jobs.write", "POST", f"{one}:cancel", work.cancel),
        ("jobs.read", "GET", f"{one}/logs", work.logs),
        ("jobs.read", "GET", f"{one}:logs", work.logs),
        ("jobs.read", "GET", f"{one}:events", work.events),
        ("jobs.read", "GET", one, work.show),
        ("jobs.write", "DELETE", one, work.delete),
    ]
