# SPDX-License-Identifier: Apache-2.0
"""One HTTP request through the router: choose a backend, send the request, retry where that is safe, return the response.

`Forwarder` makes a `ProxiedRequest` for each request and holds what all of them share. Two parts are optional: a
`StreamedBody` where the body is passed on as it arrives, and a `RequestStrategy` for hedging or for prefill and decode on
separate backends. No coroutine and no timer is involved (the pools sweep), and a small response takes one write each way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import orjson

from headrace.core.errors import HeadraceError, InvalidArgument, Unavailable
from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.policies import ChoiceReason, RequestView
from headrace.fleet.router.request_queue import TRACEPARENT, OnResponse, call_once_before
from headrace.fleet.router.requests import JOIN_BYTES, RequestPlan, plan_request
from headrace.fleet.router.stream_latency import StreamTimer, is_event_stream
from headrace.fleet.router.tunnel import open_tunnel
from headrace.net.http.heads import CONTENT_TYPE, JSON, Fields, RequestHead, ResponseHead
from headrace.net.http1.exchange import Http1Exchange

if TYPE_CHECKING:
    from headrace.fleet.router.activation import Activator
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.chooser import Chooser
    from headrace.fleet.router.continuation import Continuations
    from headrace.fleet.router.fairness import Fairness, TokenUsage
    from headrace.fleet.router.request_queue import RequestQueue
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.fleet.router.retries import RetryBudget
    from headrace.fleet.router.settings import RouterSettings
    from headrace.fleet.router.stream_latency import StreamLatency
    from headrace.fleet.router.upstream import CoarseClock, ConnectionPool, UpstreamConnection
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.heads import Buffer

log = logging.getLogger("headrace.router")

_BAD_GATEWAY = ResponseHead(502, [(CONTENT_TYPE, JSON)])
_GATEWAY_TIMEOUT = ResponseHead(504, [(CONTENT_TYPE, JSON)])


class Forwarder:
    """The handlers for everything that the router does not answer itself, and what all proxied requests share."""

    def __init__(
        self,
        settings: RouterSettings,
        backends: Backends,
        pools: dict[Backend, ConnectionPool],
        budget: RetryBudget,
        clock: CoarseClock,
    ) -> None:
        self.settings = settings
        self.backends = backends
        self.pools = pools
        self.budget = budget
        self.clock = clock
        self.chooser: Chooser | None = None
        """Chooses backends where a choice depends on the request; None: `backends` choose by load alone."""
        self.make_strategy: Callable[[], RequestStrategy] | None = None
        """Makes the strategy of a request, where there is a chooser."""
        self.queue: RequestQueue | None = None
        """Holds requests while every backend has `max_outstanding` requests."""
        self.activator: Activator | None = None
        """Holds requests while the service scales from zero."""
        self.fairness: Fairness | None = None
        """Counts the tokens of each tenant, where they share the backends."""
        self.streams: StreamLatency | None = None
        """Counts the latency of streams, for an autoscaler."""
        self.continuations: Continuations
        """Which streams can be continued. Set by the proxy."""

    def buffered(self, exchange: Exchange) -> None:
        """Handle a request whose body is complete."""
        plan: Any = exchange.head.memo
        if plan is None:
            plan = self._plan(exchange.head)
        if len(exchange.body) != plan.buffered_length:
            # The server side guarantees this. A wrong length would swallow the next request on the connection.
            raise body_length_error()
        request: ProxiedRequest
        if plan.may_stream and self.continuations.may_continue(exchange.body):
            request = self.continuations.make_request()
        elif self.chooser is None and self.fairness is None and (self.streams is None or not plan.may_stream):
            ProxiedRequest().forward(self, exchange, plan)
            return
        else:
            request = ProxiedRequest()
        request.prepare(self, exchange, plan)
        if self.fairness is not None:
            request.usage = self.fairness.admit(exchange.head, plan.buffered_length)
        if self.make_strategy is not None:
            request.strategy = self.make_strategy()
        if self.streams is not None and plan.may_stream:
            request.timer = StreamTimer(self.streams)
        request.start()

    def streamed(self, exchange: Exchange) -> None:
        """Handle a request whose body follows."""
        plan = cast("RequestPlan | None", exchange.head.memo) or self._plan(exchange.head)
        request = ProxiedRequest()
        request.prepare(self, exchange, plan)
        if self.fairness is not None:
            request.usage = self.fairness.admit(exchange.head, plan.buffered_length)
        if self.streams is not None and plan.may_stream:
            request.timer = StreamTimer(self.streams)
        request.stream_body()
        request.start()

    def no_backend(self, request: ProxiedRequest) -> None:
        """Queue a request that no backend can take now, or fail it."""
        if self.queue is not None and self.backends.live:
            self.queue.add(request)
        elif not self.hold(request):
            request.exchange.fail(self.backends.unavailable())

    def hold(self, request: ProxiedRequest) -> bool:
        """Hold a request until the service is active. Returns False without activation."""
        if self.activator is None:
            return False
        if request.timer is not None:
            request.timer.held = True
        self.activator.hold(request)
        return True

    def _plan(self, head: RequestHead) -> RequestPlan:
        plan = plan_request(head, self.settings)
        head.memo = plan
        return plan


class RequestStrategy:
    """What is done differently with one request. This base changes nothing."""

    repeatable = False
    """Whether the request may be sent again, whatever its method."""

    def start(self, request: ProxiedRequest) -> bool:
        """Run before a backend is chosen. True: the strategy calls `request.start` again later."""
        return False

    def sending(self, request: ProxiedRequest) -> None:
        """Run before the request is sent to a backend."""

    def response_received(self, request: ProxiedRequest, head: UpstreamHead) -> bool:
        """Run before a whole response is used. False: the strategy discards it."""
        return True

    def response_started(self, request: ProxiedRequest) -> None:
        """Run before a streamed response is used."""

    def response_piece(self, data: Buffer) -> None:
        """Run before a piece of a streamed response is passed on."""

    def attempt_ended(self) -> None:
        """Run when an attempt has ended, in whatever way."""

    def attempt_failed(self, request: ProxiedRequest) -> bool:
        """Run before a failed attempt is retried or reported. True: the strategy has handled the failure."""
        return False

    def cancelled(self, request: ProxiedRequest) -> None:
        """Run when the client has gone."""


class ProxiedRequest:
    """One request, from the client's exchange to the end of the response.

    Implements `upstream.UpstreamHandler`, `upstream.ConnectionWaiter` and `request_queue.QueuedRequest`.
    """

    # Defaults on the class: a plain request sets few attributes.
    fast_path = False
    sending = False
    backend: Backend | None = None
    """The backend of the current attempt."""
    connection: UpstreamConnection | None = None
    """The connection of the current attempt; None until there is one."""
    started_at = 0.0
    """When the current attempt started."""
    tried: tuple[Backend, ...] = ()
    """Backends of failed attempts."""
    strategy: RequestStrategy | None = None
    extra_head = b""
    """Header lines for the backend, each starting with CRLF."""
    view: RequestView | None = None
    """The request as policies see it, where there is a chooser."""
    usage: TokenUsage | None = None
    """The counter of its tokens, with fairness between tenants."""
    timer: StreamTimer | None = None
    """Times its stream, for an autoscaler."""
    queued = False
    queued_since = 0.0
    _body: StreamedBody | None = None
    _failed_attempts = 0
    _retried_stale = False
    _outcome = Outcome.OK

    def prepare(self, router: Forwarder, exchange: Exchange, plan: RequestPlan) -> None:
        """Set the request. Replaces `__init__`, which Python calls by way of C: that is slow."""
        self.router = router
        self.exchange = exchange
        self.plan = plan
        self.fast_path = not plan.is_head

    def stream_body(self) -> None:
        """Pass the body on as it arrives, instead of sending it with the head."""
        self.sending = True
        self.fast_path = False
        self._body = StreamedBody(self)

    @property
    def is_head(self) -> bool:
        """Whether the request is HEAD."""
        return self.plan.is_head

    @property
    def upgrade(self) -> bool:
        """Whether the request is a WebSocket handshake."""
        return self.plan.upgrade

    def start(self) -> None:
        """Choose a backend and send the request to it."""
        strategy = self.strategy
        if strategy is not None and strategy.start(self):
            return
        router = self.router
        # The settings may have changed while the request was queued.
        chooser = router.chooser
        backend = router.backends.pick() if chooser is None else chooser.pick(self.view_for(chooser))
        if backend is None:
            router.no_backend(self)
            return
        if self.usage is not None:
            self.usage.begin()
        router.budget.earn()
        self.exchange.on_disconnect = self
        self.send_to(backend)

    def forward(self, router: Forwarder, exchange: Exchange, plan: RequestPlan) -> None:
        """Run `prepare` and `start` in one, with the usual case inlined for speed: an idle connection is available."""
        self.router = router
        self.exchange = exchange
        self.plan = plan
        self.fast_path = not plan.is_head
        backend = router.backends.pick_and_begin()
        if backend is None:
            router.no_backend(self)
            return
        if router.budget.below_reserve:
            router.budget.earn()
        exchange.on_disconnect = self
        self.backend = backend
        self.started_at = monotonic()
        pool = router.pools[backend]
        if plan.is_short:
            connection = pool.send(self, b"".join((plan.buffered, exchange.peer_address, pool.head_end, exchange.body)))
            if connection is None:
                pool.connect(self)
            else:
                self.connection = connection
        else:
            self._send(pool)

    def __call__(self) -> None:
        """Handle `Exchange.on_disconnect`. The request itself is the callback: a bound method costs an allocation."""
        self._client_gone()

    # Called by the pool.

    def connected(self, connection: UpstreamConnection) -> bool:
        """Send the request on a new connection."""
        backend = self.backend
        if backend is None:
            return False
        connection.start_request(self, self._first_bytes(self.router.pools[backend]))
        self._send_rest(connection)
        return True

    def connection_failed(self, reason: str) -> None:
        """Retry or report: nothing was sent, so every request may be retried."""
        if self.backend is not None:
            self._retry_or_fail(502, reason, may_retry=True)

    # Called by the connection.

    def response_received(self, head: UpstreamHead, body: Buffer) -> None:
        """Send a whole response to the client."""
        strategy = self.strategy
        if strategy is not None and not strategy.response_received(self, head):
            return
        if self.timer is not None and is_event_stream(head):
            self.timer.piece(body)
            self.timer.ended()
        backend, router = self.backend, self.router
        if backend is not None and not head.outcome:
            # `end_attempt`, inlined for the usual outcome.
            self.connection = self.backend = None
            if strategy is not None:
                strategy.attempt_ended()
            router.backends.end_ok(backend)
            backend.seconds.observe(monotonic() - self.started_at)
        else:
            self.end_attempt(head.outcome)
        if self.usage is not None:
            self.usage.add(body)
        exchange = self.exchange
        exchange.on_disconnect = None
        if self._body is not None:
            self._release_body()
        if head.http1_bytes and self.fast_path:
            exchange.respond_written(head.head, head.http1_bytes, body)
        elif self.is_head or head.status == 304:
            fields: Fields = () if head.content_length is None else ((b"content-length", head.content_length),)
            exchange.start(head.head, fields)
            exchange.finish()
        else:
            exchange.respond(head.head, body)

    def response_started(self, head: UpstreamHead, length: int) -> None:
        """Send the head of a streamed response to the client."""
        if self.strategy is not None:
            self.strategy.response_started(self)
        if self.timer is not None and not is_event_stream(head):
            self.timer = None
        exchange = self.exchange
        if self.connection is not None:
            exchange.on_writable = self.connection.resume_reading
        exchange.start(head.head, ((b"content-length", b"%d" % length),) if length >= 0 else ())
        self._outcome = head.outcome

    def response_data(self, data: Buffer) -> bool:
        """Send a piece of the body to the client."""
        if self.strategy is not None:
            self.strategy.response_piece(data)
        if self.usage is not None:
            self.usage.add(data)
        if self.timer is not None:
            self.timer.piece(data)
        return self.exchange.send(data)

    def response_chunk(self, data: bytes, begin: int) -> bool:
        """Send one chunk to the client, framed as it is."""
        if self.strategy is not None:
            self.strategy.response_piece(data)
        if self.usage is not None:
            self.usage.add(data)
        if self.timer is not None:
            self.timer.piece(data)
        return self.exchange.send_chunk(data, begin)

    def response_ended(self) -> None:
        """Finish a streamed response."""
        self.end_attempt(self._outcome)
        self.release()
        self.exchange.finish()

    def protocol_switched(self, head: UpstreamHead, rest: bytes) -> None:
        """Open the WebSocket tunnel."""
        connection, exchange, backend = self.connection, self.exchange, self.backend
        self.end_attempt(Outcome.OK)
        self.release()
        if connection is None:
            return
        if not isinstance(exchange, Http1Exchange) or exchange.site.draining:
            connection.cancel()
            exchange.fail(Unavailable("the router is shutting down: connect again", retry_after_seconds=1))
            return
        open_tunnel(exchange, connection, head, rest, self.router.settings.timeouts.idle_seconds, backend)

    def response_failed(self, reason: str, *, unanswered: bool = False, timed_out: bool = False) -> None:
        """Retry the request or report the failure."""
        connection, backend = self.connection, self.backend
        if backend is None or connection is None:
            return
        may_retry = unanswered and self.repeatable
        if may_retry and connection.reused and not self._retried_stale:
            # The backend may have closed the idle connection just as we used it, which is not a failure. Use a new one.
            self._retried_stale = True
            self._failed_attempts += 1
            self.end_attempt(Outcome.CANCELLED)
            self.send_to(backend, new_connection=True)
        else:
            self._retry_or_fail(504 if timed_out else 502, reason, may_retry=may_retry)

    def upstream_writable(self) -> None:
        """Read more of the body from the client."""
        if self._body is not None:
            self.exchange.resume_body()

    # Called by queues.

    def is_gone(self) -> bool:
        """Return whether the client has disconnected."""
        return self.exchange.closed

    def queued_bytes(self) -> int:
        """Return the bytes of the body that are kept."""
        return len(self.exchange.body) + (self._body.pending_bytes() if self._body is not None else 0)

    def enter_queue(self) -> None:
        """Stop reading the body from the client."""
        self.queued = True
        # With a callback set, the server side takes a client that stops sending for one that has gone.
        self.exchange.on_disconnect = _ignore_disconnect
        if self.sending:
            self.exchange.pause_body()

    def traceparent(self) -> bytes:
        """Return the client's trace context; empty if there is none."""
        return self.exchange.head.get(TRACEPARENT) or b""

    def leave_queue(self, on_response: OnResponse | None = None) -> None:
        """Start the request; call `on_response` when its response starts."""
        self.queued = False
        if self.timer is not None and self.timer.held:
            self.timer.restart()
        if on_response is not None:
            call_once_before(self, ("response_received", "response_started"), lambda: on_response(self))
        self.start()

    def refuse(self, error: HeadraceError) -> None:
        """Fail the request."""
        self.queued = False
        self.exchange.on_disconnect = None
        self.exchange.fail(error)

    # Called by strategies.

    @property
    def repeatable(self) -> bool:
        """Whether the request may be sent again after a backend may have seen it."""
        if self._body is not None:
            return False  # the streamed part is no longer available
        return self.plan.repeatable or (self.strategy is not None and self.strategy.repeatable)

    def view_for(self, chooser: Chooser) -> RequestView:
        """Return the request as policies see it; a client without a session is given one."""
        view, exchange = self.view, self.exchange
        if view is None:
            view = self.view = RequestView(exchange.head, exchange.body)
            if chooser.sessions is not None:
                view.session, line = chooser.sessions.cookie_for(view)
                exchange.more_lines += line
        return view

    def send_to(self, backend: Backend, *, new_connection: bool = False) -> None:
        """Send the request to a backend."""
        self.backend = backend
        if self.strategy is not None:
            self.strategy.sending(self)
        if self._body is not None:
            # Until there is a connection, the client keeps the body.
            self.exchange.pause_body()
        router = self.router
        self.started_at = monotonic()
        router.backends.begin(backend, retry=self._failed_attempts > 0)
        self._send(router.pools[backend], new_connection=new_connection)

    def retry_refused(self) -> bool:
        """Send the request to another backend because this one refused it. Returns False if that is not possible."""
        router, backend = self.router, self.backend
        if backend is None or not self.repeatable or self.exchange.started:
            return False
        if self._failed_attempts + 1 >= router.settings.retries.tries:
            return False
        self._failed_attempts += 1
        self.tried = (*self.tried, backend)
        next_backend = self._pick_other()
        if next_backend is None or not router.budget.spend():
            return False
        self.end_attempt(Outcome.REFUSED)
        self.send_to(next_backend)
        return True

    def end_attempt(self, outcome: int) -> None:
        """Report the outcome of the current attempt."""
        backend = self.backend
        self.connection = self.backend = None
        if backend is not None:
            if self.strategy is not None:
                self.strategy.attempt_ended()
            if self.timer is not None:
                self.timer.ended()
            router = self.router
            router.backends.end(backend, outcome, router.clock.now)
            backend.seconds.observe(monotonic() - self.started_at)

    def cancel_attempt(self) -> None:
        """Give up the current attempt; the backend may stop working on it."""
        connection = self.connection
        self.end_attempt(Outcome.CANCELLED)
        if connection is not None:
            connection.cancel()

    def release(self) -> None:
        """Break the reference cycle with the exchange: otherwise only the garbage collector could free the two."""
        self.exchange.on_disconnect = None
        if self._body is not None:
            self._release_body()

    def reject_body(self) -> None:
        """Fail a request whose body does not match its Content-Length. The HTTP parser checks this; it never happens."""
        exchange = self.exchange
        self.release()
        self._client_gone()
        exchange.fail(body_length_error())

    # Private.

    def _send(self, pool: ConnectionPool, *, new_connection: bool = False) -> None:
        connection = None if new_connection or self.upgrade else pool.send(self, self._first_bytes(pool))
        if connection is None:
            pool.connect(self)
        else:
            self._send_rest(connection)

    def _first_bytes(self, pool: ConnectionPool) -> bytes:
        """Return the head, with the body if it is small."""
        plan = self.plan
        streamed = self._body is not None
        end = pool.head_end_with_host if plan.hostless else pool.head_end
        head = plan.streamed if streamed else plan.buffered
        head = b"".join((head, self.exchange.peer_address, self.extra_head, end))
        return head if streamed or plan.buffered_length > JOIN_BYTES else b"".join((head, self.exchange.body))

    def _send_rest(self, connection: UpstreamConnection) -> None:
        """Send what follows the first bytes."""
        self.connection = connection
        if self._body is not None:
            self._body.connected(connection)
        elif self.plan.buffered_length > JOIN_BYTES:
            connection.write(self.exchange.body)

    def _retry_or_fail(self, status: int, reason: str, *, may_retry: bool) -> None:
        router, backend, exchange = self.router, self.backend, self.exchange
        if backend is None or (self.strategy is not None and self.strategy.attempt_failed(self)):
            return
        unsent = self.connection is None
        self.end_attempt(Outcome.FAILED)
        if exchange.started:
            self.release()
            log.warning("%s %s: the client's response is cut", backend.name, reason)
            exchange.abort()
            return
        self._failed_attempts += 1
        self.tried = (*self.tried, backend)
        if may_retry and self._failed_attempts < router.settings.retries.tries:
            next_backend = self._pick_other()
            if next_backend is not None and router.budget.spend():
                log.info("%s %s: trying %s", backend.name, reason, next_backend.name)
                self.send_to(next_backend)
                return
        if unsent and router.hold(self):
            self._failed_attempts, self.tried = 0, ()
            return
        self.release()
        log.warning("%s %s", backend.name, reason)
        head = _GATEWAY_TIMEOUT if status == 504 else _BAD_GATEWAY
        exchange.respond(head, orjson.dumps({"error": f"the backend {backend.name} {reason}"}))

    def _pick_other(self) -> Backend | None:
        """Choose a backend that was not tried."""
        chooser, view = self.router.chooser, self.view
        if chooser is None or view is None:
            return self.router.backends.pick(self.tried)
        return chooser.pick(view, self.tried, ChoiceReason.RETRY)

    def _release_body(self) -> None:
        self._body = None
        self.exchange.on_body = self.exchange.on_body_end = None

    def _client_gone(self) -> None:
        if self.strategy is not None:
            self.strategy.cancelled(self)
        self.cancel_attempt()
        self._body = None  # the two refer to each other


class StreamedBody:
    """A request body that is passed on as it arrives: it is too long to keep, or its length is unknown."""

    def __init__(self, request: ProxiedRequest) -> None:
        self._request = request
        self._exchange = request.exchange
        self._length = request.plan.length
        self._left = request.plan.length
        self._pending: list[bytes] = []
        self._ended = False
        self._exchange.on_body = self._received
        self._exchange.on_body_end = self._end

    def pending_bytes(self) -> int:
        """Return the bytes that arrived before there was a connection."""
        return sum(map(len, self._pending))

    def connected(self, connection: UpstreamConnection) -> None:
        """Send what has arrived so far, and let the client send more."""
        pending, self._pending = self._pending, []
        for piece in pending:
            self._send(connection, piece)
        if self._ended:
            self._finish(connection)
        if not connection.write_paused:
            self._exchange.resume_body()

    def _received(self, data: bytes) -> None:
        request = self._request
        connection = request.connection
        if self._length < 0 and request.usage is not None:
            request.usage.add_prompt_bytes(len(data))
        if connection is None:
            if request.backend is not None or request.queued:
                self._pending.append(data)
            return
        self._send(connection, data)
        if connection.write_paused:
            self._exchange.pause_body()

    def _end(self) -> None:
        self._ended = True
        if self._request.connection is not None:
            self._finish(self._request.connection)

    def _send(self, connection: UpstreamConnection, data: bytes) -> None:
        if self._length < 0:
            connection.write(b"%x\r\n%b\r\n" % (len(data), data))
            return
        self._left -= len(data)
        if self._left < 0:
            self._request.reject_body()
        else:
            connection.write(data)

    def _finish(self, connection: UpstreamConnection) -> None:
        request = self._request
        request.sending, request.fast_path = False, not request.is_head
        if self._length < 0:
            connection.write(b"0\r\n\r\n")
        elif self._left:
            request.reject_body()


def body_length_error() -> InvalidArgument:
    """Return the error for a body that does not match its Content-Length."""
    return InvalidArgument("the body does not match its Content-Length")


def _ignore_disconnect() -> None:
    """Do nothing: queues check `ProxiedRequest.is_gone`."""
