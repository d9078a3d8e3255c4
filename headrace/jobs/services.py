# SPDX-License-Identifier: Apache-2.0
"""Inference microservices: start, find, poll and stop them.

A record is written before a launch and after a cleanup, so whatever is killed in between, the record says that something may
run; `reconcile` finishes it:

    Pending     recorded; a launch may be in progress
    Running     launched
    Canceling   to be stopped; the final status is in the details
    Done        stopped and cleaned up
    Error       ended by itself or never started; the reason says why
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, NotFound, ResourceExhausted, Unavailable
from headrace.core.fault_points import fault_point
from headrace.jobs.concurrency import BackgroundTasks, Busy, JobLocks
from headrace.jobs.launch_plan import LaunchPlan, launch_spec
from headrace.jobs.records import SERVICE, Endpoint, Experiment, Job, ServiceStatus
from headrace.jobs.secrets import Vault
from headrace.jobs.service_status import (
    FetchStatus,
    FinalState,
    failed_status,
    failure_message,
    running_status,
    with_final_state,
)
from headrace.jobs.settings import JobSettings
from headrace.jobs.store.jobs import Change
from headrace.jobs.store.store import Store
from headrace.platforms.contract import Driver, Handle, PlatformStatus

log = logging.getLogger("headrace.jobs")

LOG_LINES = 1000
_MAX_LOG_CHARS = 256 * 1024
_REASON_LINES = 8
_ENDPOINT_CACHE_SECONDS = 2.0
_MAX_CACHED_ENDPOINTS = 10_000
STOPPED = FinalState("Done", "stopped by a user")


class InferenceServices:
    """All inference microservices of one place, run by one driver."""

    def __init__(
        self,
        store: Store,
        driver: Driver,
        vault: Vault,
        settings: JobSettings,
        clock: Clock,
        fetch_status: FetchStatus,
        locks: JobLocks,
    ) -> None:
        self.store = store
        self.driver = driver
        self.locks = locks
        self.clock = clock
        self.callback_url = settings.callback_url
        self.shares_place = settings.containers is not None
        """Whether other programs start services on this platform, which have no record here."""
        self._vault = vault
        self._settings = settings
        self._fetch_status = fetch_status
        self._endpoints: dict[str, tuple[Endpoint, float]] = {}
        self._background = BackgroundTasks()

    async def close(self) -> None:
        """Finish background tasks."""
        await self._background.close()

    # Start

    async def start(self, org: str, user_id: str, plan: LaunchPlan) -> Job:
        """Record a service and launch it."""
        running = await self.store.jobs.unfinished(self.driver.place)
        if len(running) >= self._settings.max_services:
            raise ResourceExhausted(f"{len(running)} services run already, which is the limit; stop one first")
        return await self._background.run_shielded(self._start(org, user_id, plan))

    async def _start(self, org: str, user_id: str, plan: LaunchPlan) -> Job:
        job_id, now = str(uuid.uuid4()), self.clock.wall()
        experiment = plan.experiment
        if experiment is None:
            workspace = plan.workspace.id if plan.workspace is not None else ""
            experiment = Experiment(job_id, org, user_id, "", "", plan.network_arch, workspace, {}, now, now)
            await self.store.experiments.insert(experiment, "")
        job = Job(
            id=job_id,
            org=org,
            experiment_id=experiment.id,
            user_id=user_id,
            parent_id=plan.parent_id,
            action=SERVICE,
            status="Pending",
            reason="recorded; not launched yet",
            name="",
            description="",
            network_arch=plan.network_arch,
            num_gpu=plan.num_gpu,
            checkpoint="",
            specs_json=plan.specs_json,
            details_json=json.dumps({"model_path": plan.model_path, "gateway": self.locks.owner}),
            place=self.driver.place,
            created_on=now,
            last_modified=now,
            stopped_on=None,
            version=1,
        )
        async with self.locks.hold(job_id):
            await self.store.jobs.insert(job, user_id)
            return await self._launch(job, plan)

    async def _launch(self, job: Job, plan: LaunchPlan) -> Job:
        owner = self.locks.owner
        try:
            key = self._vault.callback_key(job.id)
            handle = await self.driver.start(launch_spec(job, plan, self._settings, self.callback_url, key))
        except Exception as error:
            text = error.message if isinstance(error, HeadraceError) else "internal error; see the gateway's log"
            log.warning("Could not launch job %s.", job.id, exc_info=not isinstance(error, HeadraceError))
            await self.change(job.id, Change("Error", f"could not be launched: {text}", owner))
            raise
        fault_point("jobs.service.launched")
        launched = Change("Running", f"launched by {self.driver.name}", owner, {"handle": dict(handle.data)})
        # A stop request that arrived meanwhile waits for the lock, and stops the service then.
        return await self.store.jobs.change(
            job.id, lambda now: launched if now.status == "Pending" else None, self.clock.wall()
        )

    # Observe

    async def find(self, org: str, experiment_id: str | None, job_id: str) -> Job:
        """Return a service of this organisation that was not stopped, or raise NotFound."""
        job = await self.store.jobs.get(job_id)
        if job is None or job.org != org or not job.is_service or experiment_id not in (None, job.experiment_id):
            raise NotFound(f"Job {job_id} not found")
        if job.stopped_on is not None:
            raise _stopped_error(job_id)
        return job

    async def status(self, org: str, experiment_id: str | None, job_id: str) -> ServiceStatus:
        """Return the status from the record, the service and the platform."""
        job = await self.find(org, experiment_id, job_id)
        self._check_place(job)
        job = with_final_state(job)
        platform_status = PlatformStatus("gone")
        if not job.is_final:
            platform_status = await self.driver.status(_handle(job))
            if platform_status.phase in ("ended", "gone") and job.status == "Running":
                job = await self.record_exit(job)
                if job.stopped_on is not None:
                    raise _stopped_error(job_id)
        if job.status == "Error":
            return ServiceStatus(job, failed_status(job, platform_status))
        url = await self.driver.endpoint(_handle(job))
        reported = await self._fetch_status(url, self._settings.status_seconds) if url is not None else None
        if reported is not None and reported.get("job_id") != job_id:
            reported = None  # another service listens there now
        return ServiceStatus(job, running_status(job, platform_status, reported))

    def cached_endpoint(self, org: str, experiment_id: str | None, job_id: str) -> Endpoint | None:
        """Return the cached endpoint; None if there is none."""
        cached = self._endpoints.get(job_id)
        if cached is None or cached[1] < self.clock.monotonic():
            return None
        job = cached[0].job
        return cached[0] if job.org == org and experiment_id in (None, job.experiment_id) else None

    async def endpoint(self, org: str, experiment_id: str | None, job_id: str) -> Endpoint:
        """Return where to send a request, or why the service cannot take one."""
        cached = self.cached_endpoint(org, experiment_id, job_id)
        if cached is not None:
            return cached
        job = await self.find(org, experiment_id, job_id)
        self._check_place(job)
        job = with_final_state(job)
        if job.status == "Canceling":
            raise _stopped_error(job_id)
        url = await self.driver.endpoint(_handle(job)) if job.status == "Running" else None
        if url is None and job.status == "Running":
            job = await self.record_exit(job)
            if job.stopped_on is not None:
                raise _stopped_error(job_id)
        if url is None:
            failed = job.status == "Error"
            return Endpoint(job, None, "failed" if failed else "initializing", failure_message(job) if failed else "")
        endpoint = Endpoint(job, url, "running")
        if len(self._endpoints) >= _MAX_CACHED_ENDPOINTS:
            self._endpoints.clear()
        self._endpoints[job_id] = endpoint, self.clock.monotonic() + _ENDPOINT_CACHE_SECONDS
        return endpoint

    def drop_endpoint(self, job_id: str) -> None:
        """Drop the cached endpoint of a service."""
        self._endpoints.pop(job_id, None)

    # Stop

    async def stop(self, org: str, user_id: str, experiment_id: str | None, job_id: str) -> Job:
        """Stop a service for good and wait for its end."""
        await self.find(org, experiment_id, job_id)
        return await self._background.run_shielded(self._stop(job_id, user_id))

    async def _stop(self, job_id: str, user_id: str) -> Job:
        job = await self.request_stop(job_id, STOPPED, user_id)
        if job.is_final:
            return job
        if job.place != self.driver.place:
            return await self._wait_for_other_gateway(job_id)
        return await self.finish_stop(job_id)

    async def request_stop(self, job_id: str, final_state: FinalState, actor: str) -> Job:
        """Record that a service is to be stopped; any gateway of its place may do it."""
        now = self.clock.wall()
        self.drop_endpoint(job_id)

        def decide(job: Job) -> Change | None:
            if job.stopped_on is not None:
                raise _stopped_error(job_id)
            if job.is_final:
                # It has ended with an error, which stays on record; from now on its id is NotFound.
                return Change(job.status, job.reason, actor, stopped_on=now) if final_state is STOPPED else None
            if job.status == "Canceling" and final_state is not STOPPED:
                return None
            end = {"status": final_state.status, "reason": final_state.reason, "details": dict(final_state.details)}
            return (
                None if job.details.get("end") == end else Change("Canceling", final_state.reason, actor, {"end": end})
            )

        return await self.store.jobs.change(job_id, decide, now)

    async def finish_stop(self, job_id: str, wait_seconds: float | None = None) -> Job:
        """Stop a Canceling service and record its final state."""
        wait = self._settings.lease_seconds if wait_seconds is None else wait_seconds
        async with self.locks.hold(job_id, wait):
            job = await self.store.jobs.get(job_id)
            if job is None:
                raise _stopped_error(job_id)
            if job.is_final:
                return job
            await self._save_log(job)
            await self.clean_up(job_id)
            now = self.clock.wall()
            owner = self.locks.owner

            def decide(job: Job) -> Change | None:
                if job.is_final:
                    return None
                end = job.details.get("end") or {"status": "Done", "reason": STOPPED.reason, "details": {}}
                stopped_on = now if end["status"] == "Done" else None
                return Change(end["status"], end["reason"], owner, end["details"], stopped_on)

            return await self.store.jobs.change(job_id, decide, now)

    async def record_exit(self, job: Job, wait_seconds: float = 10.0) -> Job:
        """Record that a service has ended by itself, unless it runs or another task holds it."""
        self.drop_endpoint(job.id)
        try:
            async with self.locks.hold(job.id, wait_seconds):
                return await self._record_exit(job.id)
        except Busy:
            return await self.store.jobs.get(job.id) or job

    async def _record_exit(self, job_id: str) -> Job:
        job = await self.store.jobs.get(job_id)
        if job is None:
            raise _stopped_error(job_id)
        if job.status not in ("Pending", "Running"):
            return job
        platform_status = await self.driver.status(_handle(job))
        if platform_status.phase in ("starting", "running"):
            return job
        text = await self._save_log(job)
        reason = platform_status.reason or "the platform does not know it"
        if job.status == "Pending":
            reason = f"the gateway ended during the launch ({reason}); start the service again"
        if text:
            reason += ". The log ends: " + " | ".join(text.splitlines()[-_REASON_LINES:])[-800:]
        change = Change("Error", reason, self.locks.owner, {"exit_code": platform_status.exit_code})
        job = await self.store.jobs.change(
            job_id, lambda now: change if now.status in ("Pending", "Running") else None, self.clock.wall()
        )
        if job.is_final:
            await self.clean_up(job_id)
        return job

    async def clean_up(self, job_id: str) -> None:
        """Stop the service on the platform, if it runs, and remove its files."""
        self.drop_endpoint(job_id)
        await self.driver.stop(Handle(job_id, self.driver.name), self._settings.grace_seconds)
        with contextlib.suppress(OSError):
            # The service removes this file itself, unless it was killed.
            (self._settings.models_folder / f"{job_id}_server.json").unlink(missing_ok=True)

    async def change(self, job_id: str, change: Change) -> Job:
        """Change a job, unless its status is final."""
        return await self.store.jobs.change(job_id, lambda now: None if now.is_final else change, self.clock.wall())

    async def logs(self, job: Job, tail: int, driver: Driver | None = None) -> str:
        """Return the log of a running service, else the saved one. `driver`: for a job that is not a service."""
        driver = driver or self.driver
        if not job.is_final and job.place == driver.place:
            text = await driver.logs(_handle(job), tail)
            if text:
                return text
        saved = await self.store.jobs.load_log(job.id)
        return "\n".join(saved.splitlines()[-tail:]) if tail > 0 else ""

    def finish_stop_later(self, job_id: str) -> None:
        """Stop a Canceling service in the background."""

        async def finish() -> None:
            try:
                await self.finish_stop(job_id)
            except HeadraceError as error:
                log.warning("Could not stop job %s yet: %s", job_id, error.message)

        self._background.spawn(finish())

    async def _save_log(self, job: Job) -> str:
        text = (await self.driver.logs(_handle(job), LOG_LINES))[-_MAX_LOG_CHARS:]
        await self.store.jobs.save_log(job.id, text)
        return text

    async def _wait_for_other_gateway(self, job_id: str) -> Job:
        """Wait until a gateway of the service's own place reads the record and stops the service."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.grace_seconds + self._settings.status_seconds
        while loop.time() < deadline:
            job = await self.store.jobs.get(job_id)
            if job is None:
                raise _stopped_error(job_id)
            if job.is_final:
                return job
            await asyncio.sleep(0.5)
        raise Unavailable(f"job {job_id} will be stopped by the gateway of its machine; try again later")

    def _check_place(self, job: Job) -> None:
        if not job.is_final and job.place != self.driver.place:
            raise Unavailable(f"job {job.id} runs on the machine of another gateway; send the request there")


def _handle(job: Job) -> Handle:
    data: Mapping[str, Any] = job.details.get("handle") or {}
    return Handle(job.id, job.place.partition(":")[0], data)


def _stopped_error(job_id: str) -> NotFound:
    return NotFound(f"Job {job_id} not found: its inference microservice was stopped; start a new one")
