# SPDX-License-Identifier: Apache-2.0
"""A driver without processes, and a job service over it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.core.clock import Clock, ManualClock
from headrace.core.errors import AlreadyExists
from headrace.jobs.records import ExperimentSpec, Job, JobSpec
from headrace.jobs.service import JobService
from headrace.jobs.settings import JobSettings
from headrace.platforms.contract import Check, Handle, LaunchSpec, PlatformStatus
from support.ports import service_ports


class GatewayKilled(BaseException):
    """Stands for kill -9: nothing of ours catches it and goes on."""


class FakeDriver:
    """A platform in memory: it outlives the services that use it, and may be told to kill its gateway at any call."""

    name = "fake"
    place = "fake:world"

    def __init__(self) -> None:
        self.running: dict[str, LaunchSpec] = {}
        self.ended: dict[str, str] = {}
        """With their logs."""
        self.killed_at = ""
        """"start", "started", "stop", "stopped": where the next call dies."""
        self.gateway_is_dead = False
        self.fail_start: Exception | None = None

    def crash(self, job_id: str, log: str = "boom") -> None:
        if self.running.pop(job_id, None) is not None:
            self.ended[job_id] = log

    def _die(self, where: str) -> None:
        if self.killed_at == where:
            self.killed_at = ""
            self.gateway_is_dead = True
            raise GatewayKilled

    async def preflight(self) -> list[Check]:
        return []

    async def start(self, spec: LaunchSpec) -> Handle:
        await asyncio.sleep(0)
        self._die("start")
        if self.fail_start is not None:
            raise self.fail_start
        if spec.job_id in self.running or spec.job_id in self.ended:
            raise AlreadyExists("started before")
        self.running[spec.job_id] = spec
        self._die("started")
        return Handle(spec.job_id, self.name, {"pid": 7})

    async def status(self, handle: Handle) -> PlatformStatus:
        await asyncio.sleep(0)
        if handle.job_id in self.running:
            return PlatformStatus("running", f"fake-{handle.job_id[:8]}", "Running")
        if handle.job_id in self.ended:
            return PlatformStatus("ended", pod_phase="Failed", exit_code=1, reason="it fell over")
        return PlatformStatus("gone")

    async def logs(self, handle: Handle, tail: int) -> str:
        return self.ended.get(handle.job_id) or ("alive" if handle.job_id in self.running else "")

    async def endpoint(self, handle: Handle) -> str | None:
        return "http://127.0.0.1:9" if handle.job_id in self.running else None

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        await asyncio.sleep(0)
        self._die("stop")
        self.running.pop(handle.job_id, None)
        self.ended.pop(handle.job_id, None)
        self._die("stopped")

    async def list_services(self) -> dict[str, PlatformStatus]:
        return {job_id: await self.status(Handle(job_id, self.name)) for job_id in [*self.running, *self.ended]}

    async def close(self) -> None:
        pass


RANGE = service_ports()
"""Ports of real processes."""


def settings_of(folder: Path, **more: Any) -> JobSettings:
    """For real processes, of a program that starts in a moment."""
    stand_in: dict[str, Any] = {"service_target": "stand_in_service:main", "service_args": ()}
    stand_in["database_url"] = os.environ.get("HEADRACE_TEST_DATABASE", "")
    return JobSettings(folder / "data", port_range=RANGE, **{**stand_in, **more})


async def silent(url: str, seconds: float) -> Mapping[str, Any] | None:
    """A service that does not answer yet."""
    return None


@asynccontextmanager
async def opened(
    folder: Path,
    driver: FakeDriver | None = None,
    *,
    url: str = "",
    clock: Clock | None = None,
    fetch_status: Any = silent,
    **more: Any,
) -> AsyncIterator[JobService]:
    settings = JobSettings(folder / "data", url, **more)
    service = await JobService.open(
        settings, driver or FakeDriver(), clock=clock or ManualClock(), fetch_status=fetch_status
    )
    try:
        yield service
    finally:
        await service.close()


def model_file(folder: Path, name: str = "model.onnx") -> Path:
    path = folder / "trained"
    path.mkdir(exist_ok=True)
    (path / name).write_bytes(b"weights")
    return path


async def trained(service: JobService, folder: Path, org: str = "org") -> Job:
    """A completed training job."""
    _, job = await service.register(org, "user", str(model_file(folder)), "classification_pyt")
    return job


async def started(service: JobService, parent: Job, **extra: Any) -> Job:
    return await service.start(parent.org, "user", parent.experiment_id, parent.id, extra)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


__all__ = [
    "ExperimentSpec",
    "FakeDriver",
    "GatewayKilled",
    "JobSpec",
    "model_file",
    "opened",
    "run",
    "started",
    "trained",
]
