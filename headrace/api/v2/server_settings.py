# SPDX-License-Identifier: Apache-2.0
"""v2 over HTTP: the trace and the log settings of a running server. Registered by `http`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.api.v2.documents import answer_json, read_document
from headrace.api.v2.shared import V2Shared
from headrace.core.errors import InvalidArgument
from headrace.core.names import check_name
from headrace.net.http.exchange import Exchange
from headrace.net.http.routes import Routes


class V2ServerSettings:
    """Handlers over the settings."""

    def __init__(self, shared: V2Shared) -> None:
        self._gate = shared.http_gate
        self._tracing = shared.tracing
        self._logs = shared.logs

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        for path in ("/v2/trace/setting", "/v2/models/{model}/trace/setting"):
            routes.add("GET", path, self._gate.http("trace", self.trace))
            routes.add("POST", path, self._gate.http("trace", self.change_trace))
        routes.add("GET", "/v2/logging", self._gate.http("logging", self.logging))
        routes.add("POST", "/v2/logging", self._gate.http("logging", self.change_logging))

    def trace(self, exchange: Exchange) -> None:
        """Which requests are traced, of a model or of all."""
        shown = self._tracing.shown(_model(exchange))
        levels = shown.pop("trace_level")
        answer_json(exchange, {"trace_level": levels, **{name: values[0] for name, values in shown.items()}})

    def change_trace(self, exchange: Exchange) -> None:
        """Change some settings, and show all."""
        changes = {name: _texts(name, value) for name, value in read_document(exchange.body).items()}
        self._tracing.change(_model(exchange), changes)
        self.trace(exchange)

    def logging(self, exchange: Exchange) -> None:
        """Which lines are written."""
        answer_json(exchange, self._logs.shown())

    def change_logging(self, exchange: Exchange) -> None:
        """Change some settings, and show all."""
        self._logs.change(read_document(exchange.body))
        self.logging(exchange)


def _model(exchange: Exchange) -> str:
    return check_name(exchange.params[0]) if exchange.params else ""


def _texts(name: str, value: Any) -> Sequence[str] | None:
    """A value as clients write it: text, a number, a list of texts; null for what it was at first."""
    if value is None:
        return None
    if isinstance(value, str):
        return [value]
    if type(value) is int:
        return [str(value)]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    raise InvalidArgument(f"trace setting {name[:64]!a} must be a string, a list of strings, or null")
