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
from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.requests import JOIN_BYTES, RequestPlan
from headrace.fleet.router.tunnel import open_tunnel
from headrace.net.http.heads import CONTENT_TYPE, JSON, Fields, ResponseHead
from headrace.net.http1.exchange import Http1Exchange

if TYPE_CHECKING:
    from headrace.fleet.router.answers import AnswerHead
    from headrace.fleet.router.forwarding import Forwarder
    from headrace.fleet.router.pools import Pool
    from headrace.fleet.router.upstream import Upstream
    from headrace.net.http.exchange import Buffer, Exchange

log = logging.getLogger("headrace.router")

_BAD_GATEWAY = ResponseHead(502, [(CONTENT_TYPE, JSON)])
_GATEWAY_TIMEOUT = ResponseHead(504, [(CONTENT_TYPE, JSON)])


class Flow:
    """One request with its body, from the client's exchange to the end of the answer."""

    sending = False
    _tries = 0
    """Those that came to nothing."""
    _stale = False
    _tried: tuple[Backend, ...] = ()
    _connection: Upstream | None = None
    _backend: Backend | None = None
    _began = 0.0
    _outcome = Outcome.OK
    held = False
    """Whether it waits for somebody to wake."""
    held_since = 0.0

    def take(self, router: Forwarder, exchange: Exchange, plan: RequestPlan) -> None:
        """This is the request. In place of `__init__`, which Python calls by way of C: that is slow."""
        self._router = router
        self._exchange = exchange
        self._plan = plan
        self.plain = not plan.silent

    @property
    def silent(self) -> bool:
        """See `customers.Customer`."""
        return self._plan.silent

    @property
    def upgrade(self) -> bool:
        """See `customers.Customer`."""
        return self._plan.upgrade

    def start(self) -> None:
        """Go to a backend."""
        router, exchange = self._router, self._exchange
        backend = router.backends.pick()
        if backend is None:
            router.nobody(self, exchange)
            return
        router.budget.earn()
        exchange.on_disconnect = self
        self._give(backend)

    def forward(self, router: Forwarder, exchange: Exchange, plan: RequestPlan) -> None:
        """`take` and `start` in one. Nearly always a connection is there to be used: that way is all here, for speed."""
        self._router = router
        self._exchange = exchange
        self._plan = plan
        self.plain = not plan.silent
        backend = router.backends.give()
        if backend is None:
            router.nobody(self, exchange)
            return
        if router.budget.short:
            router.budget.earn()
        exchange.on_disconnect = self
        self._backend = backend
        self._began = monotonic()
        pool = router.pools[backend]
        if plan.is_short:
            connection = pool.send(self, b"".join((plan.whole, exchange.peer_address, pool.tail, exchange.body)))
            if connection is None:
                pool.connect(self)
            else:
                self._connection = connection
        else:
            self._ask(pool)

    def __call__(self) -> None:
        """For `Exchange.on_disconnect`: the flow itself, since a bound method would have to be made for every request."""
        self._cancelled()

    # Called by the pool.

    def connected(self, connection: Upstream) -> bool:
        """See `customers.Applicant`."""
        backend = self._backend
        if backend is None:
            return False
        connection.begin(self, self._opening(self._router.pools[backend]))
        self._go_on(connection)
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
            backend.seconds.observe(monotonic() - self._began)
        else:
            self._settle(head.outcome)
        exchange = self._exchange
        exchange.on_disconnect = None
        if head.written and self.plain:
            exchange.respond_written(head.head, head.written, body)
        elif self.silent or head.status == 304:
            fields: Fields = () if head.told is None else ((b"content-length", head.told),)
            exchange.start(head.head, fields)
            exchange.finish()
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

    def answer_chunk(self, data: bytes, begin: int) -> bool:
        """See `customers.Customer`."""
        return self._exchange.send_chunk(data, begin)

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
            self._tries += 1
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
        self._began = monotonic()
        router.backends.begin(backend, retry=self._tries > 0)
        self._ask(router.pools[backend], fresh=fresh)

    def _ask(self, pool: Pool, *, fresh: bool = False) -> None:
        connection = None if fresh or self.upgrade else pool.send(self, self._opening(pool))
        if connection is None:
            pool.connect(self)
        else:
            self._go_on(connection)

    def _opening(self, pool: Pool) -> bytes:
        """What is sent first: the head, and the body if it may be copied."""
        plan = self._plan
        head = self._completed(plan.whole, pool)
        return b"".join((head, self._exchange.body)) if plan.whole_length <= JOIN_BYTES else head

    def _go_on(self, connection: Upstream) -> None:
        """Send what follows the opening on this connection."""
        self._connection = connection
        if self._plan.whole_length > JOIN_BYTES:
            connection.write(self._exchange.body)

    def _completed(self, head: bytes, pool: Pool) -> bytes:
        """The head with what is not known before: the client's address, and the backend's name."""
        tail = pool.hostless_tail if self._plan.hostless else pool.tail
        return b"".join((head, self._exchange.peer_address, tail))

    def _settle(self, outcome: int) -> None:
        """The backend is done with the request, one way or another."""
        backend = self._backend
        self._connection = self._backend = None
        if backend is not None:
            router = self._router
            router.backends.end(backend, outcome, router.clock.now)
            backend.seconds.observe(monotonic() - self._began)

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
        self._tries += 1
        self._tried = (*self._tried, backend)
        if may and self._tries < router.settings.retries.tries:
            other = self._other()
            if other is not None and router.budget.spend():
                log.info("%s %s: trying %s", backend.name, why, other.name)
                self._give(other)
                return
        if unsent and router.hold(self, exchange):
            self._tries, self._tried = 0, ()
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


def wrong_length() -> InvalidArgument:
    """What a client is told whose body and head differ."""
    return InvalidArgument("the body is not as long as its head says")
