# SPDX-License-Identifier: Apache-2.0
"""`JobService`: the operations behind the job API, the gateway and the command line.

Every record belongs to an organisation; an id of another organisation is NotFound. The service takes and returns plain data,
raises classes of `core.errors` and knows nothing of HTTP. `record_service` has workspaces, experiments and job records;
`services` has inference microservices; `batch_jobs` has batch jobs.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound, Unauthenticated
from headrace.jobs.backups import Backups
from headrace.jobs.batch_jobs import BatchJobs
from headrace.jobs.concurrency import JobLocks
from headrace.jobs.launch_plan import LaunchPlanner
from headrace.jobs.reconcile import reconcile
from headrace.jobs.record_service import RecordService
from headrace.jobs.records import BATCH, Endpoint, Event, Job, JobSpec, ServiceStatus
from headrace.jobs.secrets import Vault
from headrace.jobs.service_status import FetchStatus, StatusClient, parse_status_update
from headrace.jobs.services import STOPPED, InferenceServices
from headrace.jobs.settings import JobSettings
from headrace.jobs.store.jobs import Change
from headrace.jobs.store.store import Store
from headrace.jobs.validation import check_id, check_org
from headrace.platforms.contract import Driver
from headrace.platforms.process import ProcessDriver
from headrace.platforms.processes import process_name

log = logging.getLogger("headrace.jobs")


class JobService(RecordService):
    """Create it with `open`, close it with `close`. Any number of tasks of one loop may call it."""

    def __init__(
        self,
        store: Store,
        vault: Vault,
        driver: Driver,
        settings: JobSettings,
        clock: Clock,
        fetch_status: FetchStatus | None,
        processes: Driver | None = None,
    ) -> None:
        planner = LaunchPlanner(store, vault, settings)
        super().__init__(store, vault, settings, planner, clock)
        self.driver = driver
        self._planner = planner
        self._own_client = StatusClient() if fetch_status is None else None
        locks = JobLocks(store.leases, process_name(secrets.token_hex(4)), clock, settings.lease_seconds)
        self.services = InferenceServices(
            store, driver, vault, settings, clock, fetch_status or self._own_client or StatusClient(), locks
        )
        self.backups = Backups(store.database, vault, clock)
        self.batches = BatchJobs(store, processes or driver, settings, clock, locks, planner)

    @classmethod
    async def open(
        cls,
        settings: JobSettings,
        driver: Driver | None = None,
        *,
        clock: Clock | None = None,
        fetch_status: FetchStatus | None = None,
    ) -> JobService:
        """Open the database, migrate it, and read or create the key file. Default driver: local processes.

        Batches always run as local processes, unless a driver is given without `containers`.
        """

        def prepare() -> Vault:
            try:
                settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                settings.models_folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise FailedPrecondition(f"{settings.data_dir} cannot be created: {error.strerror}") from None
            return Vault.open(settings.key_path)

        vault = await asyncio.to_thread(prepare)
        store = await Store.open(settings.url)
        processes: Driver | None = None
        if driver is None or settings.containers is not None:
            processes = ProcessDriver(
                settings.launch_folder,
                host=settings.service_host,
                ports=settings.port_range,
                log_bytes=settings.log_bytes,
            )
            driver = driver or processes
        return cls(store, vault, driver, settings, clock or SystemClock(), fetch_status, processes)

    async def close(self) -> None:
        """Finish pending work; services and batches keep running."""
        await self.services.close()
        await self.batches.close()
        if self._own_client is not None:
            self._own_client.close()
        await self.driver.close()
        if self.batches.driver is not self.driver:
            await self.batches.driver.close()
        await self.store.close()

    @property
    def callback_url(self) -> str:
        """Return the URL by which services reach this gateway, such as "http://127.0.0.1:8090"."""
        return self.services.callback_url

    @callback_url.setter
    def callback_url(self, url: str) -> None:
        self.services.callback_url = url

    # Inference microservices

    async def start(
        self, org: str, user_id: str, experiment_id: str | None, parent_id: str | None, extra: Mapping[str, Any]
    ) -> Job:
        """Start a service; return when it is launched, long before it is ready.

        `extra`: the rest of the request, such as model_path, hf_model, network_arch, docker_env_vars, num_gpus. Without an
        experiment (v2), one new UUID is both experiment and job. InvalidArgument: the parent is unknown, not Done, or has no
        checkpoint. NotFound: the experiment is unknown. PermissionDenied: users may not name this model.
        """
        check_org(org)
        if experiment_id is not None:
            experiment_id = check_id(experiment_id, "Experiment")
        plan = await self._planner.plan(org, experiment_id, parent_id, extra)
        return await self.services.start(org, user_id, plan)

    async def status(self, org: str, experiment_id: str | None, job_id: str) -> ServiceStatus:
        """Return the status from the record, the service and the platform. NotFound once it is stopped."""
        return await self.services.status(org, *_ids(experiment_id, job_id))

    async def endpoint(self, org: str, experiment_id: str | None, job_id: str) -> Endpoint:
        """Return where to send a request; cached for two seconds. NotFound once it is stopped."""
        cached = self.services.cached_endpoint(org, experiment_id, job_id)
        return cached if cached is not None else await self.services.endpoint(org, *_ids(experiment_id, job_id))

    def cached_endpoint(self, org: str, experiment_id: str | None, job_id: str) -> Endpoint | None:
        """Return the cached result of `endpoint`; None if there is none."""
        return self.services.cached_endpoint(org, experiment_id, job_id)

    def drop_endpoint(self, job_id: str) -> None:
        """Drop the cached endpoint: the service did not answer there."""
        self.services.drop_endpoint(job_id)

    async def stop(self, org: str, user_id: str, experiment_id: str | None, job_id: str) -> Job:
        """Stop a service for good and wait for its end. Concurrent calls all succeed; later ones are NotFound."""
        return await self.services.stop(org, user_id, *_ids(experiment_id, job_id))

    async def status_update(
        self, org: str, experiment_id: str, job_id: str, payload: Mapping[str, Any], *, key: str
    ) -> bool:
        """Handle a service's status update, sent with the service's own key; return whether the service is stopped for it.

        Returns before the service has ended: the service waits for the response.
        """
        checked_id = check_id(job_id, "Job")
        if not hmac.compare_digest(self._vault.callback_key(checked_id).encode(), key.encode("utf-8", "replace")):
            raise Unauthenticated("the key does not belong to this service")
        job = await self.services.find(org, check_id(experiment_id, "Experiment"), checked_id)
        final_state = parse_status_update(payload)
        if final_state is None or job.is_final or job.status == "Canceling":
            return False
        job = await self.services.request_stop(checked_id, final_state, f"service {checked_id}")
        if job.status != "Canceling":
            return False
        self.services.finish_stop_later(checked_id)
        return True

    async def reconcile(self) -> None:
        """Bring records in line with running processes. Call it at start and every few seconds."""
        await reconcile(self.services, self.batches)

    async def stop_all(self) -> None:
        """Stop all services of this place and pause all batches; the next gateway resumes the batches."""
        owner = self.services.locks.owner

        async def stop(job: Job) -> None:
            try:
                stopping = await self.services.request_stop(job.id, STOPPED, owner)
                if not stopping.is_final:
                    await self.services.finish_stop(job.id)
            except NotFound:
                pass  # already stopped
            except HeadraceError as error:
                log.warning("Could not stop job %s: %s", job.id, error.message)

        services = await self.store.jobs.unfinished(self.driver.place)
        await asyncio.gather(self.batches.pause_all(), *map(stop, services))

    async def counts(self) -> dict[str, int]:
        """Count the unfinished services of this place by status."""
        return dict(Counter(job.status for job in await self.store.jobs.unfinished(self.driver.place)))

    # Jobs of every kind

    async def create_batch(self, org: str, user_id: str, experiment_id: str, spec: JobSpec) -> Job:
        """Create a batch job; it starts when a slot is free. See `batch_process` for its specs.

        InvalidArgument names the wrong field. PermissionDenied: users may not name this path.
        """
        experiment = await self.get_experiment(org, experiment_id)
        work = await self.batches.check(experiment, spec)
        job = await self.create_job(org, user_id, experiment.id, spec, place=self.batches.driver.place, work=work)
        self.batches.schedule()
        return job

    async def newest_jobs(self, count: int) -> list[Job]:
        """Return the newest jobs of all organisations, to warm the gateway's caches."""
        return await self.store.jobs.newest(count)

    async def refresh_job(self, org: str, job_id: str, experiment_id: str | None = None) -> Job:
        """Return a job as `get_job` does, with the current progress of a running batch."""
        job = await self.get_job(org, job_id, experiment_id)
        return await self.batches.refresh(job) if job.action == BATCH else job

    async def cancel_job(self, org: str, user_id: str, job_id: str, experiment_id: str | None = None) -> Job:
        """Stop a service, cancel a batch, or ask an external runner to cancel its job."""
        job = await self.get_job(org, job_id, experiment_id)
        if job.is_service:
            return await self.services.stop(org, user_id, experiment_id, job.id)
        if job.action == BATCH:
            return await self.batches.cancel(job, user_id)

        def decide(job: Job) -> Change | None:
            if job.is_final:
                raise FailedPrecondition(f"job {job.id} is {job.status} already")
            if job.status == "Canceling":
                return None
            return Change("Canceled" if job.status == "Pending" else "Canceling", "canceled by a user", user_id)

        return await self.store.jobs.change(job.id, decide, self._clock.wall())

    async def pause_job(self, org: str, user_id: str, job_id: str, experiment_id: str | None = None) -> Job:
        """Pause a batch; its results are kept. FailedPrecondition for any other job."""
        job = await self._batch_job(org, job_id, experiment_id, "paused")
        return await self.batches.pause(job, user_id)

    async def resume_job(
        self,
        org: str,
        user_id: str,
        job_id: str,
        experiment_id: str | None = None,
        specs: Mapping[str, Any] | None = None,
    ) -> Job:
        """Resume a paused batch. `specs`, if given, must equal the job's own."""
        job = await self._batch_job(org, job_id, experiment_id, "resumed")
        if specs and dict(specs) != job.specs:
            raise InvalidArgument(
                "a paused job continues with its own specs: omit them, or create a new job with other specs"
            )
        return await self.batches.resume(job, user_id)

    async def retry_job(self, org: str, user_id: str, job_id: str, experiment_id: str | None = None) -> Job:
        """Create a batch like one that failed or was canceled; with the same output, it continues there."""
        job = await self._batch_job(org, job_id, experiment_id, "retried")
        if job.status not in ("Error", "Canceled"):
            hint = "it has finished" if job.status == "Done" else "cancel it first, or let it end"
            raise FailedPrecondition(f"job {job.id} is {job.status}: {hint}; only Error and Canceled can be retried")
        backend = job.details.get("backend_details") or {}
        spec = JobSpec(
            BATCH, job.parent_id, job.name, job.description, job.num_gpu, job.specs, backend, None, job.network_arch
        )
        return await self.create_batch(org, user_id, job.experiment_id, spec)

    async def _batch_job(self, org: str, job_id: str, experiment_id: str | None, what: str) -> Job:
        job = await self.get_job(org, job_id, experiment_id)
        if job.is_service:
            raise FailedPrecondition(f"an inference microservice cannot be {what}: stop it and start another one")
        if job.action != BATCH:
            raise FailedPrecondition(
                f"a job with action {job.action} cannot be {what}: only jobs with action {BATCH} run here"
            )
        return job

    async def job_logs(self, org: str, job_id: str, experiment_id: str | None = None, tail: int = 1000) -> str:
        """Return the last lines of a job's log; "" if it has none."""
        job = await self.get_job(org, job_id, experiment_id)
        return await self.services.logs(job, tail, self.batches.driver if job.action == BATCH else None)

    async def job_events(self, org: str, job_id: str, experiment_id: str | None = None) -> list[Event]:
        """Return every change of a job, oldest first."""
        return await self.store.jobs.events((await self.get_job(org, job_id, experiment_id)).id)


def _ids(experiment_id: str | None, job_id: str) -> tuple[str | None, str]:
    job = check_id(job_id, "Job")
    return (None if experiment_id is None else check_id(experiment_id, "Experiment")), job
