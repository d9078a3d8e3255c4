# SPDX-License-Identifier: Apache-2.0
"""The HTTP half of a router: makes backends, pools, health checks and handlers from settings, and applies new settings.

`programs.router` makes it and starts it in its event loop. The gRPC half (`grpc.proxy`) shares `backends`, `budget`, `queue`
and `activator`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.core.clock import SystemClock
from headrace.core.continuation import STREAM_PATHS
from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.metrics import Registry
from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.fleet.router.activation import Activator
from headrace.fleet.router.backends import Backends, LimitedBackends
from headrace.fleet.router.chooser import Chooser, make_chooser, reads_bodies
from headrace.fleet.router.continuation import Continuations
from headrace.fleet.router.discovery import Discoverer, Source, make_sources
from headrace.fleet.router.explain import ExplainEndpoint
from headrace.fleet.router.fairness import Fairness, FindTenant
from headrace.fleet.router.health_checks import HealthChecker
from headrace.fleet.router.hedging import HedgedRequest, Hedger
from headrace.fleet.router.kv_events import KVEvents, KVEventSubscriber, PromptTokens, TokensFirst, require_events
from headrace.fleet.router.kv_index import KVIndex
from headrace.fleet.router.predicted_latency import PredictedLatency, TimedRequest
from headrace.fleet.router.prefill_decode import PrefillDecode, PrefillFirst
from headrace.fleet.router.proxied_request import Forwarder
from headrace.fleet.router.responses import UpstreamHeadParser
from headrace.fleet.router.retries import RetryBudget
from headrace.fleet.router.settings import without_scaling
from headrace.fleet.router.status import RouterStatus
from headrace.fleet.router.stream_latency import StreamLatency
from headrace.fleet.router.upstream import CoarseClock, ConnectionPool

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.scale_targets import Scaler
    from headrace.fleet.router.settings import BackendAddress, RouterSettings
    from headrace.net.http.routes import Routes

MakeScaler = Callable[["RouterSettings"], "Scaler | None"]
_TICK_SECONDS = 0.25
_READ_BYTES = 1 << 20
"""Where a choice depends on bodies, bodies up to this size are complete before it is made."""
FIXED = (
    "keep_host",
    "trust_forwarded",
    "idle_connections",
    "whole_bytes",
    "answer_head_bytes",
    "ca_file",
    "max_outstanding",
    "queue",
    "fairness",
    "endpoint_picker",
)
"""Settings that need a restart: open connections and requests depend on them."""
_BACKEND_SETTINGS = ("health", "outliers", "policy", "slow_start_seconds")
_CHOICE_SETTINGS = (
    "policy",
    "cache_aware",
    "prefix_hash",
    "kv_events",
    "predicted_latency",
    "sticky",
    "hedging",
    "pairing",
    "paired",
)


class RouterProxy:
    """The HTTP proxy with all its parts. Used from the loop's thread only."""

    def __init__(
        self,
        settings: RouterSettings,
        scaler: Scaler | None = None,
        tracer: Tracer = NO_TRACING,
        make_scaler: MakeScaler | None = None,
        find_tenant: FindTenant | None = None,
    ) -> None:
        """make_scaler: makes the scaler if new settings add activation. find_tenant: finds the tenant of a request's key."""
        check_backends(settings)
        self.settings = settings
        self._tracer = tracer
        self._make_scaler = make_scaler or (lambda _: None)
        self.fairness = Fairness(settings.fairness, find_tenant) if settings.fairness.is_enabled else None
        """Counts the tokens of each tenant, where they share the backends."""
        limited = LimitedBackends(settings, self.fairness) if settings.max_outstanding else None
        self.backends = limited or Backends(settings)
        self.queue = limited.queue if limited is not None else None
        """Requests that wait while every backend has `max_outstanding` requests."""
        self.budget = RetryBudget(settings.retries)
        self.clock = CoarseClock()
        self.registry = Registry(SystemClock())
        self._head_parser = UpstreamHeadParser()
        self.pools = {backend: self._make_pool(backend) for backend in self.backends.all}
        self._checker = HealthChecker(settings, self.backends)
        self.activator = self._make_activator(scaler)
        """Holds requests while the service is scaled to zero."""
        self.continuations = Continuations(settings.continuation, settings.transfer_key)
        """Which streams go on at another backend when theirs dies."""
        self._status = RouterStatus(self.registry, self.backends, self.pools, self.budget, settings, self.activator)
        self._status.add_continuations(self.continuations)
        if self.fairness is not None:
            self._status.add_fairness(self.fairness)
        self.forwarder = Forwarder(settings, self.backends, self.pools, self.budget, self.clock)
        self.forwarder.activator = self.activator
        self.forwarder.queue = self.queue
        self.forwarder.fairness = self.fairness
        self.forwarder.continuations = self.continuations
        self._measure_streams()
        self.chooser: Chooser | None = None
        """Chooses backends, where the choice depends on the request."""
        self.hedger: Hedger | None = None
        self.kv_events: KVEventSubscriber | None = None
        """Follows the KV events of the backends, with the policy `kv_events`."""
        self.prompt_tokens: PromptTokens | None = None
        """Finds the tokens of prompts, with that policy."""
        self.latency: PredictedLatency | None = None
        """Predicts how long backends take, with the policy `predicted_latency`."""
        self.prefill_decode: PrefillDecode | None = None
        self._make_strategies()
        self._discoverer: Discoverer | None = None
        self.on_update: list[Callable[[RouterSettings], None]] = []
        """Called with new settings."""
        self.backends.on_added.append(self._backend_added)
        self.backends.on_removed.append(self._backend_removed)
        self._timer: asyncio.TimerHandle | None = None
        self.backends.on_change = self._backend_changed

    def add_to(self, routes: Routes) -> None:
        """Register the router's own endpoints, and forward everything else to backends."""
        self._status.add_to(routes)
        ExplainEndpoint(self.backends, lambda: self.settings).add_to(routes)
        whole_bytes = self.settings.whole_bytes
        if reads_bodies(self.settings):
            whole_bytes = max(whole_bytes, _READ_BYTES)
        handlers = (self.forwarder.buffered, self.forwarder.streamed)
        routes.fallback(*handlers, whole_bytes=whole_bytes)
        for path in STREAM_PATHS if self.settings.continuation.enabled else ():
            # What is kept to be continued has to be complete first.
            kept_bytes = max(whole_bytes, self.settings.continuation.body_bytes)
            routes.fallback(*handlers, whole_bytes=kept_bytes, prefix=path)

    async def start(self) -> None:
        """Discover and check the backends, and start the timers."""
        self._tick()
        if self.settings.discovery.is_enabled:
            await self._discover(make_sources(self.settings.discovery))
        self._follow_events()
        if self.activator is not None:
            # Before the checks: a suspended backend need not be reported as down.
            await self.activator.start()
        await self._checker.start()

    async def close(self) -> None:
        """Stop all tasks and close all connections to backends."""
        if self._timer is not None:
            self._timer.cancel()
        if self._discoverer is not None:
            await self._discoverer.close()
        if self.kv_events is not None:
            await self.kv_events.close()
        if self.queue is not None:
            self.queue.close()
        if self.activator is not None:
            await self.activator.close()
        await self._checker.close()
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    def set_config_version(self, version: str) -> None:
        """Report which configuration the router runs with."""
        self._status.config_version = version

    def drain(self, grace_seconds: float = 0.0) -> None:
        """Report not ready: the router stops within so many seconds."""
        self._status.ready = False
        if self.activator is not None:
            self.activator.drain(grace_seconds)

    async def update_settings(self, settings: RouterSettings) -> list[str]:
        """Apply new settings while requests run. Returns the names of settings that need a restart; they are ignored."""
        check_backends(settings)
        old = self.settings
        new, fixed = with_fixed(old, settings)
        backends_changed = new.discovery != old.discovery or new.backends != old.backends
        # Before anything changes: these may raise.
        sources = make_sources(new.discovery) if backends_changed else []
        scaler = self._make_scaler(new) if new.activation is not None and self.activator is None else None
        self.settings = self.forwarder.settings = new
        if any(getattr(new, name) != getattr(old, name) for name in _BACKEND_SETTINGS):
            self.backends.update_settings(new, asyncio.get_running_loop().time())
        if new.health != old.health:
            self._checker.update_settings(new)
        self.continuations.settings = new.continuation
        self._measure_streams()
        if new.retries != old.retries:
            self.budget.update(new.retries)
        for pool in self.pools.values():
            pool.timeouts = new.timeouts
        if any(getattr(new, name) != getattr(old, name) for name in _CHOICE_SETTINGS):
            before = self.kv_events
            self._make_strategies()
            if before is not None:
                await before.close()
            self._follow_events()
        if backends_changed:
            await self._discover(sources)
        if new.activation != old.activation:
            await self._update_activation(new, scaler)
        for on_update in self.on_update:
            on_update(new)
        return fixed

    async def _discover(self, sources: Sequence[Source]) -> None:
        """Replace the discovery; current backends are used until the new sources have results."""
        before, settings = self._discoverer, self.settings
        results: list[Sequence[BackendAddress]] = []
        discoverer = Discoverer(settings.backends, sources, results.append)
        await discoverer.start()
        self._discoverer = discoverer
        if before is not None:
            await before.close()
        self._set_addresses(results[-1] if results else settings.backends)
        discoverer.on_backends = self._set_addresses

    def _set_addresses(self, addresses: Sequence[BackendAddress]) -> None:
        now = asyncio.get_running_loop().time()
        self.backends.set_addresses(addresses, now)
        if self.chooser is not None:
            self.chooser.tick(now)

    def _make_strategies(self) -> None:
        """Make what the settings need to choose backends by request, to hedge, and to separate prefill and decode."""
        settings = self.settings
        pairs = self.prefill_decode = PrefillDecode(settings, self.backends) if settings.paired else None
        hedger = self.hedger = Hedger(settings.hedging) if settings.hedging.is_enabled else None
        policy: KVEvents | None = None
        self.kv_events = self.prompt_tokens = None
        if settings.policy == "kv_events":
            index: KVIndex[Backend] = KVIndex(settings.kv_events.max_blocks)
            policy = KVEvents(settings, self.backends.all, index)
            self.kv_events = KVEventSubscriber(settings.kv_events, index)
        latency = self.latency = PredictedLatency(settings) if settings.policy == "predicted_latency" else None
        self.chooser = pairs.chooser if pairs is not None else make_chooser(settings, self.backends, policy or latency)
        self.backends.chooser = self.forwarder.chooser = self.chooser
        if pairs is not None:
            self.forwarder.make_strategy = partial(PrefillFirst, pairs)
        elif latency is not None:
            self.forwarder.make_strategy = partial(TimedRequest, latency)
        elif policy is not None:
            self.prompt_tokens = PromptTokens(settings.kv_events, policy.index)
            self.forwarder.make_strategy = partial(TokensFirst, self.prompt_tokens)
        else:
            self.forwarder.make_strategy = partial(HedgedRequest, hedger) if hedger is not None else None
        self._status.choices.update(settings.policy, self.chooser, hedger, pairs)
        self._status.choices.kv_events = self.kv_events
        self._status.choices.latency = latency

    def _measure_streams(self) -> None:
        """Count the latency of streams if the settings say so; what was counted stays."""
        if self.settings.measure_streams and self._status.streams is None:
            self._status.add_streams(StreamLatency())
        self.forwarder.streams = self._status.streams if self.settings.measure_streams else None

    def _make_pool(self, backend: Backend) -> ConnectionPool:
        return ConnectionPool(backend, self.settings, self._head_parser, self.clock)

    def _backend_added(self, backend: Backend) -> None:
        self.pools[backend] = self._make_pool(backend)
        self._status.add_backend(backend)
        self._checker.add(backend)

    def _backend_removed(self, backend: Backend) -> None:
        if self.kv_events is not None:
            self.kv_events.leave(backend)
        pool = self.pools.pop(backend)
        self._status.remove_backend(backend)
        for connection in tuple(pool.all):
            connection.close()

    def _backend_changed(self, backend: Backend) -> None:
        # One that was down may have been restarted, with an empty cache.
        self._follow_events()
        if not backend.live:
            self.pools[backend].close_idle()
            if backend in self.backends.draining:
                self._checker.remove(backend)

    def _follow_events(self) -> None:
        if self.kv_events is not None:
            self.kv_events.follow(self.backends.live)

    async def _update_activation(self, settings: RouterSettings, scaler: Scaler | None) -> None:
        if self.activator is not None:
            self.activator.update(settings.activation or without_scaling(self.activator.settings))
            return
        self.activator = self.forwarder.activator = self._make_activator(scaler)
        if self.activator is not None:
            self._status.set_activator(self.activator)
            await self.activator.start()

    def _make_activator(self, scaler: Scaler | None) -> Activator | None:
        activation = self.settings.activation
        if activation is None:
            return None
        if scaler is None:
            raise InvalidArgument("activation needs a scaler for its targets: give the router one")
        activator = Activator(activation, self.backends, scaler, self._checker.is_answering, self._tracer)
        activator.refresh_discovery = self._refresh_discovery
        self.backends.on_added.append(lambda _: activator.backend_added())
        return activator

    def _refresh_discovery(self) -> None:
        if self._discoverer is not None:
            self._discoverer.refresh()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TICK_SECONDS, self._tick)
        self.clock.now = now = loop.time()
        self.backends.tick(now)
        for pool in self.pools.values():
            pool.sweep(now)
        if self.chooser is not None:
            self.chooser.tick(now)
        if self.queue is not None:
            self.queue.sweep(now)


def check_backends(settings: RouterSettings) -> None:
    """Check that there are backends, each once, and what the policy needs. Raises InvalidArgument or MissingExtra."""
    if not settings.backends and not settings.discovery.is_enabled:
        raise InvalidArgument("a router needs a backend: add --backend http://host:8000")
    if len({address.url for address in settings.backends}) != len(settings.backends):
        raise InvalidArgument("a backend is named twice: give it a weight instead")
    if settings.policy == "kv_events":
        require_events()


def with_fixed(old: RouterSettings, new: RouterSettings) -> tuple[RouterSettings, list[str]]:
    """Return the new settings with the old values of those that need a restart, and the names of these."""
    fixed_values: dict[str, Any] = {
        name: getattr(old, name) for name in FIXED if getattr(old, name) != getattr(new, name)
    }
    names = sorted(fixed_values)
    if new.retries.inference != old.retries.inference:
        # It is part of the cached plan of each request head.
        fixed_values["retries"] = replace(new.retries, inference=old.retries.inference)
        names.append("retries.inference")
    if old.activation and new.activation and old.activation.local != new.activation.local:
        fixed_values["activation"] = old.activation
        names.append("activation.local")
    return replace(new, **fixed_values), names
