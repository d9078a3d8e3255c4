# SPDX-License-Identifier: Apache-2.0
"""The router as a program: puts the proxies of `headrace.router` on a port, serves until a signal, and drains.

Called by `headrace router`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import uvloop

from headrace.core.errors import HeadraceError
from headrace.core.exit_codes import BAD_CONFIGURATION
from headrace.core.limits import Limits
from headrace.core.telemetry.access import log_access
from headrace.core.telemetry.tracing import NO_TRACING, open_tracing
from headrace.fleet.router.h2.proxy import GrpcProxy
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.settings import RouterSettings
from headrace.fleet.router.waking.scaler import Scaler
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import WireServer, run_until_signal
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles
from headrace.programs.router_reloading import Reloading

log = logging.getLogger("headrace.apps")


@dataclass(frozen=True, slots=True)
class RouterAppSettings:
    """What `headrace router` can be told."""

    router: RouterSettings
    address: Address
    tls: TlsFiles | None = None
    limits: Limits = field(default_factory=Limits)
    grace_seconds: float = 30.0
    """How long a request in flight may take after SIGTERM."""
    access_log: bool = False
    trace_endpoint: str = ""
    """An OTLP/HTTP collector for the cold starts of what sleeps; "": none."""
    config: str = ""
    """The file that they come from, if any: they are read anew when it changes, and on SIGHUP."""


OnReady = Callable[[RouterProxy, Address], None]


Reread = Callable[[], RouterAppSettings]


def run_router(settings: RouterAppSettings, on_ready: OnReady | None = None, reread: Reread | None = None) -> int:
    """Route until a signal; returns the exit code.

    `on_ready` is called once the port is open, `reread` when the settings may be others.
    """
    try:
        return uvloop.run(_run(settings, on_ready, reread))
    except HeadraceError as error:
        log.error("%s", error.message)
        return BAD_CONFIGURATION


async def _run(settings: RouterAppSettings, on_ready: OnReady | None, reread: Reread | None) -> int:
    tracer = open_tracing(settings.trace_endpoint, "headrace-router") if settings.trace_endpoint else NO_TRACING
    proxy = RouterProxy(settings.router, _scaler(settings.router), tracer, _scaler)
    _tell_of_wakes(proxy)
    grpc = GrpcProxy(proxy.backends, settings.router, budget=proxy.budget)
    grpc.waking = proxy.waking
    grpc.line = proxy.line
    proxy.on_renew.append(grpc.renew)

    def wake_alike(_: RouterSettings) -> None:
        grpc.waking = proxy.waking
        _tell_of_wakes(proxy)

    proxy.on_renew.append(wake_alike)
    site = build_router_site(proxy, grpc, settings)
    server = WireServer(site, settings.address, partial(NegotiatingProtocol, site), tls=settings.tls)
    stop = partial(proxy.stop_being_ready, settings.grace_seconds)
    reloading = Reloading(settings, proxy, reread) if reread is not None else None
    try:
        # Who is up is known before the first request comes.
        await proxy.start()
        grpc.start()
        await server.start()
        # What exists now lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        if on_ready is not None:
            on_ready(proxy, server.address)
        if reloading is not None:
            reloading.start()
        return await run_until_signal([server], settings.grace_seconds, on_signal=stop)
    finally:
        if reloading is not None:
            await reloading.close()
        await grpc.close()
        await proxy.close()
        tracer.close()


def _scaler(settings: RouterSettings) -> Scaler | None:
    if settings.activation is None:
        return None
    if settings.activation.local is not None:
        from headrace.fleet.router.waking.local import LocalScaler

        return LocalScaler(settings.activation.local)
    from headrace.fleet.router.waking.kubernetes import connect

    return connect()


def _tell_of_wakes(proxy: RouterProxy) -> None:
    """The daemon of this machine has a place for them: `headrace describe` shows the last one."""
    waking = proxy.waking
    if waking is None or waking.settings.local is None:
        return
    from headrace.fleet.router.waking.local import LocalScaler

    scaler, first = waking.scaler, waking.settings.targets[0]
    if isinstance(scaler, LocalScaler):
        waking.told.on_woken = lambda wake: scaler.tell(first, wake.seconds())


def build_router_site(proxy: RouterProxy, grpc: GrpcProxy | None, settings: RouterAppSettings) -> Site:
    """Both proxies on one site: any port of it speaks HTTP/1.1, HTTP/2 and gRPC."""
    routes = Routes()
    proxy.add_to(routes)
    return Site(
        routes,
        services=grpc.services if grpc is not None else None,
        limits=settings.limits,
        access_log=log_access if settings.access_log else None,
    )
