# SPDX-License-Identifier: Apache-2.0
"""The gRPC half of a router: puts pools, plans and calls together. The room's docstring says how it is attached."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.core.errors import InvalidArgument
from headrace.core.limits import Limits
from headrace.fleet.router.h2.call import ProxiedCall
from headrace.fleet.router.h2.headers import RequestPlan
from headrace.fleet.router.h2.pool import ConnectionPool
from headrace.fleet.router.h2.settings import GrpcProxySettings
from headrace.fleet.router.retries import RetryBudget
from headrace.net.grpc.services import CallPlan, Services, is_grpc
from headrace.net.site import Site

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.choosing.queueing import WaitingLine
    from headrace.fleet.router.settings import RouterSettings
    from headrace.fleet.router.waking.activator import Activator
    from headrace.net.http.heads import RequestHead
    from headrace.net.http2.connection import Http2Connection
    from headrace.net.http2.stream import Stream

_SWEEP_SECONDS = 1.0
_TURN_SECONDS = 0.01
_CLOSING_TURNS = 100


class GrpcProxy:
    """See the module. Used from the loop's thread only."""

    def __init__(
        self,
        backends: Backends,
        settings: RouterSettings,
        grpc: GrpcProxySettings | None = None,
        *,
        budget: RetryBudget | None = None,
    ) -> None:
        self.backends = backends
        self.budget = budget or RetryBudget(settings.retries)
        self.settings = grpc or GrpcProxySettings()
        self.waking: Activator | None = None
        """See `forwarding.Forwarder.waking`."""
        self.line: WaitingLine | None = None
        """See `forwarding.Forwarder.line`."""
        self.replay_bytes = self.settings.replay_bytes
        self.tries = settings.retries.tries
        self.services = ProxiedServices(self, settings)
        """For `Site(services=...)`."""
        self.loop = asyncio.get_running_loop()
        limits = replace(
            Limits(),
            header_bytes=self.settings.header_bytes,
            stream_window_bytes=self.settings.stream_window_bytes,
            connection_window_bytes=self.settings.connection_window_bytes,
            idle_seconds=settings.timeouts.keep_alive_seconds,
        )
        self.site = Site(limits=limits)
        """What the connections to the backends share."""
        self._router_settings = settings
        self._tls: ssl.SSLContext | None = None
        self.pools: dict[Backend, ConnectionPool] = {}
        for backend in backends.all:
            self._join(backend)
        backends.joined.append(self._join)
        backends.left.append(self._leave)
        self._timer: asyncio.TimerHandle | None = None
        self.site.tick(self.loop.time())

    def start(self) -> None:
        """Begin to sweep, once a second."""
        if self._timer is None:
            self._tick()

    async def close(self) -> None:
        """Close the connections to the backends; calls that are still open end with them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for pool in self.pools.values():
            pool.close()
        for _ in range(_CLOSING_TURNS):
            if not self.site.connections:
                return
            await asyncio.sleep(_TURN_SECONDS)
        for connection in tuple(self.site.connections):
            connection.abort()
        await asyncio.sleep(0)  # connection_lost comes a turn later

    def renew(self, settings: RouterSettings) -> None:
        """Other settings, for calls and backends that come from now on."""
        self._router_settings = settings
        self.tries = settings.retries.tries

    def _join(self, backend: Backend) -> None:
        https = backend.address.scheme == "https"
        if https and self._tls is None:
            self._tls = _context(self._router_settings)
        self.pools[backend] = ConnectionPool(
            backend,
            self.site,
            self.settings,
            connect_seconds=self._router_settings.timeouts.connect_seconds,
            tls=self._tls if https else None,
        )

    def _leave(self, backend: Backend) -> None:
        self.pools.pop(backend).close()

    def _tick(self) -> None:
        now = self.loop.time()
        self.site.tick(now)
        for connection in tuple(self.site.connections):
            connection.sweep(now)
        self._timer = self.loop.call_later(_SWEEP_SECONDS, self._tick)


class ProxiedServices(Services):
    """Methods that the router answers itself, and all others, which it passes on."""

    def __init__(self, proxy: GrpcProxy, settings: RouterSettings) -> None:
        super().__init__()
        self._proxy = proxy
        self._keep_host = settings.keep_host
        self._trust = settings.trust_forwarded

    def open(self, connection: Http2Connection, stream_id: int, head: RequestHead) -> Stream | None:
        """See `Services.open`."""
        plan = head.memo
        if plan.__class__ is RequestPlan:
            return ProxiedCall(connection, stream_id, head, plan, self._proxy)
        if plan.__class__ is CallPlan:
            return super().open(connection, stream_id, head)
        if plan is not None or not is_grpc(head.get(b"content-type") or b""):
            # The memo of a head that is not gRPC's belongs to the routes.
            return None
        if head.path in self._methods:
            return super().open(connection, stream_id, head)
        # A head belongs to one connection, so that its client can be named in it.
        client = _host_of(connection.peer)
        plan = head.memo = RequestPlan(head, client, keep_host=self._keep_host, trust_forwarded=self._trust)
        return ProxiedCall(connection, stream_id, head, plan, self._proxy)


def _host_of(peer: str) -> str:
    """The address without its port, as X-Forwarded-For has it."""
    host = peer.rpartition(":")[0]
    return host.strip("[]") if host else "unknown"


def _context(settings: RouterSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
    except (OSError, ssl.SSLError):
        raise InvalidArgument(
            f"the authorities in {settings.ca_file} cannot be read; give a PEM file of CA certificates"
        ) from None
    context.set_alpn_protocols(["h2"])
    return context
