# SPDX-License-Identifier: Apache-2.0
"""Which backend a request would get, and why, without sending it: `POST /router/explain`.

Registered by `proxy`; asked by `headrace router explain`. The question is JSON: `method`, `path`, `headers` and `body` (a
text, or a document that is sent as JSON) or `body_base64` (bytes). Nothing is changed, but for the dice of those who throw
them.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import orjson

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.choosing.policies import Why
from headrace.fleet.router.choosing.request import Request
from headrace.net.http.heads import OK_JSON, RequestHead

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.settings import RouterSettings
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.routes import Routes

_FORM = 'send JSON such as {"method": "POST", "path": "/v1/chat/completions", "headers": {}, "body": {"messages": []}}'

WORDS = {
    Why.POLICY: "the policy looks at nothing but numbers, and it is its turn",
    Why.ONLY: "no other backend can take a request",
    Why.HIT: "it has seen most of the prompt's beginning",
    Why.MISS: "nobody has seen enough of the prompt, and it has the least to do",
    Why.IMBALANCE: "one backend has far more to do than another, so that load alone counts",
    Why.NO_PROMPT: "the request has no prompt to look at, and it has the least to do",
    Why.HASH: "the prompt's first characters stand for it",
    Why.OVERFLOW: "the one that the prompt's first characters stand for is down or has too much to do",
    Why.STICKY: "the session belongs to it",
    Why.MOVED: "the session's own backend is down or full",
    Why.AGGREGATED: "no decoder can take a request, and a prefill can serve all of it",
}


class Explaining:
    """The endpoint."""

    def __init__(self, backends: Backends, settings: Callable[[], RouterSettings]) -> None:
        self._backends = backends
        self._settings = settings

    def add_to(self, routes: Routes) -> None:
        """Register it."""
        routes.add("POST", "/router/explain", self._answer)

    def explain(self, request: Request) -> dict[str, Any]:
        """The choice, and everybody's state."""
        backends, settings = self._backends, self._settings()
        chooser = backends.chooser
        live: Sequence[Backend] = chooser.candidates() if chooser is not None else backends.live
        chosen, why = None, "nobody"
        if live:
            # A copy takes the turn, so that the next request finds it untaken.
            turn = copy(backends.policy).pick
            if chooser is not None:
                chosen, why = chooser.decide(request, live, turn)
            else:
                chosen, why = (turn(live), Why.POLICY) if len(live) > 1 else (live[0], Why.ONLY)
        return {
            "backend": chosen.name if chosen is not None else None,
            "why": why,
            "because": WORDS.get(why) or self._nobody(),
            "policy": settings.policy,
            "details": chooser.explain(request, live) if chooser is not None else {},
            "backends": [
                {
                    "url": each.name,
                    **({"role": each.address.role} if each.address.role else {}),
                    "state": each.state,
                    "reason": each.health.reason,
                    "weight": each.weight,
                    "outstanding": each.outstanding,
                    "candidate": each in live,
                }
                for each in backends.all
            ],
        }

    def _nobody(self) -> str:
        if self._backends.live:
            return f"every backend has {self._settings().max_outstanding} requests: it would wait"
        return self._backends.unavailable().message

    def _answer(self, exchange: Exchange) -> None:
        told = self.explain(read_question(bytes(exchange.body)))
        exchange.respond(OK_JSON, orjson.dumps(told, option=orjson.OPT_INDENT_2))


def read_question(body: bytes) -> Request:
    """The request that is asked about. Raises InvalidArgument."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise InvalidArgument(f"this is not JSON; {_FORM}") from None
    if not isinstance(asked, dict) or set(asked) - {"method", "path", "headers", "body", "body_base64"}:
        raise InvalidArgument(_FORM)
    method, path, headers = asked.get("method", "POST"), asked.get("path", "/"), asked.get("headers") or {}
    right = isinstance(method, str) and isinstance(path, str) and isinstance(headers, dict)
    if not right or not all(isinstance(each, str) for each in headers.values()):
        raise InvalidArgument(_FORM)
    content = _content(asked.get("body"), asked.get("body_base64"))
    fields = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return Request(RequestHead(method.upper().encode(), path.encode(), fields, version="1.1"), content)


def _content(body: Any, encoded: Any) -> bytes:
    if encoded is not None:
        try:
            return b64decode(encoded, validate=True)
        except (ValueError, TypeError):
            raise InvalidArgument(f"body_base64 is no base64; {_FORM}") from None
    if isinstance(body, str):
        return body.encode()
    return orjson.dumps(body) if body is not None else b""
