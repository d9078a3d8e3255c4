# SPDX-License-Identifier: Apache-2.0
"""The inference server program: the engine, every protocol and their ports, until a signal."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import ipaddress
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from headrace.core.errors import BAD_CONFIGURATION, FailedPrecondition, HeadraceError
from headrace.core.telemetry.logs import log_fatal
from headrace.core.telemetry.progress import silent
from headrace.core.telemetry.tracing import NO_TRACING, open_tracing
from headrace.engine.engine import Engine, open_engine
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer, drain_servers, run_until_signal
from headrace.net.site import Site
from headrace.net.sockets import Address, reserve_port
from headrace.net.tls import TlsFiles
from headrace.programs.serve.node_server import NodeServer, open_pool
from headrace.programs.serve.protocols import Protocols, build_protocols, build_site
from headrace.programs.serve.settings import ListenSettings, ServerSettings, StartReport
from headrace.programs.serve.split_reload import SplitsFile
from headrace.programs.serve.supervisor import Heartbeats, Watchdog, run_processes
from headrace.programs.serve.worker import Worker
from headrace.programs.serve.worker_channel import worker_folder

if TYPE_CHECKING:
    from headrace.backends.llm.tensor_parallel.node_pool import NodePool

_CHECK_SECONDS = 4.0
_GROWTH_BYTES = 8 << 20
_STATM = Path("/proc/self/statm")


class HeapTrimmer:
    """Returns free heap memory to the system after large requests. Does nothing without glibc."""

    def __init__(
        self,
        trim: Callable[[int], int] | None = None,
        read_size: Callable[[], int] | None = None,
        check_seconds: float = _CHECK_SECONDS,
    ) -> None:
        """`read_size` returns the memory of the process: `resident_bytes`, but for tests."""
        self._trim = trim or getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._read_size = read_size or resident_bytes
        self._check_seconds = check_seconds
        self._baseline = 0
        self._warned = False
        self._timer: asyncio.TimerHandle | None = None
        self._trimming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start watching."""
        if self._trim is not None:
            self._baseline = self._read_size()
            self._schedule()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
        if self._trimming is not None:
            self._trimming.cancel()

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._check_seconds, self._check)

    def _check(self) -> None:
        try:
            has_grown = self._read_size() > self._baseline + _GROWTH_BYTES
        except OSError as error:
            self._warn(error)
            has_grown = False
        if has_grown:
            self._trimming = asyncio.create_task(self._run_trim())
        else:
            self._schedule()

    async def _run_trim(self) -> None:
        try:
            if self._trim is not None:
                # In a thread: it takes milliseconds and releases the GIL.
                await asyncio.to_thread(self._trim, 0)
            self._baseline = self._read_size()
        except (OSError, RuntimeError) as error:  # no free descriptor or thread
            self._warn(error)
        self._schedule()

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "free memory is not returned to the system for now: %s; raise `ulimit -n` and `ulimit -u`", error
            )


def resident_bytes() -> int:
    """Return the resident memory of the process."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


log = logging.getLogger("headrace.apps")


@dataclass(frozen=True, slots=True)
class _Port:
    """A port to open."""

    address: Address
    tls: TlsFiles | None
    reuse: bool
    optional: bool = False


@contextmanager
def reserved_ports(settings: ServerSettings) -> Iterator[ServerSettings]:
    """Reserve the ports for as long as workers may restart; yield settings with the ports that the kernel chose."""
    listening = settings.listening
    with ExitStack() as held:
        http = settings.http and _hold(settings.http, listening.reuse_http, held)
        grpc = settings.grpc and _hold(settings.grpc, listening.reuse_grpc, held)
        metrics = settings.metrics
        if metrics is not None:
            try:
                metrics = _hold(metrics, False, held)
            except FailedPrecondition as error:
                _skip_port(metrics, error, optional=listening.metrics_optional)
                metrics = None
        yield replace(settings, http=http, grpc=grpc, metrics=metrics)


def _hold(address: Address, reuse: bool, held: ExitStack) -> Address:
    if reuse and address.port:
        return address  # Other servers may listen there already, or later.
    address, sock = reserve_port(address)
    held.enter_context(sock)
    return address


class Ports:
    """All servers of one process."""

    def __init__(self, settings: ServerSettings, site: Site, metrics_site: Site | None) -> None:
        listening = settings.listening
        shared = settings.workers > 1
        self._optional: HttpServer | None = None
        self.servers: list[HttpServer] = []
        """In the order in which they open: the metrics port first, because it reports on the others."""
        self._named: dict[str, tuple[HttpServer, str]] = {}
        """The server and the scheme of each port."""
        if settings.metrics is not None and metrics_site is not None:
            port = _Port(settings.metrics, listening.tls, shared, listening.metrics_optional)
            self._add("metrics", metrics_site, port)
        if settings.http is not None:
            self._add("http", site, _Port(settings.http, listening.tls, shared or listening.reuse_http))
        if settings.grpc is not None:
            tls = listening.grpc_tls or listening.tls
            self._add("grpc", site, _Port(settings.grpc, tls, shared or listening.reuse_grpc))

    def _add(self, name: str, site: Site, port: _Port) -> None:
        server = HttpServer(site, port.address, partial(NegotiatingProtocol, site), tls=port.tls, reuse_port=port.reuse)
        self.servers.append(server)
        self._named[name] = server, "http" if port.tls is None else "https"
        if port.optional:
            self._optional = server

    def url(self, name: str) -> str:
        """Return the URL of a port that is open; "" without one."""
        server, scheme = self._named.get(name, (None, ""))
        return f"{scheme}://{server.address}" if server in self.servers and not server.address.path else ""

    def urls(self) -> dict[str, str]:
        """Return the URLs of all open ports, by their names."""
        return {name: url for name in ("http", "grpc", "metrics") if (url := self.url(name))}

    async def open(self) -> None:
        """Listen on all ports."""
        for server in tuple(self.servers):
            try:
                await server.start()
            except FailedPrecondition as error:
                _skip_port(server.address, error, optional=server is self._optional)
                self.servers.remove(server)


def _skip_port(address: Address, error: HeadraceError, *, optional: bool) -> None:
    if not optional:
        raise error
    log.warning(
        "port %d is taken: metrics are only at /metrics of the HTTP port; --metrics-port chooses another",
        address.port,
    )


def log_exposure(addresses: Sequence[Address | None], *, needs_keys: bool) -> None:
    """Log which clients can connect: unlike Triton, Headrace listens on loopback only by default."""
    hosts = [address.host for address in addresses if address is not None and address.host]
    if hosts and all(_is_loopback(host) for host in hosts):
        log.info("only this machine can connect: --http-address 0.0.0.0 and --grpc-address 0.0.0.0 admit others")
    elif hosts and not needs_keys:
        log.warning(
            "other machines can connect without an API key: anyone who can reach this machine can use its models; "
            "--api-keys-file FILE requires keys (headrace keys create), --host 127.0.0.1 refuses other machines"
        )


def only_this_machine(addresses: Iterable[Address | None]) -> bool:
    """Return whether only this machine can connect."""
    return all(address is None or address.path or _is_loopback(address.host) for address in addresses)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


__all__ = ["ListenSettings", "ServerSettings", "build_site", "run_server"]


def run_server(settings: ServerSettings) -> int:
    """Serve until a signal; return the exit code."""
    if settings.nodes.rank:
        return _run(NodeServer.of(settings).run())
    if settings.workers == 1:
        return _run_process(settings, "", None, 0)
    beats = Heartbeats(settings.workers)
    watchdog = Watchdog(beats, settings.worker_timeout_seconds) if settings.worker_timeout_seconds else None
    with reserved_ports(settings) as held, worker_folder() as folder:
        return run_processes(settings.workers, partial(_run_process, held, folder, beats), watchdog)


def _run_process(settings: ServerSettings, folder: str, beats: Heartbeats | None, index: int) -> int:
    return _run(_Serving(settings, folder, beats, index).run())


def _run(program: Coroutine[Any, Any, int]) -> int:
    try:
        return uvloop.run(program)
    except HeadraceError as error:
        log_fatal(log, error.message)
        return BAD_CONFIGURATION


class _Serving:
    """One process, from its settings to its exit code."""

    def __init__(self, settings: ServerSettings, folder: str, beats: Heartbeats | None, index: int) -> None:
        self._settings = settings
        self._folder = folder
        self._beats = beats
        self._index = index
        self._deadline: float | None = None
        self._nodes: NodePool | None = None

    async def run(self) -> int:
        """Open the ports, load the models, serve until a signal, drain."""
        settings = self._settings
        if self._beats is not None:
            self._beats.keep_beating(self._index)
        self._nodes = open_pool(settings.nodes)
        try:
            return await self._serve(replace(settings, engine=replace(settings.engine, nodes=self._nodes)))
        finally:
            if self._nodes is not None:
                await asyncio.to_thread(self._nodes.close)

    async def _serve(self, settings: ServerSettings) -> int:
        engine = open_engine(settings.engine, settings.progress if self._index == 0 else silent)
        worker = Worker(self._folder, self._index, settings.workers, engine.plane) if self._folder else None
        tracer = open_tracing(settings.trace_endpoint, "headrace") if settings.trace_endpoint else NO_TRACING
        protocols = build_protocols(engine, settings, tracer, worker, self._folder)
        splits_file = SplitsFile(settings, protocols.traffic)
        memory = HeapTrimmer()
        ports = Ports(settings, protocols.site, protocols.metrics_site)
        protocols.start(ports.urls)
        # Ports first, so that clients see that models are loading, which may take long. But while other workers serve, this
        # one opens its ports only when it can serve, too.
        late = worker is not None and await worker.start()
        if not late:
            await self._open(ports)
        loading = asyncio.create_task(self._load(engine, protocols, worker, ports, late=late))
        memory.start()
        splits_file.start()
        stop = partial(self._drain, engine, protocols)
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
            splits_file.close()
            loading.cancel()
            await asyncio.gather(loading, serving, return_exceptions=True)
            if worker is not None:
                await worker.close()
            protocols.traffic.close()
            if protocols.batches is not None:
                await protocols.batches.close()
            # One grace period for connections and engine.
            await engine.close(self._grace_left())
            await protocols.close()
            tracer.close()

    async def _open(self, ports: Ports) -> None:
        await ports.open()
        if self._index == 0:
            needs_keys = self._settings.access.keys_file is not None
            log_exposure([server.address for server in ports.servers], needs_keys=needs_keys)

    async def _load(
        self, engine: Engine, protocols: Protocols, worker: Worker | None, ports: Ports, *, late: bool
    ) -> None:
        await engine.start()
        protocols.traffic.settled()
        if worker is not None:
            await worker.catch_up()
        if late:
            await self._open(ports)
        # These objects live as long as the process: the garbage collector need not visit them.
        gc.collect()
        gc.freeze()
        if self._beats is not None:
            self._beats.serve(self._index)
        names = engine.plane.model_names()
        state = "ready" if engine.plane.ready else "not ready"
        log.info("%s: %d model(s): %s", state, len(names), ", ".join(names), extra={"worker": self._index})
        if waiting := len(engine.plane.known_names()) - len(names):
            log.info("%d more model(s) load at the first request that names them", waiting)
        if self._settings.on_start is not None and self._index == 0:
            self._settings.on_start(await self._start_report(engine, ports))

    async def _start_report(self, engine: Engine, ports: Ports) -> StartReport:
        settings = self._settings
        http, metrics = ports.url("http"), ports.url("metrics")
        has_console = settings.allow_console and not settings.v2.http_restrictions
        entries = await engine.plane.index()
        ready = tuple(engine.plane.model_names())
        return StartReport(
            http=http,
            grpc=ports.url("grpc").partition("://")[2],
            metrics=f"{metrics or http}/metrics" if settings.metrics_settings and (metrics or http) else "",
            console=f"{http}/console" if http and has_console else "",
            documentation=f"{http}/docs" if http else "",
            ready=ready,
            failed={
                entry.name: entry.reason
                for entry in entries
                if entry.reason and entry.name not in ready and not engine.plane.is_ready(entry.name)
            },
        )

    def _drain(self, engine: Engine, protocols: Protocols) -> None:
        self._deadline = asyncio.get_running_loop().time() + self._settings.grace_seconds
        engine.plane.accepting = protocols.plane.accepting = False
        protocols.drain()
        if self._nodes is not None:
            self._nodes.stop_waiting()

    def _grace_left(self) -> float:
        if self._deadline is None:
            return self._settings.grace_seconds
        return max(0.0, self._deadline - asyncio.get_running_loop().time())
