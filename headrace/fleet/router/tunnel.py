# SPDX-License-Identifier: Apache-2.0
"""A WebSocket through the router: after the backend answers 101, bytes are copied in both directions.

Frames are not parsed. A slow reader at one end slows the other down, and a tunnel that is idle for too long is closed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.fleet.router.upstream import UpstreamConnection
    from headrace.net.http1.exchange import Http1Exchange
    from headrace.net.site import Site


def open_tunnel(
    exchange: Http1Exchange,
    connection: UpstreamConnection,
    head: UpstreamHead,
    rest: bytes,
    idle_seconds: float,
    backend: Backend | None = None,
) -> Tunnel | None:
    """Send 101 to the client and connect the two transports."""
    site = exchange.site
    try:
        upstream = connection.detach()
        client, sent = exchange.take_over()
    except ConnectionResetError:
        exchange.abort()
        return None
    tunnel = Tunnel(site, client, upstream, idle_seconds, backend)
    if site.access_log is not None:
        site.access_log(exchange.peer, exchange.head, 101)
    switching = b"HTTP/1.1 101 Switching Protocols\r\n%bconnection: upgrade\r\nupgrade: websocket\r\n%b\r\n"
    client.write(switching % (site.date_line, head.lines))
    if rest:
        client.write(rest)
    if sent:
        upstream.write(sent)
    return tunnel


class Tunnel:
    """Two connections that are joined. Implements `net.site.Connection`."""

    def __init__(
        self,
        site: Site,
        client: asyncio.Transport,
        upstream: asyncio.Transport,
        idle_seconds: float,
        backend: Backend | None = None,
    ) -> None:
        self.site = site
        self._backend = backend
        if backend is not None:
            backend.tunnels += 1
        self._idle_seconds = idle_seconds
        self.last_activity = site.now
        self._closed_ends = 0
        self._ends = (_End(self, client, upstream), _End(self, upstream, client))
        client.set_protocol(self._ends[0])
        upstream.set_protocol(self._ends[1])
        site.connections.add(self)

    def drain(self) -> None:
        """Do nothing: only the two ends know where a message ends. They have the grace period to close."""

    def sweep(self, now: float) -> None:
        """Enforce the timeouts."""
        if self._closed_ends and now - self.last_activity > self.site.limits.write_idle_seconds:
            self.abort()
        elif now - self.last_activity > self._idle_seconds:
            self.expire()

    def expire(self) -> None:
        """Close both ends after pending writes."""
        for end in self._ends:
            end.transport.close()

    def abort(self) -> None:
        """Close both ends at once."""
        for end in self._ends:
            end.transport.abort()

    @property
    def ended(self) -> bool:
        """Whether both ends have sent EOF."""
        return all(end.ended for end in self._ends)

    def lost(self) -> None:
        """Handle that one end is closed: flush the other end, then close it too."""
        self._closed_ends += 1
        if self._closed_ends == len(self._ends):
            self.site.connections.discard(self)
            if self._backend is not None:
                self._backend.tunnels -= 1
            return
        self.last_activity = self.site.now
        for end in self._ends:
            end.transport.close()


class _End(asyncio.Protocol):
    """One end: what is read here is written to the other end."""

    def __init__(self, tunnel: Tunnel, transport: asyncio.Transport, other: asyncio.Transport) -> None:
        self._tunnel = tunnel
        self.transport = transport
        self._other = other
        self.ended = False
        """Whether this end has sent EOF."""

    def data_received(self, data: bytes) -> None:
        self._tunnel.last_activity = self._tunnel.site.now
        if not self._other.is_closing():
            self._other.write(data)

    def eof_received(self) -> bool:
        self.ended = True
        if self._tunnel.ended:
            return False
        # TLS cannot close one direction only.
        if self.transport.can_write_eof() and self._other.can_write_eof() and not self._other.is_closing():
            self._other.write_eof()
            return True
        return False

    def pause_writing(self) -> None:
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tunnel.lost()
