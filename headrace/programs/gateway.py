# SPDX-License-Identifier: Apache-2.0
"""The gateway program: serve the job API with its database, users and services until a signal, then drain.

Called by `headrace gateway`; `open_gateway` also by `headrace users` and `headrace jobs`, which work beside it. Services
keep running after the gateway, unless `stop_services` is set. They report to the gateway over loopback: if its own port
has TLS or is not on loopback, it opens a second port for them, whose number is kept in the data directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from headrace.api.access.authenticator import Access, open_access
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import BAD_CONFIGURATION, FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.limits import MIB, Limits
from headrace.core.names import is_http_url
from headrace.core.telemetry.exposition import Format, negotiate, render
from headrace.core.telemetry.logs import log_access, log_fatal
from headrace.core.telemetry.metrics import Registry
from headrace.jobs.api.routes import JobsApi
from headrace.jobs.service import JobService
from headrace.jobs.settings import ContainerSettings, JobsApiSettings, JobSettings
from headrace.net.http.heads import CONTENT_TYPE, RequestHead, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer, run_until_signal
from headrace.net.site import Site
from headrace.net.sockets import Address, reserve_port
from headrace.net.tls import TlsFiles
from headrace.platforms.contract import Driver
from headrace.platforms.drivers import PROCESS, DriverOptions, create_driver
from headrace.programs.console.http import GATEWAY, Pages

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange

log = logging.getLogger("headrace.gateway")

_SERVICE = "headrace.cli.gateway:service"

OnReady = Callable[[Address, str | None], None]
"""Called with the gateway's address and, at the very first start, the administrator's key."""


_BODY_BYTES = 8 * MIB
PLATFORMS = (PROCESS, "local-docker", "kubernetes", "slurm")
_KUBERNETES = {
    "workload": "statefulset",
    "service_type": "ClusterIP",
    # The gateway polls the status of a loading service, so the service must be reachable before it is ready.
    "readiness_path": "/api/v1/health/liveness",
}
"""Defaults as in TAO's API; `--platform-setting` overrides them."""
_CALLBACK_PORT_FILE = "callback-port"
_LOOPBACK = "127.0.0.1"
_ALL_INTERFACES = ("0.0.0.0", "::")  # noqa: S104  # compared, not listened on


def run_gateway(settings: GatewaySettings, on_ready: OnReady | None = None) -> int:
    """Serve until a signal; return the exit code."""
    try:
        check_tls(settings)
        return uvloop.run(_run(settings, on_ready))
    except HeadraceError as error:
        log_fatal(log, error.message)
        return BAD_CONFIGURATION


def job_settings(settings: GatewaySettings, callback_url: str) -> JobSettings:
    """Return the settings of the job service."""
    return JobSettings(
        settings.data_dir,
        database_url=settings.database_url,
        key_file=settings.secrets_key,
        callback_url=callback_url,
        checkpoint_folders=settings.checkpoint_folders,
        trust_remote_code=settings.trust_remote_code,
        idle_timeout_minutes=settings.idle_timeout_minutes,
        service_target=_SERVICE,
        service_args=(),
        max_batches=settings.max_batches,
    )


async def _run(settings: GatewaySettings, on_ready: OnReady | None) -> int:
    make_data_dir(settings.data_dir)
    driver = driver_for(settings.platform, settings.data_dir, os.environ)
    ports = ReservedPorts(settings)
    try:
        service_settings = with_platform(job_settings(settings, ports.callback_url), settings.platform, os.environ)
        async with open_gateway(service_settings, settings.token_key, driver) as state:
            if driver is not None:
                await log_preflight(driver)
            return await _serve(settings, ports, state, on_ready)
    finally:
        ports.release()


async def _serve(settings: GatewaySettings, ports: ReservedPorts, state: GatewayState, on_ready: OnReady | None) -> int:
    jobs, access = state
    metrics = GatewayMetrics(SystemClock(), logs=settings.access_log)
    http = JobsApi(jobs, access, metrics.registry, settings.api)
    servers = _servers(settings, ports, http, metrics)
    reconcile_loop = ReconcileLoop(jobs, metrics, settings.reconcile_seconds)
    try:
        http.start()
        await http.warm()
        for server in servers:
            await server.start()
        ports.release()
        reconcile_loop.start()
        # These objects live as long as the process: exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        # Printed last, so that a new key is not overlooked.
        admin_key = await access.users.ensure_admin()
        if on_ready is not None:
            on_ready(servers[0].address, admin_key)
        code = await run_until_signal(servers, settings.grace_seconds, on_signal=http.drain)
        await reconcile_loop.close()
        if settings.stop_services:
            await jobs.stop_all()
        return code
    finally:
        await reconcile_loop.close()
        await http.close()


def _servers(
    settings: GatewaySettings, ports: ReservedPorts, http: JobsApi, metrics: GatewayMetrics
) -> list[HttpServer]:
    routes = Routes()
    http.add_to(routes)
    metrics.add_to(routes)
    if settings.console:
        Pages(GATEWAY).add_to(routes)
    site = Site(routes, limits=settings.limits, access_log=metrics.count)
    servers = [
        HttpServer(
            site,
            ports.address,
            partial(NegotiatingProtocol, site),
            tls=settings.tls,
            reuse_port=ports.is_reserved(ports.address),
        )
    ]
    if ports.callback is not None:
        servers.append(HttpServer(site, ports.callback, partial(NegotiatingProtocol, site), reuse_port=True))
    return servers


@dataclass(frozen=True, slots=True)
class PlatformSettings:
    """The platform that runs services."""

    name: str = "process"
    """`process`, `local-docker`, `kubernetes` or `slurm`."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Settings of the platform's driver, by name."""
    image: str = ""
    """"" for Headrace's image. See `jobs.settings.ContainerSettings.image`."""
    callback_url: str = ""
    """URL by which services reach the gateway; "" for none: then idle services are not stopped."""
    gpus: bool = True
    """Whether services request GPUs."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All settings of the gateway; times are in seconds."""

    address: Address
    data_dir: Path
    database_url: str = field(default="", repr=False)
    """"" for SQLite in the data directory."""
    tls: TlsFiles | None = None
    insecure: bool = False
    """Whether other machines may connect without TLS."""
    stop_services: bool = False
    """Whether services stop with the gateway; otherwise they keep running, and the next start finds them."""
    checkpoint_folders: tuple[Path, ...] = ()
    """Local folders in which users may name models."""
    idle_timeout_minutes: float = 30.0
    """Minutes without a request after which a service is stopped; 0 for never."""
    token_key: Path | None = None
    """PEM file that signs tokens (RS256, EdDSA); default: a secret in the data directory (HS256)."""
    secrets_key: Path | None = None
    """Key file that encrypts workspace credentials; gateways of one database share it. Default: in the data directory."""
    trust_remote_code: bool = False
    """Whether users may start models with their own Python code."""
    grace_seconds: float = 30.0
    """How long a request in flight may take after SIGTERM."""
    reconcile_seconds: float = 5.0
    """Interval of reconciling records with running processes."""
    access_log: bool = False
    console: bool = True
    """Whether `/console` is served. The page is public; its data need a login."""
    max_batches: int = 2
    """Maximum number of running batch jobs; others wait."""
    platform: PlatformSettings = field(default_factory=PlatformSettings)
    api: JobsApiSettings = field(default_factory=JobsApiSettings)
    limits: Limits = field(default_factory=lambda: Limits(body_bytes=_BODY_BYTES))
    """Limits of requests; inference requests are streamed and have no body limit."""


def check_platform(platform: PlatformSettings) -> None:
    """Raise InvalidArgument for contradicting settings."""
    if platform.name not in PLATFORMS:
        raise InvalidArgument(f"--platform {platform.name[:64]!a} is unknown: use one of {', '.join(PLATFORMS)}")
    if platform.name == PROCESS:
        for flag, value in (
            ("--platform-setting", platform.given),
            ("--image", platform.image),
            ("--callback-url", platform.callback_url),
            ("--no-gpus", not platform.gpus),
        ):
            if value:
                raise InvalidArgument(f"{flag} needs a --platform other than process")
    if platform.callback_url and not is_http_url(platform.callback_url):
        raise InvalidArgument("--callback-url must be written http://HOST:PORT, as services reach the gateway")


def with_platform(settings: JobSettings, platform: PlatformSettings, environ: Mapping[str, str]) -> JobSettings:
    """Return the job settings for services on a platform."""
    check_platform(platform)
    if platform.name == PROCESS:
        return settings
    mode = platform.given.get("mode") or environ.get("SLURM_CONTAINER_MODE", "")
    bare = platform.name == "slurm" and mode == "bare"
    if bare and platform.image:
        raise InvalidArgument("--image: the mode bare has no container; omit it")
    containers = ContainerSettings(platform.name, platform.image or "headrace", environ, bare, platform.gpus)
    return replace(settings, containers=containers, callback_url=platform.callback_url)


def driver_for(platform: PlatformSettings, data_dir: Path, environ: Mapping[str, str]) -> Driver | None:
    """Return the driver of a platform; None for processes. InvalidArgument for an unknown setting."""
    check_platform(platform)
    if platform.name == PROCESS:
        return None
    driver_settings: dict[str, str] = dict(platform.given)
    if platform.name == "kubernetes":
        driver_settings = {**_KUBERNETES, **driver_settings}
    return create_driver(platform.name, DriverOptions(data_dir / "platform", environ, driver_settings))


async def log_preflight(driver: Driver) -> None:
    """Log failed preflight checks. They do not stop the gateway: records are useful without the platform."""
    try:
        missing = [check for check in await driver.preflight() if not check.passed]
    except HeadraceError as error:
        log.warning("%s: %s", driver.name, error.message)
        return
    for check in missing:
        log.warning("Platform %s is not ready for services: %s: %s", driver.name, check.name, check.message)


def check_tls(settings: GatewaySettings) -> None:
    """Raise if keys and tokens would cross a network without TLS."""
    if settings.tls is None and not settings.insecure and not is_loopback(settings.address):
        raise FailedPrecondition(
            f"{settings.address} is reachable from other machines without TLS, which exposes keys and tokens: use "
            "--tls-certificate and --tls-key, or --host 127.0.0.1, or --insecure behind a proxy with TLS"
        )


def is_loopback(address: Address) -> bool:
    """Return whether only this machine can connect."""
    try:
        return bool(address.path) or ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


class ReservedPorts:
    """Ports reserved until the servers listen on them; the kernel may have chosen them."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._reserved: list[socket.socket] = []
        self._addresses: set[Address] = set()
        self.address = self._reserve(settings.address)
        """The gateway's own address."""
        self.callback: Address | None = None
        """The second address, for services; None if the first is enough."""
        address = self.address
        if settings.tls is None and (address.host in _ALL_INTERFACES or is_loopback(address)) and not address.path:
            host = _LOOPBACK if address.host in (*_ALL_INTERFACES, "localhost") else address.host
            self.callback_url = f"http://{Address(host, address.port)}"
            return
        self.callback = self._reserve_callback(settings.data_dir / _CALLBACK_PORT_FILE)
        self.callback_url = f"http://{self.callback}"

    def is_reserved(self, address: Address) -> bool:
        """Return whether a reserved socket is on the address, so the server has to share the port."""
        return address in self._addresses

    def release(self) -> None:
        """Close the reserved sockets: the servers listen."""
        for reserved in self._reserved:
            reserved.close()
        self._reserved.clear()

    def _reserve(self, address: Address) -> Address:
        if address.path or address.port:
            return address
        return self._add(*reserve_port(address))

    def _add(self, address: Address, sock: socket.socket) -> Address:
        self._reserved.append(sock)
        self._addresses.add(address)
        return address

    def _reserve_callback(self, file: Path) -> Address:
        saved_port = 0
        with contextlib.suppress(OSError, ValueError):
            saved_port = int(file.read_text())
        try:
            address = self._add(*reserve_port(Address(_LOOPBACK, saved_port if 0 < saved_port < 65536 else 0)))
        except FailedPrecondition:
            address = self._add(*reserve_port(Address(_LOOPBACK, 0)))
        file.write_text(f"{address.port}\n")
        return address


class GatewayState(NamedTuple):
    """The job service and the users of one data directory."""

    jobs: JobService
    access: Access


@asynccontextmanager
async def open_gateway(
    settings: JobSettings, token_key: Path | None = None, driver: Driver | None = None
) -> AsyncIterator[GatewayState]:
    """Open the job service and the users; close both and the driver at the end. Services keep running."""
    make_data_dir(settings.data_dir)
    jobs = await JobService.open(settings, driver)
    try:
        access = open_access(settings.data_dir, jobs.store.users, key_file=token_key)
        try:
            yield GatewayState(jobs, access)
        finally:
            access.close()
    finally:
        await jobs.close()


def make_data_dir(folder: Path) -> None:
    """Create the folder, readable by its owner only; leave an existing one unchanged."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FailedPrecondition(
            f"--data-dir {folder} cannot be used: {error.strerror}; use a folder that this user may write"
        ) from None


class GatewayMetrics:
    """Metrics of the gateway, and `GET /metrics`. Requests are counted by the access log."""

    def __init__(self, clock: Clock, *, logs: bool) -> None:
        self.registry = Registry(clock)
        self._logs = logs
        self._statuses: dict[int, int] = {}
        self._heads = {exposition: ResponseHead(200, [(CONTENT_TYPE, exposition.value)]) for exposition in Format}
        self.registry.callback(
            "headrace_gateway_requests_total",
            "Responses, by status.",
            lambda: {(str(status),): count for status, count in self._statuses.items()},
            ["status"],
            kind="counter",
        )
        self.reconciled = self.registry.histogram(
            "headrace_gateway_reconcile_seconds", "Time to reconcile records with running processes."
        ).labels()
        self.unreconciled = self.registry.counter(
            "headrace_gateway_reconcile_failures_total", "Failed reconcile rounds."
        ).labels()

    def add_to(self, routes: Routes) -> None:
        """Add the route."""
        routes.add("GET", "/metrics", self.scrape)

    def count(self, peer: str, head: RequestHead, status: int) -> None:
        """Count a response, and log it if the access log is on."""
        self._statuses[status] = self._statuses.get(status, 0) + 1
        if self._logs:
            log_access(peer, head, status)

    def scrape(self, exchange: Exchange) -> None:
        """Send the metrics to Prometheus."""
        exposition = negotiate(exchange.head.get(b"accept"))
        exchange.respond(self._heads[exposition], render(self.registry, exposition))


class ReconcileLoop:
    """Reconciles once at the start and then at intervals, whatever fails."""

    def __init__(self, jobs: JobService, metrics: GatewayMetrics, seconds: float) -> None:
        self._jobs = jobs
        self._metrics = metrics
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop the loop. A running round is cancelled, and the next start repairs it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            started = monotonic()
            try:
                await self._jobs.reconcile()
            except Exception:
                self._metrics.unreconciled.add()
                log.exception("Could not reconcile records; retrying in %g s.", self._seconds)
            self._metrics.reconciled.observe(monotonic() - started)
            await asyncio.sleep(self._seconds)
