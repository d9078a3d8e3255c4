# SPDX-License-Identifier: Apache-2.0
"""`POST /router/explain`: which backend a request would get, and why, without sending it."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import orjson

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.policies import ChoiceReason, RequestView
from headrace.net.http.heads import OK_JSON, RequestHead

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.settings import RouterSettings
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.routes import Routes

_EXPLAIN_EXAMPLE = (
    'send JSON such as {"method": "POST", "path": "/v1/chat/completions", "headers": {}, "body": {"messages": []}}'
)

REASON_TEXTS = {
    ChoiceReason.POLICY: "the policy chooses by load and weight alone, and it is next",
    ChoiceReason.ONLY: "no other backend can take a request",
    ChoiceReason.HIT: "it has seen most of the prompt's beginning",
    ChoiceReason.MISS: "no backend has seen enough of the prompt, and it has the least load",
    ChoiceReason.IMBALANCE: "one backend has far more load than another, so that load alone decides",
    ChoiceReason.NO_PROMPT: "the request has no prompt, and it has the least load",
    ChoiceReason.HASH: "the hash of the prompt's first characters selects it",
    ChoiceReason.OVERFLOW: "the backend that the hash selects is down or has too much load",
    ChoiceReason.STICKY: "the session belongs to it",
    ChoiceReason.MOVED: "the backend of the session is down or full",
    ChoiceReason.PREDICTED: "it is expected to be done first",
    ChoiceReason.TARGET_MISSED: "no backend is expected to keep the latency target, and it misses it least",
    ChoiceReason.AGGREGATED: "no decode backend can take a request, and a prefill backend can serve all of it",
}


class ExplainEndpoint:
    """`POST /router/explain`: which backend a request would get, and why, without sending it.

    The body is JSON with `method`, `path`, `headers` and `body` (a string, or a JSON document) or `body_base64`. Nothing is
    changed but the state of random policies.
    """

    def __init__(self, backends: Backends, settings: Callable[[], RouterSettings]) -> None:
        self._backends = backends
        self._settings = settings

    def add_to(self, routes: Routes) -> None:
        """Register the endpoint."""
        routes.add("POST", "/router/explain", self._respond)

    def explain(self, request: RequestView) -> dict[str, Any]:
        """Return the choice and the state of all backends."""
        backends, settings = self._backends, self._settings()
        chooser = backends.chooser
        live: Sequence[Backend] = chooser.candidates() if chooser is not None else backends.live
        chosen, reason = None, "nobody"
        if live:
            # A copy of the policy chooses, so that the next request is not affected.
            pick = copy(backends.policy).pick
            if chooser is not None:
                chosen, reason = chooser.decide(request, live, pick)
            else:
                chosen, reason = (pick(live), ChoiceReason.POLICY) if len(live) > 1 else (live[0], ChoiceReason.ONLY)
        return {
            "backend": chosen.name if chosen is not None else None,
            "why": reason,
            "because": REASON_TEXTS.get(reason) or self._no_backend_reason(),
            "policy": settings.policy,
            "details": chooser.explain(request, live) if chooser is not None else {},
            "backends": [
                {
                    "url": backend.name,
                    **({"role": backend.address.role} if backend.address.role else {}),
                    "state": backend.state,
                    "reason": backend.health.reason,
                    "weight": backend.weight,
                    "outstanding": backend.outstanding,
                    "candidate": backend in live,
                }
                for backend in backends.all
            ],
        }

    def _no_backend_reason(self) -> str:
        if self._backends.live:
            return f"every backend has {self._settings().max_outstanding} requests: the request would be queued"
        return self._backends.unavailable().message

    def _respond(self, exchange: Exchange) -> None:
        explanation = self.explain(parse_explain_request(bytes(exchange.body)))
        exchange.respond(OK_JSON, orjson.dumps(explanation, option=orjson.OPT_INDENT_2))


def parse_explain_request(body: bytes) -> RequestView:
    """Parse the body of `/router/explain`. Raises InvalidArgument."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise InvalidArgument(f"the body is not JSON; {_EXPLAIN_EXAMPLE}") from None
    if not isinstance(document, dict) or set(document) - {"method", "path", "headers", "body", "body_base64"}:
        raise InvalidArgument(_EXPLAIN_EXAMPLE)
    method, path = document.get("method", "POST"), document.get("path", "/")
    headers = document.get("headers") or {}
    valid = isinstance(method, str) and isinstance(path, str) and isinstance(headers, dict)
    if not valid or not all(isinstance(value, str) for value in headers.values()):
        raise InvalidArgument(_EXPLAIN_EXAMPLE)
    content = _decode_content(document.get("body"), document.get("body_base64"))
    fields = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return RequestView(RequestHead(method.upper().encode(), path.encode(), fields, version="1.1"), content)


def _decode_content(body: Any, encoded: Any) -> bytes:
    if encoded is not None:
        try:
            return b64decode(encoded, validate=True)
        except (ValueError, TypeError):
            raise InvalidArgument(f"body_base64 is not base64; {_EXPLAIN_EXAMPLE}") from None
    if isinstance(body, str):
        return body.encode()
    return orjson.dumps(body) if body is not None else b""
