# SPDX-License-Identifier: Apache-2.0
"""Records against what really runs: `reconcile`. Called by the gateway at its start and every few seconds.

Adopts services whose gateway was killed, finishes what it left half done, records the ends of those that died, and ends what
no record knows, but where others start services too. Of several gateways one does each of these; for a service that runs,
nothing is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from headrace.core.errors import HeadraceError
from headrace.jobs.acting import Busy
from headrace.jobs.batch_tools import waits
from headrace.jobs.batches import Batches
from headrace.jobs.records import BATCH, Job
from headrace.jobs.services import Services
from headrace.jobs.store.jobs import Change
from headrace.platforms.contract import Observed
from headrace.platforms.identity import is_surely_dead

log = logging.getLogger("headrace.jobs")

_AT_ONCE = 16
_GONE = Observed("gone")


async def reconcile(services: Services, batches: Batches) -> None:
    """One look at everything. What fails is logged and tried again at the next look."""
    try:
        # In this order: a service's record is older than the service, so what was found has its record by now.
        found = await services.driver.found()
        beside = await batches.driver.found() if batches.driver is not services.driver else {}
        found = {**beside, **found}
        jobs = await services.store.jobs.unfinished(services.driver.place)
        jobs += await services.store.jobs.unfinished(batches.driver.place, BATCH)
        await services.store.leases.drop_stale(services.clock.wall())
        strays = found.keys() - {job.id for job in jobs}
        if services.shares_place:
            # A record is older than its service: one without is of others, who start some there too.
            strays &= {*await services.store.jobs.among(sorted(strays)), *beside}
    except HeadraceError as error:
        log.warning("records cannot be compared with what runs: %s", error.message)
        return
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(job_id: str, job: Job | None) -> None:
        async with limit:
            try:
                observed = found.get(job_id, _GONE)
                if job is None and job_id in beside:
                    await _stray(services, job_id, batches.clear)
                elif job is None:
                    await _stray(services, job_id, services.clear)
                elif job.action == BATCH:
                    await batches.reconcile(job, observed)
                else:
                    await _known(services, job, observed)
            except Busy:
                pass  # somebody is at it
            except HeadraceError as error:
                log.warning("job %s: %s", job_id, error.message)
            except Exception:
                log.exception("job %s cannot be reconciled", job_id)

    tasks = [one(job.id, job) for job in jobs] + [one(job_id, None) for job_id in strays]
    await asyncio.gather(*tasks)
    if any(job.action == BATCH and waits(job) for job in jobs):
        batches.wake()


async def _known(services: Services, job: Job, observed: Observed) -> None:
    if job.status == "Canceling":
        await services.finish_ending(job.id, 0.0)
        return
    if observed.phase in ("ended", "gone"):
        await services.settle(job, 0.0)  # looks again: it may have been started a moment ago
    elif job.status == "Pending" or _is_orphan(services, job):
        await _adopt(services, job)


def _is_orphan(services: Services, job: Job) -> bool:
    gateway = str(job.details.get("gateway", ""))
    return gateway != services.acting.owner and is_surely_dead(gateway)


async def _adopt(services: Services, job: Job) -> None:
    """It runs, and the gateway that launched it is gone."""
    owner = services.acting.owner

    def decide(now: Job) -> Change | None:
        if now.status not in ("Pending", "Running"):
            return None
        return Change(
            "Running", "adopted: it runs, and the gateway that launched it is gone", owner, {"gateway": owner}
        )

    async with services.acting.alone(job.id):
        await services.store.jobs.change(job.id, decide, services.clock.wall())
    log.info("job %s is adopted", job.id)


async def _stray(services: Services, job_id: str, clear: Callable[[str], Awaitable[None]]) -> None:
    """Something runs, or has left files, of which no record says that it should."""
    async with services.acting.alone(job_id):
        again = await services.store.jobs.get(job_id)
        if again is None:
            log.warning("job %s runs here and has no record: it is ended", job_id)
        if again is None or again.is_final:
            await clear(job_id)
