# SPDX-License-Identifier: Apache-2.0
"""A router put together: backends, pools, checks and the handlers, from settings to routes.

Made by `apps.router`, started in its loop. The gRPC half (`h2`) takes `backends`, `budget` and `clock` from here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.core.clock import SystemClock
from headrace.core.errors import InvalidArgument
from headrace.router.answers import Answers
from headrace.router.backends import Backends
from headrace.router.checks import HealthChecks
from headrace.router.forwarding import Forwarder
from headrace.router.pools import CoarseClock, Pool
from headrace.router.retries import RetryBudget
from headrace.router.status import RouterStatus
from headrace.telemetry.registry import Registry

if TYPE_CHECKING:
    from headrace.router.backends import Backend
    from headrace.router.settings import RouterSettings
    from headrace.wire.http.routes import Routes

_TICK_SECONDS = 0.25


class RouterProxy:
    """See the module. Used from the loop's thread only."""

    def __init__(self, settings: RouterSettings) -> None:
        if not settings.backends:
            raise InvalidArgument("a router needs a backend: add --backend http://host:8000")
        if len({address.url for address in settings.backends}) != len(settings.backends):
            raise InvalidArgument("a backend is named twice: give it a weight instead")
        self.settings = settings
        self.backends = Backends(settings)
        self.budget = RetryBudget(settings.retries)
        self.clock = CoarseClock()
        self.registry = Registry(SystemClock())
        answers = Answers()
        self.pools = {backend: Pool(backend, settings, answers, self.clock) for backend in self.backends.all}
        self._status = RouterStatus(self.registry, self.backends, self.pools, self.budget, settings)
        self._forwarder = Forwarder(settings, self.backends, self.pools, self.budget, self.clock, self._status.seconds)
        self._checks = HealthChecks(settings, self.backends)
        self._timer: asyncio.TimerHandle | None = None
        self.backends.on_change = self._changed

    def add_to(self, routes: Routes) -> None:
        """Answer everything: what is under `/router/` here, the rest by a backend."""
        self._status.add_to(routes)
        routes.fallback(self._forwarder.whole, self._forwarder.streamed, whole_bytes=self.settings.whole_bytes)

    async def start(self) -> None:
        """Find out who is up, and keep time from now on."""
        self._tick()
        await self._checks.start()

    async def close(self) -> None:
        """Let go of the backends."""
        if self._timer is not None:
            self._timer.cancel()
        await self._checks.close()
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    def stop_being_ready(self) -> None:
        """The router is to end: who asks after its health is told so."""
        self._status.ready = False

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TICK_SECONDS, self._tick)
        self.clock.now = now = loop.time()
        self.backends.tick(now)
        for pool in self.pools.values():
            pool.sweep(now)

    def _changed(self, backend: Backend) -> None:
        if not backend.live:
            self.pools[backend].close_idle()
