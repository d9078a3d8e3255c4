# SPDX-License-Identifier: Apache-2.0
"""Why backends were chosen, as metrics. Owned by `status`; read from the counts of others when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.fleet.router.choosing.limits import LimitedBackends
from headrace.fleet.router.choosing.policies import Why

if TYPE_CHECKING:
    from headrace.core.telemetry.registry import Registry
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.choosing.chooser import Chooser
    from headrace.fleet.router.choosing.hedging import Hedger
    from headrace.fleet.router.pairing.pairs import Pairs


class Choices:
    """See the module."""

    def __init__(self, registry: Registry, backends: Backends, policy: str) -> None:
        self.policy = policy
        self._backends = backends
        self._chooser: Chooser | None = None
        self._hedger: Hedger | None = None
        self.pairs: Pairs | None = None
        """Where prefill and decode are apart."""
        self._declare(registry)

    def renew(self, policy: str, chooser: Chooser | None, hedger: Hedger | None) -> None:
        """From now on, these choose."""
        self.policy, self._chooser, self._hedger = policy, chooser, hedger

    def _decisions(self) -> dict[tuple[str, ...], float]:
        if self._chooser is not None:
            return {(self.policy, name, why): count for (name, why), count in self._chooser.counts.items()}
        # A policy that looks at numbers alone counts nothing: what a backend was given says it all.
        told: dict[tuple[str, ...], float] = {}
        for each in self._backends.all:
            told[self.policy, each.name, Why.POLICY] = each.stats.requests - each.stats.retries
            told[self.policy, each.name, Why.RETRY] = each.stats.retries
        return told

    def _hedges(self) -> dict[tuple[str, ...], float]:
        hedger = self._hedger
        if hedger is None:
            return {}
        return {("asked",): hedger.asked, ("won",): hedger.won, ("refused",): hedger.budget.refused}

    def _declare(self, registry: Registry) -> None:
        registry.callback(
            "headrace_router_decisions_total",
            "Choices of a backend, by policy and reason.",
            self._decisions,
            ["policy", "backend", "why"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_hedges_total",
            "Second requests to another backend: asked, won by it, and refused for want of budget.",
            self._hedges,
            ["outcome"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_handings_total",
            "Requests with a prompt, by what came of handing it over: handed, or why the one who answers computes it.",
            lambda: {(outcome,): count for outcome, count in self.pairs.counts.items()} if self.pairs else {},
            ["outcome"],
            kind="counter",
        )
        registry.callback(
            "headrace_router_prefill_seconds_total",
            "Time that prefills took for prompts that were handed over.",
            lambda: self.pairs.seconds if self.pairs else 0.0,
            kind="counter",
        )
        registry.callback("headrace_router_leaving", "Backends that drain.", lambda: len(self._backends.leaving))
        if isinstance(self._backends, LimitedBackends):
            line = self._backends.line
            registry.callback("headrace_router_queued_requests", "Requests that wait.", lambda: line.length)
            registry.callback(
                "headrace_router_queue_refused_total",
                "Requests that could not wait, or not long enough.",
                lambda: line.refused,
                kind="counter",
            )
