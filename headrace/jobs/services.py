# SPDX-License-Identifier: Apache-2.0
"""Inference microservices: started, asked, stopped. Called by `service`; `reconcile` does what others left half done.

A record is written before anything is started and after everything is ended, so that whatever is killed in between, a record
says at least that something may be there:

    Pending     written; a launch may be under way
    Running     launched
    Canceling   to be stopped; how it ends is in the details
    Done        stopped, and nothing of it is left
    Error       ended by itself or never started; why is in the reason
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
from headrace.jobs.acting import Acting, Busy
from headrace.jobs.asking import AskStatus
from headrace.jobs.background import Background
from headrace.jobs.idle import Ending
from headrace.jobs.launching import launch_spec
from headrace.jobs.planning import Plan
from headrace.jobs.records import SERVICE, Endpoint, Experiment, Job, ServiceStatus
from headrace.jobs.secrets import Vault
from headrace.jobs.settings import JobSettings
from headrace.jobs.statuses import as_it_ends, failed_body, failure_of, live_body
from headrace.jobs.store.jobs import Change
from headrace.jobs.store.store import Store
from headrace.platforms.contract import Driver, Handle, Observed

log = logging.getLogger("headrace.jobs")

LOG_LINES = 1000
_MOST_LOG = 256 * 1024
_REASON_LINES = 8
_REMEMBERED_SECONDS = 2.0
_MOST_REMEMBERED = 10_000
STOPPED = Ending("Done", "stopped by a user")


class Services:
    """All services of one place, through one driver."""

    def __init__(
        self,
        store: Store,
        driver: Driver,
        vault: Vault,
        settings: JobSettings,
        clock: Clock,
        ask: AskStatus,
        acting: Acting,
    ) -> None:
        self.store = store
        self.driver = driver
        self.acting = acting
        self.clock = clock
        self.callback_url = settings.callback_url
        self.shares_place = settings.containers is not None
        """Whether others may start services there too, of which there is no record here."""
        self._vault = vault
        self._settings = settings
        self._ask = ask
        self._remembered: dict[str, tuple[Endpoint, float]] = {}
        self._background = Background()

    async def close(self) -> None:
        """Finish what is under way."""
        await self._background.close()

    # Start

    async def start(self, org: str, user_id: str, plan: Plan) -> Job:
        """Record it and launch it."""
        running = await self.store.jobs.unfinished(self.driver.place)
        if len(running) >= self._settings.max_services:
            raise ResourceExhausted(f"{len(running)} services run already, which is the most; stop one first")
        return await self._background.finish(self._start(org, user_id, plan))

    async def _start(self, org: str, user_id: str, plan: Plan) -> Job:
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
            details_json=json.dumps({"model_path": plan.model_path, "gateway": self.acting.owner}),
            place=self.driver.place,
            created_on=now,
            last_modified=now,
            stopped_on=None,
            version=1,
        )
        async with self.acting.alone(job_id):
            await self.store.jobs.insert(job, user_id)
            return await self._launch(job, plan)

    async def _launch(self, job: Job, plan: Plan) -> Job:
        by = self.acting.owner
        try:
            key = self._vault.callback_key(job.id)
            handle = await self.driver.start(launch_spec(job, plan, self._settings, self.callback_url, key))
        except Exception as error:
            told = (
                error.message if isinstance(error, HeadraceError) else "an internal error; the gateway's log has more"
            )
            log.warning("job %s could not be launched", job.id, exc_info=not isinstance(error, HeadraceError))
            await self.change(job.id, Change("Error", f"could not be launched: {told}", by))
            raise
        launched = Change("Running", f"launched by {self.driver.name}", by, {"handle": dict(handle.data)})
        # Whoever asked to stop it meanwhile waits for us, and stops it then.
        return await self.store.jobs.change(
            job.id, lambda now: launched if now.status == "Pending" else None, self.clock.wall()
        )

    # Look

    async def find(self, org: str, experiment_id: str | None, job_id: str) -> Job:
        """A service of this organisation that was not stopped."""
        job = await self.store.jobs.get(job_id)
        if job is None or job.org != org or not job.is_service or experiment_id not in (None, job.experiment_id):
            raise NotFound(f"Job {job_id} not found")
        if job.stopped_on is not None:
            raise _stopped(job_id)
        return job

    async def status(self, org: str, experiment_id: str | None, job_id: str) -> ServiceStatus:
        """See `JobService.status`."""
        job = await self.find(org, experiment_id, job_id)
        self._check_place(job)
        job = as_it_ends(job)
        observed = Observed("gone")
        if not job.is_final:
            observed = await self.driver.status(_handle(job))
            if observed.phase in ("ended", "gone") and job.status == "Running":
                job = await self.settle(job)
                if job.stopped_on is not None:
                    raise _stopped(job_id)
        if job.status == "Error":
            return ServiceStatus(job, failed_body(job, observed))
        url = await self.driver.endpoint(_handle(job))
        told = await self._ask(url, self._settings.status_seconds) if url is not None else None
        if told is not None and told.get("job_id") != job_id:
            told = None  # somebody else's
        return ServiceStatus(job, live_body(job, observed, told))

    def cached_endpoint(self, org: str, experiment_id: str | None, job_id: str) -> Endpoint | None:
        """What `endpoint` found a moment ago."""
        found = self._remembered.get(job_id)
        if found is None or found[1] < self.clock.monotonic():
            return None
        job = found[0].job
        return found[0] if job.org == org and experiment_id in (None, job.experiment_id) else None

    async def endpoint(self, org: str, experiment_id: str | None, job_id: str) -> Endpoint:
        """See `JobService.endpoint`."""
        found = self.cached_endpoint(org, experiment_id, job_id)
        if found is not None:
            return found
        job = await self.find(org, experiment_id, job_id)
        self._check_place(job)
        job = as_it_ends(job)
        if job.status == "Canceling":
            raise _stopped(job_id)
        url = await self.driver.endpoint(_handle(job)) if job.status == "Running" else None
        if url is None and job.status == "Running":
            job = await self.settle(job)
            if job.stopped_on is not None:
                raise _stopped(job_id)
        if url is None:
            failed = job.status == "Error"
            return Endpoint(job, None, "failed" if failed else "initializing", failure_of(job) if failed else "")
        made = Endpoint(job, url, "running")
        if len(self._remembered) >= _MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[job_id] = made, self.clock.monotonic() + _REMEMBERED_SECONDS
        return made

    def lost(self, job_id: str) -> None:
        """Forget where it was."""
        self._remembered.pop(job_id, None)

    # End

    async def stop(self, org: str, user_id: str, experiment_id: str | None, job_id: str) -> Job:
        """See `JobService.stop`."""
        await self.find(org, experiment_id, job_id)
        return await self._background.finish(self._stop(job_id, user_id))

    async def _stop(self, job_id: str, user_id: str) -> Job:
        job = await self.ask_to_end(job_id, STOPPED, user_id)
        if job.is_final:
            return job
        if job.place != self.driver.place:
            return await self._wait_for_others(job_id)
        return await self.finish_ending(job_id)

    async def ask_to_end(self, job_id: str, ending: Ending, by: str) -> Job:
        """Record that a service is to end; whoever reads that may do it."""
        now = self.clock.wall()
        self.lost(job_id)

        def decide(job: Job) -> Change | None:
            if job.stopped_on is not None:
                raise _stopped(job_id)
            if job.is_final:
                # It has ended already, with an error that stays on record. Nobody answers for it from now on.
                return Change(job.status, job.reason, by, stopped_on=now) if ending is STOPPED else None
            if job.status == "Canceling" and ending is not STOPPED:
                return None
            end = {"status": ending.status, "reason": ending.reason, "details": dict(ending.details)}
            return None if job.details.get("end") == end else Change("Canceling", ending.reason, by, {"end": end})

        return await self.store.jobs.change(job_id, decide, now)

    async def finish_ending(self, job_id: str, wait_seconds: float | None = None) -> Job:
        """End what is Canceling, and record that nothing is left of it."""
        wait = self._settings.lease_seconds if wait_seconds is None else wait_seconds
        async with self.acting.alone(job_id, wait):
            job = await self.store.jobs.get(job_id)
            if job is None:
                raise _stopped(job_id)
            if job.is_final:
                return job
            await self._keep_log(job)
            await self.clear(job_id)
            now = self.clock.wall()
            by = self.acting.owner

            def decide(job: Job) -> Change | None:
                if job.is_final:
                    return None
                end = job.details.get("end") or {"status": "Done", "reason": STOPPED.reason, "details": {}}
                for_good = now if end["status"] == "Done" else None
                return Change(end["status"], end["reason"], by, end["details"], for_good)

            return await self.store.jobs.change(job_id, decide, now)

    async def settle(self, job: Job, wait_seconds: float = 10.0) -> Job:
        """Record that a service has ended by itself, if that is so and nobody else is at it."""
        self.lost(job.id)
        try:
            async with self.acting.alone(job.id, wait_seconds):
                return await self._settle(job.id)
        except Busy:
            return await self.store.jobs.get(job.id) or job

    async def _settle(self, job_id: str) -> Job:
        job = await self.store.jobs.get(job_id)
        if job is None:
            raise _stopped(job_id)
        if job.status not in ("Pending", "Running"):
            return job
        observed = await self.driver.status(_handle(job))
        if observed.phase in ("starting", "running"):
            return job
        text = await self._keep_log(job)
        reason = observed.reason or "the platform knows nothing of it"
        if job.status == "Pending":
            reason = f"the gateway ended while it was launched ({reason}); start it again"
        if text:
            reason += ". The log ends: " + " | ".join(text.splitlines()[-_REASON_LINES:])[-800:]
        change = Change("Error", reason, self.acting.owner, {"exit_code": observed.exit_code})
        job = await self.store.jobs.change(
            job_id, lambda now: change if now.status in ("Pending", "Running") else None, self.clock.wall()
        )
        if job.is_final:
            await self.clear(job_id)
        return job

    async def clear(self, job_id: str) -> None:
        """End whatever there is of a service, and leave nothing."""
        self.lost(job_id)
        await self.driver.stop(Handle(job_id, self.driver.name), self._settings.grace_seconds)
        with contextlib.suppress(OSError):
            # The service removes it itself, unless it was killed.
            (self._settings.models_folder / f"{job_id}_server.json").unlink(missing_ok=True)

    async def change(self, job_id: str, change: Change) -> Job:
        """Unless it is final."""
        return await self.store.jobs.change(job_id, lambda now: None if now.is_final else change, self.clock.wall())

    async def logs(self, job: Job, tail: int, driver: Driver | None = None) -> str:
        """Of the service if it lives, else what was kept. `driver`: of a job that is no service."""
        driver = driver or self.driver
        if not job.is_final and job.place == driver.place:
            text = await driver.logs(_handle(job), tail)
            if text:
                return text
        kept = await self.store.jobs.kept_log(job.id)
        return "\n".join(kept.splitlines()[-tail:]) if tail > 0 else ""

    def end_later(self, job_id: str) -> None:
        """End a service that is Canceling; nobody waits for it."""

        async def end() -> None:
            try:
                await self.finish_ending(job_id)
            except HeadraceError as error:
                log.warning("job %s is not stopped yet: %s", job_id, error.message)

        self._background.leave(end())

    async def _keep_log(self, job: Job) -> str:
        text = (await self.driver.logs(_handle(job), LOG_LINES))[-_MOST_LOG:]
        await self.store.jobs.keep_log(job.id, text)
        return text

    async def _wait_for_others(self, job_id: str) -> Job:
        """A gateway of the service's own place reads the record and stops it."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._settings.grace_seconds + self._settings.status_seconds
        while loop.time() < limit:
            job = await self.store.jobs.get(job_id)
            if job is None:
                raise _stopped(job_id)
            if job.is_final:
                return job
            await asyncio.sleep(0.5)
        raise Unavailable(f"job {job_id} will be stopped when the gateway of its machine answers; ask again later")

    def _check_place(self, job: Job) -> None:
        if not job.is_final and job.place != self.driver.place:
            raise Unavailable(f"job {job.id} runs on another gateway's machine; ask that gateway")


def _handle(job: Job) -> Handle:
    told: Mapping[str, Any] = job.details.get("handle") or {}
    return Handle(job.id, job.place.partition(":")[0], told)


def _stopped(job_id: str) -> NotFound:
    return NotFound(f"Job {job_id} not found: its inference microservice was stopped; start a new one")
