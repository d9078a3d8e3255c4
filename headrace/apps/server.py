# SPDX-License-Identifier: Apache-2.0
"""The inference server: puts the engine behind every protocol and the protocols on their ports.

Called by `headrace serve`. One event loop per process; `--processes` starts several that share the ports.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import uvloop

from headrace.api.v2.grpc import V2Grpc
from headrace.api.v2.http import V2Http
from headrace.api.v2.schema import inference_schema
from headrace.apps.supervisor import BAD_CONFIGURATION, run_processes
from headrace.core.errors import HeadraceError
from headrace.core.limits import Limits
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.telemetry.access import log_access
from headrace.telemetry.progress import Progress, silent
from headrace.telemetry.tracing import NO_TRACING, Tracer, open_tracing
from headrace.wire.grpc.health import HealthService
from headrace.wire.grpc.reflection import ReflectionService
from headrace.wire.grpc.services import Services
from headrace.wire.http.routes import Routes
from headrace.wire.negotiation import NegotiatingProtocol
from headrace.wire.server import WireServer, drain_servers, run_until_signal
from headrace.wire.site import Site
from headrace.wire.sockets import Address, reserve_port
from headrace.wire.tls import TlsFiles

log = logging.getLogger("headrace.apps")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What `headrace serve` can be told."""

    http: Address
    """Where HTTP/1.1 and HTTP/2 are spoken."""

    grpc: Address
    """Where gRPC is spoken; HTTP works there too, as gRPC works on the HTTP port."""

    tls: TlsFiles | None = None
    """Certificate and key for both ports; with a client CA, clients must have a certificate too."""

    processes: int = 1
    """Processes that share the ports."""

    grace_seconds: float = 30.0
    """How long a request in flight may take after SIGTERM."""

    access_log: bool = False
    """One log line per request."""

    trace_endpoint: str = ""
    """Send a span per infer request to this OTLP/HTTP collector."""

    limits: Limits = field(default_factory=Limits)

    engine: EngineSettings = field(default_factory=EngineSettings)
    """Which models, and how they are kept."""

    progress: Progress = silent
    """Who looks on while models load."""


def run_server(settings: ServerSettings) -> int:
    """Serve until a signal; returns the exit code."""
    if settings.processes == 1:
        return _run_process(settings, settings.http, settings.grpc, 0)
    http, http_reserved = reserve_port(settings.http)
    with http_reserved:
        grpc, grpc_reserved = reserve_port(settings.grpc)
        with grpc_reserved:
            return run_processes(settings.processes, partial(_run_process, settings, http, grpc))


def _run_process(settings: ServerSettings, http: Address, grpc: Address, index: int) -> int:
    try:
        return uvloop.run(_serve(settings, http, grpc, index))
    except HeadraceError as error:
        log.error("%s", error.message)
        return BAD_CONFIGURATION


async def _serve(settings: ServerSettings, http: Address, grpc: Address, index: int) -> int:
    engine = open_engine(settings.engine, settings.progress if index == 0 else silent)
    plane = engine.plane
    tracer = open_tracing(settings.trace_endpoint, "headrace") if settings.trace_endpoint else NO_TRACING
    site, health = build_site(plane, settings, tracer)
    factory: Callable[[], NegotiatingProtocol] = partial(NegotiatingProtocol, site)
    shared = settings.processes > 1
    servers = [WireServer(site, address, factory, tls=settings.tls, reuse_port=shared) for address in (http, grpc)]
    # Ports first: who asks is told that models are loading, and for how long a load takes is anyone's guess.
    for server in servers:
        await server.start()

    loop = asyncio.get_running_loop()
    ends: float | None = None

    def stop_being_ready() -> None:
        nonlocal ends
        ends = loop.time() + settings.grace_seconds
        plane.accepting = False
        health.shut_down()

    loading = asyncio.create_task(_load(engine, index))
    serving = asyncio.create_task(run_until_signal(servers, settings.grace_seconds, on_signal=stop_being_ready))
    try:
        await asyncio.wait((loading, serving), return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is not None:
            stop_being_ready()
            serving.cancel()
            await drain_servers(servers, 0)
            await loading
        return await serving
    finally:
        loading.cancel()
        await asyncio.gather(loading, serving, return_exceptions=True)
        # What the connections have left of the grace; there is one for all of it.
        await engine.close(settings.grace_seconds if ends is None else max(0.0, ends - loop.time()))
        tracer.close()


async def _load(engine: Engine, index: int) -> None:
    await engine.start()
    # What exists now lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    names = engine.plane.model_names()
    state = "ready" if engine.plane.ready else "not ready"
    log.info("%s: %d model(s): %s", state, len(names), ", ".join(names), extra={"worker": index})


def build_site(plane: DataPlane, settings: ServerSettings, tracer: Tracer = NO_TRACING) -> tuple[Site, HealthService]:
    """Every protocol over one data plane."""
    routes = Routes()
    V2Http(plane, tracer).add_to(routes)
    services = Services()
    V2Grpc(plane, tracer).add_to(services)
    health = HealthService()
    health.add_to(services)
    ReflectionService(services, [inference_schema()]).add_to(services)
    for name in services.names:
        health.set(name, True)
    site = Site(
        routes, services=services, limits=settings.limits, access_log=log_access if settings.access_log else None
    )
    return site, health
