# SPDX-License-Identifier: Apache-2.0
"""Batches that are ended to go on later: by users, who resume them, and with the gateway, whose next one takes them up.

Base of `batches`. What is done is in the results, so a paused batch is one without a process.
"""

from __future__ import annotations

import asyncio

from headrace.core.errors import FailedPrecondition
from headrace.jobs.batch_tools import HELD, BatchTools
from headrace.jobs.records import BATCH, Job
from headrace.jobs.store.jobs import Change


class Pausing(BatchTools):
    """See `Batches`."""

    async def pause(self, job: Job, user_id: str) -> Job:
        """Have it ended until somebody resumes it; returns before it has. Again does nothing."""

        def decide(now: Job) -> Change | None:
            if now.is_final or now.status == "Canceling":
                raise FailedPrecondition(f"job {now.id} is {now.status}: there is nothing left to pause")
            if now.status in ("Pausing", "Paused") and now.details.get(HELD):
                return None
            status = "Paused" if now.status in ("Pending", "Paused") else "Pausing"
            return Change(status, "paused by a user", user_id, {HELD: True})

        job = await self._store.jobs.change(job.id, decide, self._clock.wall())
        if job.status == "Pausing" and job.place == self._driver.place:
            work = self._pause_and_wake(job.id)
            self._background.leave(self._quietly(f"job {job.id} is not paused yet", work))
        return job

    async def resume(self, job: Job, user_id: str) -> Job:
        """Have a paused one go on when it is its turn."""

        def decide(now: Job) -> Change | None:
            if now.status == "Resuming":
                return None
            if now.status == "Pausing":
                raise FailedPrecondition(f"job {now.id} is being paused: resume it when it is Paused")
            if now.status != "Paused":
                raise FailedPrecondition(f"job {now.id} is {now.status}, and only what is Paused is resumed")
            return Change("Resuming", "resumed by a user", user_id, {HELD: False})

        job = await self._store.jobs.change(job.id, decide, self._clock.wall())
        if job.place == self._driver.place:
            self.wake()
        return job

    async def pause_all(self) -> None:
        """End the processes of all batches of this place; the next gateway takes them up."""
        found = await self._store.jobs.unfinished(self._driver.place, BATCH)
        running = [job for job in found if job.status in ("Running", "Pausing")]

        async def pause(job: Job) -> None:
            if job.status == "Running":
                asked = Change("Pausing", "the gateway ends, and its batches with it", self._acting.owner)
                await self._change(job, asked)
            await self._finish_pausing(job.id)

        await asyncio.gather(*(self._quietly(f"job {job.id} is not paused", pause(job)) for job in running))

    async def _pause_and_wake(self, job_id: str) -> None:
        await self._finish_pausing(job_id)
        self.wake()  # there is room for another one

    async def _finish_pausing(self, job_id: str) -> None:
        async with self._acting.alone(job_id, self._settings.lease_seconds):
            job = await self._known(job_id)
            if job.status == "Pausing":
                await self._keep_log(job)
                await self.clear(job_id)
                held = job.details.get(HELD)
                reason = "goes on when it is resumed" if held else "goes on when a gateway takes it up"
                await self._change(job, Change("Paused", reason, self._acting.owner))
