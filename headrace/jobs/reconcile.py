# SPDX-License-Identifier: Apache-2.0
"""Reconcile records with running processes: called by the gateway at start and every few seconds.

Adopts services whose gateway was killed, finishes what it left half done, records exits, and stops processes without a
record, except on platforms where other programs start services too. With several gateways, one does each of these. Nothing
is written for a service that simply runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from headrace.core.errors import HeadraceError
from headrace.jobs.batch_jobs import BatchJobs, is_waiting
from headrace.jobs.concurrency import Busy
from headrace.jobs.records import BATCH, Job
from headrace.jobs.services import InferenceServices
from headrace.jobs.store.jobs import Change
from headrace.platforms.contract import PlatformStatus

log = logging.getLogger("headrace.jobs")

_MAX_CONCURRENT = 16
_GONE = PlatformStatus("gone")


async def reconcile(services: InferenceServices, batches: BatchJobs) -> None:
    """Reconcile all jobs once. Errors are logged, and the next call retries."""
    try:
        # Processes first: a record is written before its process starts, so every process listed here has its record by now.
        processes = await services.driver.list_services()
        batch_processes = await batches.driver.list_services() if batches.driver is not services.driver else {}
        processes = {**batch_processes, **processes}
        jobs = await services.store.jobs.unfinished(services.driver.place)
        jobs += await services.store.jobs.unfinished(batches.driver.place, BATCH)
        await services.store.leases.delete_expired(services.clock.wall())
        strays = processes.keys() - {job.id for job in jobs}
        if services.shares_place:
            # On a shared platform, processes without a record belong to other programs.
            strays &= {*await services.store.jobs.among(sorted(strays)), *batch_processes}
    except HeadraceError as error:
        log.warning("Could not reconcile jobs: %s", error.message)
        return
    limit = asyncio.Semaphore(_MAX_CONCURRENT)

    async def reconcile_one(job_id: str, job: Job | None) -> None:
        async with limit:
            try:
                platform_status = processes.get(job_id, _GONE)
                if job is None and job_id in batch_processes:
                    await _stop_stray(services, job_id, batches.clean_up)
                elif job is None:
                    await _stop_stray(services, job_id, services.clean_up)
                elif job.action == BATCH:
                    await batches.reconcile(job, platform_status)
                else:
                    await _reconcile_service(services, job, platform_status)
            except Busy:
                pass  # another task or gateway handles this job
            except HeadraceError as error:
                log.warning("Could not reconcile job %s: %s", job_id, error.message)
            except Exception:
                log.exception("Could not reconcile job %s.", job_id)

    tasks = [reconcile_one(job.id, job) for job in jobs] + [reconcile_one(job_id, None) for job_id in strays]
    await asyncio.gather(*tasks)
    if any(job.action == BATCH and is_waiting(job) for job in jobs):
        batches.schedule()


async def _reconcile_service(services: InferenceServices, job: Job, platform_status: PlatformStatus) -> None:
    if job.status == "Canceling":
        await services.finish_stop(job.id, 0.0)
        return
    if platform_status.phase in ("ended", "gone"):
        await services.record_exit(job, 0.0)  # polls again: the service may have just started
    elif job.status == "Pending" or services.locks.is_orphan(job):
        await _adopt(services, job)


async def _adopt(services: InferenceServices, job: Job) -> None:
    """Take over a running service whose gateway is gone."""
    owner = services.locks.owner

    def decide(now: Job) -> Change | None:
        if now.status not in ("Pending", "Running"):
            return None
        return Change(
            "Running", "adopted: it runs, and the gateway that launched it is gone", owner, {"gateway": owner}
        )

    async with services.locks.hold(job.id):
        await services.store.jobs.change(job.id, decide, services.clock.wall())
    log.info("Adopted job %s.", job.id)


async def _stop_stray(services: InferenceServices, job_id: str, clean_up: Callable[[str], Awaitable[None]]) -> None:
    """Stop a process, or remove files, without an unfinished record."""
    async with services.locks.hold(job_id):
        job = await services.store.jobs.get(job_id)
        if job is None:
            log.warning("Stopping job %s: it is running but has no record.", job_id)
        if job is None or job.is_final:
            await clean_up(job_id)
