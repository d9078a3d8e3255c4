# SPDX-License-Identifier: Apache-2.0
"""The microservice as a program: opens its port, then brings and loads its model, serves until a signal, and drains.

Called by `headrace microservice`. One process, one event loop, one model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from functools import partial

import uvloop

from headrace.core.clock import SystemClock
from headrace.core.errors import HeadraceError
from headrace.core.exit_codes import BAD_CONFIGURATION
from headrace.core.telemetry.access import log_access
from headrace.jobs.microservice.routes import MicroserviceHttp
from headrace.jobs.microservice.secrets import HidingFilter
from headrace.jobs.microservice.service import Microservice
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import WireServer, run_until_signal
from headrace.net.site import Site

log = logging.getLogger("headrace.microservice")

_LAST_SECONDS = 2.0


def run_microservice(settings: MicroserviceSettings) -> int:
    """Serve until a signal; returns the exit code."""
    hiding = HidingFilter(settings.secrets)
    for handler in logging.getLogger().handlers:
        handler.addFilter(hiding)
    try:
        return uvloop.run(_run(settings))
    except HeadraceError as error:
        log.error("%s", error.message)
        return BAD_CONFIGURATION


def end_process(code: int) -> None:
    """See to it that the process ends now: Python would wait for the thread of a load or a fetch that nobody can stop."""
    watchdog = threading.Timer(_LAST_SECONDS, os._exit, (code,))
    watchdog.daemon = True
    watchdog.start()


async def _run(settings: MicroserviceSettings) -> int:
    service = Microservice(settings, SystemClock())
    site = build_site(service)
    server = WireServer(site, settings.address, partial(NegotiatingProtocol, site))
    await server.start()
    service.port = server.address.port
    log.info("job %s: http://%s/v1/chat/completions", settings.job_id, server.address)
    ends = _Ends(settings.grace_seconds, service.stop_being_ready)
    try:
        _write_pid(settings)
        service.start()
        return await run_until_signal([server], settings.grace_seconds, on_signal=ends.begin)
    finally:
        await service.close(ends.left())
        if settings.pid_file is not None:
            settings.pid_file.unlink(missing_ok=True)


def build_site(service: Microservice) -> Site:
    """The service's routes on a site, for ports and for tests."""
    routes = Routes()
    MicroserviceHttp(service).add_to(routes)
    settings = service.settings
    return Site(routes, limits=settings.limits, access_log=log_access if settings.access_log else None)


class _Ends:
    """One grace for the connections and for the model after them."""

    def __init__(self, grace_seconds: float, stop: Callable[[], None]) -> None:
        self._grace = grace_seconds
        self._stop = stop
        self._at: float | None = None

    def begin(self) -> None:
        self._at = asyncio.get_running_loop().time() + self._grace
        self._stop()

    def left(self) -> float:
        return self._grace if self._at is None else max(0.0, self._at - asyncio.get_running_loop().time())


def _write_pid(settings: MicroserviceSettings) -> None:
    if settings.pid_file is None:
        return
    try:
        settings.pid_file.write_text(f"{os.getpid()}\n")
    except OSError as error:
        log.warning("--pid-file %s cannot be written: %s", settings.pid_file, error.strerror)
