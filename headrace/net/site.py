# SPDX-License-Identifier: Apache-2.0
"""What all connections of one server share: routes, gRPC services, limits, the coarse clock, the open connections.

A program makes a `Site` and gives it to `server.HttpServer`; every connection keeps a reference to its site.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, Protocol

from headrace.core.limits import Limits
from headrace.net.http.heads import RequestHead
from headrace.net.http.routes import Routes

LINGER_SECONDS = 2.0
"""How long a closing connection still reads, so that a TCP reset does not destroy the response in flight."""

_RECEIVE_BYTES = 256 * 1024


class Connection(Protocol):
    """A connection as the server sees it; implemented for HTTP/1.1, HTTP/2 and WebSocket."""

    def drain(self) -> None:
        """Take no new work, finish what was begun, then close. Called once."""

    def sweep(self, now: float) -> None:
        """Close, or answer 408, if a timeout of the limits has passed. Called about once a second."""

    def expire(self) -> None:
        """End at the drain deadline: send the client an error where the protocol has one, and close."""

    def abort(self) -> None:
        """Close at once, whatever is in flight."""


class StreamOpener(Protocol):
    """Opens streams of its own kind for some HTTP/2 requests; `grpc.services.Services` opens gRPC calls."""

    def open(self, connection: Any, stream_id: int, head: RequestHead) -> Any:
        """Return an `http2.stream.Stream` for a new request, or None to leave it to the HTTP routes.

        Not typed more closely: `http2` is above this module.
        """


class Site:
    """Shared by all connections of one server; used from the event loop's thread only."""

    def __init__(
        self,
        routes: Routes | None = None,
        *,
        services: StreamOpener | None = None,
        limits: Limits | None = None,
        access_log: Callable[[str, RequestHead, int], None] | None = None,
    ) -> None:
        self.routes = routes or Routes()
        self.services = services
        self.limits = limits or Limits()
        self.access_log = access_log
        """Called with the peer, the request head and the status after a response was written to the socket."""
        self.connections: set[Connection] = set()
        """Connections add themselves when they open and remove themselves when they are lost."""
        largest = max(self.limits.body_bytes, self.limits.message_bytes)
        self.unfinished = UnfinishedBodies(max(self.limits.unfinished_bytes, 4 * largest))
        self.draining = False
        self.receive_buffer = memoryview(bytearray(_RECEIVE_BYTES))
        """Where the kernel writes. All connections share it: each takes its bytes out before the next one reads."""
        self.now = 0.0
        """The loop's time at the last tick: costs nothing to read and is right to about a second."""
        self.date_line = b""
        """The Date field as an HTTP/1.1 line."""
        self.date_block = b""
        """The Date field as an HTTP/2 literal."""
        self.tick(0.0)

    def tick(self, now: float) -> None:
        """Set the coarse clock. Called by the server before the first connection and then about once a second."""
        self.now = now
        date = formatdate(usegmt=True).encode()
        self.date_line = b"date: %b\r\n" % date
        # "date" is entry 33 of HPACK's static table; the value is a plain literal of 29 bytes.
        self.date_block = b"\x0f\x12%c%b" % (len(date), date)


HOLD_STEP_BYTES = 64 * 1024
"""Bodies are counted in steps of about this size, so that small ones cost nothing."""
TOO_MANY_UNFINISHED = "the server holds too many unfinished requests: send this one again, with fewer at a time"


class BodyHolder(Protocol):
    """Keeps request bodies that have arrived in part."""

    def drop_body(self) -> None:
        """End the request with the largest unfinished body: the client may send it again."""


class UnfinishedBodies:
    """Counts the bytes of unfinished request bodies. Above the limit, the holder with the most drops one.

    Without it, callers that begin many large requests and finish none would fill the memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: dict[BodyHolder, int] = {}
        self.total = 0

    def count(self, holder: BodyHolder, size: int) -> None:
        """Set how many bytes a holder keeps."""
        self.total += size - self._sizes.pop(holder, 0)
        if size:
            self._sizes[holder] = size
        while self.total > self._limit:
            self.drop_largest()

    def drop_largest(self) -> None:
        """Let the holder with the most bytes drop a body."""
        holder = max(self._sizes, key=self._sizes.__getitem__)
        before = self.total
        holder.drop_body()
        if self.total >= before:  # its request is over already
            self.total -= self._sizes.pop(holder, 0)


class WriteStall:
    """Detects a client that stopped reading, from one connection's unsent bytes at each sweep."""

    __slots__ = ("_bytes", "_since")

    def __init__(self) -> None:
        self._bytes = 0
        self._since = 0.0

    def start(self, now: float) -> None:
        """Start the timeout: the socket is full."""
        self._since = now

    def is_stalled(self, transport: asyncio.WriteTransport, now: float, seconds: float) -> bool:
        """Return whether the client has read nothing for `seconds`. More bytes written by us do not count."""
        unsent = transport.get_write_buffer_size()
        if unsent < self._bytes:
            self._since = now
        self._bytes = unsent
        return now - self._since > seconds


class ClosingConnection(Protocol):
    """What `sweep_closing` needs of a connection."""

    def sweep_unread(self, now: float) -> None:
        """Abort if the client has stopped reading."""

    def abort(self) -> None:
        """Close at once."""


def sweep_closing(
    connection: ClosingConnection, transport: asyncio.WriteTransport, closing_at: float, now: float
) -> float:
    """Abort a closing connection at its deadline; return the deadline, which moves while bytes are unsent."""
    if transport.get_write_buffer_size():
        # Responses are still being sent: the usual write timeout applies to them, and the linger begins after it.
        connection.sweep_unread(now)
        return now + LINGER_SECONDS
    if now >= closing_at:
        connection.abort()
    return closing_at


def peer_name(transport: asyncio.BaseTransport | None) -> str:
    """Return the client's `address:port` for logs; `unix` for a UNIX socket, `gone` for a closed one."""
    peer = None if transport is None else transport.get_extra_info("peername")
    if isinstance(peer, tuple) and len(peer) >= 2:
        host = f"[{peer[0]}]" if ":" in peer[0] else peer[0]
        return f"{host}:{peer[1]}"
    return "gone" if transport is None else "unix"
