# SPDX-License-Identifier: Apache-2.0
"""Metrics of the operator and of the model agent, and their HTTP server: `/metrics`, `/healthz` and `/readyz`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace.core.clock import SystemClock
from headrace.core.telemetry.exposition import Format, negotiate, render
from headrace.core.telemetry.metrics import Registry
from headrace.fleet.agent.model_keys import ModelKey
from headrace.net.http.heads import CONTENT_TYPE, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer
from headrace.net.site import Site
from headrace.net.sockets import Address

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange
    from headrace.platforms.kubernetes_client.api import ApiClient

_MODEL_LABELS = ["model_type", "namespace", "name"]
_PLAIN_TEXT = [(CONTENT_TYPE, b"text/plain")]


class ProgramMetrics:
    """The registry of a program that talks to an API server."""

    def __init__(self, api: ApiClient, api_calls: str) -> None:
        """api_calls: the name of the counter of API calls."""
        self.is_ready = True
        self.registry = Registry(SystemClock())
        self.registry.callback(
            api_calls,
            "Calls to the API server, by whether they may change something.",
            lambda: {("read",): api.calls - api.writes, ("write",): api.writes},
            ["kind"],
            kind="counter",
        )


class OperatorMetrics(ProgramMetrics):
    """Metrics of the operator."""

    def __init__(self, api: ApiClient) -> None:
        super().__init__(api, "headrace_operator_api_calls_total")
        self.leads = self.registry.gauge("headrace_operator_leads", "1 while this process is the leader.").labels()
        reconciles = self.registry.counter(
            "headrace_operator_reconciles_total", "Reconciliations, by outcome: done or failed.", ["outcome"]
        )
        self.done, self.failed = reconciles.labels(outcome="done"), reconciles.labels(outcome="failed")
        self.seconds = self.registry.histogram(
            "headrace_operator_reconcile_seconds", "Duration of one reconciliation."
        ).labels()


class AgentMetrics(ProgramMetrics):
    """Metrics of the model agent, with OME's names. `is_ready`: the node and all models were read once."""

    def __init__(self, api: ApiClient) -> None:
        super().__init__(api, "headrace_model_agent_api_calls_total")
        self.is_ready = False
        self._succeeded = self.registry.counter(
            "model_agent_downloads_success_total", "Completed downloads of models.", _MODEL_LABELS
        )
        self._failed = self.registry.counter(
            "model_agent_downloads_failed_total", "Failed downloads of models.", _MODEL_LABELS
        )
        self._bytes = self.registry.counter("model_agent_download_bytes_total", "Downloaded bytes.", _MODEL_LABELS)
        self._seconds = self.registry.histogram(
            "model_agent_download_duration_seconds", "Time from the start of a download to a model in its folder."
        ).labels()

    def succeeded(self, key: ModelKey, seconds: float, size: int) -> None:
        """Count a completed download."""
        labels = _labels(key)
        self._succeeded.labels(**labels).add()
        self._bytes.labels(**labels).add(size)
        self._seconds.observe(seconds)

    def failed(self, key: ModelKey) -> None:
        """Count a failed download."""
        self._failed.labels(**_labels(key)).add()


def metrics_server(metrics: ProgramMetrics, address: Address) -> HttpServer:
    """Return a server of `/metrics`, `/healthz` and `/readyz` that is not started yet."""
    heads = {media_type: ResponseHead(200, [(CONTENT_TYPE, media_type.value)]) for media_type in Format}

    def scrape(exchange: Exchange) -> None:
        media_type = negotiate(exchange.head.get(b"accept"))
        exchange.respond(heads[media_type], render(metrics.registry, media_type))

    def healthz(exchange: Exchange) -> None:
        # Says only that the event loop runs: a restart would not help against an API server that is down.
        exchange.respond(ResponseHead(200, _PLAIN_TEXT), b"ok\n")

    def readyz(exchange: Exchange) -> None:
        status, body = (200, b"ok\n") if metrics.is_ready else (503, b"not yet\n")
        exchange.respond(ResponseHead(status, _PLAIN_TEXT), body)

    routes = Routes()
    routes.add("GET", "/metrics", scrape)
    routes.add("GET", "/healthz", healthz)
    routes.add("GET", "/readyz", readyz)
    site = Site(routes)
    return HttpServer(site, address, partial(NegotiatingProtocol, site))


def _labels(key: ModelKey) -> dict[str, str]:
    kind = "BaseModel" if key[0] else "ClusterBaseModel"
    return {"model_type": kind, "namespace": key[0], "name": key[1]}
