# SPDX-License-Identifier: Apache-2.0
"""`JobService`: what `api.jobs`, the gateway and the command line ask.

Everything belongs to an organisation, and an id of another one's is NotFound. Takes and gives plain data, raises classes of
`core.errors`, and knows nothing of HTTP. `desk` has workspaces, experiments and records of jobs, `services` what runs.
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
from headrace.jobs.acting import Acting
from headrace.jobs.asking import Asking, AskStatus
from headrace.jobs.backups import Backups
from headrace.jobs.batches import Batches
from headrace.jobs.checks import check_id, check_org
from headrace.jobs.desk import Desk
from headrace.jobs.idle import read_update
from headrace.jobs.planning import Planner
from headrace.jobs.reconcile import reconcile
from headrace.jobs.records import BATCH, Endpoint, Event, Job, JobWish, ServiceStatus
from headrace.jobs.secrets import Vault
from headrace.jobs.services import STOPPED, Services
from headrace.jobs.settings import JobSettings
from headrace.jobs.store.jobs import Change
from headrace.jobs.store.store import Store
from headrace.platforms.contract import Driver
from headrace.platforms.identity import own_name
from headrace.platforms.process import ProcessDriver

log = logging.getLogger("headrace.jobs")


class JobService(Desk):
    """Make it with `open`, end it with `close`. Any number of tasks of one loop may call it."""

    def __init__(
        self,
        store: Store,
        vault: Vault,
        driver: Driver,
        settings: JobSettings,
        clock: Clock,
        ask: AskStatus | None,
        processes: Driver | None = None,
    ) -> None:
        planner = Planner(store, vault, settings)
        super().__init__(store, vault, settings, planner, clock)
        self.driver = driver
        self._planner = planner
        self._own_ask = Asking() if ask is None else None
        acting = Acting(store.leases, own_name(secrets.token_hex(4)), clock, settings.lease_seconds)
        self.services = Services(store, driver, vault, settings, clock, ask or self._own_ask or Asking(), acting)
        self.backups = Backups(store.database, vault, clock)
        self.batches = Batches(store, processes or driver, settings, clock, acting, planner)

    @classmethod
    async def open(
        cls,
        settings: JobSettings,
        driver: Driver | None = None,
        *,
        clock: Clock | None = None,
        ask: AskStatus | None = None,
    ) -> JobService:
        """Open the database, bring it up to date, and read or make the key file. Default driver: local processes.

        Batches are local processes wherever services run, unless a driver is given without `containers`.
        """

        def prepare() -> Vault:
            try:
                settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                settings.models_folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise FailedPrecondition(f"{settings.data_dir} cannot be made: {error.strerror}") from None
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
        return cls(store, vault, driver, settings, clock or SystemClock(), ask, processes)

    async def close(self) -> None:
        """Finish what is under way; services and batches run on."""
        await self.services.close()
        await self.batches.close()
        if self._own_ask is not None:
            self._own_ask.close()
        await self.driver.close()
        if self.batches.driver is not self.driver:
            await self.batches.driver.close()
        await self.store.close()

    @property
    def callback_url(self) -> str:
        """Under which services reach this gateway, "http://127.0.0.1:8090". May be set when the port is known."""
        return self.services.callback_url

    @callback_url.setter
    def callback_url(self, url: str) -> None:
        self.services.callback_url = url

    # Inference microservices

    async def start(
        self, org: str, user_id: str, experiment_id: str | None, parent_id: str | None, extra: Mapping[str, Any]
    ) -> Job:
        """Start a service; returns when it is launched, long before it is ready.

        `extra` is the rest of the request: model_path, hf_model, network_arch, docker_env_vars, num_gpus and so on.
        Without an experiment (v2) one new UUID is both experiment and job. InvalidArgument: the parent is unknown or not
        Done, or has no checkpoint. NotFound: the experiment is unknown. PermissionDenied: users may not name this model.
        """
        check_org(org)
        if experiment_id is not None:
            experiment_id = check_id(experiment_id, "Experiment")
        plan = await self._planner.plan(org, experiment_id, parent_id, extra)
        return await self.services.start(org, user_id, plan)

    async def status(self, org: str, experiment_id: str | None, job_id: str) -> ServiceStatus:
        """The record, what the service says and what the platform says. NotFound once it is stopped."""
        return await self.services.status(org, *_ids(experiment_id, job_id))

    async def endpoint(self, org: str, experiment_id: str | None, job_id: str) -> Endpoint:
        """Where to send a request. Remembered for two seconds. NotFound once it is stopped."""
        found = self.services.cached_endpoint(org, experiment_id, job_id)
        return found if found is not None else await self.services.endpoint(org, *_ids(experiment_id, job_id))

    def cached_endpoint(self, org: str, experiment_id: str | None, job_id: str) -> Endpoint | None:
        """What `endpoint` would answer at once; None if it has to look."""
        return self.services.cached_endpoint(org, experiment_id, job_id)

    def lost(self, job_id: str) -> None:
        """Nobody answered at the endpoint: look anew next time."""
        self.services.lost(job_id)

    async def stop(self, org: str, user_id: str, experiment_id: str | None, job_id: str) -> Job:
        """Stop for good; returns when nothing is left of it. Several at once all succeed; later ones are NotFound."""
        return await self.services.stop(org, user_id, *_ids(experiment_id, job_id))

    async def status_update(
        self, org: str, experiment_id: str, job_id: str, payload: Mapping[str, Any], *, key: str
    ) -> bool:
        """What a service says of itself, with the key that it was given; whether it is stopped for that.

        Returns before it has ended: the service waits for our answer.
        """
        wanted = check_id(job_id, "Job")
        if not hmac.compare_digest(self._vault.callback_key(wanted).encode(), key.encode("utf-8", "replace")):
            raise Unauthenticated("the key is not that of this service")
        job = await self.services.find(org, check_id(experiment_id, "Experiment"), wanted)
        ending = read_update(payload)
        if ending is None or job.is_final or job.status == "Canceling":
            return False
        job = await self.services.ask_to_end(wanted, ending, f"service {wanted}")
        if job.status != "Canceling":
            return False
        self.services.end_later(wanted)
        return True

    async def reconcile(self) -> None:
        """Compare records with what runs, and set right what is not. Call it at start and every few seconds."""
        await reconcile(self.services, self.batches)

    async def stop_all(self) -> None:
        """Stop every service of this place, several at once. Batches are paused: the next gateway takes them up."""
        owner = self.services.acting.owner

        async def stop(job: Job) -> None:
            try:
                asked = await self.services.ask_to_end(job.id, STOPPED, owner)
                if not asked.is_final:
                    await self.services.finish_ending(job.id)
            except NotFound:
                pass  # somebody else has stopped it
            except HeadraceError as error:
                log.warning("job %s is not stopped: %s", job.id, error.message)

        services = await self.store.jobs.unfinished(self.driver.place)
        await asyncio.gather(self.batches.pause_all(), *map(stop, services))

    async def counts(self) -> dict[str, int]:
        """How many services of this place have which status, apart from those that have ended."""
        return dict(Counter(job.status for job in await self.store.jobs.unfinished(self.driver.place)))

    # Jobs of every kind

    async def create_batch(self, org: str, user_id: str, experiment_id: str, wish: JobWish) -> Job:
        """Have a model run once over many items; it is launched when it is its turn. See `batch_specs` for `wish.specs`.

        InvalidArgument names the field that is wrong. PermissionDenied: users may not name this path.
        """
        experiment = await self.get_experiment(org, experiment_id)
        work = await self.batches.checked(experiment, wish)
        job = await self.create_job(org, user_id, experiment.id, wish, place=self.batches.driver.place, work=work)
        self.batches.wake()
        return job

    async def newest_jobs(self, count: int) -> list[Job]:
        """Of all organisations: for the gateway, which prepares for lists of them before it is asked."""
        return await self.store.jobs.newest(count)

    async def look_at_job(self, org: str, job_id: str, experiment_id: str | None = None) -> Job:
        """As `get_job`; of a batch that runs, with how far it is."""
        job = await self.get_job(org, job_id, experiment_id)
        return await self.batches.look(job) if job.action == BATCH else job

    async def cancel_job(self, org: str, user_id: str, job_id: str, experiment_id: str | None = None) -> Job:
        """Stop a service; have a batch ended, or ask a runner to give up its job."""
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
        """Have a batch wait until it is resumed; what it has done is kept. FailedPrecondition for all others, with why."""
        job = await self._batch(org, job_id, experiment_id, "paused")
        return await self.batches.pause(job, user_id)

    async def resume_job(
        self,
        org: str,
        user_id: str,
        job_id: str,
        experiment_id: str | None = None,
        specs: Mapping[str, Any] | None = None,
    ) -> Job:
        """Have a paused batch go on. `specs`, if there are any, must be those that it has."""
        job = await self._batch(org, job_id, experiment_id, "resumed")
        if specs and dict(specs) != job.specs:
            raise InvalidArgument(
                "a paused job goes on with the specs that it has: leave them out, or make a new job with others"
            )
        return await self.batches.resume(job, user_id)

    async def retry_job(self, org: str, user_id: str, job_id: str, experiment_id: str | None = None) -> Job:
        """A new batch that does what one that failed or was canceled did not: with the same output, it goes on there."""
        job = await self._batch(org, job_id, experiment_id, "retried")
        if job.status not in ("Error", "Canceled"):
            ended = "it has done all there was" if job.status == "Done" else "cancel it first, or let it end"
            raise FailedPrecondition(f"job {job.id} is {job.status}: {ended}; Error and Canceled are retried")
        backend = job.details.get("backend_details") or {}
        wish = JobWish(
            BATCH, job.parent_id, job.name, job.description, job.num_gpu, job.specs, backend, None, job.network_arch
        )
        return await self.create_batch(org, user_id, job.experiment_id, wish)

    async def _batch(self, org: str, job_id: str, experiment_id: str | None, what: str) -> Job:
        job = await self.get_job(org, job_id, experiment_id)
        if job.is_service:
            raise FailedPrecondition(f"an inference microservice cannot be {what}: stop it, and start another one")
        if job.action != BATCH:
            raise FailedPrecondition(
                f"a job of the action {job.action} cannot be {what}: this server runs those of the action {BATCH}"
            )
        return job

    async def job_logs(self, org: str, job_id: str, experiment_id: str | None = None, tail: int = 1000) -> str:
        """The last lines of a job's log; "" if it has none."""
        job = await self.get_job(org, job_id, experiment_id)
        return await self.services.logs(job, tail, self.batches.driver if job.action == BATCH else None)

    async def job_events(self, org: str, job_id: str, experiment_id: str | None = None) -> list[Event]:
        """Every change of a job, oldest first."""
        return await self.store.jobs.events((await self.get_job(org, job_id, experiment_id)).id)


def _ids(experiment_id: str | None, job_id: str) -> tuple[str | None, str]:
    job = check_id(job_id, "Job")
    return (None if experiment_id is None else check_id(experiment_id, "Experiment")), job
