# SPDX-License-Identifier: Apache-2.0
"""The job API on loopback, over a stand-in for `JobService` and real users in a real database.

with job_api(StandInJobs(), tmp_path) as api:
    token = api.login("alice")
    api.ask("GET", "/api/v1/orgs/acme/workspaces", token=token)
"""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.api.access.authenticator import Access, open_access
from headrace.api.access.users import KeyHasher
from headrace.core.clock import SystemClock
from headrace.core.errors import NotFound
from headrace.core.limits import Limits
from headrace.core.telemetry.metrics import Registry
from headrace.jobs.api.routes import JobsApi
from headrace.jobs.records import Endpoint, Job, ServiceStatus
from headrace.jobs.service import JobService
from headrace.jobs.settings import JobsApiSettings, JobSettings
from headrace.jobs.store.store import Store
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.serving import Serving, serving

ORG = "acme"
EXPERIMENT, JOB = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
INFERENCE = f"/api/v1/orgs/{ORG}/experiments/{EXPERIMENT}/jobs/{JOB}/inference_microservice/inference"
V2_INFERENCE = f"/api/v2/orgs/{ORG}/inference_microservices/{JOB}:inference"


def job(**more: Any) -> Job:
    """A record of a service that runs."""
    fields: dict[str, Any] = {
        "id": JOB, "org": ORG, "experiment_id": EXPERIMENT, "user_id": "u", "parent_id": "", "reason": "",
        "action": "inference_microservice", "status": "Running", "name": "", "description": "", "network_arch": "a",
        "num_gpu": 0, "checkpoint": "", "specs_json": "{}", "details_json": "{}", "place": "here", "created_on": 1.0,
        "last_modified": 2.0, "stopped_on": None, "version": 1,
    }  # fmt: skip
    return Job(**{**fields, **more})


class StandInJobs:
    """Stands in for `JobService`: one service, whose state a test sets."""

    def __init__(self) -> None:
        self.url: str | None = None
        self.state: Any = "running"
        self.error = ""
        self.gone = False
        self.asked = 0
        """How often the endpoint was asked for."""
        self.lost_jobs: list[str] = []
        self.started: list[tuple[Any, ...]] = []
        self.updates: list[tuple[Any, ...]] = []

    async def endpoint(self, org: str, experiment_id: str | None, job_id: str) -> Endpoint:
        self.asked += 1
        self._check(org, experiment_id, job_id)
        return Endpoint(job(), self.url if self.state == "running" else None, self.state, self.error)

    def drop_endpoint(self, job_id: str) -> None:
        self.lost_jobs.append(job_id)

    async def start(self, *words: Any) -> Job:
        self.started.append(words)
        return job()

    async def status(self, org: str, experiment_id: str | None, job_id: str) -> ServiceStatus:
        self._check(org, experiment_id, job_id)
        return ServiceStatus(job(), {"job_id": JOB, "model_loaded": True, "initialization_error": None})

    async def stop(self, org: str, user_id: str, experiment_id: str | None, job_id: str) -> Job:
        self._check(org, experiment_id, job_id)
        self.gone = True
        return job(status="Done")

    async def status_update(self, *words: Any, key: str) -> bool:
        self.updates.append((*words, key))
        return True

    def _check(self, org: str, experiment_id: str | None, job_id: str) -> None:
        if self.gone or (org, job_id) != (ORG, JOB) or experiment_id not in (None, EXPERIMENT):
            raise NotFound(f"there is no job {job_id}")


@dataclass
class JobAnswer:
    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Api:
    """A job API that runs."""

    def __init__(
        self, server: Serving, http_: JobsApi, access: Access, keys: Mapping[str, str], folder: Path, jobs: Any
    ) -> None:
        self.jobs = jobs
        self.server = server
        self.http = http_
        self.access = access
        self.keys = keys
        self.folder = folder
        self.port = server.port

    def ask(
        self, method: str, path: str, body: Any = None, token: str = "", fields: Mapping[str, str] | None = None
    ) -> JobAnswer:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = dict(fields or {}) | ({"Authorization": f"Bearer {token}"} if token else {})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, raw, sent)
            answer = connection.getresponse()
            got = {name.lower(): value for name, value in answer.getheaders()}
            return JobAnswer(answer.status, got, answer.read())
        finally:
            connection.close()

    def login(self, name: str, org: str = ORG) -> str:
        got = self.ask("POST", "/api/v1/login", {"ngc_key": self.keys[name], "ngc_org_name": org})
        assert got.status == 200, got.body
        return str(got.json["token"])


@contextmanager
def job_api(jobs: Any, folder: Path, settings: JobsApiSettings | None = None) -> Iterator[Api]:
    """Users: alice (operator of acme), victor (viewer of acme), bob (operator of other), root (admin of all).

    Without jobs, a real `JobService` is behind it, which has no room for a service.
    """
    document: dict[str, Any] = {}

    async def build() -> Site:
        store = await Store.open(f"sqlite:///{folder / (uuid.uuid4().hex + '.sqlite3')}")
        real = jobs or await JobService.open(JobSettings(folder / "jobs", max_services=0))
        access = open_access(folder, store.users, hasher=KeyHasher(time_cost=1, memory_kib=64))
        keys = {}
        people = (
            ("alice", ORG, "operator"),
            ("victor", ORG, "viewer"),
            ("bob", "other", "operator"),
            ("root", "*", "admin"),
        )
        for name, org, role in people:
            keys[name] = (await access.users.add(name, org, role))[1]
        http_ = JobsApi(real, access, Registry(SystemClock()), settings)
        routes = Routes()
        http_.add_to(routes)
        http_.start()
        document.update(store=store, access=access, keys=keys, http=http_, jobs=real)
        return Site(routes, limits=Limits(body_bytes=1 << 20))

    with serving(build) as server:
        try:
            yield Api(server, document["http"], document["access"], document["keys"], folder, document["jobs"])
        finally:
            server.call(document["http"].close)
            if jobs is None:
                server.call(document["jobs"].close)
            server.call(document["store"].close)
            document["access"].close()
