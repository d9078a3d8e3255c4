# SPDX-License-Identifier: Apache-2.0
"""Connections from the gateway to inference microservices: the endpoint, connection pool and load of each service.

Each service is a router with one backend, which is always tried: `jobs.service` knows whether the service runs, and is asked
again after a second, and at once when a connection fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.core.errors import NotFound, ResourceExhausted
from headrace.core.telemetry.metrics import Histogram
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.proxied_request import Forwarder
from headrace.fleet.router.responses import UpstreamHeadParser
from headrace.fleet.router.retries import RetryBudget
from headrace.fleet.router.settings import (
    BackendAddress,
    HealthSettings,
    OutlierSettings,
    RetrySettings,
    RouterSettings,
    TimeoutSettings,
)
from headrace.fleet.router.upstream import CoarseClock, ConnectionPool
from headrace.jobs.records import Endpoint
from headrace.jobs.service import JobService
from headrace.jobs.settings import JobsApiSettings

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange

Target = tuple[str, str | None, str]
"""Organisation, experiment (None on v2, which has none) and job."""

_TICK_SECONDS = 1.0

OnFailure = Callable[["Exchange", "ServiceConnection", str, bool], None]
"""Called when a service failed: with the reason, and whether it accepted a connection."""


class ServiceConnection(Forwarder):
    """A running service, as a router with one backend."""

    def __init__(
        self, job_id: str, url: str, settings: RouterSettings, head_parser: UpstreamHeadParser, clock: CoarseClock
    ) -> None:
        backends = Backends(settings)
        self.backend = backends.all[0]
        self.pool = ConnectionPool(self.backend, settings, head_parser, clock)
        super().__init__(settings, backends, {self.backend: self.pool}, RetryBudget(settings.retries), clock)
        self.job_id = job_id
        self.url = url
        self.limit = 0
        """Maximum number of requests in flight."""
        self.on_failure: OnFailure
        self.fresh_until = 0.0
        self.used = 0.0

    def overload_error(self) -> ResourceExhausted:
        """Return the error for a request over the limit."""
        return ResourceExhausted(
            f"{self.in_flight} inference requests of this service are in flight, which is the limit: "
            "try again when some have finished",
            retry_after_seconds=1.0,
        )

    @property
    def in_flight(self) -> int:
        """Return the number of requests in flight."""
        return self.backend.outstanding


class ServiceConnections:
    """The connections to all services; used from the loop's thread only."""

    def __init__(self, jobs: JobService, settings: JobsApiSettings, seconds: Histogram) -> None:
        self._jobs = jobs
        self._settings = settings
        self._seconds = seconds
        self._head_parser = UpstreamHeadParser()
        self._router_settings = RouterSettings(
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
        self.by_target: dict[Target, ServiceConnection] = {}
        self._draining: set[ServiceConnection] = set()
        """Stopped, replaced or idle services with requests still in flight."""
        self._timer: asyncio.TimerHandle | None = None
        self.on_failure: OnFailure
        """Set by `inference`."""

    @property
    def router_settings(self) -> RouterSettings:
        """Return the router settings for request plans."""
        return self._router_settings

    @property
    def in_flight(self) -> int:
        """Return the number of requests in flight to all services."""
        return sum(service.in_flight for service in (*self.by_target.values(), *self._draining))

    def start(self) -> None:
        """Run once, and again every second: update the clock and close idle connections."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TICK_SECONDS, self.start)
        self.clock.now = now = loop.time()
        for target, service in tuple(self.by_target.items()):
            service.pool.sweep(now)
            if now - service.used > self._settings.forget_seconds and not service.in_flight:
                self._drain(target)
        for service in tuple(self._draining):
            service.pool.sweep(now)
            if not service.in_flight:
                service.pool.close_idle()
                self._draining.discard(service)

    async def close(self) -> None:
        """Close all connections."""
        if self._timer is not None:
            self._timer.cancel()
        services = [*self.by_target.values(), *self._draining]
        await asyncio.gather(*(service.pool.close() for service in services))

    async def find(self, target: Target) -> ServiceConnection | Endpoint:
        """Return the connection to a service, or its endpoint if it cannot take requests. Raises NotFound."""
        try:
            endpoint = await self._jobs.endpoint(*target)
        except NotFound:
            self._drain(target)
            raise
        if endpoint.url is None or endpoint.state != "running":
            return endpoint
        now = asyncio.get_running_loop().time()
        service = self.by_target.get(target)
        if service is None or service.url != endpoint.url:
            self._drain(target)
            service = self.by_target[target] = self._connect(endpoint.job.id, endpoint.url)
        service.fresh_until = now + self._settings.fresh_seconds
        service.used = now
        return service

    def close_job(self, job_id: str) -> None:
        """Close the connections of a job; the next request asks `jobs.service` again."""
        for target in [target for target in self.by_target if target[2] == job_id]:
            self._drain(target)

    def drop(self, job_id: str) -> None:
        """Close the connections of a job that failed, and drop its cached endpoint."""
        self.close_job(job_id)
        self._jobs.drop_endpoint(job_id)

    def _drain(self, target: Target) -> None:
        service = self.by_target.pop(target, None)
        if service is None:
            return
        service.fresh_until = 0.0
        service.pool.close_idle()
        self._draining.add(service)

    def _connect(self, job_id: str, url: str) -> ServiceConnection:
        settings = replace(self._router_settings, backends=(BackendAddress.parse(url),))
        connection = ServiceConnection(job_id, url, settings, self._head_parser, self.clock)
        connection.backend.seconds = self._seconds
        connection.limit = self._settings.concurrency
        connection.on_failure = self.on_failure
        return connection
