# SPDX-License-Identifier: Apache-2.0
"""The backends of a router: which of them get requests, and which one gets the next request.

The HTTP and the gRPC proxy call `Backends.pick`, `begin` when they send a request, and `end` once with its outcome. Timers
call `tick`, health checks call `checked`. Pure: no sockets, and time is passed in.

    backend = backends.pick(exclude=tried)        # None: no backend is left
    backends.begin(backend)
    ...
    backends.end(backend, Outcome.OK, now)        # exactly once for each begin
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.core.errors import Unavailable
from headrace.fleet.router.backend import Backend, Health, Outcome
from headrace.fleet.router.fairness import Fairness, FairQueue
from headrace.fleet.router.policies import Policy, SmoothWeighted, make_policy
from headrace.fleet.router.request_queue import RequestQueue

if TYPE_CHECKING:
    from headrace.fleet.router.policies import RequestView
    from headrace.fleet.router.settings import BackendAddress, RouterSettings

log = logging.getLogger("headrace.router")

_MIN_RAMP = 0.1
"""Where a slow start begins. With less, the backend would stay idle, and an idle backend proves nothing."""


class RequestChooser(Protocol):
    """Chooses a backend where the choice depends on the request. Implemented by `chooser.Chooser`."""

    def pick(self, request: RequestView, exclude: Collection[Backend] = (), reason: str = "") -> Backend | None:
        """Choose a backend that is not in `exclude`."""

    def candidates(self, exclude: Collection[Backend] = ()) -> Sequence[Backend]:
        """Return the backends that can take a request."""

    def decide(
        self, request: RequestView, live: Sequence[Backend], pick_by_load: Callable[[Sequence[Backend]], Backend]
    ) -> tuple[Backend, str]:
        """Return one of `live` and the reason for the choice; change nothing."""

    def explain(self, request: RequestView, live: Sequence[Backend]) -> dict[str, Any]:
        """Return the details of the choice, for `/router/explain`."""


class Backends:
    """All backends of a router. Used from the loop's thread only."""

    def __init__(self, settings: RouterSettings, policy: Policy | None = None) -> None:
        self._outliers = settings.outliers
        self._slow_start = settings.slow_start_seconds
        self._checks = settings.health
        self.policy = policy or make_policy(settings.policy)
        self._pick = self.policy.pick
        self.all: tuple[Backend, ...] = tuple(
            Backend(address, Health(settings.health, settings.outliers)) for address in settings.backends
        )
        self.live: list[Backend] = list(self.all)
        self.on_change: Callable[[Backend], None] | None = None
        """Called when a backend starts or stops getting requests."""
        self.on_added: list[Callable[[Backend], None]] = []
        """Called when a backend was added, before it gets requests."""
        self.on_removed: list[Callable[[Backend], None]] = []
        """Called when a backend was removed and its last request has ended."""
        self.chooser: RequestChooser | None = None
        """Used instead of `pick` by both proxies, where the choice depends on the request."""
        self.draining: list[Backend] = []
        """Removed backends that still have open requests."""
        self._removed_requests = 0

    def pick(self, exclude: Collection[Backend] = ()) -> Backend | None:
        """Choose the backend for the next request, not in `exclude`; None if there is none."""
        live: Sequence[Backend] = self.live
        if exclude:
            live = [backend for backend in live if backend not in exclude]
        if not live:
            return None
        return self._pick(live) if len(live) > 1 else live[0]

    def pick_and_begin(self) -> Backend | None:
        """Run `pick` and `begin` in one, for the first attempt of a request."""
        live = self.live
        if len(live) == 1:
            backend = live[0]
        elif live:
            backend = self._pick(live)
        else:
            return None
        backend.outstanding += 1
        return backend

    def pick_by_load(self, live: Sequence[Backend]) -> Backend:
        """Choose one of these by the policy, which knows nothing of the request."""
        return self._pick(live) if len(live) > 1 else live[0]

    def begin(self, backend: Backend, *, retry: bool = False) -> None:
        """Count a request that is sent to the backend."""
        backend.outstanding += 1
        if retry:
            backend.stats.retries += 1

    def end(self, backend: Backend, outcome: int, now: float) -> None:
        """Count the outcome of a request. Call once for each `begin`."""
        if outcome == Outcome.OK:
            self.end_ok(backend)
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
        reason = "it refused requests" if outcome == Outcome.REFUSED else "requests to it failed"
        self._request_failed(backend, now, reason)

    def end_ok(self, backend: Backend) -> None:
        """Run `end` with `Outcome.OK`."""
        backend.outstanding -= 1
        backend.stats.ok += 1

    def checked(self, backend: Backend, healthy: bool, now: float, reason: str = "") -> None:
        """Record the result of an active check. `reason`: why it failed."""
        if backend.health.checked(healthy, now, reason):
            self._update_live(backend, now)

    def tick(self, now: float) -> None:
        """Let time pass: end ejections, close windows, advance slow starts. Call at least once a second."""
        for backend in self.all:
            if backend.health.tick(now, backend.stats.healthy):
                self._update_live(backend, now)
            if backend.ramp < 1.0:
                self._set_ramp(backend, now)
        if self.draining:
            self._remove_drained()

    def set_addresses(self, addresses: Sequence[BackendAddress], now: float) -> None:
        """Replace the backends.

        A new backend waits for its first check, if there are checks. A removed one gets no more requests and drains.
        """
        suspended = any(backend.suspended for backend in self.all)
        removed = {_key(backend.address): backend for backend in self.all}
        kept: list[Backend] = []
        added: list[Backend] = []
        for address in addresses:
            backend = removed.pop(_key(address), None)
            if backend is None:
                backend = Backend(address, Health(self._checks, self._outliers))
                backend.live, backend.suspended = False, suspended
                if self._checks.path:
                    backend.health.set_unchecked()
                added.append(backend)
            elif backend.address != address:
                backend.address, backend.weight = address, address.weight
                backend.share = backend.weight * backend.ramp
            kept.append(backend)
        self.all = tuple(kept)
        self.draining += removed.values()
        for backend in removed.values():
            backend.live = False
        self.live = [backend for backend in kept if backend.live]
        for backend in added:
            log.info("Backend %s added", backend.name)
            for on_added in self.on_added:
                on_added(backend)
            backend.health.since = now
            self._update_live(backend, now)
        for backend in removed.values():
            log.info("Backend %s removed; waiting for %d open requests", backend.name, backend.outstanding)
            if self.on_change is not None:
                self.on_change(backend)
        self._remove_drained()

    def update_settings(self, settings: RouterSettings, now: float) -> None:
        """Apply new settings to the same backends."""
        self._outliers, self._checks = settings.outliers, settings.health
        self._slow_start = settings.slow_start_seconds
        self.policy = make_policy(settings.policy)
        self._pick = self.policy.pick
        for backend in self.all:
            backend.health.update_settings(settings.health, settings.outliers)
            self._update_live(backend, now)

    @property
    def queued(self) -> int:
        """Requests that wait until a backend has capacity."""
        return 0

    @property
    def removed_requests(self) -> int:
        """Requests that were sent to removed backends, without retries."""
        draining = sum(backend.stats.requests - backend.stats.retries for backend in self.draining)
        return self._removed_requests + draining

    def suspend(self) -> None:
        """Send no requests to any backend until `resume`: the service is scaled to zero."""
        for backend in self.all:
            backend.suspended = True
        live, self.live = self.live, []
        for backend in live:
            backend.live = False
            if self.on_change is not None:
                self.on_change(backend)

    def resume(self, up: Collection[Backend], now: float) -> None:
        """End `suspend`. The backends in `up` have just answered: their earlier failures are reset."""
        for backend in self.all:
            backend.suspended = False
            if backend in up:
                backend.health.set_up(now)
            self._update_live(backend, now)

    def unavailable(self) -> Unavailable:
        """Return the error for a request that no backend can take: it lists the backends and their states."""
        states = "; ".join(f"{backend.name} is {backend.state}{_reason_text(backend)}" for backend in self.all)
        states = states or "there is none yet; check the discovery settings of the router"
        return Unavailable(f"no backend can take the request: {states}", retry_after_seconds=self.retry_after())

    def retry_after(self) -> float:
        """Return after how many seconds a client may try again."""
        return max(1.0, self.all[0].health.recovery_seconds if self.all else 1.0)

    def _request_failed(self, backend: Backend, now: float, reason: str) -> None:
        if not backend.health.failed(backend.stats.healthy):
            return
        ejected = sum(other.health.ejected for other in self.all)
        if (ejected + 1) * 2 > len(self.all):
            # At most half of them are ejected: if all fail alike, ejecting them does not help.
            backend.health.reset_failures()
            return
        backend.health.eject(now, reason)
        self._update_live(backend, now)

    def _update_live(self, backend: Backend, now: float) -> None:
        live = backend.health.up and not backend.health.ejected and not backend.suspended
        if live == backend.live:
            return
        backend.live = live
        # A new list: code that iterates over the old one is not disturbed.
        self.live = [other for other in self.all if other.live]
        if live:
            self._set_ramp(backend, now)
            log.info("Backend %s is up", backend.name)
        else:
            log.warning("Backend %s is %s: %s", backend.name, backend.state, backend.health.reason)
        if self.on_change is not None:
            self.on_change(backend)

    def _remove_drained(self) -> None:
        drained = [backend for backend in self.draining if not backend.outstanding]
        for backend in drained:
            self.draining.remove(backend)
            self._removed_requests += backend.stats.requests - backend.stats.retries
            if isinstance(self.policy, SmoothWeighted):
                self.policy.remove(backend)
            for on_removed in self.on_removed:
                on_removed(backend)

    def _set_ramp(self, backend: Backend, now: float) -> None:
        if self._slow_start > 0:
            backend.ramp = min(1.0, max(_MIN_RAMP, (now - backend.health.since) / self._slow_start))
        else:
            backend.ramp = 1.0
        backend.share = backend.weight * backend.ramp


class LimitedBackends(Backends):
    """Backends with at most `max_outstanding` requests each; more requests wait in a queue until one ends."""

    def __init__(self, settings: RouterSettings, fairness: Fairness | None = None) -> None:
        super().__init__(settings)
        self.limit = settings.max_outstanding
        self.queue = (
            RequestQueue(settings.queue, self._has_capacity)
            if fairness is None
            else FairQueue(settings.queue, self._has_capacity, fairness)
        )

    @property
    def queued(self) -> int:
        """Requests in the queue."""
        return self.queue.length

    def pick(self, exclude: Collection[Backend] = ()) -> Backend | None:
        """Choose a backend that has capacity."""
        full = [backend for backend in self.live if backend.outstanding >= self.limit]
        return super().pick((*exclude, *full) if full else exclude)

    def pick_and_begin(self) -> Backend | None:
        """Run `pick` and `begin` in one."""
        backend = self.pick()
        if backend is not None:
            self.begin(backend)
        return backend

    def end(self, backend: Backend, outcome: int, now: float) -> None:
        """Count the outcome and start a queued request."""
        super().end(backend, outcome, now)
        if outcome != Outcome.OK and self.queue.length:
            self.queue.dispatch()

    def end_ok(self, backend: Backend) -> None:
        """Count the outcome and start a queued request."""
        super().end_ok(backend)
        if self.queue.length:
            self.queue.dispatch()

    def _has_capacity(self) -> bool:
        return any(backend.outstanding < self.limit for backend in self.live)


def _key(address: BackendAddress) -> tuple[str, str, int]:
    """Return what identifies a server."""
    return address.url, address.grpc_host, address.grpc_port


def _reason_text(backend: Backend) -> str:
    return f" ({backend.health.reason})" if backend.health.reason else ""
