# SPDX-License-Identifier: Apache-2.0
"""Health checks, in JSON; 503 if unhealthy.

`/livez`: the process answers. `/ready`, `/readyz`: the server is ready. `/healthz`: the model of `/predict` is loaded,
with its version. `/health`: the state of the server and of all models.
"""

from __future__ import annotations

from typing import Any

import orjson

from headrace.api.predict.models import Models
from headrace.api.predict.settings import PredictSettings
from headrace.core.errors import HeadraceError
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.residency import ModelNotLoaded
from headrace.engine.repository.states import State
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.version import __version__

# Proxies must not cache a health check.
_FIELDS = [(CONTENT_TYPE, JSON), (b"cache-control", b"no-store")]
_HEALTHY = ResponseHead(200, _FIELDS)
_UNHEALTHY = ResponseHead(503, _FIELDS)

_SHOWN = 256


class PredictHealth:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, models: Models, settings: PredictSettings) -> None:
        self._plane = plane
        self._models = models
        self._default = settings.model

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        routes.add("GET", "/livez", self.live, scope=None)
        routes.add("GET", "/ready", self.ready, scope=None)
        routes.add("GET", "/readyz", self.ready, scope=None)
        routes.add("GET", "/healthz", self.model, scope=None)
        routes.add("GET", "/health", self.summary, scope=None)

    def live(self, exchange: Exchange) -> None:
        """Answer `/livez`."""
        exchange.respond(_HEALTHY, b'{"status":"alive"}')

    def ready(self, exchange: Exchange) -> None:
        """Answer `/readyz`."""
        if self._plane.ready:
            exchange.respond(_HEALTHY, b'{"status":"ready"}')
        else:
            _respond(exchange, _UNHEALTHY, {"status": "not ready", "error": self._reason()})

    def model(self, exchange: Exchange) -> None:
        """Answer `/healthz`: the default model is loaded; without a default, all models are."""
        plane = self._plane
        names = [self._default] if self._default else plane.model_names() or plane.known_names()
        try:
            versions = {name: self._version(name) for name in names[:_SHOWN]}
        except ModelNotLoaded as missing:
            versions = {missing.model: ""}  # the first request loads it
        except HeadraceError:
            versions = {}
        healthy = plane.accepting if self._default else plane.ready
        if not versions or not healthy:
            _respond(exchange, _UNHEALTHY, {"status": "unhealthy", "error": f"Model not loaded: {self._reason()}"})
        elif len(versions) == 1:
            _respond(exchange, _HEALTHY, {"status": "healthy", "model_version": next(iter(versions.values()))})
        else:
            _respond(exchange, _HEALTHY, {"status": "healthy", "models": versions})

    def summary(self, exchange: Exchange) -> None:
        """Answer `/health` with the state of every version."""
        ready = self._plane.ready
        models: dict[str, dict[str, str]] = {}
        for entry in self._plane.states()[:_SHOWN]:
            models.setdefault(entry.name, {})[entry.version] = entry.state.value if entry.state is not None else ""
        _respond(
            exchange,
            _HEALTHY if ready else _UNHEALTHY,
            {
                "status": "healthy" if ready else "unhealthy",
                "ready": ready,
                "server": "headrace",
                "server_version": __version__,
                "models": models,
            },
        )

    def _version(self, name: str) -> str:
        model, _ = self._models.find(name)
        serving = self._plane.find(name)
        return model.labels.label(serving.version_text) if serving is not None else ""

    def _reason(self) -> str:
        plane = self._plane
        if not plane.accepting:
            return "the server is stopping"
        if not plane.started:
            return "models are loading; try again later"
        failed = sorted({entry.name for entry in plane.states() if entry.state is not State.READY})
        if failed:
            return f"not ready: {', '.join(failed[:16])}; the server's log has the reason"
        return "no model is ready"


def _respond(exchange: Exchange, head: ResponseHead, document: dict[str, Any]) -> None:
    exchange.respond(head, orjson.dumps(document))
