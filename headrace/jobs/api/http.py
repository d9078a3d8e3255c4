# SPDX-License-Identifier: Apache-2.0
"""The routes of the job API, put together. Made by `gateway`, started and closed in its loop.

Where one path is the beginning of another (`{job}` and `{job}:cancel`), the longer one comes first.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError
from headrace.jobs.api.calls import Calls, Work
from headrace.jobs.api.described import Described
from headrace.jobs.api.entrance import Entrance
from headrace.jobs.api.gate import Gate
from headrace.jobs.api.inference import Inference
from headrace.jobs.api.insight import Insight
from headrace.jobs.api.jobs import Jobs
from headrace.jobs.api.reach import Reach
from headrace.jobs.api.services import Reports, Services
from headrace.jobs.api.settings import JobsApiSettings
from headrace.jobs.api.workspaces import Experiments, Workspaces
from headrace.jobs.api.writing import JobTexts
from headrace.net.http.routes import Routes

if TYPE_CHECKING:
    from headrace.api.access.logins import Access
    from headrace.core.telemetry.registry import Registry
    from headrace.jobs.service import JobService
    from headrace.net.http.exchange import Handler

log = logging.getLogger("headrace.api")

_V1, _V2 = "/api/v1/orgs/{org}", "/api/v2/orgs/{org}"
_WARM_JOBS = 10_000
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
        self._jobs = jobs
        self._texts = JobTexts()
        self._rows = [*_rows(jobs, self.reach, self._texts), *_insight_rows(Insight(access.audit))]
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

    async def warm(self) -> None:
        """Have the newest jobs at hand, so that the first long list takes no longer than the next."""
        try:
            newest = await self._jobs.newest_jobs(_WARM_JOBS)
            for record in newest:
                self._texts.write(record)
            for last in newest[:1]:
                # Most likely what is asked for first; and all that a list passes through has been run once.
                self._texts.page(await self._jobs.list_jobs(last.org, last.experiment_id), 0, None)
        except HeadraceError as error:
            log.warning("lists of jobs are not prepared: %s", error.message)

    def stop_being_ready(self) -> None:
        """The gateway is about to end."""
        self.entrance.ready = False

    async def close(self) -> None:
        """Finish what is under way and let go of all connections."""
        await self._calls.finish()
        await self.reach.close()

    def _in_flight(self) -> float:
        return self.reach.in_flight


def _rows(jobs: JobService, reach: Reach, texts: JobTexts) -> list[Row]:
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
        ("experiments.write", "PUT", experiment, experiments.change),
        ("experiments.write", "PATCH", experiment, experiments.change),
        ("experiments.write", "DELETE", experiment, experiments.delete),
        ("experiments.read", "GET", f"{_V1}/experiments:base", experiments.base),
        ("experiments.read", "GET", f"{_V2}/jobs:list_base_experiments", experiments.base),
        *_job_rows(f"{experiment}/jobs", Jobs(jobs, texts, nested=True)),
        *_job_rows(f"{_V2}/jobs", Jobs(jobs, texts, nested=False)),
        ("services.start", "POST", f"{experiment}/inference_microservice/start", services.start),
        ("services.read", "GET", f"{of_job}/status", services.status),
        ("services.stop", "POST", f"{of_job}/stop", services.stop),
        ("services.start", "POST", f"{_V2}/inference_microservices:start", services.start_v2),
        ("services.read", "GET", f"{v2_service}:status", services.status),
        ("services.stop", "DELETE", f"{v2_service}:stop", services.stop_v2),
        ("services.stop", "POST", f"{v2_service}:stop", services.stop_v2),
    ]


def _insight_rows(work: Insight) -> list[Row]:
    return [
        ("session.read", "GET", f"{_V2}/session", work.session),
        ("audit.read", "GET", f"{_V2}/audit", work.audit),
    ]


def _workspace_rows(path: str, work: Workspaces) -> list[Row]:
    one = f"{path}/{{workspace}}"
    return [
        ("workspaces.read", "GET", path, work.list),
        ("workspaces.write", "POST", path, work.create),
        ("workspaces.write", "DELETE", path, work.delete_many),
        *(
            ("workspaces.backup", "POST", f"{where}{verb}", do)
            for where in (f"{path}:", f"{one}:", f"{one}/")  # the last is what NVIDIA's v1 command line asks for
            for verb, do in (("backup", work.backup), ("restore", work.restore))
        ),
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
        ("jobs.write", "POST", f"{one}:pause", work.pause),
        ("jobs.write", "POST", f"{one}:resume", work.resume),
        ("jobs.write", "POST", f"{one}:retry", work.retry),
        ("jobs.read", "GET", f"{one}/logs", work.logs),
        ("jobs.read", "GET", f"{one}:logs", work.logs),
        ("jobs.read", "GET", f"{one}:events", work.events),
        ("jobs.read", "GET", one, work.show),
        ("jobs.write", "DELETE", one, work.delete),
    ]
