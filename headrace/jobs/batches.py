# SPDX-License-Identifier: Apache-2.0
"""Batches: jobs of the action `inference`, each a process of `headrace batch`. Called by `service` and `reconcile`.

    Pending     waits for its turn
    Running     launched; if its process is killed it is started again and goes on where it was
    Pausing     to be ended with the gateway, or because a user asked; Paused: it was, and a gateway takes it up, or the
                user has it go on (Resuming)
    Canceling   to be ended for good; then Canceled, or Done if it was
    Done        every item has a result or an error; the summary is in the details
    Error       ended by a failure, or killed too often; why is in the reason

Items that are done are in the results, which `headrace batch` reads when it is started again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound, PermissionDenied
from headrace.jobs.acting import Busy
from headrace.jobs.batch_ends import Verdict, judge, read_progress
from headrace.jobs.batch_pauses import Pausing
from headrace.jobs.batch_specs import Places, batch_launch, check_fields, progress_path
from headrace.jobs.batch_tools import WAITING, handle_of, waits
from headrace.jobs.records import BATCH, Experiment, Job, JobWish
from headrace.jobs.store.jobs import Change
from headrace.platforms.contract import Observed
from headrace.platforms.identity import is_surely_dead

log = logging.getLogger("headrace.jobs")

_ENDED = ("finished", "cancelled", "failed", "running")


class Batches(Pausing):
    """All batches of one place, through one driver."""

    # Start

    async def checked(self, experiment: Experiment, wish: JobWish) -> dict[str, Any]:
        """The details of a new batch, or what is wrong with it."""
        specs = wish.specs
        check_fields(specs)
        if not (specs.get("model_path") or specs.get("hf_model") or wish.parent_id):
            raise InvalidArgument("specs.model_path is required, or parent_id: the job id of a completed training job")
        model = {"model_path": specs.get("model_path"), "hf_model": specs.get("hf_model")}
        extra = {**(specs.get("specs") or {}), **model, "network_arch": wish.network_arch or experiment.network_arch}
        try:
            plan = await self._planner.plan(experiment.org, experiment.id, wish.parent_id, extra, "run the batch")
        except (InvalidArgument, PermissionDenied) as error:
            if specs.get("specs") or not specs.get("model_path"):
                raise
            raise type(error)(f"specs.model_path: {error.message}") from None
        places = Places(self._settings, experiment.org, plan.metadata)
        found = await asyncio.to_thread(lambda: (places.input(specs["input"]), places.output(specs["output"])))
        return {"model_path": plan.model_path, "input": found[0], "output": found[1]}

    async def launch_waiting(self) -> None:
        """The oldest first, as many as there is room for."""
        async with self._acting.alone(self._turn, self._settings.lease_seconds):
            found = await self._store.jobs.unfinished(self._driver.place, BATCH)
            waiting = sorted(filter(waits, found), key=lambda job: job.created_on)
            room = self._settings.max_batches - sum(job.status not in WAITING for job in found)
            for job in waiting[: max(0, room)]:
                await self._quietly(f"job {job.id} is not launched", self._take_up(job.id))

    async def _take_up(self, job_id: str) -> None:
        async with self._acting.alone(job_id):
            job = await self._store.jobs.get(job_id)
            if job is None or not waits(job):
                return
            if job.status == "Paused":
                job = await self._change(job, Change("Resuming", "a gateway takes it up", self._acting.owner))
            observed = await self._driver.status(handle_of(job))
            if observed.phase in ("starting", "running"):
                await self._adopt(job)
                return
            await self._launch(job, f"launched by {self._driver.name}")

    async def _launch(self, job: Job, reason: str) -> Job:
        """Start it; whatever there is of an earlier process is removed first."""
        by = self._acting.owner
        try:
            await self.clear(job.id)
            row = await self._store.experiments.get(job.org, job.experiment_id)
            if row is None:
                raise NotFound(f"Experiment {job.experiment_id} not found")
            metadata, variables = await self._planner.credentials(*row)
            await asyncio.to_thread(self._make_folders, job.org)
            handle = await self._driver.start(batch_launch(job, self._settings, metadata, variables))
        except Exception as error:
            ours = isinstance(error, HeadraceError)
            text = (
                error.message if isinstance(error, HeadraceError) else "an internal error; the gateway's log has more"
            )
            log.warning("job %s could not be launched", job.id, exc_info=not ours)
            return await self._change(job, Change("Error", f"could not be launched: {text}", by))
        change = Change("Running", reason, by, {"handle": dict(handle.data), "gateway": by})
        job = await self._change(job, change)
        if job.is_final:
            await self.clear(job.id)  # it was canceled while it was launched
        return job

    # Look

    async def look(self, job: Job) -> Job:
        """The job as it is now: with its progress, and its end if it has just come."""
        if job.place != self._driver.place or job.status not in ("Running", "Canceling", "Pausing"):
            return job
        if job.status == "Running" and (await self._driver.status(handle_of(job))).phase in ("ended", "gone"):
            try:
                job = await self.settle(job.id)
            except Busy:
                job = await self._store.jobs.get(job.id) or job
            if job.is_final:
                self.wake()
                return job
        progress = await asyncio.to_thread(read_progress, progress_path(job, self._settings))
        return job._replace(details_json=json.dumps({**job.details, "progress": progress}))

    async def reconcile(self, job: Job, observed: Observed) -> None:
        """Hold a record against what runs."""
        if job.status == "Canceling":
            self._end_later(job.id)
        elif job.status == "Pausing":
            await self._finish_pausing(job.id)
        elif job.status == "Running":
            if observed.phase in ("ended", "gone"):
                await self.settle(job.id)  # looks again: it may have been started a moment ago
            elif self._is_orphan(job):
                async with self._acting.alone(job.id):
                    await self._adopt(job)

    # End

    async def settle(self, job_id: str) -> Job:
        """Record how a batch has ended, if it has; one that was killed is started again. Raises Busy."""
        async with self._acting.alone(job_id):
            job = await self._known(job_id)
            if job.status != "Running":
                return job
            observed = await self._driver.status(handle_of(job))
            if observed.phase in ("starting", "running"):
                return job
            verdict = judge(observed, await self._keep_log(job))
            if not verdict.status:
                return await self._again(job, verdict)
            job = await self._change(job, Change(verdict.status, verdict.reason, self._acting.owner, verdict.details))
            if job.is_final:
                await self.clear(job_id)
            return job

    async def _again(self, job: Job, verdict: Verdict) -> Job:
        deaths, most, by = int(job.details.get("deaths", 0)) + 1, self._settings.batch_restarts, self._acting.owner
        if deaths > most:
            reason = f"{verdict.reason}, {deaths} times; what is done is kept: a new job with the same output goes on"
            job = await self._change(job, Change("Error", reason, by))
            await self.clear(job.id)
            return job
        reason = f"{verdict.reason}; it is started again and goes on ({deaths} of {most})"
        log.warning("job %s: %s", job.id, reason)
        # Counted before it is started: should the gateway be what it takes along each time, there is an end to it.
        job = await self._change(job, Change("Running", reason, by, {"deaths": deaths}))
        return await self._launch(job, reason) if job.status == "Running" else job

    async def cancel(self, job: Job, user_id: str) -> Job:
        """Have it ended for good; returns before it has."""

        def decide(now: Job) -> Change | None:
            if now.is_final:
                raise FailedPrecondition(f"job {now.id} is {now.status} already")
            if now.status == "Canceling":
                return None
            return Change(
                "Canceled" if now.status in ("Pending", "Paused") else "Canceling", "canceled by a user", user_id
            )

        job = await self._store.jobs.change(job.id, decide, self._clock.wall())
        if job.status == "Canceling" and job.place == self._driver.place:
            # It may be on its way up: if nobody waited, its items would be computed until records are next looked at.
            self._end_later(job.id, self._settings.lease_seconds)
        return job

    def _end_later(self, job_id: str, wait_seconds: float = 0.0) -> None:
        """End one that is Canceling, once others have left it, in so long at most; nobody waits for it."""
        work = self._finish_canceling(job_id, wait_seconds)
        self._background.leave(self._quietly(f"job {job_id} is not ended yet", work))

    async def _finish_canceling(self, job_id: str, wait_seconds: float) -> None:
        async with self._acting.alone(job_id, wait_seconds):
            job = await self._known(job_id)
            if job.status != "Canceling":
                return
            observed = await self._driver.status(handle_of(job))
            text = await self._keep_log(job)
            verdict = judge(observed, text) if observed.phase == "ended" else Verdict("", "")
            await self.clear(job_id)
            if verdict.status != "Done":
                path = progress_path(job, self._settings)
                progress = await asyncio.to_thread(read_progress, path, states=_ENDED)
                verdict = Verdict("Canceled", _canceled(progress), {"progress": progress})
            await self._change(job, Change(verdict.status, verdict.reason, self._acting.owner, verdict.details))
        self.wake()

    # Tools

    async def _adopt(self, job: Job) -> None:
        by = self._acting.owner
        reason = "adopted: it runs, and the gateway that launched it is gone"
        await self._change(job, Change("Running", reason, by, {"gateway": by}))
        log.info("job %s is adopted", job.id)

    def _is_orphan(self, job: Job) -> bool:
        gateway = str(job.details.get("gateway", ""))
        return gateway != self._acting.owner and is_surely_dead(gateway)

    def _make_folders(self, org: str) -> None:
        for folder in (self._settings.files_folder(org), self._settings.batch_cache(org)):
            _private(folder, self._settings.data_dir)


def _private(folder: Path, above: Path) -> None:
    """Have a folder below another one; new ones are for their owner alone."""
    try:
        missing = [each for each in (folder, *folder.parents) if each.is_relative_to(above.absolute())]
        for each in reversed(missing):
            each.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise FailedPrecondition(f"{folder} cannot be made: {error.strerror}") from None


def _canceled(progress: dict[str, Any] | None) -> str:
    if progress is None:
        return "canceled by a user before the first item"
    kept = f"canceled by a user; {progress['done']} of {progress['total']} items are done and kept"
    return f"{kept}: a new job with the same output goes on"
