# SPDX-License-Identifier: Apache-2.0
"""The program `headrace router`: serve the proxies on one port, reload settings, and drain on a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvloop

from headrace.core.errors import BAD_CONFIGURATION, HeadraceError
from headrace.core.limits import Limits
from headrace.core.telemetry.logs import log_access, log_fatal
from headrace.core.telemetry.tracing import NO_TRACING, open_tracing
from headrace.fleet.router.discovery import file_changes, file_signature
from headrace.fleet.router.endpoint_picker import EndpointPicker
from headrace.fleet.router.fairness import FindTenant
from headrace.fleet.router.grpc.proxy import GrpcProxy
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.scale_targets import Scaler
from headrace.fleet.router.settings import RouterSettings
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer, run_until_signal
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles

log = logging.getLogger("headrace.apps")

_FIXED = ("address", "tls", "limits", "grace_seconds", "access_log", "trace_endpoint")
"""Settings that need a restart."""


@dataclass(frozen=True, slots=True)
class RouterAppSettings:
    """Settings of `headrace router`."""

    router: RouterSettings
    address: Address
    tls: TlsFiles | None = None
    limits: Limits = field(default_factory=Limits)
    grace_seconds: float = 30.0
    """How long open requests may take after SIGTERM."""
    access_log: bool = False
    trace_endpoint: str = ""
    """OTLP/HTTP collector for the traces of cold starts; "": none."""
    config: str = ""
    """The configuration file, if any. Settings are read again when it changes, and on SIGHUP."""
    config_version: str = ""
    """Version of the file's content. The status repeats it, so that the author knows when it is in use."""
    config_map: str = ""
    """Namespace and name of the ConfigMap that the file is mounted from. It is watched, since a mount is a minute late."""


OnReady = Callable[[RouterProxy, Address], None]
ReadSettings = Callable[[str | None], RouterAppSettings]
"""Reads the settings from the content of a ConfigMap, or from the file if there is none."""


def run_router(
    settings: RouterAppSettings, on_ready: OnReady | None = None, read_settings: ReadSettings | None = None
) -> int:
    """Run the router until a signal; returns the exit code.

    on_ready: called once the port is open. read_settings: called when the settings may have changed.
    """
    try:
        return uvloop.run(_run(settings, on_ready, read_settings))
    except HeadraceError as error:
        log_fatal(log, error.message)
        return BAD_CONFIGURATION


async def _run(settings: RouterAppSettings, on_ready: OnReady | None, read_settings: ReadSettings | None) -> int:
    tracer = open_tracing(settings.trace_endpoint, "headrace-router") if settings.trace_endpoint else NO_TRACING
    find_tenant = _find_tenant(settings.router)
    proxy = RouterProxy(settings.router, make_scaler(settings.router), tracer, make_scaler, find_tenant)
    report_cold_starts(proxy)
    grpc = GrpcProxy(proxy.backends, settings.router, budget=proxy.budget)
    grpc.activator = proxy.activator
    grpc.queue = proxy.queue
    grpc.fairness = proxy.fairness
    proxy.on_update.append(grpc.update_settings)

    def share_activator(_: RouterSettings) -> None:
        grpc.activator = proxy.activator
        report_cold_starts(proxy)

    proxy.on_update.append(share_activator)
    picker = EndpointPicker(proxy) if settings.router.endpoint_picker else None
    if picker is not None:
        picker.add_to(grpc.services)
    site = build_router_site(proxy, grpc, settings)
    server = HttpServer(site, settings.address, partial(NegotiatingProtocol, site), tls=settings.tls)

    def on_signal() -> None:
        proxy.drain(settings.grace_seconds)
        if picker is not None:
            picker.drain()

    reloader = SettingsReloader(settings, proxy, read_settings) if read_settings is not None else None
    try:
        # The state of the backends is known before the first request.
        proxy.set_config_version(settings.config_version)
        await proxy.start()
        grpc.start()
        await server.start()
        # Objects that exist now live as long as the process: the garbage collector need not scan them again.
        gc.collect()
        gc.freeze()
        if on_ready is not None:
            on_ready(proxy, server.address)
        if reloader is not None:
            reloader.start()
        return await run_until_signal([server], settings.grace_seconds, on_signal=on_signal)
    finally:
        if reloader is not None:
            await reloader.close()
        await grpc.close()
        await proxy.close()
        tracer.close()


def make_scaler(settings: RouterSettings) -> Scaler | None:
    """Return the scaler for the activation targets; None without activation."""
    if settings.activation is None:
        return None
    if settings.activation.local is not None:
        from headrace.programs.router_scalers import LocalScaler

        return LocalScaler(settings.activation.local)
    from headrace.programs.router_scalers import connect_kubernetes

    return connect_kubernetes()


def _find_tenant(settings: RouterSettings) -> FindTenant | None:
    """Return the function that finds the tenant of a request by its API key; None if tenants have no keys."""
    if not settings.fairness.keys_file:
        return None
    from headrace.api.access.api_keys import KeyRing

    return KeyRing(Path(settings.fairness.keys_file)).find


def report_cold_starts(proxy: RouterProxy) -> None:
    """Report cold starts to the fleet daemon of this machine: `headrace describe` shows the last one."""
    activator = proxy.activator
    if activator is None or activator.settings.local is None:
        return
    from headrace.programs.router_scalers import LocalScaler

    scaler, target = activator.scaler, activator.settings.targets[0]
    if isinstance(scaler, LocalScaler):
        activator.cold_starts.on_cold_start = lambda cold_start: scaler.report(target, cold_start.seconds())


def build_router_site(proxy: RouterProxy, grpc: GrpcProxy | None, settings: RouterAppSettings) -> Site:
    """Return a site with both proxies: any port of it serves HTTP/1.1, HTTP/2 and gRPC."""
    routes = Routes()
    proxy.add_to(routes)
    return Site(
        routes,
        services=grpc.services if grpc is not None else None,
        limits=settings.limits,
        access_log=log_access if settings.access_log else None,
    )


class SettingsReloader:
    """Reads the settings again when their file changes, and on SIGHUP.

    Invalid settings are logged and the old ones stay; settings that need a restart are logged too.
    """

    def __init__(self, settings: RouterAppSettings, proxy: RouterProxy, read_settings: ReadSettings) -> None:
        self._settings = settings
        self._proxy = proxy
        self._read_settings = read_settings
        self._requested = asyncio.Event()
        self._signature = file_signature(settings.config) if settings.config else None
        self._text: str | None = None
        """The content of the ConfigMap: newer than that of the file, once it is known."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to watch the file, the ConfigMap and SIGHUP."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._requested.set)
        self._tasks = [loop.create_task(self._run())]
        if self._settings.config:
            self._tasks.append(loop.create_task(self._watch()))
        if self._settings.config_map:
            self._tasks.append(loop.create_task(self._follow()))

    async def close(self) -> None:
        """Stop watching."""
        if self._tasks:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        async for _ in file_changes(self._settings.config, known=self._signature):
            if self._text is None:
                self._requested.set()

    async def _follow(self) -> None:
        from headrace.programs.router_config_map import connect_config_map

        namespace, _, name = self._settings.config_map.partition("/")
        try:
            config_map = connect_config_map(namespace, name, os.path.basename(self._settings.config))
        except HeadraceError as error:
            log.warning(
                "Cannot watch ConfigMap %s, only its mounted file: %s", self._settings.config_map, error.message
            )
            return
        try:
            async for text in config_map.contents():
                self._text = text
                self._requested.set()
        finally:
            await config_map.close()

    async def _run(self) -> None:
        while True:
            await self._requested.wait()
            self._requested.clear()
            try:
                await self._reload()
            except HeadraceError as error:
                log.warning("Settings not reloaded, the old ones stay: %s", error.message)
            except Exception:
                log.exception("Settings not reloaded, the old ones stay")

    async def _reload(self) -> None:
        settings = self._read_settings(self._text)
        fixed = [name for name in _FIXED if getattr(settings, name) != getattr(self._settings, name)]
        fixed += await self._proxy.update_settings(settings.router)
        self._proxy.set_config_version(settings.config_version)
        if fixed:
            log.warning("Settings reloaded, but these need a restart of the router: %s", ", ".join(fixed))
        else:
            log.info("Settings reloaded")
