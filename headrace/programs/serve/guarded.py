# SPDX-License-Identifier: Apache-2.0
"""Guards before the handlers: API keys, rate limits, and how many requests may be in flight.

`open_guard` makes one where the settings ask for it; `guarded_routes` and `guarded_services` stand in for `Routes` and
`Services` then, so that a server without access settings pays nothing. A guard comes before anything else that is done
for a request, also before other workers hear of it. What is decided is in `access`; which scope a path needs, in
`guarded_scopes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from headrace.api.access.concurrency import Full, InFlight, Late, OverShare, Share
from headrace.api.access.keys import ApiKey, KeyRing, sent_key
from headrace.api.access.rates import Rates, Rule, Verdict
from headrace.api.access.redis_rates import RedisRates
from headrace.api.access.settings import AccessSettings, Scope
from headrace.api.access.subjects import Subjects
from headrace.api.access.table import BucketTable
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from headrace.core.telemetry.access import log_access
from headrace.core.telemetry.registry import Registry
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services, StreamHandler, UnaryHandler
from headrace.net.http.exchange import Buffer, Exchange, Handler
from headrace.net.http.heads import RequestHead
from headrace.net.http.routes import Routes
from headrace.programs.serve.from_pages import OwnPagesRoutes
from headrace.programs.serve.gathering import Gathering
from headrace.programs.serve.guarded_scopes import grpc_scope, http_scope, mount_scope
from headrace.programs.serve.repeating import Repeating
from headrace.programs.serve.workers_routes import WorkersRoutes, WorkersServices

_TABLE = "rate-limits"
_CHALLENGE = b"www-authenticate: Bearer\r\n"
_MISSING = "this server needs an API key: send it as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
_WRONG = "this API key is not known here, or has expired: ask for a new one"

Seat = InFlight | Share
"""Where a request in flight is counted: with all, or with those of its key."""


class Refusals:
    """How often who was refused, for `/metrics`."""

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
    """One process's guards. Wraps handlers; used from the loop's thread."""

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
        self._subjects = Subjects(rates)
        self._rates: Rates | None = None
        self._redis: RedisRates | None = None
        if rates.limits:
            self._rates = Rates(rates.limits, BucketTable(folder / _TABLE) if folder is not None else None)
            if rates.redis_url:
                self._redis = RedisRates(rates.redis_url, self._rates)
        limits = settings.concurrency
        self._flow = InFlight(limits.in_flight, clock) if limits.in_flight or limits.timeout_seconds else None
        self._timeout = limits.timeout_seconds or None

    def start(self) -> None:
        """Begin what runs beside requests. In the loop."""
        if self._redis is not None:
            self._redis.start()

    async def close(self) -> None:
        """End it."""
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
        """Inference requests that are waited for, where they are counted."""
        return self._flow.count if self._flow is not None else 0

    def access_log(self, peer: str, head: RequestHead, status: int) -> None:
        """See `telemetry.access.log_access`; with the name of the key."""
        key = self._keys.find(head.by_name, self._monotonic()) if self._keys is not None else None
        log_access(peer, head, status, key.name if key is not None else "")

    # Wrapping.

    def http(self, scope: Scope | None, handler: Handler, *, streams_body: bool = False) -> Handler:
        """A route's handler behind the guards of a scope."""
        ring, rates, flow = self._of(scope)
        if scope is None or (ring is None and rates is None and flow is None):
            return handler
        monotonic, wall, timeout = self._monotonic, self._wall, self._timeout
        subjects = self._subjects.of
        # A body that streams does not wait for Redis.
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
                rule, owes = rates.take(whom, now)
                exchange.more_lines = rule.lines(owes, wall())
                if owes < 0:
                    raise self._limited(seat, rule, owes)
            exchange.on_over = None if seat is None else seat.leave
            handler(exchange)

        return _told_by(handler, guarded)

    def unary(self, scope: Scope | None, handler: UnaryHandler) -> UnaryHandler:
        """The same for a unary gRPC method."""
        ring, rates, flow = self._of(scope)
        if scope is None or (ring is None and rates is None and flow is None):
            return handler
        monotonic, timeout, redis = self._monotonic, self._timeout, self._redis
        subjects = self._subjects.of

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
                rule, owes = rates.take(whom, now)
                if owes < 0:
                    raise self._limited(seat, rule, owes)
            call.on_over = None if seat is None else seat.leave
            handler(call, message)

        return guarded

    def streaming(self, scope: Scope | None, handler: StreamHandler) -> StreamHandler:
        """The same for a streaming one.

        Each of its messages is a request, and counted so; but on this machine only, because messages must not wait, and
        not as in flight, because a stream may be open for days.
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
            whom = self._subjects.of(call.peer, call.head, key)

            def counted(message: Buffer) -> None:
                rule, owes = rates.take(whom, self._monotonic())
                if owes < 0:
                    raise self._limited(None, rule, owes)
                deed(message)

            call.on_message = counted

        return guarded

    # Inside.

    def _of(self, scope: Scope | None) -> tuple[KeyRing | None, Rates | None, InFlight | None]:
        """The guards that a scope has."""
        rates = self._rates if scope in self._limited_scopes else None
        return self._keys, rates, self._flow if scope == "infer" else None

    def _check_scope(self, request: Exchange | GrpcCall, key: ApiKey | None, scope: Scope) -> None:
        """Refuse a request whose key is none, or lacks the scope, unless it is one for everything."""
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
        """Where the request is counted, until it leaves."""
        seat: Seat = flow if key is None else flow.share(key.name, now)
        try:
            seat.enter(now, timeout)
        except Full:
            self._refusals.full.add()
            raise
        except Late:
            self._refusals.late.add()
            raise
        except OverShare:
            self._refusals.share.add()
            raise
        return seat

    def _limited(self, seat: Seat | None, rule: Rule, owes: int) -> ResourceExhausted:
        if seat is not None:
            seat.undo()
        self._refusals.limited[rule.by].add()
        return rule.refused(owes)

    def _go_on_http(self, exchange: Exchange, handler: Handler, seat: Seat | None, verdict: Verdict) -> None:
        """Redis has answered."""
        rule, owes = verdict
        exchange.more_lines = rule.lines(owes, self._wall())
        fail = getattr(handler, "fail", None)
        tell = exchange.fail if fail is None else partial(fail, exchange)
        self._go_on(exchange, exchange.closed, partial(handler, exchange), seat, verdict, tell)

    def _go_on_unary(
        self, call: GrpcCall, message: Buffer, handler: UnaryHandler, seat: Seat | None, verdict: Verdict
    ) -> None:
        self._go_on(call, call.over, partial(handler, call, message), seat, verdict, call.fail)

    def _go_on(
        self,
        request: Exchange | GrpcCall,
        gone: bool,
        deed: Callable[[], None],
        seat: Seat | None,
        verdict: Verdict,
        tell: Callable[[BaseException], None],
    ) -> None:
        rule, owes = verdict
        try:
            if owes < 0:
                raise self._limited(seat, rule, owes)
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
    """Guarded, with errors in the words of the handler's protocol, where it has words of its own (`fail`)."""
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
    """The guard that settings ask for, if they do. `folder` is that of the workers, where a server has several."""
    if not settings.guards:
        return None
    return Guard(settings, registry, Path(folder) if folder else None, clock)


class GuardedRoutes(OwnPagesRoutes):
    """Routes whose handlers are guarded. `guard` is set before the first is added."""

    guard: Guard

    def needs_keys(self) -> bool:
        """See `OwnPagesRoutes.needs_keys`."""
        return self.guard.needs_keys

    def add(self, method: str, path: str, handler: Handler, *, streams_body: bool = False) -> None:
        """See `Routes.add`."""
        handler = self.guard.http(http_scope(method, path), handler, streams_body=streams_body)
        super().add(method, path, handler, streams_body=streams_body)

    def mount(self, prefix: str, handler: Handler) -> None:
        """See `Routes.mount`."""
        super().mount(prefix, self.guard.http(mount_scope(prefix), handler, streams_body=True))


class GuardedServices(Services):
    """The same for gRPC."""

    guard: Guard

    def unary(self, service: str, method: str, handler: UnaryHandler) -> None:
        """See `Services.unary`."""
        super().unary(service, method, self.guard.unary(grpc_scope(service, method), handler))

    def streaming(self, service: str, method: str, handler: StreamHandler) -> None:
        """See `Services.streaming`."""
        super().streaming(service, method, self.guard.streaming(grpc_scope(service, method), handler))


# A worker's routes add what is for all workers and then hand on to the next class: the guard, which so comes first when a
# request does. A request that is repeated in another worker has passed the guard of the one it came to.


class _GuardedWorkersRoutes(WorkersRoutes, GuardedRoutes):
    pass


class _GuardedWorkersServices(WorkersServices, GuardedServices):
    pass


class Sharing(Protocol):
    """What a worker's routes need: `worker.Worker` has it."""

    gathering: Gathering
    repeating: Repeating


def guarded_routes(guard: Guard, worker: Sharing | None = None) -> Routes:
    """Routes behind a guard; of one of several workers, if it is given."""
    routes = GuardedRoutes() if worker is None else _GuardedWorkersRoutes(worker.gathering, worker.repeating)
    routes.guard = guard
    return routes


def guarded_services(guard: Guard, worker: Sharing | None = None) -> Services:
    """The same for gRPC."""
    services = GuardedServices() if worker is None else _GuardedWorkersServices(worker.gathering, worker.repeating)
    services.guard = guard
    return services
