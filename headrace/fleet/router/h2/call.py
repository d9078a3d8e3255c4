# SPDX-License-Identifier: Apache-2.0
"""One gRPC call through the router, from the client's side: which backend gets its bytes, and how often it is tried.

Opened by `proxy.ProxiedServices`. It asks for a backend, waits for a connection, and sends what the client sends; what
comes back is the work of its base, `answering.AnsweredCall`. As long as nothing of an answer has come and the backend
cannot have looked at the request, a failure means another try; after that the client is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.core.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.choosing.policies import Why
from headrace.fleet.router.choosing.request import Request
from headrace.fleet.router.h2.answering import AnsweredCall
from headrace.fleet.router.h2.upstream import UpstreamStream
from headrace.fleet.router.waking.held import HeldCall
from headrace.net.grpc.metadata import encode_metadata
from headrace.net.grpc.status import GRPC_STATUS, Status, status_block
from headrace.net.http2.frames import ErrorCode
from headrace.net.http2.headers import encode_fields

if TYPE_CHECKING:
    from headrace.fleet.router.choosing.chooser import Chooser
    from headrace.fleet.router.h2.connection import UpstreamConnection
    from headrace.fleet.router.h2.headers import RequestPlan
    from headrace.fleet.router.h2.proxy import GrpcProxy
    from headrace.net.http.heads import RequestHead
    from headrace.net.http2.connection import Http2Connection

_RESET_STATUS = {
    ErrorCode.CANCEL: Status.CANCELLED,
    ErrorCode.REFUSED_STREAM: Status.UNAVAILABLE,
    ErrorCode.ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: Status.PERMISSION_DENIED,
}
"""What gRPC makes of a reset; INTERNAL of all others."""


class ProxiedCall(AnsweredCall):
    """See the module."""

    # Defaults on the class, as in `Stream`.
    _backend: Backend | None = None
    _tried: tuple[Backend, ...] = ()
    _keeps = True
    """Whether the request so far is kept, to be sent again."""
    _kept: list[bytes] | None = None
    _kept_bytes = 0
    _ended = False
    late = False
    """Whether it has waited, so that its backend must be given less than the caller's whole time."""
    _arrived = 0.0
    _timer: asyncio.TimerHandle | None = None
    held_since = 0.0
    """When it first had to wait for somebody to wake."""

    def __init__(
        self, connection: Http2Connection, stream_id: int, head: RequestHead, plan: RequestPlan, proxy: GrpcProxy
    ) -> None:
        self.connection = connection
        self.id = stream_id
        self.head = head
        self.send_window = connection.peer_stream_window
        self.receive_window = connection.own_stream_window
        self.plan = plan
        self._proxy = proxy

    # Called by the client's connection.

    def on_open(self, ends: bool) -> None:
        """See `Stream.on_open`."""
        plan = self.plan
        if plan.error is not None:
            self._fail(plan.error)
            return
        if plan.timeout_seconds is not None:
            loop = self._proxy.loop
            self._arrived = loop.time()
            self._timer = loop.call_later(plan.timeout_seconds, self._deadline_passed)
        self.dispatch()

    def on_data(self, data: memoryview) -> None:
        """See `Stream.on_data`."""
        if self.over:
            return
        piece = bytes(data)
        upstream = self._upstream
        if self._keeps:
            kept = self._kept
            if kept is None:
                self._kept = [piece]
            else:
                kept.append(piece)
            self._kept_bytes += len(piece)
            if self._kept_bytes > self._proxy.replay_bytes and upstream is not None:
                self._forget_request()
        if upstream is not None and not upstream.send(piece):
            self.pause()

    def on_end(self) -> None:
        """See `Stream.on_end`."""
        self._ended = True
        if self._upstream is not None:
            self._upstream.finish()

    def on_reset(self, code: int) -> None:
        """See `Stream.on_reset`."""
        if not self.over:
            self._abandon(Outcome.CANCELLED)
            self._end(Status.CANCELLED)

    def on_expire(self) -> None:
        """See `Stream.on_expire`."""
        self._give_up(Unavailable("the router is shutting down"), Outcome.CANCELLED)

    def on_room(self) -> None:
        """See `Stream.on_room`."""
        if self._upstream is not None:
            self._upstream.resume()

    # Called by those who hold it.

    @property
    def kept_bytes(self) -> int:
        """Bytes of the request that are kept."""
        return self._kept_bytes

    def refuse(self, error: HeadraceError) -> None:
        """Nobody will take it."""
        if not self.over:
            self._fail(error)

    # Called by the pool.

    def connected(self, connection: UpstreamConnection) -> None:
        """There is a connection: the request goes on it, with what has come of it so far."""
        upstream = self._upstream = UpstreamStream(connection, self)
        connection.open(upstream)
        if not self.late:
            return
        room = True
        for piece in self._kept or ():
            room = upstream.send(piece)
        if self._kept_bytes > self._proxy.replay_bytes:
            self._forget_request()
        if self._ended:
            upstream.finish()
        if room and self.paused:
            self.resume()

    def unreached(self, text: str) -> None:
        """No connection could be made: nothing was sent."""
        self.late = True
        self._try_again(Outcome.FAILED, text)

    # Called by the stream to the backend.

    def head_block(self) -> bytes:
        """The header block of a call that has waited, but for what depends on the connection."""
        return self.plan.block_after(self._proxy.loop.time() - self._arrived)

    def upstream_room(self, upstream: UpstreamStream) -> None:
        """The backend takes more."""
        if self._upstream is upstream:
            self.resume()

    def attempt_refused(self, upstream: UpstreamStream) -> None:
        """The backend has not looked at the call."""
        if self._upstream is upstream:
            self._try_again(Outcome.CANCELLED, "the backend closes its connection")

    def attempt_reset(self, upstream: UpstreamStream, code: int) -> None:
        """The backend reset the call's stream."""
        if self._upstream is not upstream or self.over:
            return
        if code == ErrorCode.REFUSED_STREAM and not upstream.headed:
            # It is there and has too much to do: only so many of these may go to the others.
            if self._proxy.budget.spend():
                self._try_again(Outcome.REFUSED, "the backend takes no more calls")
            else:
                self._give_up(Unavailable("the backends take no more calls; try again later"), Outcome.REFUSED)
            return
        outcome = Outcome.OK if code == ErrorCode.CANCEL else Outcome.FAILED
        status = _RESET_STATUS.get(code, Status.INTERNAL)  # type: ignore[call-overload]
        name = ErrorCode(code).name if code in ErrorCode.__members__.values() else str(code)
        self.say()
        self._settle(outcome, status)
        self._say_status(status_block(status, f"the backend reset the call: {name}"))

    def attempt_lost(self, upstream: UpstreamStream, text: str) -> None:
        """The backend may have acted on the call, and its answer is lost."""
        if self._upstream is upstream and not self.over:
            self._give_up(Unavailable(f"{text}; the call may or may not have been acted on"), Outcome.FAILED)

    def dispatch(self) -> None:
        """Give it to a backend, or have it wait for one."""
        proxy, tried = self._proxy, self._tried
        backends = proxy.backends
        # One that failed is asked again only if there is no other.
        if backends.chooser is None:
            backend = backends.pick(tried) or backends.pick()
        else:
            backend = self._chosen(backends.chooser, tried)
        if backend is None:
            self._nobody(backends.unavailable)
            return
        if tried:
            backends.begin(backend, retry=True)
        else:
            proxy.budget.earn()
            backends.begin(backend)
        self._backend = backend
        pool = proxy.pools[backend]
        connection = pool.take()
        if connection is not None:
            self.connected(connection)
        elif pool.wait(self):
            self.late = True
            self.pause()
        else:
            self._give_up(Unavailable(f"{backend.name} has too many calls waiting; try again later"), Outcome.CANCELLED)

    # Inside.

    def _try_again(self, outcome: int, text: str) -> None:
        """Nothing has reached a backend's handlers: another may have the call, if there are tries left."""
        if self.over:
            return
        backend = self._backend
        self._abandon(outcome)
        if backend is not None:
            self._tried = (*self._tried, backend)
        if self._keeps and len(self._tried) < self._proxy.tries:
            self.late = True
            self.dispatch()
        else:
            name = backend.name if backend is not None else "a backend"
            self._nobody(lambda: Unavailable(f"{name} could not take the call: {text}"))

    def _chosen(self, chooser: Chooser, tried: tuple[Backend, ...]) -> Backend | None:
        """By what its head says: what it asks has not come yet."""
        request = Request(self.head)
        return chooser.pick(request, tried, Why.RETRY if tried else "") or chooser.pick(request)

    def _nobody(self, error: Callable[[], HeadraceError]) -> None:
        """Nobody can take it: it waits for somebody to wake or to have room, or is told."""
        waking, line = self._proxy.waking, self._proxy.line
        if line is not None and self._keeps and self._proxy.backends.live and not self._tried:
            line.add(HeldCall(self))
            return
        if waking is not None and self._keeps:
            self._tried = ()
            waking.hold(HeldCall(self))
        else:
            self._fail(error())

    def _abandon(self, outcome: int) -> None:
        """This attempt is over, whatever its state."""
        upstream, self._upstream = self._upstream, None
        backend, self._backend = self._backend, None
        if upstream is not None:
            upstream.abandon()
        elif backend is not None:
            self._proxy.pools[backend].leave(self)
        if backend is not None:
            self._proxy.backends.end(backend, outcome, self._proxy.loop.time())

    def _forget_request(self) -> None:
        self._keeps = False
        self._kept = None

    def _settle(self, outcome: int, status: int) -> None:
        """The backend has done its part."""
        backend, self._backend = self._backend, None
        if backend is not None:
            proxy = self._proxy
            proxy.backends.end(backend, outcome, proxy.site.now)
        # The two know each other; without this only the collector of garbage could part them.
        self._upstream = None
        self._end(status)

    def _end(self, status: int) -> None:
        self.over = True
        self._kept = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        access_log = self.connection.site.access_log
        if access_log is not None:
            access_log(self.connection.peer, self.head, status)

    def _give_up(self, error: HeadraceError, outcome: int) -> None:
        if not self.over:
            self._abandon(outcome)
            self._fail(error)

    def _fail(self, error: HeadraceError) -> None:
        """End the call with a status of ours."""
        block = status_block(GRPC_STATUS[error.code], error.message)
        if error.retry_after_seconds is not None:
            block += encode_fields(encode_metadata([("retry-after", str(round(error.retry_after_seconds)))]))
        self.say()
        self._end(GRPC_STATUS[error.code])
        self._say_status(block)

    def _deadline_passed(self) -> None:
        self._timer = None
        self._give_up(DeadlineExceeded("the caller's deadline has passed"), Outcome.CANCELLED)
