# SPDX-License-Identifier: Apache-2.0
"""The servers behind a router: which of them get requests, and which one gets the next.

Both proxies (`flows` for HTTP/1.1, `h2` for gRPC) ask `Backends.pick`, tell `begin` when they give a request to the
backend, and `end` once with how it went. Timers call `tick`, checks call `checked`. Pure: it has no sockets, and time is
passed in.

    backend = backends.pick(exclude=tried)        # None: nobody is left
    backends.begin(backend)
    ...
    backends.end(backend, Outcome.OK, now)        # exactly once for each begin
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from headrace.core.errors import Unavailable
from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.health import Health
from headrace.fleet.router.policies import Policy, SmoothWeighted, make_policy

if TYPE_CHECKING:
    from headrace.fleet.router.choosing.chooser import Chooser
    from headrace.fleet.router.settings import BackendAddress, RouterSettings

log = logging.getLogger("headrace.router")

_SMALLEST_RAMP = 0.1
"""Where a slow start begins: less would leave a backend idle, and an idle backend proves nothing."""


class Backends:
    """All servers of a router. Used from the loop's thread only."""

    def __init__(self, settings: RouterSettings, policy: Policy | None = None) -> None:
        self._outliers = settings.outliers
        self._slow_start = settings.slow_start_seconds
        self._checks = settings.health
        self.policy = policy or make_policy(settings.policy)
        self._choose = self.policy.pick
        self.all: tuple[Backend, ...] = tuple(
            Backend(address, Health(settings.health, settings.outliers)) for address in settings.backends
        )
        self.live: list[Backend] = list(self.all)
        self.on_change: Callable[[Backend], None] | None = None
        """Called when a backend starts or stops getting requests."""
        self.joined: list[Callable[[Backend], None]] = []
        """Called when a backend has come, before it gets requests."""
        self.left: list[Callable[[Backend], None]] = []
        """Called when a backend has gone and has answered all it had."""
        self.chooser: Chooser | None = None
        """Who chooses where that takes a look at the request (`choosing`); both proxies ask it instead."""
        self.leaving: list[Backend] = []
        """Those that have gone and still have requests."""
        self._departed_requests = 0

    def pick(self, exclude: Collection[Backend] = ()) -> Backend | None:
        """The backend for the next request, not among `exclude`; None when there is none."""
        live: Sequence[Backend] = self.live
        if exclude:
            live = [backend for backend in live if backend not in exclude]
        if not live:
            return None
        return self._choose(live) if len(live) > 1 else live[0]

    def give(self) -> Backend | None:
        """`pick` and `begin` in one, for a request that was never tried before."""
        live = self.live
        if len(live) == 1:
            backend = live[0]
        elif live:
            backend = self._choose(live)
        else:
            return None
        backend.outstanding += 1
        return backend

    def choose(self, live: Sequence[Backend]) -> Backend:
        """One of these by the policy, which is told nothing of the request."""
        return self._choose(live) if len(live) > 1 else live[0]

    def begin(self, backend: Backend, *, retry: bool = False) -> None:
        """A request is given to the backend."""
        backend.outstanding += 1
        if retry:
            backend.stats.retries += 1

    def end(self, backend: Backend, outcome: int, now: float) -> None:
        """That request is over. Call once for each `begin`."""
        if outcome == Outcome.OK:
            self.ended_well(backend)
            return
        backend.outstanding -= 1
        stats = backend.stats
        if outcome == Outcome.CANCELLED:
            stats.cancelled += 1
            return
        if outcome == Outcome.ERRED:
            stats.erred += 1
            return
        if outcome == Outcome.REFUSED:
            stats.refused += 1
        else:
            stats.failed += 1
        why = "it refused requests" if outcome == Outcome.REFUSED else "requests to it failed"
        self._failed(backend, now, why)

    def ended_well(self, backend: Backend) -> None:
        """`end`, with `Outcome.OK`."""
        backend.outstanding -= 1
        backend.stats.ok += 1

    def checked(self, backend: Backend, healthy: bool, now: float, why: str = "") -> None:
        """An active check has its answer; `why` it is bad, for people."""
        if backend.health.checked(healthy, now, why):
            self._renew(backend, now)

    def tick(self, now: float) -> None:
        """Let time pass: ejections end, windows close, slow starts go on. Call about once a second or more often."""
        for backend in self.all:
            if backend.health.tick(now, backend.stats.well):
                self._renew(backend, now)
            if backend.ramp < 1.0:
                self._set_ramp(backend, now)
        if self.leaving:
            self._let_leave()

    def change(self, addresses: Sequence[BackendAddress], now: float) -> None:
        """These are the servers from now on.

        Those that are new wait for a check, if there are checks. Those that are not among them get no more requests, and
        answer the ones they have.
        """
        resting = any(each.resting for each in self.all)
        gone = {_place(each.address): each for each in self.all}
        kept: list[Backend] = []
        came: list[Backend] = []
        for address in addresses:
            backend = gone.pop(_place(address), None)
            if backend is None:
                backend = Backend(address, Health(self._checks, self._outliers))
                backend.live, backend.resting = False, resting
                if self._checks.path:
                    backend.health.not_known()
                came.append(backend)
            elif backend.address != address:
                backend.address, backend.weight = address, address.weight
                backend.share = backend.weight * backend.ramp
            kept.append(backend)
        self.all = tuple(kept)
        self.leaving += gone.values()
        for backend in gone.values():
            backend.live = False
        self.live = [each for each in kept if each.live]
        for backend in came:
            log.info("%s has come", backend.name)
            for tell in self.joined:
                tell(backend)
            backend.health.since = now
            self._renew(backend, now)
        for backend in gone.values():
            log.info("%s has gone; it has %d requests to answer", backend.name, backend.outstanding)
            if self.on_change is not None:
                self.on_change(backend)
        self._let_leave()

    def renew(self, settings: RouterSettings, now: float) -> None:
        """Other settings, for the same servers."""
        self._outliers, self._checks = settings.outliers, settings.health
        self._slow_start = settings.slow_start_seconds
        self.policy = make_policy(settings.policy)
        self._choose = self.policy.pick
        for backend in self.all:
            backend.health.renew(settings.health, settings.outliers)
            self._renew(backend, now)

    @property
    def queued(self) -> int:
        """Requests that wait until a backend has room (`choosing.limits`)."""
        return 0

    @property
    def departed_requests(self) -> int:
        """Requests that were given to those that have gone, retries not counted."""
        return self._departed_requests + sum(each.stats.requests - each.stats.retries for each in self.leaving)

    def rest(self) -> None:
        """Nobody gets requests until `rise`: what answers is asleep (`waking`)."""
        for backend in self.all:
            backend.resting = True
        live, self.live = self.live, []
        for backend in live:
            backend.live = False
            if self.on_change is not None:
                self.on_change(backend)

    def rise(self, up: Collection[Backend], now: float) -> None:
        """The end of `rest`. Those in `up` have just answered: what was held against them is over."""
        for backend in self.all:
            backend.resting = False
            if backend in up:
                backend.health.found_up(now)
            self._renew(backend, now)

    def unavailable(self) -> Unavailable:
        """What a client is told when nobody can take its request: which backends there are, and why not."""
        told = "; ".join(f"{backend.name} is {backend.state}{_because(backend)}" for backend in self.all)
        told = told or "there is none yet; look whether what it should be found by names any"
        return Unavailable(f"no backend can take the request: {told}", retry_after_seconds=self.retry_after())

    def retry_after(self) -> float:
        """When it may be worth asking again."""
        return max(1.0, self.all[0].health.recovery_seconds if self.all else 1.0)

    def _failed(self, backend: Backend, now: float, why: str) -> None:
        if not backend.health.failed(backend.stats.well):
            return
        ejected = sum(each.health.ejected for each in self.all)
        if (ejected + 1) * 2 > len(self.all):
            # Half of them have to do: an error that all share is not cured by having nobody.
            backend.health.spare()
            return
        backend.health.eject(now, why)
        self._renew(backend, now)

    def _renew(self, backend: Backend, now: float) -> None:
        live = backend.health.up and not backend.health.ejected and not backend.resting
        if live == backend.live:
            return
        backend.live = live
        # A new list: one who is going through the old one is not disturbed.
        self.live = [each for each in self.all if each.live]
        if live:
            self._set_ramp(backend, now)
            log.info("%s is up", backend.name)
        else:
            log.warning("%s is %s: %s", backend.name, backend.state, backend.health.reason)
        if self.on_change is not None:
            self.on_change(backend)

    def _let_leave(self) -> None:
        done = [each for each in self.leaving if not each.outstanding]
        for backend in done:
            self.leaving.remove(backend)
            self._departed_requests += backend.stats.requests - backend.stats.retries
            if isinstance(self.policy, SmoothWeighted):
                self.policy.forget(backend)
            for tell in self.left:
                tell(backend)

    def _set_ramp(self, backend: Backend, now: float) -> None:
        if self._slow_start > 0:
            backend.ramp = min(1.0, max(_SMALLEST_RAMP, (now - backend.health.since) / self._slow_start))
        else:
            backend.ramp = 1.0
        backend.share = backend.weight * backend.ramp


def _place(address: BackendAddress) -> tuple[str, str, int]:
    """What makes two addresses the same server."""
    return address.url, address.grpc_host, address.grpc_port


def _because(backend: Backend) -> str:
    return f" ({backend.health.reason})" if backend.health.reason else ""
