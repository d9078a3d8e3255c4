# SPDX-License-Identifier: Apache-2.0
"""The gateway as a program: opens its database, takes up what runs, serves until a signal, and drains.

Called by `headrace gateway`. Services outlive it unless it is told to end them.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from functools import partial

import uvloop

from headrace.core.clock import SystemClock
from headrace.core.errors import HeadraceError
from headrace.core.exit_codes import BAD_CONFIGURATION
from headrace.jobs.api.http import JobsHttp
from headrace.jobs.settings import JobSettings
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import WireServer, run_until_signal
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.console.pages import GATEWAY, Pages
from headrace.programs.gateway.metrics import GatewayMetrics
from headrace.programs.gateway.opening import Opened, make_data_dir, opened
from headrace.programs.gateway.platforms import driver_for, on_platform, warn
from headrace.programs.gateway.ports import HeldPorts, check_safe
from headrace.programs.gateway.reconciling import Reconciling
from headrace.programs.gateway.settings import GatewaySettings

log = logging.getLogger("headrace.gateway")

_SERVICE = "headrace.cli.gateway:service"

OnReady = Callable[[Address, str | None], None]
"""Told where the gateway listens and, at the very first start, the administrator's key."""


def run_gateway(settings: GatewaySettings, on_ready: OnReady | None = None) -> int:
    """Serve until a signal; returns the exit code."""
    try:
        check_safe(settings)
        return uvloop.run(_run(settings, on_ready))
    except HeadraceError as error:
        log.error("%s", error.message)
        return BAD_CONFIGURATION


def job_settings(settings: GatewaySettings, callback_url: str) -> JobSettings:
    """What `jobs` is told."""
    return JobSettings(
        settings.data_dir,
        database_url=settings.database_url,
        key_file=settings.secrets_key,
        callback_url=callback_url,
        checkpoint_folders=settings.checkpoint_folders,
        trust_remote_code=settings.trust_remote_code,
        idle_timeout_minutes=settings.idle_timeout_minutes,
        service_target=_SERVICE,
        service_words=(),
        max_batches=settings.max_batches,
    )


async def _run(settings: GatewaySettings, on_ready: OnReady | None) -> int:
    make_data_dir(settings.data_dir)
    driver = driver_for(settings.platform, settings.data_dir, os.environ)
    ports = HeldPorts(settings)
    try:
        told = on_platform(job_settings(settings, ports.callback_url), settings.platform, os.environ)
        async with opened(told, settings.token_key, driver) as found:
            if driver is not None:
                await warn(driver)
            return await _serve(settings, ports, found, on_ready)
    finally:
        ports.release()


async def _serve(settings: GatewaySettings, ports: HeldPorts, found: Opened, on_ready: OnReady | None) -> int:
    jobs, access = found
    metrics = GatewayMetrics(SystemClock(), logs=settings.access_log)
    http = JobsHttp(jobs, access, metrics.registry, settings.api)
    servers = _servers(settings, ports, http, metrics)
    reconciling = Reconciling(jobs, metrics, settings.reconcile_seconds)
    try:
        http.start()
        await http.warm()
        for server in servers:
            await server.start()
        ports.release()
        reconciling.start()
        # What exists now lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        # Last: a key that is made must be shown.
        admin_key = await access.users.ensure_admin()
        if on_ready is not None:
            on_ready(servers[0].address, admin_key)
        code = await run_until_signal(servers, settings.grace_seconds, on_signal=http.stop_being_ready)
        await reconciling.close()
        if settings.stop_services:
            await jobs.stop_all()
        return code
    finally:
        await reconciling.close()
        await http.close()


def _servers(settings: GatewaySettings, ports: HeldPorts, http: JobsHttp, metrics: GatewayMetrics) -> list[WireServer]:
    routes = Routes()
    http.add_to(routes)
    metrics.add_to(routes)
    if settings.console:
        Pages(GATEWAY).add_to(routes)
    site = Site(routes, limits=settings.limits, access_log=metrics.count)
    made = [
        WireServer(
            site,
            ports.address,
            partial(NegotiatingProtocol, site),
            tls=settings.tls,
            reuse_port=ports.holds(ports.address),
        )
    ]
    if ports.callback is not None:
        made.append(WireServer(site, ports.callback, partial(NegotiatingProtocol, site), reuse_port=True))
    return made
