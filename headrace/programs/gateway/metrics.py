# SPDX-License-Identifier: Apache-2.0
"""What the gateway counts, and `GET /metrics`. Requests are counted where the access log hears of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.clock import Clock
from headrace.core.telemetry.access import log_access
from headrace.core.telemetry.exposition import Format, negotiate, render
from headrace.core.telemetry.registry import Registry
from headrace.net.http.heads import CONTENT_TYPE, RequestHead, ResponseHead

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.routes import Routes


class GatewayMetrics:
    """Made by `app`."""

    def __init__(self, clock: Clock, *, logs: bool) -> None:
        self.registry = Registry(clock)
        self._logs = logs
        self._statuses: dict[int, int] = {}
        self._heads = {each: ResponseHead(200, [(CONTENT_TYPE, each.value)]) for each in Format}
        self.registry.callback(
            "headrace_gateway_requests_total",
            "Requests that were answered, by status.",
            lambda: {(str(status),): count for status, count in self._statuses.items()},
            ["status"],
            kind="counter",
        )
        self.reconciled = self.registry.histogram(
            "headrace_gateway_reconcile_seconds", "Time to hold records against what runs."
        ).labels()
        self.unreconciled = self.registry.counter(
            "headrace_gateway_reconcile_failures_total", "Rounds of that which failed."
        ).labels()

    def add_to(self, routes: Routes) -> None:
        """Serve the path."""
        routes.add("GET", "/metrics", self.scrape)

    def count(self, peer: str, head: RequestHead, status: int) -> None:
        """See `wire.site.Site.access_log`."""
        self._statuses[status] = self._statuses.get(status, 0) + 1
        if self._logs:
            log_access(peer, head, status)

    def scrape(self, exchange: Exchange) -> None:
        """For Prometheus."""
        chosen = negotiate(exchange.head.get(b"accept"))
        exchange.respond(self._heads[chosen], render(self.registry, chosen))
