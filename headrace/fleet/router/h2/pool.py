# SPDX-License-Identifier: Apache-2.0
"""The connections to one backend, and the calls that wait for one.

Owned by `proxy.GrpcProxy`, one for each backend. Calls `take` a connection or `wait`; connections tell it when they have
room again and when they take no more.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from functools import partial
from typing import TYPE_CHECKING

from headrace.fleet.router.h2.connection import UpstreamConnection

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.h2.call import ProxiedCall
    from headrace.fleet.router.h2.settings import GrpcProxySettings
    from headrace.net.site import Site

log = logging.getLogger("headrace.router")


class ConnectionPool:
    """See the module."""

    def __init__(
        self,
        backend: Backend,
        site: Site,
        settings: GrpcProxySettings,
        *,
        connect_seconds: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.backend = backend
        self.waiting: dict[ProxiedCall, None] = {}
        """In the order they came; a dictionary, since any of them may give up."""
        self._site = site
        self._settings = settings
        self._connect_seconds = connect_seconds
        self._tls = tls
        self._ready: list[UpstreamConnection] = []
        self._attempts: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def connections(self) -> int:
        """Connections that take calls."""
        return len(self._ready)

    def take(self) -> UpstreamConnection | None:
        """The connection with the fewest calls, if one has room."""
        best = None
        load = 1 << 30
        for connection in self._ready:
            if connection.load < load and connection.load < connection.most:
                best = connection
                load = connection.load
        if best is not None and load >= self._settings.spread_calls:
            self._grow()
        return best

    def wait(self, call: ProxiedCall) -> bool:
        """Have the call told by `connected` or `unreached`, later; False if too many wait already."""
        if self._closed or len(self.waiting) >= self._settings.waiting_calls:
            return False
        self.waiting[call] = None
        self._grow()
        return True

    def serve_waiting(self, connection: UpstreamConnection) -> None:
        """The connection has room: give it those who wait, the first first."""
        waiting = self.waiting
        while waiting and connection.load < connection.most and not connection.retired:
            call = next(iter(waiting))
            del waiting[call]
            call.connected(connection)

    def leave(self, call: ProxiedCall) -> None:
        """The call waits no longer."""
        self.waiting.pop(call, None)

    def lost(self, connection: UpstreamConnection) -> None:
        """The connection takes no more calls."""
        if connection in self._ready:
            self._ready.remove(connection)
            if self.waiting:
                self._grow()

    def close(self) -> None:
        """Close everything."""
        self._closed = True
        for attempt in self._attempts:
            attempt.cancel()
        for connection in list(self._ready):
            connection.close()
        self._refuse_waiting("the router is shutting down")

    def _grow(self) -> None:
        """Begin to connect, unless there are enough connections or one is being made already."""
        if not self._attempts and len(self._ready) < self._settings.connections and not self._closed:
            attempt = asyncio.get_running_loop().create_task(self._connect())
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)

    async def _connect(self) -> None:
        address = self.backend.address
        protocol: UpstreamConnection | None = None
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, protocol = await asyncio.get_running_loop().create_connection(
                    partial(UpstreamConnection, self._site, self),
                    address.grpc_host,
                    address.grpc_port,
                    ssl=self._tls,
                    server_hostname=address.grpc_host if self._tls is not None else None,
                )
                await protocol.ready
        except (OSError, TimeoutError) as error:
            if protocol is not None:
                protocol.abort()
            self._failed(_reason(error, self._connect_seconds))
            return
        except Exception:
            log.exception("cannot connect for gRPC", extra={"backend": self.backend.name})
            self._failed("it cannot be reached")
            return
        if protocol.retired or self._closed:
            # Left in the same breath as it came.
            protocol.close()
            self._failed("the backend closes its connections")
            return
        self._ready.append(protocol)
        self.serve_waiting(protocol)
        self._attempts.clear()
        if self.waiting:
            self._grow()

    def _failed(self, text: str) -> None:
        log.info("cannot connect for gRPC: %s", text, extra={"backend": self.backend.name})
        self._attempts.clear()
        if not self._ready:
            self._refuse_waiting(text)

    def _refuse_waiting(self, text: str) -> None:
        waiting, self.waiting = self.waiting, {}
        for call in waiting:
            call.unreached(text)


def _reason(error: Exception, seconds: float) -> str:
    """Why there is no connection, in words of ours."""
    if isinstance(error, TimeoutError):
        return f"no connection within {seconds:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is not signed by an authority we know"
    if isinstance(error, ssl.SSLError):
        return "the TLS handshake failed"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    # Raised by `UpstreamConnection`, with a text of ours; all others have the system's, which is for the log.
    return str(error) if type(error) is ConnectionError else "it cannot be reached"
