# SPDX-License-Identifier: Apache-2.0
"""Whether the server is well, for people and for whatever restarts it or sends it traffic.

`/livez` says that the process answers; `/ready`, `/readyz` that requests would be served; `/healthz` the same of the
model of `/predict`, with its version; `/health` tells what there is. All in JSON; 503 where the answer is no.
"""

from __future__ import annotations

from typing import Any

import orjson

from headrace.api.predict.models import Models
from headrace.api.predict.settings import PredictSettings
from headrace.core.errors import HeadraceError
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.states import State
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.version import __version__

# Kept by nobody on the way: an old answer to this question is a wrong one.
_FIELDS = [(CONTENT_TYPE, JSON), (b"cache-control", b"no-store")]
_YES = ResponseHead(200, _FIELDS)
_NO = ResponseHead(503, _FIELDS)

_SHOWN = 256


class PredictHealth:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, models: Models, settings: PredictSettings) -> None:
        self._plane = plane
        self._models = models
        self._default = settings.model

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        routes.add("GET", "/livez", self.live)
        routes.add("GET", "/ready", self.ready)
        routes.add("GET", "/readyz", self.ready)
        routes.add("GET", "/healthz", self.model)
        routes.add("GET", "/health", self.summary)

    def live(self, exchange: Exchange) -> None:
        """The process answers."""
        exchange.respond(_YES, b'{"status":"alive"}')

    def ready(self, exchange: Exchange) -> None:
        """Requests would be served."""
        if self._plane.ready:
            exchange.respond(_YES, b'{"status":"ready"}')
        else:
            _answer(exchange, _NO, {"status": "not ready", "error": self._why_not()})

    def model(self, exchange: Exchange) -> None:
        """The model of `/predict` is loaded; where there are several and none is named, all are."""
        plane = self._plane
        names = [self._default] if self._default else plane.model_names()
        try:
            versions = {name: self._version(name) for name in names[:_SHOWN]}
        except HeadraceError:
            versions = {}
        healthy = plane.accepting if self._default else plane.ready
        if not versions or not healthy:
            _answer(exchange, _NO, {"status": "unhealthy", "error": f"Model not loaded: {self._why_not()}"})
        elif len(versions) == 1:
            _answer(exchange, _YES, {"status": "healthy", "model_version": next(iter(versions.values()))})
        else:
            _answer(exchange, _YES, {"status": "healthy", "models": versions})

    def summary(self, exchange: Exchange) -> None:
        """All of it, with the state of every version."""
        ready = self._plane.ready
        models: dict[str, dict[str, str]] = {}
        for entry in self._plane.states()[:_SHOWN]:
            models.setdefault(entry.name, {})[entry.version] = entry.state.value if entry.state is not None else ""
        _answer(
            exchange,
            _YES if ready else _NO,
            {
                "status": "healthy" if ready else "unhealthy",
                "ready": ready,
                "server": "headrace",
                "server_version": __version__,
                "models": models,
            },
        )

    def _version(self, name: str) -> str:
        known, _ = self._models.find(name)
        serving = self._plane.find(name)
        return known.labels.label(serving.version_text) if serving is not None else ""

    def _why_not(self) -> str:
        plane = self._plane
        if not plane.accepting:
            return "the server is stopping"
        if not plane.started:
            return "models are being loaded; ask again later"
        failed = sorted({entry.name for entry in plane.states() if entry.state is not State.READY})
        if failed:
            return f"not ready: {', '.join(failed[:16])}; the server's log says why"
        return "the server has no model that is ready"


def _answer(exchange: Exchange, head: ResponseHead, document: dict[str, Any]) -> None:
    exchange.respond(head, orjson.dumps(document))
