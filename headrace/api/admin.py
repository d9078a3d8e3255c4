# SPDX-License-Identifier: Apache-2.0
"""`/admin/traffic`: the traffic split between the versions of each model, for operators of a running server.

    GET     /admin/traffic                    all splits
    GET     /admin/traffic/{model}            one split, and where its traffic goes now
    PUT     /admin/traffic/{model}            set a split (POST does the same): {"weights": {"1": 0.9, "2": 0.1}}
    DELETE  /admin/traffic/{model}            remove a split
    GET     /admin/traffic/{model}/report     compare the versions
    POST    /admin/traffic/{model}/rollback   take a version out of a split: {"version": "2"}

The policy is in `engine.traffic`; `admin_table` describes the routes for the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import orjson

from headrace.core.errors import InvalidArgument
from headrace.engine.traffic.settings import parse_split
from headrace.engine.traffic.splits import TrafficSplits
from headrace.engine.traffic.statistics import Numbers
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON
from headrace.net.http.routes import Routes

ROLLBACK_PATH = "/admin/traffic/{model}/rollback"
_MOST_BYTES = 256 * 1024
_MOST_REASON = 500
_BY_HAND = "by hand"

OtherWorkers = Callable[[], Iterable[Numbers]]
"""Returns the traffic statistics of the other workers."""


_TAG = "Traffic"
_JSON = "application/json"
_OBJECT = {"type": "object"}
_SHARES: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}}
_SPLIT: dict[str, Any] = {
    "type": "object",
    "required": ["weights"],
    "additionalProperties": False,
    "properties": {
        "weights": {**_SHARES, "minProperties": 1, "description": "Shares by version that sum to 1, or percentages."},
        "sticky": {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: {"type": "string"} for name in ("header", "cookie", "field")},
        },
        "shadows": {**_SHARES, "description": "Share of the requests, from 0 to 1, that is copied to each version."},
        "tolerance": {"type": "number", "minimum": 0},
        "baseline": {"type": "string"},
        "rollback": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "error_rate": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
                "p99_ms": {"type": "number", "minimum": 0},
                "least_requests": {"type": "integer", "minimum": 1},
                "window_seconds": {"type": "number", "exclusiveMinimum": 0},
            },
        },
    },
    "example": {"weights": {"1": 0.9, "2": 0.1}, "sticky": {"header": "x-user-id"}, "rollback": {"error_rate": 0.05}},
}
_ROLLBACK: dict[str, Any] = {
    "type": "object",
    "required": ["version"],
    "additionalProperties": False,
    "properties": {"version": {"type": "string"}, "reason": {"type": "string"}},
    "example": {"version": "2", "reason": "complaints"},
}


def _no_workers() -> Iterable[Numbers]:
    return ()


class Admin:
    """Handlers over the splits of one server."""

    def __init__(self, traffic: TrafficSplits, others: OtherWorkers = _no_workers) -> None:
        self._traffic = traffic
        self._others = others

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        routes.add("GET", "/admin/traffic", self.list, scope="admin")
        model = "/admin/traffic/{model}"
        routes.add("GET", model, self.show, scope="admin")
        routes.add("PUT", model, self.set, scope="admin", workers="all-ordered")
        routes.add("POST", model, self.set, scope="admin", workers="all-ordered")
        routes.add("DELETE", model, self.remove, scope="admin", workers="all-ordered")
        routes.add("GET", f"{model}/report", self.report, scope="admin", workers="gather")
        routes.add("POST", ROLLBACK_PATH, self.roll_back, scope="admin", workers="all-ordered")

    def list(self, exchange: Exchange) -> None:
        """Return all splits, sorted by model name."""
        states = [self._traffic.state(model) for model in sorted(self._traffic.splits())]
        _respond(exchange, {"splits": states})

    def show(self, exchange: Exchange) -> None:
        """Return one split."""
        _respond(exchange, self._traffic.state(exchange.params[0]))

    def set(self, exchange: Exchange) -> None:
        """Set the split of a model."""
        model = exchange.params[0]
        self._traffic.set(model, parse_split(_document(exchange)))
        _respond(exchange, self._traffic.state(model))

    def remove(self, exchange: Exchange) -> None:
        """Remove the split of a model."""
        model = exchange.params[0]
        self._traffic.remove(model)
        _respond(exchange, {"model": model, "removed": True})

    def report(self, exchange: Exchange) -> None:
        """Return the statistics of the versions, compared."""
        _respond(exchange, self._traffic.report(exchange.params[0], self._others()))

    def roll_back(self, exchange: Exchange) -> None:
        """Take a version out of a split."""
        model, document = exchange.params[0], _document(exchange)
        version, reason = document.pop("version", None), document.pop("reason", _BY_HAND)
        if not isinstance(version, str) or not isinstance(reason, str) or document:
            raise InvalidArgument('send {"version": "2"} and optionally "reason"; both are strings')
        self._traffic.roll_back(model, version, reason[:_MOST_REASON] or _BY_HAND)
        _respond(exchange, self._traffic.state(model))


def _document(exchange: Exchange) -> dict[str, Any]:
    if len(exchange.body) > _MOST_BYTES:
        raise InvalidArgument(f"the body has {len(exchange.body)} bytes; a split needs far less than {_MOST_BYTES}")
    try:
        document = orjson.loads(exchange.body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not JSON (line {error.lineno}, column {error.colno})") from None
    if not isinstance(document, dict):
        raise InvalidArgument('the body must be a JSON object, such as {"weights": {"1": 0.9, "2": 0.1}}')
    return document


def _respond(exchange: Exchange, document: dict[str, Any]) -> None:
    exchange.respond(OK_JSON, orjson.dumps(document))


def admin_table() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the OpenAPI operations by (method, path)."""
    model = "/admin/traffic/{model}"
    return {
        ("GET", "/admin/traffic"): _operation("List the traffic splits of all models"),
        ("GET", model): _operation("Show the traffic split of a model", 404),
        ("PUT", model): _operation("Set the traffic split of a model", 404, body=_SPLIT),
        ("POST", model): _operation("Set the traffic split of a model, like PUT", 404, body=_SPLIT),
        ("DELETE", model): _operation("Remove a split: all traffic goes to the newest version", 404),
        ("GET", f"{model}/report"): _operation("Compare the versions", 404),
        ("POST", f"{model}/rollback"): _operation("Take a version out of a split", 404, 409, body=_ROLLBACK),
    }


def _operation(summary: str, *failing: int, body: dict[str, Any] | None = None) -> dict[str, Any]:
    statuses = sorted({400, 431, 500, 503, *failing, *((408, 413) if body else ())})
    operation: dict[str, Any] = {"tags": [_TAG], "summary": summary}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    operation["responses"] = {
        "200": {"description": "The state after the request.", "content": {_JSON: {"schema": _OBJECT}}},
        **{str(status): {"$ref": f"#/components/responses/Error{status}"} for status in statuses},
    }
    return operation
