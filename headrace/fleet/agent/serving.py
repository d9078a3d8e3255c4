# SPDX-License-Identifier: Apache-2.0
"""What the agent tells of itself: `GET /metrics`, `/healthz` and `/readyz`. Started by `program`. Names are OME's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace.core.clock import SystemClock
from headrace.core.telemetry.exposition import Format, negotiate, render
from headrace.core.telemetry.registry import Registry
from headrace.fleet.agent.marks import ModelKey
from headrace.net.http.heads import CONTENT_TYPE, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import WireServer
from headrace.net.site import Site
from headrace.net.sockets import Address

if TYPE_CHECKING:
    from headrace.fleet.cluster.api import Api
    from headrace.net.http.exchange import Exchange

_LABELS = ["model_type", "namespace", "name"]
_TEXT = [(CONTENT_TYPE, b"text/plain")]


class AgentMetrics:
    """What is counted."""

    def __init__(self, api: Api) -> None:
        self.started = False
        """Whether models and node have been seen."""
        self.registry = Registry(SystemClock())
        self._succeeded = self.registry.counter(
            "model_agent_downloads_success_total", "Downloads of models that came.", _LABELS
        )
        self._failed = self.registry.counter(
            "model_agent_downloads_failed_total", "Tries to bring a model that did not succeed.", _LABELS
        )
        self._bytes = self.registry.counter("model_agent_download_bytes_total", "Bytes that came.", _LABELS)
        self._seconds = self.registry.histogram(
            "model_agent_download_duration_seconds", "Time from the first look at a source to a model in its folder."
        ).labels()
        self.registry.callback(
            "headrace_model_agent_api_calls_total",
            "Calls to the API server, by whether they may change something.",
            lambda: {("read",): api.calls - api.writes, ("write",): api.writes},
            ["kind"],
            kind="counter",
        )
        self._heads = {each: ResponseHead(200, [(CONTENT_TYPE, each.value)]) for each in Format}

    def succeeded(self, key: ModelKey, seconds: float, size: int) -> None:
        """A model came."""
        labels = _labels(key)
        self._succeeded.labels(**labels).add()
        self._bytes.labels(**labels).add(size)
        self._seconds.observe(seconds)

    def failed(self, key: ModelKey) -> None:
        """A model did not come."""
        self._failed.labels(**_labels(key)).add()

    def scrape(self, exchange: Exchange) -> None:
        """For Prometheus."""
        chosen = negotiate(exchange.head.get(b"accept"))
        exchange.respond(self._heads[chosen], render(self.registry, chosen))

    def healthy(self, exchange: Exchange) -> None:
        """The event loop turns. Whether the API server answers is not said: a restart would not bring it back."""
        exchange.respond(ResponseHead(200, _TEXT), b"ok\n")

    def ready(self, exchange: Exchange) -> None:
        """Everything was seen once."""
        exchange.respond(ResponseHead(200 if self.started else 503, _TEXT), b"ok\n" if self.started else b"not yet\n")


def _labels(key: ModelKey) -> dict[str, str]:
    kind = "BaseModel" if key[0] else "ClusterBaseModel"
    return {"model_type": kind, "namespace": key[0], "name": key[1]}


def server_of(metrics: AgentMetrics, address: Address) -> WireServer:
    """A server of the three paths, not started yet."""
    routes = Routes()
    routes.add("GET", "/metrics", metrics.scrape)
    routes.add("GET", "/healthz", metrics.healthy)
    routes.add("GET", "/readyz", metrics.ready)
    site = Site(routes)
    return WireServer(site, address, partial(NegotiatingProtocol, site))
