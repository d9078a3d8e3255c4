# SPDX-License-Identifier: Apache-2.0
"""A WebSocket through the router: once the backend has said 101, bytes go both ways as they come.

Opened by `flows`. Reads no frames: what the two say to each other is theirs. A slow reader at one end slows the
other down, and a silence that is too long ends it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.fleet.router.answers import AnswerHead
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.upstream import Upstream
    from headrace.net.http1.exchange import Http1Exchange
    from headrace.net.site import Site


def open_tunnel(
    exchange: Http1Exchange,
    connection: Upstream,
    head: AnswerHead,
    rest: bytes,
    idle_seconds: float,
    backend: Backend | None = None,
) -> Tunnel | None:
    """Tell the client that the protocol is switched, and join the two connections."""
    site = exchange.site
    try:
        above = connection.detach()
        below, sent = exchange.take_over()
    except ConnectionResetError:
        exchange.abort()
        return None
    tunnel = Tunnel(site, below, above, idle_seconds, backend)
    if site.access_log is not None:
        site.access_log(exchange.peer, exchange.head, 101)
    switching = b"HTTP/1.1 101 Switching Protocols\r\n%bconnection: upgrade\r\nupgrade: websocket\r\n%b\r\n"
    below.write(switching % (site.date_line, head.lines))
    if rest:
        below.write(rest)
    if sent:
        above.write(sent)
    return tunnel


class Tunnel:
    """Two connections that are one. See `wire.site.Connection`."""

    def __init__(
        self,
        site: Site,
        below: asyncio.Transport,
        above: asyncio.Transport,
        idle_seconds: float,
        backend: Backend | None = None,
    ) -> None:
        self.site = site
        self._backend = backend
        if backend is not None:
            backend.tunnels += 1
        self._idle_seconds = idle_seconds
        self.since = site.now
        self._gone = 0
        self._ends = (_End(self, below, above), _End(self, above, below))
        below.set_protocol(self._ends[0])
        above.set_protocol(self._ends[1])
        site.connections.add(self)

    def drain(self) -> None:
        """See `wire.site.Connection`. Who knows where a message ends are the two; they have the grace to say goodbye."""

    def sweep(self, now: float) -> None:
        """See `wire.site.Connection`."""
        if self._gone and now - self.since > self.site.limits.write_idle_seconds:
            self.abort()
        elif now - self.since > self._idle_seconds:
            self.expire()

    def expire(self) -> None:
        """See `wire.site.Connection`."""
        for end in self._ends:
            end.transport.close()

    def abort(self) -> None:
        """See `wire.site.Connection`."""
        for end in self._ends:
            end.transport.abort()

    @property
    def ended(self) -> bool:
        """Whether both have said all they had to say."""
        return all(end.ended for end in self._ends)

    def lost(self) -> None:
        """One end is gone: the other gets what is on its way, and then goes too."""
        self._gone += 1
        if self._gone == len(self._ends):
            self.site.connections.discard(self)
            if self._backend is not None:
                self._backend.tunnels -= 1
            return
        self.since = self.site.now
        for end in self._ends:
            end.transport.close()


class _End(asyncio.Protocol):
    """One of the two: what is read here is written there."""

    def __init__(self, tunnel: Tunnel, transport: asyncio.Transport, other: asyncio.Transport) -> None:
        self._tunnel = tunnel
        self.transport = transport
        self._other = other
        self.ended = False
        """Nothing more will be read here."""

    def data_received(self, data: bytes) -> None:
        self._tunnel.since = self._tunnel.site.now
        if not self._other.is_closing():
            self._other.write(data)

    def eof_received(self) -> bool:
        self.ended = True
        if self._tunnel.ended:
            return False
        # TLS cannot say goodbye one way only.
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
