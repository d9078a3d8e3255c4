# SPDX-License-Identifier: Apache-2.0
"""Check API keys, rate limits, concurrency and cross-site requests before a handler runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from headrace.api.access.api_keys import ApiKey, KeyRing, sent_key
from headrace.api.access.concurrency import (
    ClientShare,
    DeadlineUnreachable,
    FairShareExceeded,
    InFlight,
    InFlightLimitReached,
)
from headrace.api.access.rate_limits import BucketTable, Decision, RateLimiter, RateRule, SubjectResolver
from headrace.api.access.redis_rate_limits import RedisRateLimiter
from headrace.api.access.settings import AccessSettings, Scope
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from headrace.core.telemetry.logs import log_access
from headrace.core.telemetry.metrics import Registry
from headrace.net.grpc.call import GrpcCall, StreamHandler, UnaryHandler
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import Buffer, RequestHead
from headrace.net.http.routes import Routes
from headrace.programs.serve.broadcast import Broadcaster
from headrace.programs.serve.route_scopes import OwnPagesRoutes, grpc_scope, http_scope, mount_scope
from headrace.programs.serve.worker import WorkersRoutes, WorkersServices
from headrace.programs.serve.worker_stats import WorkerStats

_TABLE = "rate-limits"
_CHALLENGE = b"www-authenticate: Bearer\r\n"
_MISSING = "this server needs an API key: send it as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
_WRONG = "this API key is not known here, or has expired: ask for a new one"

Seat = InFlight | ClientShare
"""Counts requests in flight: all, or those of one key."""


class Refusals:
    """Counters of refused requests, for `/metrics`."""

    def __init__(self, registry: Registry) -> None:
        unauthorized = registry.counter(
            "headrace_unauthorized_total", "Requests refused for want of an API key or of its scope", ["reason"]
        )
        limited = registry.counter("headrace_rate_limited_total", "Requests refused by a rate limit", ["by"])
        shed = registry.counter("headrace_shed_total", "Requests refused because too many are in flight", ["reason"])
        self.missing = unauthorized.labels(reason="missing")
        self.wrong = unauthorized.labels(reason="wrong")
        self.scope = unauthorized.labels(reason="scope")
        self.limited = {by: limited.labels(by=by) for by in ("key", "user", "address")}
        self.full = shed.labels(reason="full")
        self.late = shed.labels(reason="late")
        self.share = shed.labels(reason="share")


class Guard:
    """The guards of one process. Wraps handlers; used in the event loop's thread."""

    def __init__(
        self, settings: AccessSettings, registry: Registry, folder: Path | None = None, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        self._monotonic = clock.monotonic
        self._wall = clock.wall
        self._refusals = Refusals(registry)
        self._keys = KeyRing(settings.keys_file, clock) if settings.keys_file is not None else None
        rates = settings.rates
        self._limited_scopes = rates.scopes
        self._subjects = SubjectResolver(rates)
        self._rates: RateLimiter | None = None
        self._redis: RedisRateLimiter | None = None
        if rates.limits:
            self._rates = RateLimiter(rates.limits, BucketTable(folder / _TABLE) if folder is not None else None)
            if rates.redis_url:
                self._redis = RedisRateLimiter(rates.redis_url, self._rates)
        limits = settings.concurrency
        self._flow = InFlight(limits.in_flight, clock) if limits.in_flight or limits.timeout_seconds else None
        self._timeout = limits.timeout_seconds or None

    def start(self) -> None:
        """Start background tasks, in the event loop."""
        if self._redis is not None:
            self._redis.start()

    async def close(self) -> None:
        """Stop background tasks."""
        if self._redis is not None:
            await self._redis.close()
        if self._rates is not None:
            self._rates.close()

    @property
    def needs_keys(self) -> bool:
        """Whether requests need an API key."""
        return self._keys is not None

    @property
    def in_flight(self) -> int:
        """Inference requests in flight, if they are counted."""
        return self._flow.count if self._flow is not None else 0

    def access_log(self, peer: str, head: RequestHead, status: int) -> None:
        """Write the access log, with the name of the key."""
        key = self._keys.find(head.by_name, self._monotonic()) if self._keys is not None else None
        log_access(peer, head, status, key.name if key is not None else "")

    # Wrapping.

    def http(self, scope: Scope | None, handler: Handler, *, streams_body: bool = False) -> Handler:
        """Wrap a route's handler with the guards of a scope."""
        ring, rates, flow = self._of(scope)
        if scope is None or (ring is None and rates is None and flow is None):
            return handler
        monotonic, wall, timeout = self._monotonic, self._wall, self._timeout
        subjects = self._subjects.resolve
        # A streaming body does not wait for Redis.
        redis = None if streams_body else self._redis

        def guarded(exchange: Exchange) -> None:
            now = monotonic()
            key = None
            if ring is not None:
                key = ring.find(exchange.head.by_name, now)
                if key is None or scope not in key.scopes:
                    self._check_scope(exchange, key, scope)
            seat = None if flow is None else self._enter(flow, key, now, timeout)
            if rates is not None:
                whom = subjects(exchange.peer, exchange.head, key)
                if redis is not None:
                    redis.take(whom, now, partial(self._go_on_http, exchange, handler, seat))
                    return
                rule, debt = rates.take(whom, now)
                exchange.more_lines = rule.header_lines(debt, wall())
                if debt < 0:
                    raise self._limited(seat, rule, debt)
            exchange.on_over = None if seat is None else seat.leave
            handler(exchange)

        return _told_by(handler, guarded)

    def unary(self, scope: Scope | None, handler: UnaryHandler) -> UnaryHandler:
        """Wrap a unary gRPC method."""
        ring, rates, flow = self._of(scope)
        if scope is None or (ring is None and rates is None and flow is None):
            return handler
        monotonic, timeout, redis = self._monotonic, self._timeout, self._redis
        subjects = self._subjects.resolve

        def guarded(call: GrpcCall, message: Buffer) -> None:
            now = monotonic()
            key = None
            if ring is not None:
                key = ring.find(call.head.by_name, now)
                if key is None or scope not in key.scopes:
                    self._check_scope(call, key, scope)
            seat = None if flow is None else self._enter(flow, key, now, call.timeout_seconds or timeout)
            if rates is not None:
                whom = subjects(call.peer, call.head, key)
                if redis is not None:
                    redis.take(whom, now, partial(self._go_on_unary, call, message, handler, seat))
                    return
                rule, debt = rates.take(whom, now)
                if debt < 0:
                    raise self._limited(seat, rule, debt)
            call.on_over = None if seat is None else seat.leave
            handler(call, message)

        return guarded

    def streaming(self, scope: Scope | None, handler: StreamHandler) -> StreamHandler:
        """Wrap a streaming gRPC method.

        Each of its messages counts as a request, but only on this machine, because messages must not wait, and not as
        in flight, because a stream may be open for days.
        """
        ring, rates, _ = self._of(scope)
        if scope is None or (ring is None and rates is None):
            return handler

        def guarded(call: GrpcCall) -> None:
            key = None
            if ring is not None:
                key = ring.find(call.head.by_name, self._monotonic())
                if key is None or scope not in key.scopes:
                    self._check_scope(call, key, scope)
            handler(call)
            deed = call.on_message
            if rates is None or deed is None:
                return
            whom = self._subjects.resolve(call.peer, call.head, key)

            def counted(message: Buffer) -> None:
                rule, debt = rates.take(whom, self._monotonic())
                if debt < 0:
                    raise self._limited(None, rule, debt)
                deed(message)

            call.on_message = counted

        return guarded

    # Checks.

    def _of(self, scope: Scope | None) -> tuple[KeyRing | None, RateLimiter | None, InFlight | None]:
        """Return the guards of a scope."""
        rates = self._rates if scope in self._limited_scopes else None
        return self._keys, rates, self._flow if scope == "infer" else None

    def _check_scope(self, request: Exchange | GrpcCall, key: ApiKey | None, scope: Scope) -> None:
        """Refuse a request without a valid key, or whose key lacks the scope."""
        if key is None:
            missing = sent_key(request.head.by_name) is None
            (self._refusals.missing if missing else self._refusals.wrong).add()
            if isinstance(request, Exchange):
                request.more_lines = _CHALLENGE
            raise Unauthenticated(_MISSING if missing else _WRONG)
        if not key.allows(scope):
            self._refusals.scope.add()
            raise PermissionDenied(f"the API key '{key.name}' has no scope '{scope}': ask for one that has")

    def _enter(self, flow: InFlight, key: ApiKey | None, now: float, timeout: float | None) -> Seat:
        """Return where the request is counted until it ends."""
        seat: Seat = flow if key is None else flow.share(key.name, now)
        try:
            seat.enter(now, timeout)
        except InFlightLimitReached:
            self._refusals.full.add()
            raise
        except DeadlineUnreachable:
            self._refusals.late.add()
            raise
        except FairShareExceeded:
            self._refusals.share.add()
            raise
        return seat

    def _limited(self, seat: Seat | None, rule: RateRule, debt: int) -> ResourceExhausted:
        if seat is not None:
            seat.undo()
        self._refusals.limited[rule.by].add()
        return rule.refusal(debt)

    def _go_on_http(self, exchange: Exchange, handler: Handler, seat: Seat | None, verdict: Decision) -> None:
        """Continue after the answer of Redis."""
        rule, debt = verdict
        exchange.more_lines = rule.header_lines(debt, self._wall())
        fail = getattr(handler, "fail", None)
        tell = exchange.fail if fail is None else partial(fail, exchange)
        self._go_on(exchange, exchange.closed, partial(handler, exchange), seat, verdict, tell)

    def _go_on_unary(
        self, call: GrpcCall, message: Buffer, handler: UnaryHandler, seat: Seat | None, verdict: Decision
    ) -> None:
        self._go_on(call, call.over, partial(handler, call, message), seat, verdict, call.fail)

    def _go_on(
        self,
        request: Exchange | GrpcCall,
        gone: bool,
        deed: Callable[[], None],
        seat: Seat | None,
        verdict: Decision,
        tell: Callable[[BaseException], None],
    ) -> None:
        rule, debt = verdict
        try:
            if debt < 0:
                raise self._limited(seat, rule, debt)
            if seat is not None:
                if gone:
                    seat.undo()
                else:
                    request.on_over = seat.leave
            if not gone:
                deed()
        except Exception as error:
            tell(error)


def _told_by(handler: Handler, guarded: Handler) -> Handler:
    """Run a guarded handler; errors use the format of the handler's protocol if it has one (`fail`)."""
    fail: Callable[[Exchange, BaseException], None] | None = getattr(handler, "fail", None)
    if fail is None:
        return guarded

    def telling(exchange: Exchange) -> None:
        try:
            guarded(exchange)
        except Exception as error:
            fail(exchange, error)

    return telling


def open_guard(
    settings: AccessSettings, registry: Registry, folder: str | Path = "", clock: Clock | None = None
) -> Guard | None:
    """Return the guard for settings, or None. `folder` is that of the workers, if there are several."""
    if not settings.guards:
        return None
    return Guard(settings, registry, Path(folder) if folder else None, clock)


class GuardedRoutes(OwnPagesRoutes):
    """Routes whose handlers are guarded. `guard` must be set before the first route."""

    guard: Guard

    def needs_keys(self) -> bool:
        """Return whether changes need an API key."""
        return self.guard.needs_keys

    def add(self, method: str, path: str, handler: Handler, *, streams_body: bool = False) -> None:
        """Add a guarded route."""
        handler = self.guard.http(http_scope(method, path), handler, streams_body=streams_body)
        super().add(method, path, handler, streams_body=streams_body)

    def mount(self, prefix: str, handler: Handler) -> None:
        """Mount a guarded handler."""
        super().mount(prefix, self.guard.http(mount_scope(prefix), handler, streams_body=True))


class GuardedServices(Services):
    """gRPC services whose methods are guarded."""

    guard: Guard

    def unary(self, service: str, method: str, handler: UnaryHandler) -> None:
        """Add a guarded unary method."""
        super().unary(service, method, self.guard.unary(grpc_scope(service, method), handler))

    def streaming(self, service: str, method: str, handler: StreamHandler) -> None:
        """Add a guarded streaming method."""
        super().streaming(service, method, self.guard.streaming(grpc_scope(service, method), handler))


# A worker's routes add the broadcast to other workers, then call the next class: the guard, which therefore runs first. A
# request that is repeated in another worker has passed the guard of the one that received it.


class _GuardedWorkersRoutes(WorkersRoutes, GuardedRoutes):
    pass


class _GuardedWorkersServices(WorkersServices, GuardedServices):
    pass


class Sharing(Protocol):
    """What the routes of a worker need: `worker.Worker` has it."""

    gathering: WorkerStats
    repeating: Broadcaster


def guarded_routes(guard: Guard, worker: Sharing | None = None) -> Routes:
    """Return routes with a guard; for one of several workers, if given."""
    routes = GuardedRoutes() if worker is None else _GuardedWorkersRoutes(worker.gathering, worker.repeating)
    routes.guard = guard
    return routes


def guarded_services(guard: Guard, worker: Sharing | None = None) -> Services:
    """Return gRPC services with a guard."""
    services = GuardedServices() if worker is None else _GuardedWorkersServices(worker.gathering, worker.repeating)
    services.guard = guard
    return services
