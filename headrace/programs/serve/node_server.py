# SPDX-License-Identifier: Apache-2.0
"""The inference server on a node other than 0: its ranks, and health routes for probes. Node 0 serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import NotFound
from headrace.core.limits import Limits
from headrace.core.names import is_name
from headrace.core.nodes import NodeSettings
from headrace.engine.engine import EngineSettings
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_EMPTY, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer, drain_servers, run_until_signal
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles
from headrace.programs.serve.settings import ServerSettings

if TYPE_CHECKING:
    from headrace.backends.llm.tensor_parallel.node_pool import NodePool
    from headrace.backends.llm.tensor_parallel.node_worker import NodeWorker

log = logging.getLogger("headrace.apps")

_NOT_READY = ResponseHead(503)


def open_pool(settings: NodeSettings) -> NodePool | None:
    """Return the group that the other nodes join; None for a server on one node. Raises FailedPrecondition."""
    if settings.count == 1:
        return None
    from headrace.backends.llm.tensor_parallel.node_pool import NodePool

    return NodePool(settings)


@dataclass(frozen=True, slots=True)
class HttpPort:
    """Address of a node's health routes."""

    address: Address
    tls: TlsFiles | None
    limits: Limits


class NodeServer:
    """The program of a node other than 0."""

    def __init__(
        self,
        nodes: NodeSettings,
        find_folder: Callable[[str], Path],
        *,
        http: HttpPort | None = None,
        grace_seconds: float,
    ) -> None:
        """`find_folder` returns this node's folder of a model. `http`: where health routes are."""
        self._nodes = nodes
        self._find_folder = find_folder
        self._http = http
        self._grace_seconds = grace_seconds

    @classmethod
    def of(cls, settings: ServerSettings) -> NodeServer:
        """Return the program for the settings of a server."""
        http = HttpPort(settings.http, settings.listening.tls, settings.limits) if settings.http is not None else None
        find = partial(find_folder, settings.engine)
        return cls(settings.nodes, find, http=http, grace_seconds=settings.grace_seconds)

    async def run(self) -> int:
        """Join node 0 and follow it, until a signal; return the exit code. Raises HeadraceError.

        After the signal, ranks go on for requests in flight until node 0 has ended, or the grace period.
        """
        from headrace.backends.llm.tensor_parallel.node_worker import NodeWorker

        worker = NodeWorker(self._nodes, self._find_folder)
        servers = []
        if self._http is not None:
            site = Site(health_routes(worker), limits=self._http.limits)
            protocol = partial(NegotiatingProtocol, site)
            servers.append(HttpServer(site, self._http.address, protocol, tls=self._http.tls))
        for server in servers:
            await server.start()
        working = asyncio.create_task(asyncio.to_thread(worker.run))
        serving = asyncio.create_task(run_until_signal(servers, self._grace_seconds, on_signal=worker.drain))
        try:
            await asyncio.wait((working, serving), return_when=asyncio.FIRST_COMPLETED)
            if working.done() and working.exception() is not None:
                serving.cancel()
                await drain_servers(servers, 0)
                await working
            code = await serving
            await asyncio.wait((working,), timeout=self._grace_seconds)
            return code
        finally:
            worker.stop()
            await asyncio.gather(working, serving, return_exceptions=True)


def find_folder(settings: EngineSettings, name: str) -> Path:
    """Return this node's folder of a model, with the newest files. Raises a HeadraceError."""
    repository = settings.repository
    if repository.refresh is not None:
        repository.refresh()
    for place in settings.repositories:
        folder = Path(place) / name
        if is_name(name) and folder.is_dir():
            return folder.absolute()
    raise NotFound(f"there is no model '{name[:64]}' here: start the server with the models of node 0")


def health_routes(worker: NodeWorker) -> Routes:
    """Return the health routes of a node. It is ready once it has joined node 0, and its ranks have joined their group."""
    routes = Routes()
    routes.add("GET", "/v2/health/live", _live, scope=None)
    routes.add("GET", "/v2/health/ready", partial(_ready, worker), scope=None)
    return routes


def _live(exchange: Exchange) -> None:
    exchange.respond(OK_EMPTY)


def _ready(worker: NodeWorker, exchange: Exchange) -> None:
    exchange.respond(OK_EMPTY if worker.is_ready else _NOT_READY)
