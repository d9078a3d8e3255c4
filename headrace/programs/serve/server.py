# SPDX-License-Identifier: Apache-2.0
"""The inference server: puts the engine behind every protocol and the protocols on their ports.

Called by `headrace serve`. One event loop per process; `--workers` starts several that share the ports.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from functools import partial

import uvloop

from headrace.core.errors import HeadraceError
from headrace.core.exit_codes import BAD_CONFIGURATION
from headrace.core.telemetry.progress import silent
from headrace.core.telemetry.tracing import NO_TRACING, open_tracing
from headrace.engine.engine import Engine, open_engine
from headrace.net.server import drain_servers, run_until_signal
from headrace.programs.serve.heartbeats import Heartbeats, Watchdog
from headrace.programs.serve.memory import MemoryReturner
from headrace.programs.serve.ports import Ports, held_ports, tell_who_can_connect
from headrace.programs.serve.protocols import Protocols, build_protocols, build_site
from headrace.programs.serve.settings import ListenSettings, ServerSettings
from headrace.programs.serve.siblings import worker_folder
from headrace.programs.serve.splits_file import SplitsFile
from headrace.programs.serve.supervisor import run_processes
from headrace.programs.serve.worker import Worker

__all__ = ["ListenSettings", "ServerSettings", "build_site", "run_server"]

log = logging.getLogger("headrace.apps")


def run_server(settings: ServerSettings) -> int:
    """Serve until a signal; returns the exit code."""
    if settings.workers == 1:
        return _run_process(settings, "", None, 0)
    beats = Heartbeats(settings.workers)
    watchdog = Watchdog(beats, settings.worker_timeout_seconds) if settings.worker_timeout_seconds else None
    with held_ports(settings) as held, worker_folder() as folder:
        return run_processes(settings.workers, partial(_run_process, held, folder, beats), watchdog)


def _run_process(settings: ServerSettings, folder: str, beats: Heartbeats | None, index: int) -> int:
    try:
        return uvloop.run(_Serving(settings, folder, beats, index).run())
    except HeadraceError as error:
        log.error("%s", error.message)
        return BAD_CONFIGURATION


class _Serving:
    """One process, from its settings to its exit code."""

    def __init__(self, settings: ServerSettings, folder: str, beats: Heartbeats | None, index: int) -> None:
        self._settings = settings
        self._folder = folder
        self._beats = beats
        self._index = index
        self._ends: float | None = None

    async def run(self) -> int:
        """Open the ports, load the models, serve until a signal, drain."""
        settings = self._settings
        if self._beats is not None:
            self._beats.keep_beating(self._index)
        engine = open_engine(settings.engine, settings.progress if self._index == 0 else silent)
        worker = Worker(self._folder, self._index, settings.workers, engine.plane) if self._folder else None
        tracer = open_tracing(settings.trace_endpoint, "headrace") if settings.trace_endpoint else NO_TRACING
        protocols = build_protocols(engine, settings, tracer, worker, self._folder)
        following = SplitsFile(settings, protocols.traffic)
        protocols.start()
        memory = MemoryReturner()
        ports = Ports(settings, protocols.site, protocols.metrics_site)
        # Ports first: who asks is told that models are loading, and for how long a load takes is anyone's guess. But one
        # worker among others that serve comes to the ports when it can serve too.
        late = worker is not None and await worker.start()
        if not late:
            await self._open(ports)
        loading = asyncio.create_task(self._load(engine, protocols, worker, ports if late else None))
        memory.start()
        following.start()
        stop = partial(self._stop_being_ready, engine, protocols)
        serving = asyncio.create_task(run_until_signal(ports.servers, settings.grace_seconds, on_signal=stop))
        try:
            await asyncio.wait((loading, serving), return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and loading.exception() is not None:
                stop()
                serving.cancel()
                await drain_servers(ports.servers, 0)
                await loading
            return await serving
        finally:
            memory.close()
            following.close()
            loading.cancel()
            await asyncio.gather(loading, serving, return_exceptions=True)
            if worker is not None:
                await worker.close()
            protocols.traffic.close()
            # What the connections have left of the grace; there is one for all of it.
            await engine.close(self._grace_left())
            await protocols.close()
            tracer.close()

    async def _open(self, ports: Ports) -> None:
        await ports.open()
        if self._index == 0:
            needs_keys = self._settings.access.keys_file is not None
            tell_who_can_connect([server.address for server in ports.servers], needs_keys=needs_keys)

    async def _load(self, engine: Engine, protocols: Protocols, worker: Worker | None, ports: Ports | None) -> None:
        await engine.start()
        protocols.traffic.settled()
        if worker is not None:
            await worker.catch_up()
        if ports is not None:
            await self._open(ports)
        # What exists now lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        if self._beats is not None:
            self._beats.serve(self._index)
        names = engine.plane.model_names()
        state = "ready" if engine.plane.ready else "not ready"
        log.info("%s: %d model(s): %s", state, len(names), ", ".join(names), extra={"worker": self._index})

    def _stop_being_ready(self, engine: Engine, protocols: Protocols) -> None:
        self._ends = asyncio.get_running_loop().time() + self._settings.grace_seconds
        engine.plane.accepting = protocols.plane.accepting = False
        protocols.built.drain()

    def _grace_left(self) -> float:
        if self._ends is None:
            return self._settings.grace_seconds
        return max(0.0, self._ends - asyncio.get_running_loop().time())
