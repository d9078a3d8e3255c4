# SPDX-License-Identifier: Apache-2.0
"""Batches: jobs of the action `inference`, each a process of `headrace batch`. Called by `service` and `reconcile`.

    Pending     waits for its turn
    Running     launched; if its process is killed it is started again and goes on where it was
    Pausing     to be ended with the gateway; Paused: it was, and a gateway takes it up (Resuming)
    Canceling   to be ended for good; then Canceled, or Done if it was
    Done        every item has a result or an error; the summary is in the details
    Error       ended by a failure, or killed too often; why is in the reason

Items that are done are in the results, which `headrace batch` reads when it is started again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from pathlib import Path
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound, PermissionDenied
from headrace.jobs.acting import Acting, Busy
from headrace.jobs.background import Background
from headrace.jobs.batch_ends import Verdict, judge, read_progress
from headrace.jobs.batch_specs import Places, batch_launch, check_fields, progress_path
from headrace.jobs.planning import Planner
from headrace.jobs.records import BATCH, Experiment, Job, JobWish
from headrace.jobs.settings import JobSettings
from headrace.jobs.store.jobs import Change
from headrace.jobs.store.store import Store
from headrace.launch.contract import Driver, Handle, Observed
from headrace.launch.identity import is_surely_dead

log = logging.getLogger("headrace.jobs")

WAITING = frozenset({"Pending", "Paused", "Resuming"})
"""For their turn."""
_LOG_LINES = 1000
_MOST_LOG = 256 * 1024
_ENDED = ("finished", "cancelled", "failed", "running")


class Batches:
    """All batches of one place, through one driver."""

    def __init__(
        self, store: Store, driver: Driver, settings: JobSettings, clock: Clock, acting: Acting, planner: Planner
    ) -> None:
        self._store = store
        self._driver = driver
        self._settings = settings
        self._clock = clock
        self._acting = acting
        self._planner = planner
        self._background = Background()
        self._turn = str(uuid.uuid5(uuid.NAMESPACE_URL, driver.place))
        """The lease of whoever launches: two at once would be more than there may be."""

    async def close(self) -> None:
        """Finish what is under way; batches run on."""
        await self._background.close()

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

    def wake(self) -> None:
        """Launch what waits, if there is room."""
        self._background.leave(self._quietly("batches are not launched", self.launch_waiting()))

    async def launch_waiting(self) -> None:
        """The oldest first, as many as there is room for."""
        async with self._acting.alone(self._turn, self._settings.lease_seconds):
            found = await self._store.jobs.unfinished(self._driver.place, BATCH)
            waiting = sorted((job for job in found if job.status in WAITING), key=lambda job: job.created_on)
            room = self._settings.max_batches - (len(found) - len(waiting))
            for job in waiting[: max(0, room)]:
                await self._quietly(f"job {job.id} is not launched", self._take_up(job.id))

    async def _take_up(self, job_id: str) -> None:
        async with self._acting.alone(job_id):
            job = await self._store.jobs.get(job_id)
            if job is None or job.status not in WAITING:
                return
            if job.status == "Paused":
                job = await self._change(job, Change("Resuming", "a gateway takes it up", self._acting.owner))
            observed = await self._driver.status(_handle(job))
            if observed.phase in ("starting", "running"):
                await self._adopt(job)
                return
            await self._launch(job, f"launched by {self._driver.name}")

    async def _launch(self, job: Job, reason: str) -> Job:
        """Start it; whatever there is of an earlier process is removed first."""
        by = self._acting.owner
        try:
            await self._clear(job.id)
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
            await self._clear(job.id)  # it was canceled while it was launched
        return job

    # Look

    async def look(self, job: Job) -> Job:
        """The job as it is now: with its progress, and its end if it has just come."""
        if job.place != self._driver.place or job.status not in ("Running", "Canceling", "Pausing"):
            return job
        if job.status == "Running" and (await self._driver.status(_handle(job))).phase in ("ended", "gone"):
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
            self.end_later(job.id)
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
            observed = await self._driver.status(_handle(job))
            if observed.phase in ("starting", "running"):
                return job
            verdict = judge(observed, await self._keep_log(job))
            if not verdict.status:
                return await self._again(job, verdict)
            job = await self._change(job, Change(verdict.status, verdict.reason, self._acting.owner, verdict.details))
            if job.is_final:
                await self._clear(job_id)
            return job

    async def _again(self, job: Job, verdict: Verdict) -> Job:
        deaths, most, by = int(job.details.get("deaths", 0)) + 1, self._settings.batch_restarts, self._acting.owner
        if deaths > most:
            reason = f"{verdict.reason}, {deaths} times; what is done is kept: a new job with the same output goes on"
            job = await self._change(job, Change("Error", reason, by))
            await self._clear(job.id)
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
            self.end_later(job.id)
        return job

    def end_later(self, job_id: str) -> None:
        """End one that is Canceling; nobody waits for it."""
        self._background.leave(self._quietly(f"job {job_id} is not ended yet", self._finish_canceling(job_id)))

    async def _finish_canceling(self, job_id: str) -> None:
        async with self._acting.alone(job_id):
            job = await self._known(job_id)
            if job.status != "Canceling":
                return
            observed = await self._driver.status(_handle(job))
            text = await self._keep_log(job)
            verdict = judge(observed, text) if observed.phase == "ended" else Verdict("", "")
            await self._clear(job_id)
            if verdict.status != "Done":
                path = progress_path(job, self._settings)
                progress = await asyncio.to_thread(read_progress, path, states=_ENDED)
                verdict = Verdict("Canceled", _canceled(progress), {"progress": progress})
            await self._change(job, Change(verdict.status, verdict.reason, self._acting.owner, verdict.details))
        self.wake()

    async def pause_all(self) -> None:
        """End the processes of all batches of this place; the next gateway takes them up."""
        found = await self._store.jobs.unfinished(self._driver.place, BATCH)
        running = [job for job in found if job.status in ("Running", "Pausing")]

        async def pause(job: Job) -> None:
            asked = Change("Pausing", "the gateway ends, and its batches with it", self._acting.owner)
            await self._change(job, asked)
            await self._finish_pausing(job.id)

        await asyncio.gather(*(self._quietly(f"job {job.id} is not paused", pause(job)) for job in running))

    async def _finish_pausing(self, job_id: str) -> None:
        async with self._acting.alone(job_id, self._settings.lease_seconds):
            job = await self._known(job_id)
            if job.status == "Pausing":
                await self._keep_log(job)
                await self._clear(job_id)
                await self._change(job, Change("Paused", "goes on when a gateway takes it up", self._acting.owner))

    # Tools

    async def _known(self, job_id: str) -> Job:
        job = await self._store.jobs.get(job_id)
        if job is None:
            raise NotFound(f"Job {job_id} not found")
        return job

    async def _change(self, job: Job, change: Change) -> Job:
        """Unless somebody has changed its status meanwhile: who cancels does not wait for us."""
        expected = job.status
        return await self._store.jobs.change(
            job.id, lambda now: change if now.status == expected else None, self._clock.wall()
        )

    async def _adopt(self, job: Job) -> None:
        by = self._acting.owner
        reason = "adopted: it runs, and the gateway that launched it is gone"
        await self._change(job, Change("Running", reason, by, {"gateway": by}))
        log.info("job %s is adopted", job.id)

    def _is_orphan(self, job: Job) -> bool:
        gateway = str(job.details.get("gateway", ""))
        return gateway != self._acting.owner and is_surely_dead(gateway)

    async def _clear(self, job_id: str) -> None:
        await self._driver.stop(Handle(job_id, self._driver.name), self._settings.grace_seconds)

    async def _keep_log(self, job: Job) -> str:
        text = (await self._driver.logs(_handle(job), _LOG_LINES))[-_MOST_LOG:]
        if text:
            await self._store.jobs.keep_log(job.id, text)
        return text

    def _make_folders(self, org: str) -> None:
        for folder in (self._settings.files_folder(org), self._settings.batch_cache(org)):
            _private(folder, self._settings.data_dir)

    async def _quietly(self, what: str, work: Any) -> None:
        """What fails is logged, and tried again when records are next held against what runs."""
        try:
            await work
        except Busy:
            pass  # somebody is at it
        except HeadraceError as error:
            log.warning("%s: %s", what, error.message)
        except Exception:
            log.exception("%s", what)


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


def _handle(job: Job) -> Handle:
    return Handle(job.id, job.place.partition(":")[0], job.details.get("handle") or {})
