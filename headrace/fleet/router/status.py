# SPDX-License-Identifier: Apache-2.0
"""The router's own endpoints for state: `/router/status`, `/router/metrics` and `/router/healthz`.

All numbers but one histogram are computed from counters of other objects when a client reads them: requests pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from headrace.core.errors import NotFound, Unavailable
from headrace.core.telemetry.exposition import Format, negotiate, render
from headrace.fleet.router.backends import LimitedBackends
from headrace.fleet.router.policies import ChoiceReason
from headrace.net.http.heads import CONTENT_TYPE, OK_JSON, OK_PLAIN, ResponseHead
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.core.telemetry.metrics import Registry
    from headrace.fleet.router.activation import Activator
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.chooser import Chooser
    from headrace.fleet.router.continuation import Continuations
    from headrace.fleet.router.fairness import Fairness, Tenant
    from headrace.fleet.router.hedging import Hedger
    from headrace.fleet.router.kv_events import KVEventSubscriber
    from headrace.fleet.router.predicted_latency import PredictedLatency
    from headrace.fleet.router.prefill_decode import PrefillDecode
    from headrace.fleet.router.retries import RetryBudget
    from headrace.fleet.router.settings import RouterSettings
    from headrace.fleet.router.stream_latency import StreamLatency
    from headrace.fleet.router.upstream import ConnectionPool
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.routes import Routes

_OUTCOMES = ("ok", "erred", "refused", "failed", "cancelled")
_MAX_REMOVED_REVISIONS = 16
"""Revisions without a backend whose counts are kept."""


class RouterStatus:
    """The endpoints for status, metrics and health."""

    def __init__(
        self,
        registry: Registry,
        backends: Backends,
        pools: dict[Backend, ConnectionPool],
        budget: RetryBudget,
        settings: RouterSettings,
        activator: Activator | None = None,
    ) -> None:
        self.ready = True
        self.config_version = ""
        """Version of the configuration that the router runs with."""
        self._activator: Activator | None = None
        self._fairness: Fairness | None = None
        self.streams: StreamLatency | None = None
        self._registry = registry
        self._backends = backends
        self._pools = pools
        self._budget = budget
        self._revisions = RevisionStats(backends)
        self.choices = ChoiceMetrics(registry, backends, settings.policy)
        self._heads = {format_: ResponseHead(200, [(CONTENT_TYPE, format_.value)]) for format_ in Format}
        self._seconds = registry.histogram(
            "headrace_router_backend_seconds",
            "Time from the choice of a backend to the end of its response.",
            ["backend"],
        )
        for backend in backends.all:
            self.add_backend(backend)
        self._register_metrics()
        if activator is not None:
            self.set_activator(activator)

    def set_activator(self, activator: Activator) -> None:
        """Report on activation from now on."""
        self._activator = activator
        activator.register_metrics(self._registry)

    def add_continuations(self, continuations: Continuations) -> None:
        """Report on streams that are continued."""
        self._registry.callback(
            "headrace_router_continuations_total",
            "Streams whose backend could not go on: sent to another one (continued, each time), or given up (lost). Streams "
            "with more records than the limit (too_long).",
            continuations.outcomes,
            ["outcome"],
            kind="counter",
        )
        self._registry.callback(
            "headrace_router_continuation_bytes",
            "Memory for the records of open streams.",
            lambda: continuations.record_bytes,
        )

    def add_fairness(self, fairness: Fairness) -> None:
        """Report on tenants."""
        self._fairness = fairness

        def per_tenant(read: Callable[[Tenant], float]) -> Callable[[], dict[tuple[str, ...], float]]:
            return lambda: {(tenant.name,): read(tenant) for tenant in fairness.tenants.values()}

        def tokens() -> dict[tuple[str, ...], float]:
            return {
                (tenant.name, kind): count
                for tenant in fairness.tenants.values()
                for kind, count in (("prompt", tenant.prompt_tokens), ("output", tenant.output_tokens))
            }

        def refused() -> dict[tuple[str, ...], float]:
            return {
                (tenant.name, reason): count
                for tenant in fairness.tenants.values()
                for reason, count in (("queue", tenant.refused_queue), ("budget", tenant.refused_budget))
            }

        registry = self._registry
        registry.callback(
            "headrace_router_tenant_requests_total",
            "Requests of a tenant that were sent to a backend.",
            per_tenant(lambda tenant: tenant.requests),
            ["tenant"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_tenant_tokens_total",
            "Tokens of a tenant's prompts and answers.",
            tokens,
            ["tenant", "kind"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_tenant_queued_requests",
            "Queued requests of a tenant.",
            per_tenant(lambda tenant: tenant.queued),
            ["tenant"],
        )
        registry.callback(
            "headrace_router_tenant_wait_seconds_total",
            "Time that a tenant's requests spent in the queue.",
            per_tenant(lambda tenant: tenant.waited_seconds),
            ["tenant"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_tenant_refused_total",
            "Refused requests of a tenant: it has used its tokens per minute (budget), or they could not wait (queue).",
            refused,
            ["tenant", "reason"],
            kind="counter",
        )

    def add_streams(self, streams: StreamLatency) -> None:
        """Report on the latency of streams."""
        self.streams = streams
        streams.register_metrics(self._registry)

    def add_to(self, routes: Routes) -> None:
        """Register the endpoints; no path under `/router` goes to a backend."""
        routes.add("GET", "/router/status", self._respond_status)
        routes.add("GET", "/router/metrics", self._respond_metrics)
        routes.add("GET", "/router/healthz", self._respond_health)
        routes.mount("/router", _respond_not_found)

    def add_backend(self, backend: Backend) -> None:
        """Report the response times of a new backend."""
        backend.seconds = self._seconds.labels(backend=backend.name)

    def remove_backend(self, backend: Backend) -> None:
        """Remove the response times of a backend, unless another one has its name."""
        self._revisions.remove_backend(backend)
        if all(other.name != backend.name for other in self._backends.all):
            self._seconds.remove(backend=backend.name)

    def as_json(self) -> dict[str, Any]:
        """Return the state of the router."""
        status = {
            "version": __version__,
            "config_version": self.config_version,
            "policy": self.choices.policy,
            "live": len(self._backends.live),
            "queued": self._backends.queued,
            "retries": {"spent": self._budget.spent, "refused": self._budget.refused},
            "hedges": self.choices.hedges_json(),
            "backends": [self._backend_json(backend) for backend in self._backends.all],
            "leaving": [
                {"url": backend.name, "outstanding": backend.outstanding} for backend in self._backends.draining
            ],
            "revisions": self._revisions.as_json(),
        }
        if self._fairness is not None:
            status["tenants"] = self._fairness.as_json()
        if self.streams is not None:
            status["streams"] = self.streams.as_json()
        if self._activator is not None:
            # A number: the metrics-api trigger of KEDA reads it.
            status |= {"active": int(self._activator.active), "waking": self._activator.as_json()}
        return status

    def _backend_json(self, backend: Backend) -> dict[str, Any]:
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
            "ejected_times": backend.health.ejected_times,
            "failed_checks": backend.health.failed_checks,
            "slow_start": round(backend.ramp, 3),
            "connections": len(pool.all),
            "idle_connections": len(pool.idle),
        }

    def _respond_status(self, exchange: Exchange) -> None:
        exchange.respond(OK_JSON, orjson.dumps(self.as_json(), option=orjson.OPT_INDENT_2))

    def _respond_metrics(self, exchange: Exchange) -> None:
        content_format = negotiate(exchange.head.get(b"accept"))
        exchange.respond(self._heads[content_format], render(self._registry, content_format))

    def _respond_health(self, exchange: Exchange) -> None:
        if not self.ready:
            exchange.fail(Unavailable("the router is shutting down", retry_after_seconds=1))
        elif not self._backends.live and self._activator is None:
            exchange.fail(self._backends.unavailable())
        else:
            exchange.respond(OK_PLAIN, b"ok\n")

    def _register_metrics(self) -> None:
        def per_backend(read: Callable[[Backend], float]) -> Callable[[], dict[tuple[str, ...], float]]:
            return lambda: {(backend.name,): read(backend) for backend in self._backends.all}

        def outcomes() -> dict[tuple[str, ...], float]:
            return {
                (backend.name, outcome): getattr(backend.stats, outcome)
                for backend in self._backends.all
                for outcome in _OUTCOMES
            }

        registry = self._registry
        labels = ["backend"]
        registry.callback(
            "headrace_router_requests_total",
            "Requests that a backend has finished: ok, erred (other 5xx), refused (502, 503, 504), failed, or cancelled.",
            outcomes,
            ["backend", "outcome"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_revision_requests_total",
            "Requests that the backends of a revision have finished: ok, or error (5xx, or no response).",
            self._revisions.outcomes,
            ["revision", "outcome"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_retries_total",
            "Requests sent to a backend after a first attempt had failed.",
            per_backend(lambda backend: backend.stats.retries),
            labels,
            kind="counter",
        )
        registry.callback(
            "headrace_router_retries_refused_total",
            "Retries refused for lack of budget.",
            lambda: self._budget.refused,
            kind="counter",
        )
        registry.callback(
            "headrace_router_failed_checks_total",
            "Failed health checks of a backend.",
            per_backend(lambda backend: backend.health.failed_checks),
            labels,
            kind="counter",
        )
        registry.callback(
            "headrace_router_ejections_total",
            "How often a backend was taken out because requests to it failed.",
            per_backend(lambda backend: backend.health.ejected_times),
            labels,
            kind="counter",
        )
        registry.callback(
            "headrace_router_outstanding",
            "Open requests of a backend.",
            per_backend(lambda backend: backend.outstanding),
            labels,
        )
        registry.callback(
            "headrace_router_backend_up",
            "1 if it gets requests.",
            per_backend(lambda backend: int(backend.live)),
            labels,
        )
        registry.callback(
            "headrace_router_slow_start",
            "Part of its share that a backend gets: below 1 for a while after it came back, with slow_start_seconds.",
            per_backend(lambda backend: backend.ramp),
            labels,
        )
        registry.callback(
            "headrace_router_connections",
            "Open HTTP/1.1 connections to a backend.",
            per_backend(lambda backend: len(self._pools[backend].all)),
            labels,
        )


def _respond_not_found(exchange: Exchange) -> None:
    exchange.fail(
        NotFound("not found; the router has /router/status, /router/metrics, /router/healthz and /router/explain")
    )


class ChoiceMetrics:
    """Metrics of choices, hedging, KV transfer and the request queue."""

    def __init__(self, registry: Registry, backends: Backends, policy: str) -> None:
        self.policy = policy
        self._backends = backends
        self._chooser: Chooser | None = None
        self._hedger: Hedger | None = None
        self._prefill_decode: PrefillDecode | None = None
        self.kv_events: KVEventSubscriber | None = None
        self.latency: PredictedLatency | None = None
        self._register(registry)

    def update(
        self, policy: str, chooser: Chooser | None, hedger: Hedger | None, prefill_decode: PrefillDecode | None
    ) -> None:
        """Report on these from now on."""
        self.policy, self._chooser, self._hedger = policy, chooser, hedger
        self._prefill_decode = prefill_decode

    def _choices(self) -> dict[tuple[str, ...], float]:
        if self._chooser is not None:
            return {(self.policy, name, reason): count for (name, reason), count in self._chooser.counts.items()}
        # Policies that choose by load alone count nothing: the requests of a backend are enough.
        counts: dict[tuple[str, ...], float] = {}
        for backend in self._backends.all:
            first_attempts = backend.stats.requests - backend.stats.retries
            counts[self.policy, backend.name, ChoiceReason.POLICY] = first_attempts
            counts[self.policy, backend.name, ChoiceReason.RETRY] = backend.stats.retries
        return counts

    def hedges_json(self) -> dict[str, int]:
        """Return the counts of second requests; empty without hedging."""
        hedger = self._hedger
        return {} if hedger is None else {"asked": hedger.hedged, "won": hedger.won, "refused": hedger.budget.refused}

    def _hedges(self) -> dict[tuple[str, ...], float]:
        hedger = self._hedger
        if hedger is None:
            return {}
        return {("asked",): hedger.hedged, ("won",): hedger.won, ("refused",): hedger.budget.refused}

    def _transfers(self) -> dict[tuple[str, ...], float]:
        if self._prefill_decode is None:
            return {}
        return {(outcome,): count for outcome, count in self._prefill_decode.counts.items()}

    def _register(self, registry: Registry) -> None:
        registry.callback(
            "headrace_router_decisions_total",
            "Choices of a backend, by policy and reason.",
            self._choices,
            ["policy", "backend", "why"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_hedges_total",
            "Second requests to another backend: sent (asked), answered first (won), refused for lack of budget.",
            self._hedges,
            ["outcome"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_handings_total",
            "Requests with a prompt, by the outcome of the KV transfer: handed, or why the decode backend computes it.",
            self._transfers,
            ["outcome"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_prefill_seconds_total",
            "Time that prefill backends took for prompts that were transferred.",
            lambda: self._prefill_decode.seconds if self._prefill_decode else 0.0,
            kind="counter",
        )
        registry.callback(
            "headrace_router_kv_events_total",
            "KV events: batches, gaps (or restarts), gaps that could not be filled (lost), blocks behind unknown ones "
            "(orphans), blocks dropped for want of memory (evicted).",
            lambda: self.kv_events.counts() if self.kv_events is not None else {},
            ["what"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_kv_blocks",
            "Blocks in the prefix caches of all backends, as their KV events say.",
            lambda: self.kv_events.blocks if self.kv_events is not None else 0,
        )
        registry.callback(
            "headrace_router_latency_prediction_error",
            "Mean relative error of recent predictions of the time to the first token (ttft) and between tokens (tpot).",
            lambda: self.latency.errors() if self.latency is not None else {},
            ["kind"],
        )
        registry.callback(
            "headrace_router_latency_refused_total",
            "Requests refused because no backend was expected to keep their latency target.",
            lambda: self.latency.refused if self.latency is not None else 0,
            kind="counter",
        )
        registry.callback("headrace_router_leaving", "Backends that drain.", lambda: len(self._backends.draining))
        if isinstance(self._backends, LimitedBackends):
            queue = self._backends.queue
            registry.callback("headrace_router_queued_requests", "Queued requests.", lambda: queue.length)
            registry.callback(
                "headrace_router_queue_refused_total",
                "Requests refused because the queue was full or they waited too long.",
                lambda: queue.refused,
                kind="counter",
            )


class RevisionStats:
    """Results of requests by revision, for the controller of a rollout.

    Backends count for themselves and are added up here. The sums of removed backends are kept: the errors of a revision must
    not disappear with the pod that caused them.
    """

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._removed: dict[str, _RevisionSum] = {}

    def remove_backend(self, backend: Backend) -> None:
        """Keep the counts of a backend that was removed and has drained."""
        revision = backend.address.revision
        if not revision:
            return
        removed = self._removed.pop(revision, None) or _RevisionSum()
        removed.add(backend)
        # Inserted last, so that the revision that has had no backend for longest is dropped first.
        self._removed[revision] = removed
        while len(self._removed) > _MAX_REMOVED_REVISIONS:
            del self._removed[next(iter(self._removed))]

    def as_json(self) -> dict[str, Any]:
        """Return `bounds` of the buckets, and `counts` by revision: requests, errors, seconds and bucket counts."""
        backends = self._backends.all
        return {
            "bounds": list(backends[0].seconds.bounds) if backends else [],
            "counts": {
                revision: {
                    "requests": total.requests,
                    "errors": total.errors,
                    "seconds": total.seconds,
                    "times": total.times,
                }
                for revision, total in self._sums().items()
            },
        }

    def outcomes(self) -> dict[tuple[str, ...], float]:
        """Return the counts for the metrics."""
        counts: dict[tuple[str, ...], float] = {}
        for revision, total in self._sums().items():
            counts[(revision, "ok")], counts[(revision, "error")] = total.requests - total.errors, total.errors
        return counts

    def _sums(self) -> dict[str, _RevisionSum]:
        sums: dict[str, _RevisionSum] = {}
        for revision, removed in self._removed.items():
            sums[revision] = total = _RevisionSum()
            total.add_counts(removed.requests, removed.errors, removed.seconds, removed.times)
        for backend in (*self._backends.all, *self._backends.draining):
            if backend.address.revision:
                sums.setdefault(backend.address.revision, _RevisionSum()).add(backend)
        return sums


class _RevisionSum:
    """Counts of one revision."""

    __slots__ = ("errors", "requests", "seconds", "times")

    def __init__(self) -> None:
        self.requests = self.errors = 0
        self.seconds = 0.0
        self.times: list[int] = []

    def add(self, backend: Backend) -> None:
        stats, histogram = backend.stats, backend.seconds
        self.add_counts(stats.done, stats.done - stats.ok, histogram.sum, histogram.counts)

    def add_counts(self, requests: int, errors: int, seconds: float, times: list[int]) -> None:
        self.requests += requests
        self.errors += errors
        self.seconds += seconds
        self.times = [a + b for a, b in zip(self.times, times, strict=True)] if self.times else list(times)
