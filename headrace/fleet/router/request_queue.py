# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a backend: while all backends are busy, or while the service scales from zero.

Both kinds of queue are first in, first out, and limit how many requests wait and for how long. A request that cannot wait
gets an error with Retry-After. A client that disconnects is found by polling, so that requests pay nothing for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from headrace.core.errors import HeadraceError, ResourceExhausted, Unavailable

if TYPE_CHECKING:
    from headrace.fleet.router.fairness import TokenUsage
    from headrace.fleet.router.settings import ActivationSettings, QueueSettings

log = logging.getLogger("headrace.router")

OnResponse = Callable[["QueuedRequest"], None]
TRACEPARENT = b"traceparent"
SWEEP_SECONDS = 0.05
_BATCH_REQUESTS, _BATCH_SECONDS = 64, 0.01
"""Each request needs a connection. The accept backlog of many servers is 100; a connection beyond it is a second late."""


class QueuedRequest(Protocol):
    """A request that can wait: over HTTP (`proxied_request.ProxiedRequest`) or gRPC (`grpc.proxy.ProxiedCall`)."""

    queued_since: float
    """When it first entered a queue; 0 before. It may enter twice."""
    usage: TokenUsage | None
    """The counter of its tokens, with fairness between tenants."""

    def is_gone(self) -> bool:
        """Return whether the client has disconnected, or the deadline has passed."""

    def queued_bytes(self) -> int:
        """Return the bytes of the body that are kept."""

    def enter_queue(self) -> None:
        """Stop reading the body from the client."""

    def traceparent(self) -> bytes:
        """Return the client's trace context; empty if there is none."""

    def leave_queue(self, on_response: OnResponse | None = None) -> None:
        """Start the request; call `on_response` when its response starts."""

    def refuse(self, error: HeadraceError) -> None:
        """Fail the request."""


class RequestQueue:
    """Requests that wait because every backend has `max_outstanding` requests. Used from the loop's thread only.

    First in, first out; `fairness.FairQueue` has another order.
    """

    def __init__(self, settings: QueueSettings, has_capacity: Callable[[], bool]) -> None:
        self._settings = settings
        self._has_capacity = has_capacity
        self._waiting: deque[tuple[float, QueuedRequest]] = deque()
        self._dispatching = False
        self.refused = 0
        """Requests refused because the queue was full or they waited too long."""
        self.length = 0
        """Requests that wait. The clients of some of them may have gone."""

    def add(self, request: QueuedRequest) -> None:
        """Queue a request, or refuse it if the queue is full."""
        settings = self._settings
        if self.length >= settings.requests:
            self._drop_gone()
        if self.length >= settings.requests and not self._make_room(request):
            self._refuse(request, self._full_error())
            return
        self._push(asyncio.get_running_loop().time(), request)
        self.length += 1
        request.enter_queue()

    def dispatch(self) -> None:
        """Start queued requests as long as a backend has capacity."""
        if self._dispatching:
            return
        self._dispatching = True
        try:
            while self.length and self._has_capacity():
                request = self._pop()
                self.length -= 1
                if request.is_gone():
                    continue
                try:
                    request.leave_queue()
                except Exception:
                    log.exception("A queued request failed.")
                    self._refuse(request, Unavailable("the request could not be sent on; see the router's log"))
        finally:
            self._dispatching = False

    def sweep(self, now: float) -> None:
        """Refuse requests that waited too long, and dispatch others: backends may have joined."""
        limit = self._settings.wait_seconds
        for request in self._pop_expired(now - limit):
            self.length -= 1
            if not request.is_gone():
                text = f"every backend was busy for {limit:g} seconds: try again later, or add backends"
                self._refuse(request, Unavailable(text, retry_after_seconds=1))
        self.dispatch()

    def close(self) -> None:
        """Refuse all queued requests."""
        for request in self._pop_expired(inf):
            self.length -= 1
            self._refuse(request, Unavailable("the router is shutting down: try again", retry_after_seconds=1))

    def _push(self, now: float, request: QueuedRequest) -> None:
        """Add a request."""
        self._waiting.append((now, request))

    def _pop(self) -> QueuedRequest:
        """Remove and return the request that is next."""
        return self._waiting.popleft()[1]

    def _pop_expired(self, before: float) -> Iterator[QueuedRequest]:
        """Remove and return requests that entered until then, and some whose clients have gone."""
        while self._waiting and (self._waiting[0][0] <= before or self._waiting[0][1].is_gone()):
            yield self._waiting.popleft()[1]

    def _make_room(self, request: QueuedRequest) -> bool:
        """Try to make room for a request in a full queue; return whether there is."""
        return False

    def _full_error(self) -> ResourceExhausted:
        return ResourceExhausted(
            f"every backend is busy, and {self._settings.requests} requests are queued already: try again later "
            "(`queue.requests` of the router sets this limit)",
            retry_after_seconds=1,
        )

    def _drop_gone(self) -> None:
        """Remove all requests whose clients have gone."""
        self._waiting = deque(entry for entry in self._waiting if not entry[1].is_gone())
        self.length = len(self._waiting)

    def _refuse(self, request: QueuedRequest, error: HeadraceError) -> None:
        self.refused += 1
        try:
            request.refuse(error)
        except Exception:
            log.exception("Could not refuse a queued request.")


class HeldRequests:
    """Requests that wait while the service scales from zero. Used from the loop's thread only."""

    def __init__(
        self,
        settings: ActivationSettings,
        inactive_reason: Callable[[], str],
        on_refused: Callable[[QueuedRequest, str], None] = lambda _request, _reason: None,
    ) -> None:
        """inactive_reason: why no backend answers yet, for the error. on_refused: called with each refused request."""
        self._settings = settings
        self._on_refused = on_refused
        self._inactive_reason = inactive_reason
        self._held: list[QueuedRequest] = []
        self._bytes = 0
        self._deadline = inf
        self._timer: asyncio.TimerHandle | None = None
        self._release_timer: asyncio.TimerHandle | None = None
        self.retry_after_seconds = 10.0
        """Retry-After of requests that are refused."""
        self.dropped = 0
        """Requests whose client has gone, or that were refused."""
        self.refused = 0
        """Requests that were refused."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def bytes(self) -> int:
        """Bytes that are kept, as of the last sweep."""
        return self._bytes

    @property
    def oldest(self) -> float | None:
        """When the first of the held requests entered; None if there are none."""
        return self._held[0].queued_since if self._held else None

    def add(self, request: QueuedRequest) -> None:
        """Hold a request, or refuse it if there are too many or too many bytes."""
        settings = self._settings
        now = asyncio.get_running_loop().time()
        if len(self._held) >= settings.held_requests:
            self._check()
        if len(self._held) >= settings.held_requests:
            self._refuse(
                request,
                f"the service is starting, and {settings.held_requests} requests wait for it already: "
                "try again later (`activation.held_requests` of the router sets this limit)",
            )
            return
        if self._bytes + request.queued_bytes() > settings.held_bytes:
            self._refuse(request, self._too_many_bytes())
            return
        request.queued_since = request.queued_since or now
        self._bytes += request.queued_bytes()
        self._held.append(request)
        request.enter_queue()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def release(self, is_active: Callable[[], bool], on_response: OnResponse | None = None) -> None:
        """Start all held requests in order, in batches, as long as the service is active.

        on_response: called with each request when its response starts.
        """
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
        if not is_active():
            return
        batch, self._held = self._held[:_BATCH_REQUESTS], self._held[_BATCH_REQUESTS:]
        self._bytes = sum(request.queued_bytes() for request in self._held)
        if self._held:
            self._release_timer = asyncio.get_running_loop().call_later(
                _BATCH_SECONDS, self.release, is_active, on_response
            )
        for request in batch:
            if request.is_gone():
                self.dropped += 1
                continue
            try:
                request.leave_queue(on_response)
            except Exception:
                log.exception("A held request failed.")
                self._refuse(request, "the request could not be sent on; see the router's log")

    def update(self, settings: ActivationSettings) -> None:
        """Apply new limits, also to requests that are held already."""
        self._settings = settings

    def set_deadline(self, time: float) -> None:
        """Refuse all requests that are still held at this time: the router stops."""
        self._deadline = time

    def close(self) -> None:
        """Refuse all held requests."""
        for timer in (self._timer, self._release_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._release_timer = None
        held, self._held, self._bytes = self._held, [], 0
        for request in held:
            self._refuse(request, _SHUTTING_DOWN)

    def _sweep(self) -> None:
        self._timer = None
        self._check()
        if self._held:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _check(self) -> None:
        """Remove requests whose client has gone, and refuse those that waited too long or whose bodies became too large."""
        now = asyncio.get_running_loop().time()
        limit = self._settings.wait_seconds
        remaining: list[QueuedRequest] = []
        refused: list[tuple[QueuedRequest, str]] = []
        size = 0
        for request in self._held:
            if request.is_gone():
                self.dropped += 1
            elif now >= self._deadline:
                refused.append((request, _SHUTTING_DOWN))
            elif now - request.queued_since >= limit:
                text = f"the service did not start within {limit:g} seconds: {self._inactive_reason()}"
                refused.append((request, text))
            elif size + request.queued_bytes() > self._settings.held_bytes:
                refused.append((request, self._too_many_bytes()))
            else:
                size += request.queued_bytes()
                remaining.append(request)
        self._held, self._bytes = remaining, size
        for request, text in refused:
            self._refuse(request, text)

    def _refuse(self, request: QueuedRequest, text: str) -> None:
        self.dropped += 1
        self.refused += 1
        self._on_refused(request, text)
        try:
            request.refuse(Unavailable(text, retry_after_seconds=self.retry_after_seconds))
        except Exception:
            log.exception("Could not refuse a held request.")

    def _too_many_bytes(self) -> str:
        return (
            "the service is starting, and the requests that wait for it have as many bytes as may be kept: "
            "try again later (`activation.held_bytes` of the router sets this limit)"
        )


_SHUTTING_DOWN = "the router is shutting down, and the service has not started yet: try again"


def call_once_before(request: object, methods: Sequence[str], callback: Callable[[], None]) -> None:
    """Call `callback` before the first call of any of these methods of one object.

    It replaces the methods on this object, so that requests that never waited pay nothing for the check.
    """
    attributes: dict[str, Any] = vars(request)

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for name in methods:
                attributes.pop(name, None)
            try:
                callback()
            except Exception:
                log.exception("Could not report how long a request waited; the response is sent anyway.")
            return method(*args, **kwargs)

        return wrapper

    attributes.update({name: wrap(getattr(request, name)) for name in methods})
