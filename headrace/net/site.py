# SPDX-License-Identifier: Apache-2.0
"""What the connections of one server share: the routes, the services, the limits, and who is connected.

Made by a composition root, handed to `server.WireServer`; every connection protocol keeps a reference to its site.
"""

from __future__ import annotations

from email.utils import formatdate
from typing import TYPE_CHECKING, Protocol

from headrace.core.limits import Limits
from headrace.net.http.routes import Routes

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.net.grpc.services import Services
    from headrace.net.http.heads import RequestHead


_RECEIVE_BYTES = 256 * 1024


class Connection(Protocol):
    """A connection as the server sees it. `http1`, `http2` and `websocket` protocols are such."""

    def drain(self) -> None:
        """Take no new work, finish what was begun, then close. Called once."""

    def sweep(self, now: float) -> None:
        """Close, or answer 408, if a time-out of the limits has passed. Called about once a second."""

    def expire(self) -> None:
        """The time to drain is over: tell the client so where the protocol has words for it, and close."""

    def abort(self) -> None:
        """Close at once, whatever is in flight."""


class Site:
    """Shared by all connections of one server; used from the loop's thread only."""

    def __init__(
        self,
        routes: Routes | None = None,
        *,
        services: Services | None = None,
        limits: Limits | None = None,
        access_log: Callable[[str, RequestHead, int], None] | None = None,
    ) -> None:
        self.routes = routes or Routes()
        self.services = services
        self.limits = limits or Limits()
        self.access_log = access_log
        """Called with the peer, the request head and the status when a response has been handed to the socket."""
        self.connections: set[Connection] = set()
        """Connections add themselves when made and remove themselves when lost."""
        self.draining = False
        self.receive_buffer = memoryview(bytearray(_RECEIVE_BYTES))
        """Where the kernel writes: one for all connections, since each takes its bytes out before the next one reads."""
        self.now = 0.0
        """The loop's time at the last tick: a clock that costs nothing to read, right to about a second."""
        self.date_line = b""
        """The Date field as an HTTP/1.1 line."""
        self.date_block = b""
        """The Date field as an HTTP/2 literal."""
        self.tick(0.0)

    def tick(self, now: float) -> None:
        """Set the coarse clock. Called by the server before connections come and then about once a second."""
        self.now = now
        date = formatdate(usegmt=True).encode()
        self.date_line = b"date: %b\r\n" % date
        # "date" is entry 33 of HPACK's static table; the value is a plain literal of 29 bytes.
        self.date_block = b"\x0f\x12%c%b" % (len(date), date)
