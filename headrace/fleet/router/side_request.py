# SPDX-License-Identifier: Apache-2.0
"""A request of the router's own to a backend, on behalf of a client's request, whose short response the router reads.

Prefill requests and requests for the tokens of a prompt are made of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.requests import JOIN_BYTES

if TYPE_CHECKING:
    from headrace.fleet.router.proxied_request import Forwarder
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.fleet.router.upstream import UpstreamConnection
    from headrace.net.http.heads import Buffer


class SideRequest:
    """Sends one request and collects its response.

    Implements `upstream.UpstreamHandler` and `upstream.ConnectionWaiter`. Ends with one call of `_received` or `_failed`.
    """

    fast_path = True
    sending = False
    is_head = False
    upgrade = False
    max_response_bytes = 1 << 20

    def __init__(self, router: Forwarder, head: bytes, body: Buffer) -> None:
        """`head`: up to the end of its last field's value."""
        self.router = router
        self.backend: Backend | None = None
        self._head = head
        self._body = body
        self._connection: UpstreamConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._new_connection = False
        self._response_head: UpstreamHead | None = None
        self._pieces: list[Buffer] = []

    def send(self, backend: Backend, timeout_seconds: float) -> None:
        """Send the request to this backend."""
        self.backend = backend
        self.router.backends.begin(backend)
        self._timer = asyncio.get_running_loop().call_later(timeout_seconds, self._timed_out)
        pool = self.router.pools[backend]
        connection = pool.send(self, self._first_bytes())
        if connection is None:
            self._new_connection = True
            pool.connect(self)
        else:
            self._send_rest(connection)

    def cancel(self) -> None:
        """Stop: the client has gone."""
        self._end(Outcome.CANCELLED, drop=True)

    # Called by the pool.

    def connected(self, connection: UpstreamConnection) -> bool:
        """Send the request on a new connection."""
        if self.backend is None:
            return False
        connection.start_request(self, self._first_bytes())
        self._send_rest(connection)
        return True

    def connection_failed(self, reason: str) -> None:
        """Give up."""
        self._give_up(reason)

    # Called by the connection.

    def response_received(self, head: UpstreamHead, body: Buffer) -> None:
        """Read the response."""
        self._connection = None
        self._received(head, bytes(body))

    def response_started(self, head: UpstreamHead, length: int) -> None:
        """Keep the head until the body is complete."""
        self._response_head = head

    def response_data(self, data: Buffer) -> bool:
        """Collect the body, up to a limit."""
        self._pieces.append(bytes(data))
        if sum(map(len, self._pieces)) > self.max_response_bytes:
            self._give_up("sent a response that is too long", drop=True)
        return True

    def response_chunk(self, data: bytes, begin: int) -> bool:
        """Collect the body."""
        return self.response_data(data[begin:-2])

    def response_ended(self) -> None:
        """Read the response."""
        self._connection = None
        if self._response_head is not None:
            self._received(self._response_head, b"".join(self._pieces))

    def protocol_switched(self, head: UpstreamHead, rest: bytes) -> None:
        """Fail: 101 is not a valid response."""
        self._give_up("switched protocols without being asked", drop=True)

    def response_failed(self, reason: str, *, unanswered: bool = False, timed_out: bool = False) -> None:
        """Retry on a new connection, or give up."""
        self._connection = None
        backend = self.backend
        if unanswered and not self._new_connection and not timed_out and backend is not None:
            # The backend may have closed the idle connection just as we used it.
            self._new_connection = True
            self.router.pools[backend].connect(self)
            return
        self._give_up(reason)

    def upstream_writable(self) -> None:
        """Do nothing: the body is written at once."""

    # For what is made of it.

    def _received(self, head: UpstreamHead, body: bytes) -> None:
        """Use the response; call `_end` with its outcome."""
        raise NotImplementedError

    def _failed(self, backend: Backend, reason: str, *, late: bool) -> None:
        """Go on without a response."""
        raise NotImplementedError

    def _end(self, outcome: int, *, drop: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        backend, self.backend = self.backend, None
        connection, self._connection = self._connection, None
        if backend is not None:
            self.router.backends.end(backend, outcome, self.router.clock.now)
        if drop and connection is not None:
            connection.cancel()

    # Private.

    def _first_bytes(self) -> bytes:
        if self.backend is None:
            return b""
        head = self._head + self.router.pools[self.backend].head_end
        return b"".join((head, self._body)) if len(self._body) <= JOIN_BYTES else head

    def _send_rest(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        if len(self._body) > JOIN_BYTES:
            connection.write(self._body)

    def _give_up(self, reason: str, *, drop: bool = False, late: bool = False) -> None:
        backend = self.backend
        if backend is None:
            return
        self._end(Outcome.FAILED, drop=drop)
        self._failed(backend, reason, late=late)

    def _timed_out(self) -> None:
        # This counts against its health: otherwise each request would wait as long for a backend that hangs.
        self._give_up("did not answer in time", drop=True, late=True)
