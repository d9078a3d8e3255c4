# SPDX-License-Identifier: Apache-2.0
"""What a router tells of itself: `/router/status`, `/router/metrics`, `/router/healthz`.

Made by `proxy`. Everything but one histogram is read from the backends when asked, so it costs requests nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from headrace.core.errors import NotFound, Unavailable
from headrace.core.telemetry.exposition import Format, negotiate, render
from headrace.fleet.router.choosing.counting import Choices
from headrace.fleet.router.revisions import Revisions
from headrace.net.http.heads import CONTENT_TYPE, OK_JSON, OK_PLAIN, ResponseHead
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.core.telemetry.registry import Registry
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.pools import Pool
    from headrace.fleet.router.retries import RetryBudget
    from headrace.fleet.router.settings import RouterSettings
    from headrace.fleet.router.waking.activator import Activator
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.routes import Routes

_OUTCOMES = ("ok", "erred", "refused", "failed", "cancelled")


class RouterStatus:
    """The router's own endpoints."""

    def __init__(
        self,
        registry: Registry,
        backends: Backends,
        pools: dict[Backend, Pool],
        budget: RetryBudget,
        settings: RouterSettings,
        waking: Activator | None = None,
    ) -> None:
        self.ready = True
        self._waking: Activator | None = None
        self._registry = registry
        self._backends = backends
        self._pools = pools
        self._budget = budget
        self._revisions = Revisions(backends)
        self.choices = Choices(registry, backends, settings.policy)
        """Why backends were chosen."""
        self._heads = {each: ResponseHead(200, [(CONTENT_TYPE, each.value)]) for each in Format}
        self._family = registry.histogram(
            "headrace_router_backend_seconds",
            "Time from the choice of a backend to the end of its answer.",
            ["backend"],
        )
        for backend in backends.all:
            self.join(backend)
        self._declare()
        if waking is not None:
            self.wakes(waking)

    def wakes(self, waking: Activator) -> None:
        """What is behind the backends may sleep from now on."""
        self._waking = waking
        waking.declare(self._registry)

    def add_to(self, routes: Routes) -> None:
        """Register the endpoints; nothing under `/router` goes to a backend."""
        routes.add("GET", "/router/status", self._answer_status)
        routes.add("GET", "/router/metrics", self._answer_metrics)
        routes.add("GET", "/router/healthz", self._answer_health)
        routes.mount("/router", _unknown)

    def join(self, backend: Backend) -> None:
        """A backend has come: its times are told from now on."""
        backend.seconds = self._family.labels(backend=backend.name)

    def leave(self, backend: Backend) -> None:
        """A backend has gone; its times go with it, unless another of its name has come."""
        self._revisions.leave(backend)
        if all(each.name != backend.name for each in self._backends.all):
            self._family.remove(backend=backend.name)

    def as_json(self) -> dict[str, Any]:
        """The whole state."""
        told = {
            "version": __version__,
            "policy": self.choices.policy,
            "live": len(self._backends.live),
            "queued": self._backends.queued,
            "retries": {"spent": self._budget.spent, "refused": self._budget.refused},
            "backends": [self._of(backend) for backend in self._backends.all],
            "leaving": [{"url": each.name, "outstanding": each.outstanding} for each in self._backends.leaving],
            "revisions": self._revisions.as_json(),
        }
        if self._waking is not None:
            # A number: KEDA's metrics-api trigger reads it.
            told |= {"active": int(self._waking.active), "waking": self._waking.as_json()}
        return told

    def _of(self, backend: Backend) -> dict[str, Any]:
        stats, pool = backend.stats, self._pools[backend]
        return {
            "url": backend.name,
            **({"role": backend.address.role} if backend.address.role else {}),
            "state": backend.state,
            "reason": backend.health.reason,
            "weight": backend.weight,
            "outstanding": backend.outstanding,
            "requests": stats.requests,
            "retries": stats.retries,
            **{outcome: getattr(stats, outcome) for outcome in _OUTCOMES},
            "checks": backend.health.checks,
            "ejections": backend.health.ejections,
            "connections": len(pool.all),
            "idle_connections": len(pool.idle),
        }

    def _answer_status(self, exchange: Exchange) -> None:
        exchange.respond(OK_JSON, orjson.dumps(self.as_json(), option=orjson.OPT_INDENT_2))

    def _answer_metrics(self, exchange: Exchange) -> None:
        chosen = negotiate(exchange.head.get(b"accept"))
        exchange.respond(self._heads[chosen], render(self._registry, chosen))

    def _answer_health(self, exchange: Exchange) -> None:
        if not self.ready:
            exchange.fail(Unavailable("the router is shutting down", retry_after_seconds=1))
        elif not self._backends.live and self._waking is None:
            exchange.fail(self._backends.unavailable())
        else:
            exchange.respond(OK_PLAIN, b"ok\n")

    def _declare(self) -> None:
        def each(read: Callable[[Backend], float]) -> Callable[[], dict[tuple[str, ...], float]]:
            return lambda: {(backend.name,): read(backend) for backend in self._backends.all}

        def outcomes() -> dict[tuple[str, ...], float]:
            return {
                (backend.name, outcome): getattr(backend.stats, outcome)
                for backend in self._backends.all
                for outcome in _OUTCOMES
            }

        registry, of = self._registry, ["backend"]
        registry.callback(
            "headrace_router_requests_total",
            "Requests that a backend is done with: ok, erred (other 5xx), refused (502, 503, 504), failed, or cancelled.",
            outcomes,
            ["backend", "outcome"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_revision_requests_total",
            "Requests that the backends of a revision are done with: ok, or error (5xx, or none).",
            self._revisions.outcomes,
            ["revision", "outcome"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_retries_total",
            "Requests given to a backend after a first try had failed.",
            each(lambda backend: backend.stats.retries),
            of,
            kind="counter",
        )
        registry.callback(
            "headrace_router_retries_refused_total",
            "Retries that there was no budget for.",
            lambda: self._budget.refused,
            kind="counter",
        )
        registry.callback(
            "headrace_router_outstanding", "Requests a backend has.", each(lambda backend: backend.outstanding), of
        )
        registry.callback(
            "headrace_router_backend_up", "1 if it gets requests.", each(lambda backend: int(backend.live)), of
        )
        registry.callback(
            "headrace_router_connections",
            "Open HTTP/1.1 connections to a backend.",
            each(lambda backend: len(self._pools[backend].all)),
            of,
        )


def _unknown(exchange: Exchange) -> None:
    exchange.fail(
        NotFound(
            "there is no such page: /router/status, /router/metrics, /router/healthz and /router/explain are there"
        )
    )
