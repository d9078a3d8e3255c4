# SPDX-License-Identifier: Apache-2.0
"""One inference request on its way to a service and back: the router's flow, with TAO's words for what goes wrong.

Made by `inference`. On v1 an answer goes back as it came, status and all. On v2 (facts of NVIDIA's client: it knows 200 and
nothing finer) a service that loads answers 200, and one that failed 500.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import orjson

from headrace.fleet.router.backend import Outcome
from headrace.fleet.router.flows import Flow
from headrace.fleet.router.streaming import StreamedFlow
from headrace.jobs.api.errors import json_head
from headrace.net.http.heads import ResponseHead

if TYPE_CHECKING:
    from headrace.fleet.router.answers import AnswerHead
    from headrace.jobs.api.reach import Service
    from headrace.net.http.exchange import Buffer, Exchange

log = logging.getLogger("headrace.api")

LOADING = (202, 503)


class _ToService(Flow):
    """What all kinds of flows have."""

    _router: Service
    _reached = True

    def unreachable(self, why: str) -> None:
        """See `router.customers.Applicant`."""
        self._reached = False
        super().unreachable(why)

    def _try_again_or(self, status: int, why: str, *, may: bool) -> None:
        exchange, backend = self._exchange, self._backend
        if backend is None:
            return
        self._settle(Outcome.FAILED)
        self._let_go()
        service = self._router
        log.warning("service %s at %s %s", service.job_id, backend.name, why)
        if exchange.started:
            exchange.abort()
        else:
            service.on_failure(exchange, service, why, self._reached)


class WholeFlow(_ToService):
    """A request whose body is there."""


class LongFlow(_ToService, StreamedFlow):
    """A request whose body is passed on as it comes."""


class _Facade(_ToService):
    """On v2: see the module."""

    def answered(self, head: AnswerHead, body: Buffer) -> None:
        """See `router.customers.Customer`."""
        if head.status not in LOADING:
            super().answered(head, body)
            return
        self._settle(Outcome.OK)
        self._let_go()
        status = facade_status(head.status, body)
        fields = head.head.fields
        self._exchange.respond(ResponseHead(status, fields, raw=True), body)


class FacadeFlow(_Facade, WholeFlow):
    """A request whose body is there, on v2."""


class LongFacadeFlow(_Facade, LongFlow):
    """A request whose body is passed on as it comes, on v2."""


def facade_status(status: int, body: Buffer) -> int:
    """What v2 says for what a service that is not ready said."""
    if status not in LOADING:
        return status
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return status
    return 500 if isinstance(found, dict) and found.get("status") == "error" else 200


def respond(exchange: Exchange, status: int, body: dict[str, Any], facade: bool) -> None:
    """Answer in a service's place."""
    text = orjson.dumps(body)
    exchange.respond(json_head(facade_status(status, text) if facade else status), text, _retry(status))


def _retry(status: int) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"retry-after", b"5"),) if status == 202 else ()
