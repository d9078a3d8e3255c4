# SPDX-License-Identifier: Apache-2.0
"""A request whose body is passed on as it comes: it is too long to be kept, or nobody knows how long it is.

Made by `forwarding`; all but the body goes as in `flows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.fleet.router.flows import Flow, wrong_length

if TYPE_CHECKING:
    from headrace.fleet.router.answers import AnswerHead
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.forwarding import Forwarder
    from headrace.fleet.router.pools import Pool
    from headrace.fleet.router.requests import RequestPlan
    from headrace.fleet.router.upstream import Upstream
    from headrace.net.http.exchange import Buffer, Exchange


class StreamedFlow(Flow):
    """One request whose body is passed on as it comes."""

    def take(self, router: Forwarder, exchange: Exchange, plan: RequestPlan) -> None:
        """This is the request; its body follows."""
        super().take(router, exchange, plan)
        self.sending = True
        self.plain = False
        self._early: list[bytes] = []
        self._ended = False
        self._left = plan.length
        exchange.on_body = self._piece
        exchange.on_body_end = self._body_ended

    @property
    def _repeatable(self) -> bool:
        return False  # what was passed on is gone

    def writable(self) -> None:
        """See `customers.Customer`."""
        self._exchange.resume_body()

    def early_bytes(self) -> int:
        """See `Flow.early_bytes`."""
        return sum(map(len, self._early))

    def _give(self, backend: Backend, *, fresh: bool = False) -> None:
        # Until there is a connection, the client keeps what it has.
        self._exchange.pause_body()
        super()._give(backend, fresh=fresh)

    def _opening(self, pool: Pool) -> bytes:
        return self._completed(self._plan.streamed, pool)

    def _go_on(self, connection: Upstream) -> None:
        self._connection = connection
        early, self._early = self._early, []
        for piece in early:
            self._send(connection, piece)
        if self._ended:
            self._finish(connection)
        if not connection.write_paused:
            self._exchange.resume_body()

    def _piece(self, data: bytes) -> None:
        connection = self._connection
        if connection is None:
            if self._backend is not None or self.held:
                self._early.append(data)
            return
        self._send(connection, data)
        if connection.write_paused:
            self._exchange.pause_body()

    def _body_ended(self) -> None:
        self._ended = True
        if self._connection is not None:
            self._finish(self._connection)

    def _send(self, connection: Upstream, data: bytes) -> None:
        if self._plan.length < 0:
            connection.write(b"%x\r\n%b\r\n" % (len(data), data))
            return
        self._left -= len(data)
        if self._left < 0:
            self._broken()
        else:
            connection.write(data)

    def _finish(self, connection: Upstream) -> None:
        self.sending, self.plain = False, not self.silent
        if self._plan.length < 0:
            connection.write(b"0\r\n\r\n")
        elif self._left:
            self._broken()

    def _broken(self) -> None:
        """The body is not as long as its head says. The wire sees to that; if it should not, it ends here."""
        exchange = self._exchange
        self._cancelled()
        self._let_go()
        exchange.fail(wrong_length())

    def answered(self, head: AnswerHead, body: Buffer) -> None:
        """See `customers.Customer`."""
        self._let_go()
        super().answered(head, body)

    def _let_go(self) -> None:
        super()._let_go()
        self._exchange.on_body = self._exchange.on_body_end = None
