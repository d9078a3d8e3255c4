# SPDX-License-Identifier: Apache-2.0
"""What the operator tells of itself: `GET /metrics`, and `GET /healthz` for the kubelet. Started by `program`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace.core.clock import SystemClock
from headrace.core.telemetry.exposition import Format, negotiate, render
from headrace.core.telemetry.registry import Registry
from headrace.net.http.heads import CONTENT_TYPE, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import WireServer
from headrace.net.site import Site
from headrace.net.sockets import Address

if TYPE_CHECKING:
    from headrace.fleet.cluster.api import Api
    from headrace.net.http.exchange import Exchange


class OperatorMetrics:
    """What is counted."""

    def __init__(self, api: Api) -> None:
        self.registry = Registry(SystemClock())
        self.leads = self.registry.gauge(
            "headrace_operator_leads", "1 while this process is the one that works."
        ).labels()
        looks = self.registry.counter(
            "headrace_operator_reconciles_total", "Looks at a service, by how they ended: done or failed.", ["outcome"]
        )
        self.done, self.failed = looks.labels(outcome="done"), looks.labels(outcome="failed")
        self.seconds = self.registry.histogram(
            "headrace_operator_reconcile_seconds", "Time for one look at a service."
        ).labels()
        self.registry.callback(
            "headrace_operator_api_calls_total",
            "Calls to the API server, by whether they may change something.",
            lambda: {("read",): api.calls - api.writes, ("write",): api.writes},
            ["kind"],
            kind="counter",
        )
        self._heads = {each: ResponseHead(200, [(CONTENT_TYPE, each.value)]) for each in Format}

    def scrape(self, exchange: Exchange) -> None:
        """For Prometheus."""
        chosen = negotiate(exchange.head.get(b"accept"))
        exchange.respond(self._heads[chosen], render(self.registry, chosen))

    def healthy(self, exchange: Exchange) -> None:
        """The event loop turns. Whether the API server answers is not said: a restart would not bring it back."""
        exchange.respond(ResponseHead(200, [(CONTENT_TYPE, b"text/plain")]), b"ok\n")


def server_of(metrics: OperatorMetrics, address: Address) -> WireServer:
    """A server of the two paths, not started yet."""
    routes = Routes()
    routes.add("GET", "/metrics", metrics.scrape)
    for path in ("/healthz", "/readyz"):
        routes.add("GET", path, metrics.healthy)
    site = Site(routes)
    return WireServer(site, address, partial(NegotiatingProtocol, site))
