# SPDX-License-Identifier: Apache-2.0
"""A router put together: backends, pools, checks and the handlers, from settings to routes.

Made by `apps.router`, started in its loop. The gRPC half (`h2`) takes `backends`, `budget` and `clock` from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.core.clock import SystemClock
from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.registry import Registry
from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.fleet.router.answers import Answers
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.checks import HealthChecks
from headrace.fleet.router.choosing.chooser import Chooser, make_chooser, reads_bodies
from headrace.fleet.router.choosing.hedging import Hedger
from headrace.fleet.router.choosing.limits import LimitedBackends
from headrace.fleet.router.discovery.discoverer import Discoverer, Source, make_sources
from headrace.fleet.router.explaining import Explaining
from headrace.fleet.router.forwarding import Forwarder
from headrace.fleet.router.pairing.pairs import Pairs
from headrace.fleet.router.pools import CoarseClock, Pool
from headrace.fleet.router.retries import RetryBudget
from headrace.fleet.router.status import RouterStatus
from headrace.fleet.router.waking.activator import Activator
from headrace.fleet.router.waking.settings import never_idle

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.settings import BackendAddress, RouterSettings
    from headrace.fleet.router.waking.scaler import Scaler
    from headrace.net.http.routes import Routes

MakeScaler = Callable[["RouterSettings"], "Scaler | None"]
_TICK_SECONDS = 0.25
_READ_BYTES = 1 << 20
"""Where a choice looks into bodies, those up to this size are there before it is made."""
FIXED = (
    "keep_host",
    "trust_forwarded",
    "idle_connections",
    "whole_bytes",
    "answer_head_bytes",
    "ca_file",
    "max_outstanding",
    "queue",
)
"""Settings that connections and requests under way have taken for granted: they need a new start."""
_WORK = ("health", "outliers", "policy", "slow_start_seconds")
_CHOICES = ("policy", "cache_aware", "prefix_hash", "sticky", "hedging", "pairing", "paired")


class RouterProxy:
    """See the module. Used from the loop's thread only."""

    def __init__(
        self,
        settings: RouterSettings,
        scaler: Scaler | None = None,
        tracer: Tracer = NO_TRACING,
        make_scaler: MakeScaler | None = None,
    ) -> None:
        """make_scaler: for what is to sleep by settings that come later."""
        check_backends(settings)
        self.settings = settings
        self._tracer = tracer
        self._make_scaler = make_scaler or (lambda _: None)
        limited = LimitedBackends(settings) if settings.max_outstanding else None
        self.backends = limited or Backends(settings)
        self.line = limited.line if limited is not None else None
        """Where requests wait when every backend has all it may have; for the gRPC half, too."""
        self.budget = RetryBudget(settings.retries)
        self.clock = CoarseClock()
        self.registry = Registry(SystemClock())
        self._answers = Answers()
        self.pools = {backend: Pool(backend, settings, self._answers, self.clock) for backend in self.backends.all}
        self._checks = HealthChecks(settings, self.backends)
        self.waking = self._made_waking(scaler)
        """Who holds requests while what is behind the backends sleeps; for the gRPC half, too."""
        self._status = RouterStatus(self.registry, self.backends, self.pools, self.budget, settings, self.waking)
        self._forwarder = Forwarder(settings, self.backends, self.pools, self.budget, self.clock)
        self._forwarder.waking = self.waking
        self._forwarder.line = self.line
        self.chooser: Chooser | None = None
        """Who chooses, where that takes a look at the request."""
        self._consider()
        self._discoverer: Discoverer | None = None
        self.on_renew: list[Callable[[RouterSettings], None]] = []
        """Called with other settings while it runs; for the gRPC half."""
        self.backends.joined.append(self._join)
        self.backends.left.append(self._leave)
        self._timer: asyncio.TimerHandle | None = None
        self.backends.on_change = self._changed

    def add_to(self, routes: Routes) -> None:
        """Answer everything: what is under `/router/` here, the rest by a backend."""
        self._status.add_to(routes)
        Explaining(self.backends, lambda: self.settings).add_to(routes)
        whole_bytes = self.settings.whole_bytes
        if reads_bodies(self.settings):
            whole_bytes = max(whole_bytes, _READ_BYTES)
        routes.fallback(self._forwarder.whole, self._forwarder.streamed, whole_bytes=whole_bytes)

    async def start(self) -> None:
        """Find out who is up, and keep time from now on."""
        self._tick()
        if self.settings.discovery.wanted:
            await self._discover(make_sources(self.settings.discovery))
        if self.waking is not None:
            # First: of what sleeps no check need say that it is down.
            await self.waking.start()
        await self._checks.start()

    async def close(self) -> None:
        """Let go of the backends."""
        if self._timer is not None:
            self._timer.cancel()
        if self._discoverer is not None:
            await self._discoverer.close()
        if self.line is not None:
            self.line.close()
        if self.waking is not None:
            await self.waking.close()
        await self._checks.close()
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    def stop_being_ready(self, grace_seconds: float = 0.0) -> None:
        """The router is to end within so long: who asks after its health is told so."""
        self._status.ready = False
        if self.waking is not None:
            self.waking.drain(grace_seconds)

    async def renew(self, settings: RouterSettings) -> list[str]:
        """Other settings, while requests come. Returns the names of those that need a new start, which are left alone."""
        check_backends(settings)
        old = self.settings
        wanted, fixed = with_fixed(old, settings)
        elsewhere = wanted.discovery != old.discovery or wanted.backends != old.backends
        # Before anything is changed: it may turn out that this cannot be.
        sources = make_sources(wanted.discovery) if elsewhere else []
        scaler = self._make_scaler(wanted) if wanted.activation is not None and self.waking is None else None
        self.settings = self._forwarder.settings = wanted
        if any(getattr(wanted, name) != getattr(old, name) for name in _WORK):
            self.backends.renew(wanted, asyncio.get_running_loop().time())
        if wanted.health != old.health:
            self._checks.renew(wanted)
        if wanted.retries != old.retries:
            self.budget.renew(wanted.retries)
        for pool in self.pools.values():
            pool.timeouts = wanted.timeouts
        if any(getattr(wanted, name) != getattr(old, name) for name in _CHOICES):
            self._consider()
        if elsewhere:
            await self._discover(sources)
        if wanted.activation != old.activation:
            await self._renew_waking(wanted, scaler)
        for tell in self.on_renew:
            tell(wanted)
        return fixed

    async def _discover(self, sources: Sequence[Source]) -> None:
        """Look for backends there from now on; those that are up go on meanwhile."""
        before, settings = self._discoverer, self.settings
        found: list[Sequence[BackendAddress]] = []
        made = Discoverer(settings.backends, sources, found.append)
        await made.start()
        self._discoverer = made
        if before is not None:
            await before.close()
        self._change(found[-1] if found else settings.backends)
        made.tell = self._change

    def _change(self, addresses: Sequence[BackendAddress]) -> None:
        now = asyncio.get_running_loop().time()
        self.backends.change(addresses, now)
        if self.chooser is not None:
            self.chooser.keep(now)

    def _consider(self) -> None:
        pairs = Pairs(self.settings, self.backends) if self.settings.paired else None
        made = pairs.chooser if pairs is not None else make_chooser(self.settings, self.backends)
        self.chooser = self.backends.chooser = made
        hedging = self.settings.hedging
        self._forwarder.consider(made, Hedger(hedging) if hedging.wanted else None, pairs)
        self._status.choices.pairs = pairs
        self._status.choices.renew(self.settings.policy, self.chooser, self._forwarder.hedger)

    def _join(self, backend: Backend) -> None:
        self.pools[backend] = Pool(backend, self.settings, self._answers, self.clock)
        self._status.join(backend)
        self._checks.join(backend)

    def _leave(self, backend: Backend) -> None:
        pool = self.pools.pop(backend)
        self._status.leave(backend)
        for connection in tuple(pool.all):
            connection.close()

    async def _renew_waking(self, settings: RouterSettings, scaler: Scaler | None) -> None:
        if self.waking is not None:
            self.waking.renew(settings.activation or never_idle(self.waking.settings))
            return
        self.waking = self._forwarder.waking = self._made_waking(scaler)
        if self.waking is not None:
            self._status.wakes(self.waking)
            await self.waking.start()

    def _made_waking(self, scaler: Scaler | None) -> Activator | None:
        activation = self.settings.activation
        if activation is None:
            return None
        if scaler is None:
            raise InvalidArgument("activation needs somebody who starts what sleeps: give the router a scaler")
        made = Activator(activation, self.backends, scaler, self._checks.answers, self._tracer)
        made.look_around = self._look_around
        self.backends.joined.append(lambda _: made.joined())
        return made

    def _look_around(self) -> None:
        if self._discoverer is not None:
            self._discoverer.hurry()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TICK_SECONDS, self._tick)
        self.clock.now = now = loop.time()
        self.backends.tick(now)
        for pool in self.pools.values():
            pool.sweep(now)
        if self.chooser is not None:
            self.chooser.keep(now)
        if self.line is not None:
            self.line.sweep(now)

    def _changed(self, backend: Backend) -> None:
        if not backend.live:
            self.pools[backend].close_idle()
            if backend in self.backends.leaving:
                self._checks.leave(backend)


def check_backends(settings: RouterSettings) -> None:
    """Raises InvalidArgument for backends that cannot be meant so."""
    if not settings.backends and not settings.discovery.wanted:
        raise InvalidArgument("a router needs a backend: add --backend http://host:8000")
    if len({address.url for address in settings.backends}) != len(settings.backends):
        raise InvalidArgument("a backend is named twice: give it a weight instead")


def with_fixed(old: RouterSettings, new: RouterSettings) -> tuple[RouterSettings, list[str]]:
    """The new settings with what cannot change as it was, and the names of what would have."""
    kept: dict[str, Any] = {name: getattr(old, name) for name in FIXED if getattr(old, name) != getattr(new, name)}
    names = sorted(kept)
    if new.retries.inference != old.retries.inference:
        # It is part of what is known of each head.
        kept["retries"] = replace(new.retries, inference=old.retries.inference)
        names.append("retries.inference")
    if old.activation and new.activation and old.activation.local != new.activation.local:
        kept["activation"] = old.activation
        names.append("activation.local")
    return replace(new, **kept), names
