# SPDX-License-Identifier: Apache-2.0
"""Check API keys, rate limits, concurrency and cross-site requests before a handler runs.

`Middleware` wraps the handler of every route and gRPC method, by the policy that it was registered with.

A browser sends the requests of a page to any address that its machine reaches, loopback included, and names the page in
`Origin`. It is checked for every route that can change the server, unless API keys are required. Programs send no
`Origin`. To resist DNS rebinding, the host must be an address, `localhost`, a name without a dot or this machine's own
name; with TLS any name is accepted, since the browser has verified the certificate.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headrace.api.access.api_keys import ApiKey, KeyRing, request_key
from headrace.api.access.concurrency import (
    ClientShare,
    DeadlineUnreachable,
    FairShareExceeded,
    InFlight,
    InFlightLimitReached,
)
from headrace.api.access.rate_limits import BucketTable, Decision, RateLimiter, RateRule, SubjectResolver
from headrace.api.access.redis_rate_limits import RedisRateLimiter
from headrace.api.access.settings import AccessSettings
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from headrace.core.telemetry.logs import log_access
from headrace.core.telemetry.metrics import Registry
from headrace.net.grpc.call import GrpcCall, StreamHandler, UnaryHandler
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import Buffer, RequestHead
from headrace.net.http.routes import Policy, Route, Scope
from headrace.net.websocket.handshake import same_origin
from headrace.programs.serve.worker import WorkerPolicies

_TABLE = "rate-limits"
_CHALLENGE = b"www-authenticate: Bearer\r\n"
_MISSING = "this server needs an API key: send it as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
_WRONG = "this API key is not known here, or has expired: ask for a new one"
_CROSS_SITE = "pages of this Origin may not change this server: use its own page, a program, or --api-keys-file"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

InFlightSlot = InFlight | ClientShare
"""Counts requests in flight: all, or those of one key."""


class Refusals:
    """Counters of refused requests, for `/metrics`."""

    def __init__(self, registry: Registry) -> None:
        unauthorized = registry.counter(
            "headrace_unauthorized_total", "Requests refused because an API key or its scope is missing", ["reason"]
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
        self._in_flight = InFlight(limits.in_flight, clock) if limits.in_flight or limits.timeout_seconds else None
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
        return self._in_flight.count if self._in_flight is not None else 0

    def access_log(self, peer: str, head: RequestHead, status: int) -> None:
        """Write the access log, with the name of the key."""
        key = self._keys.find(head.by_name, self._monotonic()) if self._keys is not None else None
        log_access(peer, head, status, key.name if key is not None else "")

    # Wrapping.

    def http(self, scope: Scope | None, handler: Handler, *, streams_body: bool = False) -> Handler:
        """Wrap a route's handler with the guards of a scope."""
        ring, rates, in_flight = self._guards_of(scope)
        if scope is None or (ring is None and rates is None and in_flight is None):
            return handler
        monotonic, wall, timeout = self._monotonic, self._wall, self._timeout
        resolve_subjects = self._subjects.resolve
        # A streaming body does not wait for Redis.
        redis = None if streams_body else self._redis

        def guarded(exchange: Exchange) -> None:
            now = monotonic()
            key = None
            if ring is not None:
                key = ring.find(exchange.head.by_name, now)
                if key is None or scope not in key.scopes:
                    self._check_scope(exchange, key, scope)
                if key is not None:
                    exchange.caller = key.name
            slot = None if in_flight is None else self._enter(in_flight, key, now, timeout)
            if rates is not None:
                subjects = resolve_subjects(exchange.peer, exchange.head, key)
                if redis is not None:
                    redis.take(subjects, now, partial(self._resume_http, exchange, handler, slot))
                    return
                rule, debt = rates.take(subjects, now)
                exchange.more_lines = rule.header_lines(debt, wall())
                if debt < 0:
                    raise self._rate_limited(slot, rule, debt)
            exchange.on_over = None if slot is None else slot.leave
            handler(exchange)

        return _with_error_format(handler, guarded)

    def unary(self, scope: Scope | None, handler: UnaryHandler) -> UnaryHandler:
        """Wrap a unary gRPC method."""
        ring, rates, in_flight = self._guards_of(scope)
        if scope is None or (ring is None and rates is None and in_flight is None):
            return handler
        monotonic, timeout, redis = self._monotonic, self._timeout, self._redis
        resolve_subjects = self._subjects.resolve

        def guarded(call: GrpcCall, message: Buffer) -> None:
            now = monotonic()
            key = None
            if ring is not None:
                key = ring.find(call.head.by_name, now)
                if key is None or scope not in key.scopes:
                    self._check_scope(call, key, scope)
            slot = None if in_flight is None else self._enter(in_flight, key, now, call.timeout_seconds or timeout)
            if rates is not None:
                subjects = resolve_subjects(call.peer, call.head, key)
                if redis is not None:
                    redis.take(subjects, now, partial(self._resume_unary, call, message, handler, slot))
                    return
                rule, debt = rates.take(subjects, now)
                if debt < 0:
                    raise self._rate_limited(slot, rule, debt)
            call.on_over = None if slot is None else slot.leave
            handler(call, message)

        return guarded

    def streaming(self, scope: Scope | None, handler: StreamHandler) -> StreamHandler:
        """Wrap a streaming gRPC method.

        Each of its messages counts as a request, but only on this machine, because messages must not wait, and not as
        in flight, because a stream may be open for days.
        """
        ring, rates, _ = self._guards_of(scope)
        if scope is None or (ring is None and rates is None):
            return handler

        def guarded(call: GrpcCall) -> None:
            key = None
            if ring is not None:
                key = ring.find(call.head.by_name, self._monotonic())
                if key is None or scope not in key.scopes:
                    self._check_scope(call, key, scope)
            handler(call)
            run_handler = call.on_message
            if rates is None or run_handler is None:
                return
            subjects = self._subjects.resolve(call.peer, call.head, key)

            def counted(message: Buffer) -> None:
                rule, debt = rates.take(subjects, self._monotonic())
                if debt < 0:
                    raise self._rate_limited(None, rule, debt)
                run_handler(message)

            call.on_message = counted

        return guarded

    # Checks.

    def _guards_of(self, scope: Scope | None) -> tuple[KeyRing | None, RateLimiter | None, InFlight | None]:
        """Return the guards of a scope."""
        rates = self._rates if scope in self._limited_scopes else None
        return self._keys, rates, self._in_flight if scope == "infer" else None

    def _check_scope(self, request: Exchange | GrpcCall, key: ApiKey | None, scope: Scope) -> None:
        """Refuse a request without a valid key, or whose key lacks the scope."""
        if key is None:
            missing = request_key(request.head.by_name) is None
            (self._refusals.missing if missing else self._refusals.wrong).add()
            if isinstance(request, Exchange):
                request.more_lines = _CHALLENGE
            raise Unauthenticated(_MISSING if missing else _WRONG)
        if not key.allows(scope):
            self._refusals.scope.add()
            raise PermissionDenied(f"the API key '{key.name}' has no scope '{scope}': ask for one that has")

    def _enter(self, in_flight: InFlight, key: ApiKey | None, now: float, timeout: float | None) -> InFlightSlot:
        """Count the request as in flight; return the counter to decrement when it ends."""
        slot: InFlightSlot = in_flight if key is None else in_flight.share(key.name, now)
        try:
            slot.enter(now, timeout)
        except InFlightLimitReached:
            self._refusals.full.add()
            raise
        except DeadlineUnreachable:
            self._refusals.late.add()
            raise
        except FairShareExceeded:
            self._refusals.share.add()
            raise
        return slot

    def _rate_limited(self, slot: InFlightSlot | None, rule: RateRule, debt: int) -> ResourceExhausted:
        if slot is not None:
            slot.undo()
        self._refusals.limited[rule.by].add()
        return rule.refusal(debt)

    def _resume_http(self, exchange: Exchange, handler: Handler, slot: InFlightSlot | None, decision: Decision) -> None:
        """Continue a request after the reply of Redis."""
        rule, debt = decision
        exchange.more_lines = rule.header_lines(debt, self._wall())
        protocol_fail = getattr(handler, "fail", None)
        fail = exchange.fail if protocol_fail is None else partial(protocol_fail, exchange)
        self._resume(exchange, exchange.closed, partial(handler, exchange), slot, decision, fail)

    def _resume_unary(
        self, call: GrpcCall, message: Buffer, handler: UnaryHandler, slot: InFlightSlot | None, decision: Decision
    ) -> None:
        self._resume(call, call.over, partial(handler, call, message), slot, decision, call.fail)

    def _resume(
        self,
        request: Exchange | GrpcCall,
        client_gone: bool,
        run_handler: Callable[[], None],
        slot: InFlightSlot | None,
        decision: Decision,
        fail: Callable[[BaseException], None],
    ) -> None:
        rule, debt = decision
        try:
            if debt < 0:
                raise self._rate_limited(slot, rule, debt)
            if slot is not None:
                if client_gone:
                    slot.undo()
                else:
                    request.on_over = slot.leave
            if not client_gone:
                run_handler()
        except Exception as error:
            fail(error)


def _with_error_format(handler: Handler, guarded: Handler) -> Handler:
    """Run a guarded handler; errors use the format of the handler's protocol if it has one (`fail`)."""
    fail: Callable[[Exchange, BaseException], None] | None = getattr(handler, "fail", None)
    if fail is None:
        return guarded

    def run(exchange: Exchange) -> None:
        try:
            guarded(exchange)
        except Exception as error:
            fail(exchange, error)

    return run


def open_guard(
    settings: AccessSettings, registry: Registry, folder: str | Path = "", clock: Clock | None = None
) -> Guard | None:
    """Return the guard for settings, or None. `folder` is the folder that several workers share."""
    if not settings.guards:
        return None
    return Guard(settings, registry, Path(folder) if folder else None, clock)


class Middleware:
    """Everything that runs before the handlers of a server: the cross-site check, the guard, the policy of a worker.

    In this order: a request that is broadcast to another worker has passed the guard of the worker that received it.
    """

    def __init__(self, guard: Guard | None, workers: WorkerPolicies | None = None) -> None:
        self._guard = guard
        self._workers = workers

    def http(self, method: str, path: str, route: Route) -> Handler:
        """Wrap the handler of a route."""
        scope, workers, keeps_data = route.policy
        handler, guard = route.handler, self._guard
        if self._workers is not None:
            handler = self._workers.http(f"{method} {path}", workers, handler)
        if guard is not None:
            handler = guard.http(scope, handler, streams_body=route.streams_body)
        changes = keeps_data or (scope == "admin" and method not in _SAFE_METHODS)
        if changes and (guard is None or not guard.needs_keys):
            handler = _refuse_cross_site(handler)
        return handler

    def unary(self, name: str, policy: Policy, handler: UnaryHandler) -> UnaryHandler:
        """Wrap the handler of a unary gRPC method."""
        if self._workers is not None:
            handler = self._workers.unary(name, policy.workers, handler)
        return handler if self._guard is None else self._guard.unary(policy.scope, handler)

    def streaming(self, policy: Policy, handler: StreamHandler) -> StreamHandler:
        """Wrap the handler of a streaming gRPC method."""
        return handler if self._guard is None else self._guard.streaming(policy.scope, handler)


def _refuse_cross_site(handler: Handler) -> Handler:
    """Refuse changes from pages of other sites."""

    def checked(exchange: Exchange) -> None:
        if not may_change(exchange.head):
            raise PermissionDenied(_CROSS_SITE)
        handler(exchange)

    return checked


def may_change(head: RequestHead) -> bool:
    """Return whether a request without a key may change the server: it is from a program, or from a page of this server."""
    if head.get(b"origin") is None:
        return True
    return same_origin(head) and (head.scheme == b"https" or _is_local_host(head.get(b"host") or b""))


def _is_local_host(host: bytes) -> bool:
    """Return whether a Host header can only name this machine or its network."""
    text = host.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0].rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return ("." not in name and name != "") or name.endswith(".localhost") or name == socket.gethostname().lower()
    return True
