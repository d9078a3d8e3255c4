# SPDX-License-Identifier: Apache-2.0
"""Batch jobs (action `inference`): each runs as a `headrace batch` process.

    Pending     waits for a free slot
    Running     launched; a killed process is restarted and continues
    Pausing     its process is being stopped, by a user or with the gateway
    Paused      has no process; a user resumes it (Resuming), or the next gateway does if the gateway paused it
    Canceling   its process is being stopped for good; then Canceled, or Done if it had finished
    Done        every item has a result or an error; the summary is in the details
    Error       failed, or killed too often; the reason says why

Finished items are in the results file, which `headrace batch` reads on every start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound, PermissionDenied
from headrace.core.fault_points import fault_point
from headrace.jobs.batch_process import (
    BatchExit,
    BatchPaths,
    batch_launch_spec,
    check_specs,
    classify_exit,
    progress_path,
    read_progress,
)
from headrace.jobs.concurrency import BackgroundTasks, Busy, JobLocks
from headrace.jobs.launch_plan import LaunchPlanner
from headrace.jobs.records import BATCH, Experiment, Job, JobSpec
from headrace.jobs.settings import JobSettings
from headrace.jobs.store.jobs import Change
from headrace.jobs.store.store import Store
from headrace.platforms.contract import Driver, Handle, PlatformStatus

log = logging.getLogger("headrace.jobs")

_WAITING = frozenset({"Pending", "Paused", "Resuming"})
"""Statuses of jobs without a process."""
_HELD = "held"
"""Key in a job's details: a user paused the job, so gateways do not resume it."""
_STOPPED_STATES = ("finished", "cancelled", "failed", "running")
_LOG_LINES = 1000
_MAX_LOG_CHARS = 256 * 1024


class BatchJobs:
    """All batch jobs of one place, run by one driver."""

    def __init__(
        self, store: Store, driver: Driver, settings: JobSettings, clock: Clock, locks: JobLocks, planner: LaunchPlanner
    ) -> None:
        self.driver = driver
        self._store = store
        self._settings = settings
        self._clock = clock
        self._locks = locks
        self._planner = planner
        self._background = BackgroundTasks()
        self._launch_lock_id = str(uuid.uuid5(uuid.NAMESPACE_URL, driver.place))
        """Lock for launching: two gateways that launch at once could exceed the limit."""

    async def close(self) -> None:
        """Finish background tasks; batch processes keep running."""
        await self._background.close()

    # Start

    async def check(self, experiment: Experiment, spec: JobSpec) -> dict[str, Any]:
        """Return the details of a new batch job; raise what is wrong with its specs."""
        specs = spec.specs
        check_specs(specs)
        if not (specs.get("model_path") or specs.get("hf_model") or spec.parent_id):
            raise InvalidArgument("specs.model_path is required, or parent_id: the job id of a completed training job")
        model = {"model_path": specs.get("model_path"), "hf_model": specs.get("hf_model")}
        extra = {**(specs.get("specs") or {}), **model, "network_arch": spec.network_arch or experiment.network_arch}
        try:
            plan = await self._planner.plan(experiment.org, experiment.id, spec.parent_id, extra, "run the batch")
        except (InvalidArgument, PermissionDenied) as error:
            if specs.get("specs") or not specs.get("model_path"):
                raise
            raise type(error)(f"specs.model_path: {error.message}") from None
        paths = BatchPaths(self._settings, experiment.org, plan.metadata)
        input_path, output_path = await asyncio.to_thread(
            lambda: (paths.input(specs["input"]), paths.output(specs["output"]))
        )
        return {"model_path": plan.model_path, "input": input_path, "output": output_path}

    def schedule(self) -> None:
        """Launch waiting jobs in the background."""
        self._background.spawn(self._log_errors("could not launch waiting batches", self.launch_waiting()))

    async def launch_waiting(self) -> None:
        """Launch the oldest waiting jobs, as many as there are free slots."""
        async with self._locks.hold(self._launch_lock_id, self._settings.lease_seconds):
            jobs = await self._store.jobs.unfinished(self.driver.place, BATCH)
            waiting = sorted(filter(is_waiting, jobs), key=lambda job: job.created_on)
            free = self._settings.max_batches - sum(job.status not in _WAITING for job in jobs)
            for job in waiting[: max(0, free)]:
                await self._log_errors(f"could not launch job {job.id}", self._launch_or_adopt(job.id))

    async def _launch_or_adopt(self, job_id: str) -> None:
        async with self._locks.hold(job_id):
            job = await self._store.jobs.get(job_id)
            if job is None or not is_waiting(job):
                return
            if job.status == "Paused":
                job = await self._change(job, Change("Resuming", "resumed by the gateway", self._locks.owner))
            status = await self.driver.status(handle_of(job))
            if status.phase in ("starting", "running"):
                await self._adopt(job)
                return
            await self._launch(job, f"launched by {self.driver.name}")

    async def _launch(self, job: Job, reason: str) -> Job:
        """Start the process; remove what is left of an earlier one first."""
        owner = self._locks.owner
        try:
            await self.clean_up(job.id)
            row = await self._store.experiments.get(job.org, job.experiment_id)
            if row is None:
                raise NotFound(f"Experiment {job.experiment_id} not found")
            metadata, variables = await self._planner.credentials(*row)
            await asyncio.to_thread(self._create_folders, job.org)
            handle = await self.driver.start(batch_launch_spec(job, self._settings, metadata, variables))
        except Exception as error:
            expected = isinstance(error, HeadraceError)
            text = error.message if isinstance(error, HeadraceError) else "internal error; see the gateway's log"
            log.warning("Could not launch job %s.", job.id, exc_info=not expected)
            return await self._change(job, Change("Error", f"could not be launched: {text}", owner))
        fault_point("jobs.batch.launched")
        change = Change("Running", reason, owner, {"handle": dict(handle.data), "gateway": owner})
        job = await self._change(job, change)
        if job.is_final:
            await self.clean_up(job.id)  # a user canceled it during the launch
        return job

    def _create_folders(self, org: str) -> None:
        for folder in (self._settings.files_folder(org), self._settings.batch_cache(org)):
            _create_private(folder, self._settings.data_dir)

    # Observe

    async def refresh(self, job: Job) -> Job:
        """Return the job with its current progress; record its exit if its process just ended."""
        if job.place != self.driver.place or job.status not in ("Running", "Canceling", "Pausing"):
            return job
        if job.status == "Running" and (await self.driver.status(handle_of(job))).phase in ("ended", "gone"):
            try:
                job = await self.record_exit(job.id)
            except Busy:
                job = await self._store.jobs.get(job.id) or job
            if job.is_final:
                self.schedule()
                return job
        progress = await asyncio.to_thread(read_progress, progress_path(job, self._settings))
        return job._replace(details_json=json.dumps({**job.details, "progress": progress}))

    async def reconcile(self, job: Job, status: PlatformStatus) -> None:
        """Bring a record in line with its process."""
        if job.status == "Canceling":
            self._finish_cancel_later(job.id)
        elif job.status == "Pausing":
            await self._finish_pause(job.id)
        elif job.status == "Running":
            if status.phase in ("ended", "gone"):
                await self.record_exit(job.id)  # polls again: the process may have just started
            elif self._locks.is_orphan(job):
                async with self._locks.hold(job.id):
                    await self._adopt(job)

    async def _adopt(self, job: Job) -> None:
        owner = self._locks.owner
        fault_point("jobs.batch.adopt")
        reason = "adopted: it runs, and the gateway that launched it is gone"
        await self._change(job, Change("Running", reason, owner, {"gateway": owner}))
        log.info("Adopted job %s.", job.id)

    # Exit

    async def record_exit(self, job_id: str) -> Job:
        """Record how a batch ended, if it did; restart a killed one. Raises Busy."""
        async with self._locks.hold(job_id):
            job = await self._get(job_id)
            if job.status != "Running":
                return job
            status = await self.driver.status(handle_of(job))
            if status.phase in ("starting", "running"):
                return job
            batch_exit = classify_exit(status, await self._save_log(job))
            if not batch_exit.status:
                return await self._restart(job, batch_exit)
            change = Change(batch_exit.status, batch_exit.reason, self._locks.owner, batch_exit.details)
            job = await self._change(job, change)
            fault_point("jobs.batch.exit")
            if job.is_final:
                await self.clean_up(job_id)
            return job

    async def _restart(self, job: Job, batch_exit: BatchExit) -> Job:
        deaths, limit, owner = int(job.details.get("deaths", 0)) + 1, self._settings.batch_restarts, self._locks.owner
        if deaths > limit:
            reason = f"{batch_exit.reason}, {deaths} times; results are kept: a new job with the same output continues"
            job = await self._change(job, Change("Error", reason, owner))
            await self.clean_up(job.id)
            return job
        reason = f"{batch_exit.reason}; restarted to continue ({deaths} of {limit})"
        log.warning("Job %s: %s", job.id, reason)
        # Counted before the start: if the batch kills the gateway every time, the restarts must still end.
        job = await self._change(job, Change("Running", reason, owner, {"deaths": deaths}))
        return await self._launch(job, reason) if job.status == "Running" else job

    # Cancel

    async def cancel(self, job: Job, user_id: str) -> Job:
        """Cancel a batch for good; return before its process has ended."""

        def decide(now: Job) -> Change | None:
            if now.is_final:
                raise FailedPrecondition(f"job {now.id} is {now.status} already")
            if now.status == "Canceling":
                return None
            return Change(
                "Canceled" if now.status in ("Pending", "Paused") else "Canceling", "canceled by a user", user_id
            )

        job = await self._store.jobs.change(job.id, decide, self._clock.wall())
        if job.status == "Canceling" and job.place == self.driver.place:
            # It may be launching right now: without waiting, it would compute until the next reconcile.
            self._finish_cancel_later(job.id, self._settings.lease_seconds)
        return job

    def _finish_cancel_later(self, job_id: str, wait_seconds: float = 0.0) -> None:
        """Stop a Canceling job in the background; wait this long for its lock."""
        work = self._finish_cancel(job_id, wait_seconds)
        self._background.spawn(self._log_errors(f"could not cancel job {job_id} yet", work))

    async def _finish_cancel(self, job_id: str, wait_seconds: float) -> None:
        async with self._locks.hold(job_id, wait_seconds):
            job = await self._get(job_id)
            if job.status != "Canceling":
                return
            status = await self.driver.status(handle_of(job))
            text = await self._save_log(job)
            batch_exit = classify_exit(status, text) if status.phase == "ended" else BatchExit("", "")
            await self.clean_up(job_id)
            if batch_exit.status != "Done":
                path = progress_path(job, self._settings)
                progress = await asyncio.to_thread(read_progress, path, states=_STOPPED_STATES)
                batch_exit = BatchExit("Canceled", _cancel_reason(progress), {"progress": progress})
            change = Change(batch_exit.status, batch_exit.reason, self._locks.owner, batch_exit.details)
            await self._change(job, change)
        self.schedule()

    # Pause and resume

    async def pause(self, job: Job, user_id: str) -> Job:
        """Pause a batch until a user resumes it; return before its process has ended. Idempotent."""

        def decide(now: Job) -> Change | None:
            if now.is_final or now.status == "Canceling":
                raise FailedPrecondition(f"job {now.id} is {now.status}: there is nothing left to pause")
            if now.status in ("Pausing", "Paused") and now.details.get(_HELD):
                return None
            status = "Paused" if now.status in ("Pending", "Paused") else "Pausing"
            return Change(status, "paused by a user", user_id, {_HELD: True})

        job = await self._store.jobs.change(job.id, decide, self._clock.wall())
        if job.status == "Pausing" and job.place == self.driver.place:
            work = self._finish_pause_and_schedule(job.id)
            self._background.spawn(self._log_errors(f"could not pause job {job.id} yet", work))
        return job

    async def resume(self, job: Job, user_id: str) -> Job:
        """Queue a paused batch again."""

        def decide(now: Job) -> Change | None:
            if now.status == "Resuming":
                return None
            if now.status == "Pausing":
                raise FailedPrecondition(f"job {now.id} is being paused: resume it when it is Paused")
            if now.status != "Paused":
                raise FailedPrecondition(f"job {now.id} is {now.status}: only a Paused job can be resumed")
            return Change("Resuming", "resumed by a user", user_id, {_HELD: False})

        job = await self._store.jobs.change(job.id, decide, self._clock.wall())
        if job.place == self.driver.place:
            self.schedule()
        return job

    async def pause_all(self) -> None:
        """Stop the processes of all batches of this place; the next gateway resumes them."""
        jobs = await self._store.jobs.unfinished(self.driver.place, BATCH)
        running = [job for job in jobs if job.status in ("Running", "Pausing")]

        async def pause(job: Job) -> None:
            if job.status == "Running":
                await self._change(job, Change("Pausing", "paused because the gateway stops", self._locks.owner))
            await self._finish_pause(job.id)

        await asyncio.gather(*(self._log_errors(f"could not pause job {job.id}", pause(job)) for job in running))

    async def _finish_pause_and_schedule(self, job_id: str) -> None:
        await self._finish_pause(job_id)
        self.schedule()  # a slot is free

    async def _finish_pause(self, job_id: str) -> None:
        async with self._locks.hold(job_id, self._settings.lease_seconds):
            job = await self._get(job_id)
            if job.status == "Pausing":
                await self._save_log(job)
                await self.clean_up(job_id)
                reason = (
                    "continues when a user resumes it" if job.details.get(_HELD) else "continues with the next gateway"
                )
                await self._change(job, Change("Paused", reason, self._locks.owner))

    # Helpers

    async def clean_up(self, job_id: str) -> None:
        """Stop the process of a batch, if there is one, and remove its files."""
        await self.driver.stop(Handle(job_id, self.driver.name), self._settings.grace_seconds)

    async def _get(self, job_id: str) -> Job:
        job = await self._store.jobs.get(job_id)
        if job is None:
            raise NotFound(f"Job {job_id} not found")
        return job

    async def _change(self, job: Job, change: Change) -> Job:
        """Apply a change, unless the status changed meanwhile: a user's cancel does not wait for the lock."""
        expected = job.status
        return await self._store.jobs.change(
            job.id, lambda now: change if now.status == expected else None, self._clock.wall()
        )

    async def _save_log(self, job: Job) -> str:
        text = (await self.driver.logs(handle_of(job), _LOG_LINES))[-_MAX_LOG_CHARS:]
        if text:
            await self._store.jobs.save_log(job.id, text)
        return text

    async def _log_errors(self, action: str, work: Coroutine[Any, Any, None]) -> None:
        """Await `work` and log its errors; the next reconcile retries."""
        try:
            await work
        except Busy:
            pass  # another task or gateway handles this job
        except HeadraceError as error:
            log.warning("%s: %s", action.capitalize(), error.message)
        except Exception:
            log.exception("%s.", action.capitalize())


def is_waiting(job: Job) -> bool:
    """Return whether a batch is to be launched when a slot is free."""
    return job.status in _WAITING and not (job.status == "Paused" and job.details.get(_HELD))


def handle_of(job: Job) -> Handle:
    """Return the driver's handle of a job."""
    return Handle(job.id, job.place.partition(":")[0], job.details.get("handle") or {})


def _create_private(folder: Path, root: Path) -> None:
    """Create a folder below `root`; new folders are readable by their owner only."""
    try:
        for path in reversed([path for path in (folder, *folder.parents) if path.is_relative_to(root.absolute())]):
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise FailedPrecondition(f"{folder} cannot be created: {error.strerror}") from None


def _cancel_reason(progress: dict[str, Any] | None) -> str:
    if progress is None:
        return "canceled by a user before the first item"
    kept = f"canceled by a user; {progress['done']} of {progress['total']} items are done and kept"
    return f"{kept}: a new job with the same output continues"
