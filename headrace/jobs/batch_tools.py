# SPDX-License-Identifier: Apache-2.0
"""What all that is done with a batch needs: its record, its process, its log. Base of `batch_pauses` and `batches`."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, NotFound
from headrace.jobs.acting import Acting, Busy
from headrace.jobs.background import Background
from headrace.jobs.planning import Planner
from headrace.jobs.records import Job
from headrace.jobs.settings import JobSettings
from headrace.jobs.store.jobs import Change
from headrace.jobs.store.store import Store
from headrace.platforms.contract import Driver, Handle

log = logging.getLogger("headrace.jobs")

WAITING = frozenset({"Pending", "Paused", "Resuming"})
"""For their turn, unless a user has paused them (`waits`)."""
HELD = "held"
"""In the details of a batch: a user has paused it, and no gateway takes it up."""
_LOG_LINES = 1000
_MOST_LOG = 256 * 1024


class BatchTools:
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

    @property
    def driver(self) -> Driver:
        """What starts their processes."""
        return self._driver

    async def close(self) -> None:
        """Finish what is under way; batches run on."""
        await self._background.close()

    async def launch_waiting(self) -> None:
        """Those whose turn it is."""
        raise NotImplementedError

    def wake(self) -> None:
        """Launch what waits, if there is room."""
        self._background.leave(self._quietly("batches are not launched", self.launch_waiting()))

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

    async def clear(self, job_id: str) -> None:
        """End whatever there is of a batch's process, and leave nothing."""
        await self._driver.stop(Handle(job_id, self._driver.name), self._settings.grace_seconds)

    async def _keep_log(self, job: Job) -> str:
        text = (await self._driver.logs(handle_of(job), _LOG_LINES))[-_MOST_LOG:]
        if text:
            await self._store.jobs.keep_log(job.id, text)
        return text

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


def waits(job: Job) -> bool:
    """Whether a batch is to be launched when it is its turn."""
    return job.status in WAITING and not (job.status == "Paused" and job.details.get(HELD))


def handle_of(job: Job) -> Handle:
    """By which the driver knows a job."""
    return Handle(job.id, job.place.partition(":")[0], job.details.get("handle") or {})
