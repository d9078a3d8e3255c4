# SPDX-License-Identifier: Apache-2.0
"""`/admin/traffic`: how the versions of each model share its traffic, and how they do.

    GET     /admin/traffic                    every split
    GET     /admin/traffic/{model}            one, and where its traffic really goes
    PUT     /admin/traffic/{model}            set it (POST does the same): {"weights": {"1": 0.9, "2": 0.1}, ...}
    DELETE  /admin/traffic/{model}            all to the newest version again
    GET     /admin/traffic/{model}/report     counts, percentiles, agreement and tests
    POST    /admin/traffic/{model}/rollback   {"version": "2", "reason": "..."}

Translates to `traffic`. Who may call it is for the composition root to guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import orjson

from headrace.core.errors import InvalidArgument
from headrace.engine.traffic.accounts import Numbers
from headrace.engine.traffic.parsing import parse_split
from headrace.engine.traffic.traffic import Traffic
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON
from headrace.net.http.routes import Routes

_MOST_BYTES = 256 * 1024
_MOST_REASON = 500
_BY_HAND = "by hand"

Others = Callable[[], Iterable[Numbers]]
"""What `Traffic.numbers` said in the other workers."""


def _nobody() -> Iterable[Numbers]:
    return ()


class Admin:
    """Handlers over the splits of one server."""

    def __init__(self, traffic: Traffic, others: Others = _nobody) -> None:
        self._traffic = traffic
        self._others = others

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        routes.add("GET", "/admin/traffic", self.list)
        routes.add("GET", "/admin/traffic/{model}", self.show)
        routes.add("PUT", "/admin/traffic/{model}", self.set)
        routes.add("POST", "/admin/traffic/{model}", self.set)
        routes.add("DELETE", "/admin/traffic/{model}", self.remove)
        routes.add("GET", "/admin/traffic/{model}/report", self.report)
        routes.add("POST", "/admin/traffic/{model}/rollback", self.roll_back)

    def list(self, exchange: Exchange) -> None:
        """Every split, in the order of the models' names."""
        states = [self._traffic.state(model) for model in sorted(self._traffic.splits())]
        _respond(exchange, {"splits": states})

    def show(self, exchange: Exchange) -> None:
        """One split."""
        _respond(exchange, self._traffic.state(exchange.params[0]))

    def set(self, exchange: Exchange) -> None:
        """Share a model's traffic so from now on."""
        model = exchange.params[0]
        self._traffic.set(model, parse_split(_document(exchange)))
        _respond(exchange, self._traffic.state(model))

    def remove(self, exchange: Exchange) -> None:
        """Share it no longer."""
        model = exchange.params[0]
        self._traffic.remove(model)
        _respond(exchange, {"model": model, "removed": True})

    def report(self, exchange: Exchange) -> None:
        """What the versions did."""
        _respond(exchange, self._traffic.report(exchange.params[0], self._others()))

    def roll_back(self, exchange: Exchange) -> None:
        """Take a version's traffic away."""
        model, document = exchange.params[0], _document(exchange)
        version, reason = document.pop("version", None), document.pop("reason", _BY_HAND)
        if not isinstance(version, str) or not isinstance(reason, str) or document:
            raise InvalidArgument('write {"version": "2"} and, if you like, "reason": both are texts')
        self._traffic.roll_back(model, version, reason[:_MOST_REASON] or _BY_HAND)
        _respond(exchange, self._traffic.state(model))


def _document(exchange: Exchange) -> dict[str, Any]:
    if len(exchange.body) > _MOST_BYTES:
        raise InvalidArgument(f"the body has {len(exchange.body)} bytes; a split needs far less than {_MOST_BYTES}")
    try:
        document = orjson.loads(exchange.body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is no JSON (line {error.lineno}, column {error.colno})") from None
    if not isinstance(document, dict):
        raise InvalidArgument('the body must be a JSON object, such as {"weights": {"1": 0.9, "2": 0.1}}')
    return document


def _respond(exchange: Exchange, document: dict[str, Any]) -> None:
    exchange.respond(OK_JSON, orjson.dumps(document))
