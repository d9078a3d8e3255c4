# SPDX-License-Identifier: Apache-2.0
"""One request on its way: to a backend and back, tried again where that is safe.

Made by `forwarding.Forwarder` for each request, told by `pools` and `upstream` what comes. No coroutine, no timer (`pools`
sweeps), and for a small answer one write each way.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

import orjson

from headrace.core.errors import InvalidArgument, Unavailable
from headrace.router.backends import Backend, Outcome
from headrace.router.requests import JOIN_BYTES, RequestPlan
from headrace.router.tunnel import open_tunnel
from headrace.wire.http.heads import CONTENT_TYPE, JSON, Fields, ResponseHead
from headrace.wire.http1.exchange import Http1Exchange

if TYPE_CHECKING:
    from headrace.router.answers import AnswerHead
    from headrace.router.forwarding import Forwarder
    from headrace.router.upstream import Upstream
    from headrace.wire.http.exchange import Buffer, Exchange

log = logging.getLogger("headrace.router")

_BAD_GATEWAY = ResponseHead(502, [(CONTENT_TYPE, JSON)])
_GATEWAY_TIMEOUT = ResponseHead(504, [(CONTENT_TYPE, JSON)])


class Flow:
    """One request with its body, from the client's exchange to the end of the answer."""

    sending = False
    _tries = 0
    _stale = False
    _tried: tuple[Backend, ...] = ()
    _connection: Upstream | None = None
    _backend: Backend | None = None
    _began = 0.0
    _outcome = Outcome.OK
    held = False
    """Whether it waits for somebody to wake."""
    held_since = 0.0

    def __init__(self, router: Forwarder, exchange: Exchange, plan: RequestPlan) -> None:
        self._router = router
        self._exchange = exchange
        self._plan = plan
        self.silent = plan.silent
        self.upgrade = plan.upgrade

    def start(self) -> None:
        """Take the request to a backend. Nearly always one has a connection to spare: that way is all here, for speed."""
        router, exchange, plan = self._router, self._exchange, self._plan
        backend = router.backends.give()
        if backend is None:
            router.nobody(self, exchange)
            return
        budget = router.budget
        if budget.short:
            budget.earn()
        exchange.on_disconnect = self._cancelled
        self._backend = backend
        self._tries = 1
        self._began = monotonic()
        pool = router.pools[backend]
        connection = pool.take() if pool.idle and not self.upgrade else None
        if connection is None:
            pool.connect(self)
            return
        address = router.addresses.get(exchange.peer)
        if plan.is_short and address is not None:
            self._connection = connection
            connection.begin(self, b"".join((plan.whole, address, connection.tail, exchange.body)))
        else:
            self._transmit(connection)

    # Called by the pool.

    def connected(self, connection: Upstream) -> bool:
        """See `customers.Applicant`."""
        if self._backend is None:
            return False
        self._transmit(connection)
        return True

    def unreachable(self, why: str) -> None:
        """See `customers.Applicant`."""
        if self._backend is not None:
            # Nothing was sent, so nothing can be done twice.
            self._try_again_or(502, why, may=True)

    # Called by the connection.

    def answered(self, head: AnswerHead, body: Buffer) -> None:
        """See `customers.Customer`."""
        backend, router = self._backend, self._router
        if backend is not None and not head.outcome:
            # `_settle`, for the outcome that nearly all have.
            self._connection = self._backend = None
            router.backends.ended_well(backend)
            router.observe[backend](monotonic() - self._began)
        else:
            self._settle(head.outcome)
        exchange = self._exchange
        exchange.on_disconnect = None
        if self.silent or head.status == 304:
            fields: Fields = () if head.told is None else ((b"content-length", head.told),)
            exchange.start(head.head, fields)
            exchange.finish()
        elif head.written and head.length == len(body) and type(exchange) is Http1Exchange:
            exchange.respond_written(head.head, head.written, body)
        else:
            exchange.respond(head.head, body)

    def answer_begun(self, head: AnswerHead, length: int) -> None:
        """See `customers.Customer`."""
        exchange = self._exchange
        if self._connection is not None:
            exchange.on_writable = self._connection.resume
        exchange.start(head.head, ((b"content-length", b"%d" % length),) if length >= 0 else ())
        self._outcome = head.outcome

    def answer_piece(self, data: Buffer) -> bool:
        """See `customers.Customer`."""
        return self._exchange.send(data)

    def answer_ended(self) -> None:
        """See `customers.Customer`."""
        self._settle(self._outcome)
        self._let_go()
        self._exchange.finish()

    def switched(self, head: AnswerHead, rest: bytes) -> None:
        """See `customers.Customer`."""
        connection, exchange, backend = self._connection, self._exchange, self._backend
        self._settle(Outcome.OK)
        self._let_go()
        if connection is None:
            return
        if not isinstance(exchange, Http1Exchange) or exchange.site.draining:
            connection.drop()
            exchange.fail(Unavailable("the router is shutting down: connect again", retry_after_seconds=1))
            return
        open_tunnel(exchange, connection, head, rest, self._router.settings.timeouts.idle_seconds, backend)

    def failed(self, why: str, *, untouched: bool = False, late: bool = False) -> None:
        """See `customers.Customer`."""
        connection, backend = self._connection, self._backend
        if backend is None or connection is None:
            return
        may = untouched and self._repeatable
        if may and connection.reused and not self._stale:
            # It may have closed an idle connection just as we used it: no fault of its own. A new one will tell.
            self._stale = True
            self._settle(Outcome.CANCELLED)
            self._give(backend, fresh=True)
        else:
            self._try_again_or(504 if late else 502, why, may=may)

    def writable(self) -> None:
        """See `customers.Customer`."""

    # Called by those who hold it.

    def early_bytes(self) -> int:
        """Bytes of its body that have come before it could be sent."""
        return 0

    # Inside.

    @property
    def _repeatable(self) -> bool:
        return self._plan.repeatable

    def _give(self, backend: Backend, *, fresh: bool = False) -> None:
        router = self._router
        self._backend = backend
        self._tries += 1
        self._began = monotonic()
        router.backends.begin(backend, retry=self._tries > 1)
        pool = router.pools[backend]
        connection = None if fresh or self.upgrade else pool.take()
        if connection is None:
            pool.connect(self)
        else:
            self._transmit(connection)

    def _transmit(self, connection: Upstream) -> None:
        self._connection = connection
        exchange, plan, router = self._exchange, self._plan, self._router
        peer = exchange.peer
        address = router.addresses.get(peer) or router.name(peer)
        tail = connection.hostless_tail if plan.hostless else connection.tail
        if plan.whole_length <= JOIN_BYTES:
            connection.begin(self, b"".join((plan.whole, address, tail, exchange.body)))
        else:
            connection.begin(self, b"".join((plan.whole, address, tail)))
            connection.write(exchange.body)

    def _settle(self, outcome: int) -> None:
        """The backend is done with the request, one way or another."""
        backend = self._backend
        self._connection = self._backend = None
        if backend is not None:
            router = self._router
            router.backends.end(backend, outcome, router.clock.now)
            router.observe[backend](monotonic() - self._began)

    def _try_again_or(self, status: int, why: str, *, may: bool) -> None:
        router, backend, exchange = self._router, self._backend, self._exchange
        if backend is None:
            return
        unsent = self._connection is None
        self._settle(Outcome.FAILED)
        if exchange.started:
            self._let_go()
            log.warning("%s %s: the client's response is cut", backend.name, why)
            exchange.abort()
            return
        self._tried = (*self._tried, backend)
        if may and self._tries < router.settings.retries.tries:
            other = self._other()
            if other is not None and router.budget.spend():
                log.info("%s %s: trying %s", backend.name, why, other.name)
                self._give(other)
                return
        if unsent and router.hold(self, exchange):
            self._tried = ()
            return
        self._let_go()
        log.warning("%s %s", backend.name, why)
        head = _GATEWAY_TIMEOUT if status == 504 else _BAD_GATEWAY
        exchange.respond(head, orjson.dumps({"error": f"the backend {backend.name} {why}"}))

    def _other(self) -> Backend | None:
        """Who may have it after those that were tried."""
        return self._router.backends.pick(self._tried)

    def _let_go(self) -> None:
        """Nothing more is to come. The two know each other: without this, only the collector would part them."""
        self._exchange.on_disconnect = None

    def _cancelled(self) -> None:
        """The client has gone: the backend may stop too."""
        connection = self._connection
        self._settle(Outcome.CANCELLED)
        if connection is not None:
            connection.drop()


class StreamedFlow(Flow):
    """One request whose body is passed on as it comes."""

    def __init__(self, router: Forwarder, exchange: Exchange, plan: RequestPlan) -> None:
        super().__init__(router, exchange, plan)
        self.sending = True
        self._early: list[bytes] = []
        self._ended = False
        self._left = plan.length
        exchange.on_body = self._piece
        exchange.on_body_end = self._body_ended

    def start(self) -> None:
        """Take the request to a backend; its body follows."""
        router = self._router
        backend = router.backends.pick()
        if backend is None:
            router.nobody(self, self._exchange)
            return
        router.budget.earn()
        self._exchange.on_disconnect = self._cancelled
        self._give(backend)

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

    def _transmit(self, connection: Upstream) -> None:
        self._connection = connection
        plan, peer = self._plan, self._exchange.peer
        tail = connection.hostless_tail if plan.hostless else connection.tail
        connection.begin(self, b"".join((plan.streamed, self._router.name(peer), tail)))
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
        self.sending = False
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


def wrong_length() -> InvalidArgument:
    """What a client is told whose body and head differ."""
    return InvalidArgument("the body is not as long as its head says")
