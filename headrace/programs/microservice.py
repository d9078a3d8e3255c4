# SPDX-License-Identifier: Apache-2.0
"""The microservice program: open the port, download and load the model, serve until a signal, then drain.

Called by `headrace microservice`. One process, one event loop, one model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from headrace.core.clock import SystemClock
from headrace.core.errors import BAD_CONFIGURATION, HeadraceError
from headrace.core.telemetry.logs import log_access, log_fatal
from headrace.jobs.microservice.model_loader import fetch_model
from headrace.jobs.microservice.redaction import RedactingFilter
from headrace.jobs.microservice.routes import MicroserviceHttp
from headrace.jobs.microservice.service import Microservice
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer, run_until_signal
from headrace.net.site import Site
from headrace.programs.serve.node_server import NodeServer, open_pool

log = logging.getLogger("headrace.microservice")

_EXIT_SECONDS = 2.0


def run_microservice(settings: MicroserviceSettings) -> int:
    """Serve until a signal; return the exit code."""
    redacting = RedactingFilter(settings.secrets)
    for handler in logging.getLogger().handlers:
        handler.addFilter(redacting)
    try:
        return uvloop.run(_follow(settings) if settings.nodes.rank else _run(settings))
    except HeadraceError as error:
        log_fatal(log, error.message)
        return BAD_CONFIGURATION


def end_process(code: int) -> None:
    """End the process soon: Python would wait for a thread that loads or downloads and cannot be stopped."""
    watchdog = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    watchdog.daemon = True
    watchdog.start()


async def _run(settings: MicroserviceSettings) -> int:
    nodes = open_pool(settings.nodes)
    service = Microservice(settings, SystemClock(), nodes=nodes)
    site = build_site(service)
    server = HttpServer(site, settings.address, partial(NegotiatingProtocol, site))
    await server.start()
    service.port = server.address.port
    log.info("job %s: http://%s/v1/chat/completions", settings.job_id, server.address)
    grace_period = _GracePeriod(settings.grace_seconds, service.drain)
    try:
        _write_pid(settings)
        service.start()
        return await run_until_signal([server], settings.grace_seconds, on_signal=grace_period.start)
    finally:
        await service.close(grace_period.remaining())
        if nodes is not None:
            await asyncio.to_thread(nodes.close)
        if settings.pid_file is not None:
            settings.pid_file.unlink(missing_ok=True)


async def _follow(settings: MicroserviceSettings) -> int:
    """Compute with node 0, which serves."""

    def find(_name: str) -> Path:
        if settings.base_model_path:
            fetch_model(settings.base_model_path, settings)
        # Absolute paths are sent, which are the same on all nodes.
        return fetch_model(settings.model_path, settings)

    await asyncio.to_thread(find, "")  # now, while node 0 fetches its own
    return await NodeServer(settings.nodes, find, grace_seconds=settings.grace_seconds).run()


def build_site(service: Microservice) -> Site:
    """Return the service's routes as a site."""
    routes = Routes()
    MicroserviceHttp(service).add_to(routes)
    settings = service.settings
    return Site(routes, limits=settings.limits, access_log=log_access if settings.access_log else None)


class _GracePeriod:
    """One grace period for the connections and then for the model."""

    def __init__(self, grace_seconds: float, drain: Callable[[], None]) -> None:
        self._grace = grace_seconds
        self._drain = drain
        self._deadline: float | None = None

    def start(self) -> None:
        self._deadline = asyncio.get_running_loop().time() + self._grace
        self._drain()

    def remaining(self) -> float:
        return self._grace if self._deadline is None else max(0.0, self._deadline - asyncio.get_running_loop().time())


def _write_pid(settings: MicroserviceSettings) -> None:
    if settings.pid_file is None:
        return
    try:
        settings.pid_file.write_text(f"{os.getpid()}\n")
    except OSError as error:
        log.warning("Could not write --pid-file %s: %s", settings.pid_file, error.strerror)
