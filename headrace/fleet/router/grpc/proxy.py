# SPDX-License-Identifier: Apache-2.0
"""The gRPC half of a router: proxied calls, and the proxy that opens them.

A `ProxiedCall` chooses a backend, waits for a connection, and sends what the client sends. As long as no response has
started and the backend cannot have processed the request, a failure means another attempt; after that the client gets an
error.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidArgument, Unavailable
from headrace.core.limits import Limits
from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.grpc.connections import GrpcConnectionPool
from headrace.fleet.router.grpc.headers import ProxiedCallPlan
from headrace.fleet.router.grpc.streams import CallStream, UpstreamStream
from headrace.fleet.router.policies import ChoiceReason, RequestView
from headrace.fleet.router.request_queue import TRACEPARENT, OnResponse, call_once_before
from headrace.fleet.router.retries import RetryBudget
from headrace.fleet.router.settings import GrpcProxySettings
from headrace.net.grpc.call import CallPlan
from headrace.net.grpc.messages import encode_metadata
from headrace.net.grpc.services import Services, is_grpc
from headrace.net.grpc.status import GRPC_STATUS, Status, status_block
from headrace.net.http2.frames import ErrorCode
from headrace.net.http2.headers import encode_fields
from headrace.net.site import Site

if TYPE_CHECKING:
    from headrace.fleet.router.activation import Activator
    from headrace.fleet.router.backends import Backends, RequestChooser
    from headrace.fleet.router.fairness import Fairness
    from headrace.fleet.router.grpc.streams import BatchingConnection
    from headrace.fleet.router.request_queue import RequestQueue
    from headrace.fleet.router.settings import RouterSettings
    from headrace.net.http.heads import RequestHead
    from headrace.net.http2.connection import Http2Connection
    from headrace.net.http2.stream import Stream

_SWEEP_SECONDS = 1.0
_TURN_SECONDS = 0.01
_CLOSING_TURNS = 100
_RESET_STATUS = {
    ErrorCode.CANCEL: Status.CANCELLED,
    ErrorCode.REFUSED_STREAM: Status.UNAVAILABLE,
    ErrorCode.ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: Status.PERMISSION_DENIED,
}
"""gRPC status of a reset by its code; INTERNAL for all others."""


class GrpcProxy:
    """Opens proxied calls, and holds what all of them share. Used from the loop's thread only."""

    def __init__(
        self,
        backends: Backends,
        settings: RouterSettings,
        grpc: GrpcProxySettings | None = None,
        *,
        budget: RetryBudget | None = None,
    ) -> None:
        self.backends = backends
        self.budget = budget or RetryBudget(settings.retries)
        self.settings = grpc or GrpcProxySettings()
        self.activator: Activator | None = None
        """Holds calls while the service scales from zero."""
        self.queue: RequestQueue | None = None
        """Holds calls while every backend has `max_outstanding` requests."""
        self.fairness: Fairness | None = None
        """Counts what each tenant sends and gets, where they share the backends."""
        self.replay_bytes = self.settings.replay_bytes
        self.max_attempts = settings.retries.tries
        self.services = ProxiedServices(self, settings)
        """For `Site(services=...)`."""
        self.loop = asyncio.get_running_loop()
        limits = replace(
            Limits(),
            header_bytes=self.settings.header_bytes,
            stream_window_bytes=self.settings.stream_window_bytes,
            connection_window_bytes=self.settings.connection_window_bytes,
            idle_seconds=settings.timeouts.keep_alive_seconds,
        )
        self.site = Site(limits=limits)
        """Shared by the connections to backends."""
        self._router_settings = settings
        self._tls: ssl.SSLContext | None = None
        self.pools: dict[Backend, GrpcConnectionPool] = {}
        for backend in backends.all:
            self._backend_added(backend)
        backends.on_added.append(self._backend_added)
        backends.on_removed.append(self._backend_removed)
        self._timer: asyncio.TimerHandle | None = None
        self.site.tick(self.loop.time())

    def start(self) -> None:
        """Start the sweep, once a second."""
        if self._timer is None:
            self._tick()

    async def close(self) -> None:
        """Close the connections to backends; open calls end with them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for pool in self.pools.values():
            pool.close()
        for _ in range(_CLOSING_TURNS):
            if not self.site.connections:
                return
            await asyncio.sleep(_TURN_SECONDS)
        for connection in tuple(self.site.connections):
            connection.abort()
        await asyncio.sleep(0)  # connection_lost comes a turn later

    def update_settings(self, settings: RouterSettings) -> None:
        """Apply new settings to new calls and new backends."""
        self._router_settings = settings
        self.max_attempts = settings.retries.tries

    def _backend_added(self, backend: Backend) -> None:
        https = backend.address.scheme == "https"
        if https and self._tls is None:
            self._tls = _tls_context(self._router_settings)
        self.pools[backend] = GrpcConnectionPool(
            backend,
            self.site,
            self.settings,
            connect_seconds=self._router_settings.timeouts.connect_seconds,
            tls=self._tls if https else None,
        )

    def _backend_removed(self, backend: Backend) -> None:
        self.pools.pop(backend).close()

    def _tick(self) -> None:
        now = self.loop.time()
        self.site.tick(now)
        for connection in tuple(self.site.connections):
            connection.sweep(now)
        self._timer = self.loop.call_later(_SWEEP_SECONDS, self._tick)


class ProxiedServices(Services):
    """Methods that the router answers itself; all others are proxied."""

    def __init__(self, proxy: GrpcProxy, settings: RouterSettings) -> None:
        super().__init__()
        self._proxy = proxy
        self._keep_host = settings.keep_host
        self._trust = settings.trust_forwarded

    def open(self, connection: Http2Connection, stream_id: int, head: RequestHead) -> Stream | None:
        """Open a proxied call, or a call of a method of the router; None if the request is not gRPC."""
        plan = head.memo
        if plan.__class__ is ProxiedCallPlan:
            return ProxiedCall(connection, stream_id, head, plan, self._proxy)
        if plan.__class__ is CallPlan:
            return super().open(connection, stream_id, head)
        if plan is not None or not is_grpc(head.get(b"content-type") or b""):
            # The memo of a head that is not gRPC belongs to the HTTP routes.
            return None
        if head.path in self._methods:
            return super().open(connection, stream_id, head)
        # A head belongs to one connection, so the plan can contain the client's address.
        client = _host_of(connection.peer)
        plan = head.memo = ProxiedCallPlan(head, client, keep_host=self._keep_host, trust_forwarded=self._trust)
        return ProxiedCall(connection, stream_id, head, plan, self._proxy)


def _host_of(peer: str) -> str:
    """Return the address without the port, for X-Forwarded-For."""
    host = peer.rpartition(":")[0]
    return host.strip("[]") if host else "unknown"


def _tls_context(settings: RouterSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
    except (OSError, ssl.SSLError):
        raise InvalidArgument(
            f"cannot read the CA certificates in {settings.ca_file}; give a PEM file of CA certificates"
        ) from None
    context.set_alpn_protocols(["h2"])
    return context


class ProxiedCall(CallStream):
    """One gRPC call through the router. Implements `request_queue.QueuedRequest`."""

    # Defaults on the class, as in `Stream`.
    _backend: Backend | None = None
    _tried: tuple[Backend, ...] = ()
    _replayable = True
    """Whether the data of the request is kept, to send it again."""
    _kept: list[bytes] | None = None
    _kept_bytes = 0
    _ended = False
    _arrived = 0.0
    _timer: asyncio.TimerHandle | None = None
    queued_since = 0.0

    def __init__(
        self, connection: Http2Connection, stream_id: int, head: RequestHead, plan: ProxiedCallPlan, proxy: GrpcProxy
    ) -> None:
        self.connection = connection
        self.id = stream_id
        self.head = head
        self.receive_window = connection.own_stream_window
        self.plan = plan
        self._proxy = proxy

    # Called by the client's connection.

    def on_open(self, ends: bool) -> None:
        """Start the call."""
        plan = self.plan
        if plan.error is not None:
            self._fail(plan.error)
            return
        if self._proxy.fairness is not None:
            try:
                self.usage = self._proxy.fairness.admit(self.head, 0)
            except HeadraceError as error:
                self._fail(error)
                return
        if plan.timeout_seconds is not None:
            loop = self._proxy.loop
            self._arrived = loop.time()
            self._timer = loop.call_later(plan.timeout_seconds, self._deadline_passed)
        self.dispatch()

    def on_data(self, data: memoryview) -> None:
        """Send data of the request to the backend, and keep it for a retry."""
        if self.finished:
            return
        piece = bytes(data)
        upstream = self._upstream
        if self.usage is not None:
            self.usage.add_prompt_bytes(len(piece))
        if self._replayable:
            kept = self._kept
            if kept is None:
                self._kept = [piece]
            else:
                kept.append(piece)
            self._kept_bytes += len(piece)
            if self._kept_bytes > self._proxy.replay_bytes and upstream is not None:
                self._drop_replay()
        if upstream is not None and not upstream.send(piece):
            self.pause()

    def on_end(self) -> None:
        """End the request."""
        self._ended = True
        if self._upstream is not None:
            self._upstream.finish()

    def on_reset(self, code: int) -> None:
        """Cancel the call: the client has reset it."""
        if not self.finished:
            self._end_attempt(Outcome.CANCELLED)
            self._end(Status.CANCELLED)

    def on_expire(self) -> None:
        """Fail the call: the router stops."""
        self._give_up(Unavailable("the router is shutting down"), Outcome.CANCELLED)

    def on_send_ready(self) -> None:
        """Read more of the response: the client takes more data."""
        if self._upstream is not None:
            self._upstream.resume()

    # Called by queues.

    def is_gone(self) -> bool:
        """Return whether the client has gone, or the deadline has passed."""
        return self.finished

    def queued_bytes(self) -> int:
        """Return the bytes of the request that are kept."""
        return self._kept_bytes

    def enter_queue(self) -> None:
        """Stop reading from the client. The deadline of the call runs on."""
        self.waited = True
        self.pause()

    def traceparent(self) -> bytes:
        """Return the client's trace context; empty if there is none."""
        return self.head.get(TRACEPARENT) or b""

    def leave_queue(self, on_response: OnResponse | None = None) -> None:
        """Start the call; call `on_response` when its response starts."""
        if on_response is not None:
            call_once_before(self, ("response_head", "response_whole"), lambda: on_response(self))
        self.dispatch()

    def refuse(self, error: HeadraceError) -> None:
        """Fail the call."""
        if not self.finished:
            self._fail(error)

    # Called by the pool.

    def connected(self, connection: BatchingConnection) -> None:
        """Send the request on a connection, with the data that has arrived so far."""
        upstream = self._upstream = UpstreamStream(connection, self)
        connection.open(upstream)
        if not self.waited:
            return
        writable = True
        for piece in self._kept or ():
            writable = upstream.send(piece)
        if self._kept_bytes > self._proxy.replay_bytes:
            self._drop_replay()
        if self._ended:
            upstream.finish()
        if writable and self.paused:
            self.resume()

    def connection_failed(self, text: str) -> None:
        """Retry: nothing was sent."""
        self.waited = True
        self._retry(Outcome.FAILED, text)

    # Called by the stream to the backend.

    def head_block(self) -> bytes:
        """Return the header block of a call that has waited, without what depends on the connection."""
        return self.plan.block_after(self._proxy.loop.time() - self._arrived)

    def upstream_writable(self, upstream: UpstreamStream) -> None:
        """Read more of the request from the client."""
        if self._upstream is upstream:
            self.resume()

    def attempt_refused(self, upstream: UpstreamStream) -> None:
        """Retry: the backend has not processed the call."""
        if self._upstream is upstream:
            self._retry(Outcome.CANCELLED, "the backend closes its connection")

    def attempt_reset(self, upstream: UpstreamStream, code: int) -> None:
        """Retry a refused call, or pass the reset on as a status."""
        if self._upstream is not upstream or self.finished:
            return
        if code == ErrorCode.REFUSED_STREAM and not upstream.response_started:
            # The backend is overloaded: the retry budget limits how many calls go to the others.
            if self._proxy.budget.spend():
                self._retry(Outcome.REFUSED, "the backend takes no more calls")
            else:
                self._give_up(Unavailable("the backends take no more calls; try again later"), Outcome.REFUSED)
            return
        outcome = Outcome.OK if code == ErrorCode.CANCEL else Outcome.FAILED
        status = _RESET_STATUS.get(code, Status.INTERNAL)  # type: ignore[call-overload]
        name = ErrorCode(code).name if code in ErrorCode.__members__.values() else str(code)
        self.flush_response()
        self._complete(outcome, status)
        self._send_status(status_block(status, f"the backend reset the call: {name}"))

    def attempt_lost(self, upstream: UpstreamStream, text: str) -> None:
        """Fail the call: the backend may have processed it, and the response is lost."""
        if self._upstream is upstream and not self.finished:
            self._give_up(Unavailable(f"{text}; the call may or may not have been processed"), Outcome.FAILED)

    def dispatch(self) -> None:
        """Send the call to a backend, or queue it."""
        proxy, tried = self._proxy, self._tried
        backends = proxy.backends
        # A backend that failed is tried again only if there is no other.
        if backends.chooser is None:
            backend = backends.pick(tried) or backends.pick()
        else:
            backend = self._choose(backends.chooser, tried)
        if backend is None:
            self._no_backend(backends.unavailable)
            return
        if tried:
            backends.begin(backend, retry=True)
        else:
            proxy.budget.earn()
            backends.begin(backend)
            if self.usage is not None:
                self.usage.begin()
        self._backend = backend
        pool = proxy.pools[backend]
        connection = pool.pick()
        if connection is not None:
            self.connected(connection)
        elif pool.wait(self):
            self.waited = True
            self.pause()
        else:
            self._give_up(Unavailable(f"{backend.name} has too many calls waiting; try again later"), Outcome.CANCELLED)

    # Private.

    def _retry(self, outcome: int, text: str) -> None:
        """Send the call to another backend, if attempts are left: no backend has processed it."""
        if self.finished:
            return
        backend = self._backend
        self._end_attempt(outcome)
        if backend is not None:
            self._tried = (*self._tried, backend)
        if self._replayable and len(self._tried) < self._proxy.max_attempts:
            self.waited = True
            self.dispatch()
        else:
            name = backend.name if backend is not None else "a backend"
            self._no_backend(lambda: Unavailable(f"{name} could not take the call: {text}"))

    def _choose(self, chooser: RequestChooser, tried: tuple[Backend, ...]) -> Backend | None:
        """Choose by the headers: the body has not arrived yet."""
        request = RequestView(self.head)
        return chooser.pick(request, tried, ChoiceReason.RETRY if tried else "") or chooser.pick(request)

    def _no_backend(self, error: Callable[[], HeadraceError]) -> None:
        """Queue a call that no backend can take now, or fail it."""
        activator, queue = self._proxy.activator, self._proxy.queue
        if queue is not None and self._replayable and self._proxy.backends.live and not self._tried:
            queue.add(self)
            return
        if activator is not None and self._replayable:
            self._tried = ()
            activator.hold(self)
        else:
            self._fail(error())

    def _end_attempt(self, outcome: int) -> None:
        """End the current attempt, in any state."""
        upstream, self._upstream = self._upstream, None
        backend, self._backend = self._backend, None
        if upstream is not None:
            upstream.abandon()
        elif backend is not None:
            self._proxy.pools[backend].stop_waiting(self)
        if backend is not None:
            self._proxy.backends.end(backend, outcome, self._proxy.loop.time())

    def _drop_replay(self) -> None:
        self._replayable = False
        self._kept = None

    def _complete(self, outcome: int, status: int) -> None:
        """Report the outcome of the attempt and end the call."""
        backend, self._backend = self._backend, None
        if backend is not None:
            proxy = self._proxy
            proxy.backends.end(backend, outcome, proxy.site.now)
        # Break the reference cycle: otherwise only the garbage collector could free the two streams.
        self._upstream = None
        self._end(status)

    def _end(self, status: int) -> None:
        self.finished = True
        self._kept = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        access_log = self.connection.site.access_log
        if access_log is not None:
            access_log(self.connection.peer, self.head, status)

    def _give_up(self, error: HeadraceError, outcome: int) -> None:
        if not self.finished:
            self._end_attempt(outcome)
            self._fail(error)

    def _fail(self, error: HeadraceError) -> None:
        """End the call with a status of the router."""
        block = status_block(GRPC_STATUS[error.code], error.message)
        if error.retry_after_seconds is not None:
            block += encode_fields(encode_metadata([("retry-after", str(round(error.retry_after_seconds)))]))
        self.flush_response()
        self._end(GRPC_STATUS[error.code])
        self._send_status(block)

    def _deadline_passed(self) -> None:
        self._timer = None
        self._give_up(DeadlineExceeded("the caller's deadline has passed"), Outcome.CANCELLED)
