# SPDX-License-Identifier: Apache-2.0
"""The services that this gateway has passed requests to: where each listens, its connections, how much it has to do.

Asked by `inference`. Each service is a router's backend that is alone and always tried: whether it is up is for `jobs` to
know, which is asked again after a second, and at once when a connection fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.core.errors import NotFound, ResourceExhausted
from headrace.core.telemetry.metrics import Histogram
from headrace.fleet.router.answers import Answers
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.forwarding import Forwarder
from headrace.fleet.router.pools import CoarseClock, Pool
from headrace.fleet.router.retries import RetryBudget
from headrace.fleet.router.settings import (
    BackendAddress,
    HealthSettings,
    OutlierSettings,
    RetrySettings,
    RouterSettings,
    TimeoutSettings,
)
from headrace.jobs.api.settings import JobsApiSettings
from headrace.jobs.records import Endpoint
from headrace.jobs.service import JobService

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange

Target = tuple[str, str | None, str]
"""Organisation, experiment (None on v2, which has none) and job."""

_TICK_SECONDS = 1.0


OnFailure = Callable[["Exchange", "Service", str, bool], None]
"""Told that a service gave no answer: why, and whether it took a connection at all."""


class Service(Forwarder):
    """A service that runs, as requests reach it: for them, the router before a backend that is alone."""

    def __init__(self, job_id: str, url: str, settings: RouterSettings, answers: Answers, clock: CoarseClock) -> None:
        backends = Backends(settings)
        self.backend = backends.all[0]
        self.pool = Pool(self.backend, settings, answers, clock)
        super().__init__(settings, backends, {self.backend: self.pool}, RetryBudget(settings.retries), clock)
        self.job_id = job_id
        self.url = url
        self.limit = 0
        """Requests that it may have at once."""
        self.on_failure: OnFailure
        self.fresh_until = 0.0
        self.used = 0.0

    def full(self) -> ResourceExhausted:
        """What one request too many is told."""
        return ResourceExhausted(
            f"{self.in_flight} inference requests of this service are in flight, as many as it may have: "
            "try again when some are answered",
            retry_after_seconds=1.0,
        )

    @property
    def in_flight(self) -> int:
        """Requests that it has and has not answered, which the router counts anyway."""
        return self.backend.outstanding


class Reach:
    """See the module. Used from the loop's thread only."""

    def __init__(self, jobs: JobService, settings: JobsApiSettings, seconds: Histogram) -> None:
        self._jobs = jobs
        self._settings = settings
        self._seconds = seconds
        self._answers = Answers()
        self._router = RouterSettings(
            (),
            policy="round-robin",
            health=HealthSettings(path=""),
            outliers=OutlierSettings(consecutive_failures=0, error_rate=0.0),
            retries=RetrySettings(tries=1),
            timeouts=TimeoutSettings(
                connect_seconds=settings.connect_seconds,
                response_seconds=settings.inference_seconds,
                idle_seconds=settings.inference_seconds,
            ),
            whole_bytes=settings.whole_bytes,
        )
        self.clock = CoarseClock()
        self.known: dict[Target, Service] = {}
        self._parting: set[Service] = set()
        """Stopped, replaced or forgotten, with requests still in flight."""
        self._timer: asyncio.TimerHandle | None = None
        self.on_failure: OnFailure
        """Set by `inference`, for all services."""

    @property
    def plans(self) -> RouterSettings:
        """What heads of requests are written by."""
        return self._router

    @property
    def in_flight(self) -> int:
        """Requests of all services."""
        return sum(service.in_flight for service in (*self.known.values(), *self._parting))

    def start(self) -> None:
        """Keep time from now on."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TICK_SECONDS, self.start)
        self.clock.now = now = loop.time()
        for target, service in tuple(self.known.items()):
            service.pool.sweep(now)
            if now - service.used > self._settings.forget_seconds and not service.in_flight:
                self._drop(target)
        for service in tuple(self._parting):
            service.pool.sweep(now)
            if not service.in_flight:
                service.pool.close_idle()
                self._parting.discard(service)

    async def close(self) -> None:
        """Let go of all connections."""
        if self._timer is not None:
            self._timer.cancel()
        services = [*self.known.values(), *self._parting]
        await asyncio.gather(*(service.pool.close() for service in services))

    async def find(self, target: Target) -> Service | Endpoint:
        """The service; or, if it cannot be asked, what is known of it. Raises `NotFound` for one that is not there."""
        try:
            endpoint = await self._jobs.endpoint(*target)
        except NotFound:
            self._drop(target)
            raise
        if endpoint.url is None or endpoint.state != "running":
            return endpoint
        now = asyncio.get_running_loop().time()
        service = self.known.get(target)
        if service is None or service.url != endpoint.url:
            self._drop(target)
            service = self.known[target] = self._made(endpoint.job.id, endpoint.url)
        service.fresh_until = now + self._settings.fresh_seconds
        service.used = now
        return service

    def forget(self, job_id: str) -> None:
        """A job is being stopped, or did not take a connection: ask `jobs` before the next request."""
        for target in [each for each in self.known if each[2] == job_id]:
            self._drop(target)

    def lost(self, job_id: str) -> None:
        """The same, and tell `jobs`."""
        self.forget(job_id)
        self._jobs.lost(job_id)

    def _drop(self, target: Target) -> None:
        service = self.known.pop(target, None)
        if service is None:
            return
        service.fresh_until = 0.0
        service.pool.close_idle()
        self._parting.add(service)

    def _made(self, job_id: str, url: str) -> Service:
        settings = replace(self._router, backends=(BackendAddress.parse(url),))
        made = Service(job_id, url, settings, self._answers, self.clock)
        made.backend.seconds = self._seconds
        made.limit = self._settings.concurrency
        made.on_failure = self.on_failure
        return made
