# SPDX-License-Identifier: Apache-2.0
"""Inference through the gateway: who asks, whether they may, which service it is, and then the router's way there and back.

Takes every request that no other route answers, since only so does the wire give it short bodies whole and long ones as they
come; what is no inference is told that it is not there. What is worked out of a head is kept with the head: clients repeat
theirs, and the usual request costs a few look-ups.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from headrace.core.errors import HeadraceError
from headrace.fleet.router.flows import wrong_length
from headrace.fleet.router.requests import RequestPlan, plan_of
from headrace.jobs.api.errors import error_json, fail, json_head
from headrace.jobs.api.gate import token_of
from headrace.jobs.api.inference_flows import FacadeFlow, LongFacadeFlow, LongFlow, WholeFlow, respond
from headrace.jobs.api.reach import Reach, Service, Target
from headrace.jobs.api.reading import organisation_of, uuid_of
from headrace.jobs.api.writing import now_text
from headrace.jobs.records import Endpoint
from headrace.net.http.heads import CONTENT_TYPE, JSON, RequestHead, ResponseHead

if TYPE_CHECKING:
    from headrace.api.access.roles import Principal
    from headrace.jobs.api.gate import Gate
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.routes import Routes

V1 = "/api/v1/orgs/{org}/experiments/{experiment}/jobs/{job}/inference_microservice/inference"
V2 = "/api/v2/orgs/{org}/inference_microservices/{job}:inference"
OPERATION = "services.infer"

_V1 = re.compile(r"/api/v1/orgs/([^/]+)/experiments/([^/]+)/jobs/([^/]+)/inference_microservice/inference")
_V2 = re.compile(r"/api/v2/orgs/([^/]+)/inference_microservices/([^/]+):inference")
_TARGET = b"/api/v1/inference"
_KEPT_BACK = frozenset((b"authorization", b"cookie", b"x-api-key"))
"""What is between the client and the gateway."""
_INITIALIZING = "Server is initializing (downloading files, setting up), please wait"


class InferencePlan:
    """What a head means: whose service, and the head that it gets."""

    __slots__ = ("admitted", "facade", "request", "service", "target", "token")

    def __init__(self, target: Target, facade: bool, request: RequestPlan, token: str) -> None:
        self.target = target
        self.token = token
        self.facade = facade
        self.request = request
        self.service: Service | None = None
        self.admitted: Principal | None = None
        """Who was found to be allowed this, by this token."""


class Inference:
    """Handlers."""

    def __init__(self, gate: Gate, reach: Reach) -> None:
        self._gate = gate
        self._reach = reach
        reach.on_failure = self._failed
        self._clock = reach.clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes: Routes | None = None
        self._paths: list[tuple[re.Pattern[str], set[str]]] = []

    def add_to(self, routes: Routes, described: Routes) -> None:
        """Take the two paths, and everything that nobody else takes; `described` is for the OpenAPI document."""
        routes.fallback(self.whole, self.long, whole_bytes=self._reach.plans.whole_bytes)
        self._routes = described
        for path in (V1, V2):
            described.add("POST", path, self.whole)

    def whole(self, exchange: Exchange) -> None:
        """A request whose body is there. Nearly always, everything about it is known: that way is all here."""
        plan: Any = exchange.head.memo
        if plan is None:
            plan = self._plan(exchange)
            if plan is None:
                return
        service = plan.service
        if len(exchange.body) != plan.request.whole_length:
            # A promise of the wire's; a request with the wrong length would swallow the next one.
            fail(exchange, wrong_length())
        elif (
            service is not None
            and service.fresh_until > self._clock.now
            and plan.admitted is not None
            and self._gate.recall(plan.token, monotonic()) is plan.admitted
        ):
            self._send(exchange, plan, service)
        else:
            self._go(self._prepare(exchange, plan, self._send))

    def long(self, exchange: Exchange) -> None:
        """A request whose body follows."""
        plan = cast("InferencePlan | None", exchange.head.memo) or self._plan(exchange)
        if plan is None:
            return
        # The client keeps what it has until a connection to the service is there.
        exchange.pause_body()
        early = _Early()
        exchange.on_body = early.pieces.append
        exchange.on_body_end = early.end
        self._go(self._prepare(exchange, plan, partial(self._send_long, early)))

    # Inside.

    def _go(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, exchange: Exchange, plan: InferencePlan, send: Any) -> None:
        target = plan.target
        try:
            plan.admitted = await self._gate.admit(exchange, OPERATION, target[0], target[2])
            found = await self._reach.find(target)
            if exchange.closed:
                return
            if isinstance(found, Service):
                plan.service = found
                send(exchange, plan, found)
            else:
                self._not_there(exchange, found, plan.facade)
        except Exception as error:
            fail(exchange, error)

    def _send(self, exchange: Exchange, plan: InferencePlan, service: Service) -> None:
        if service.backend.outstanding >= service.limit:
            fail(exchange, service.full())
            return
        service.used = self._clock.now
        flow = FacadeFlow() if plan.facade else WholeFlow()
        flow.forward(service, exchange, plan.request)

    def _send_long(self, early: _Early, exchange: Exchange, plan: InferencePlan, service: Service) -> None:
        if service.in_flight >= service.limit:
            raise service.full()
        service.used = self._clock.now
        flow = LongFacadeFlow() if plan.facade else LongFlow()
        flow.take(service, exchange, plan.request)
        flow.start()
        for piece in early.pieces:
            if exchange.on_body is not None:
                exchange.on_body(piece)
        if early.ended and exchange.on_body_end is not None:
            exchange.on_body_end()

    def _failed(self, exchange: Exchange, service: Service, why: str, reached: bool) -> None:
        plan = cast("InferencePlan", exchange.head.memo)
        self._reach.lost(service.job_id)
        self._go(self._tell(exchange, plan, why, reached))

    async def _tell(self, exchange: Exchange, plan: InferencePlan, why: str, reached: bool) -> None:
        """The service gave no answer: it may have been stopped, have died, or not be there yet."""
        try:
            found = await self._reach.find(plan.target)
        except Exception as error:
            fail(exchange, error)
            return
        if exchange.closed or exchange.started:
            return
        if isinstance(found, Endpoint):
            self._not_there(exchange, found, plan.facade)
            return
        if not reached:
            # It lives and does not listen: its status says that it is initializing, and so does this.
            respond(exchange, 202, _initializing(found.job_id), plan.facade)
            return
        text = f"the inference microservice {why}: check its status and logs, then try again or stop and start it"
        _respond_error(exchange, 500, found.job_id, text, plan.facade)

    def _not_there(self, exchange: Exchange, found: Endpoint, facade: bool) -> None:
        if found.state == "failed":
            body = {"job_id": found.job.id, "status": "error", "error": found.error}
            respond(exchange, 503, body, facade)
        else:
            respond(exchange, 202, _initializing(found.job.id), facade)

    def _plan(self, exchange: Exchange) -> InferencePlan | None:
        """What a head means; None if that is answered already."""
        head = exchange.head
        path = head.path.decode("latin-1")
        v1 = _V1.fullmatch(path)
        v2 = _V2.fullmatch(path) if v1 is None else None
        match = v1 or v2
        if match is None or head.method != b"POST":
            self._elsewhere(exchange, path)
            return None
        try:
            org = organisation_of(match[1])
            experiment = uuid_of(match[2], "Experiment") if v1 is not None else None
            job = uuid_of(match[3] if v1 is not None else match[2], "Job")
            token = token_of(head)
            request = plan_of(_passed_on(head, v2 is not None), self._reach.plans)
        except HeadraceError as error:
            fail(exchange, error)
            return None
        request.repeatable = True  # it changes nothing
        plan = InferencePlan((org, experiment, job), v2 is not None, request, token)
        head.memo = plan
        return plan

    def _elsewhere(self, exchange: Exchange, path: str) -> None:
        allowed = self._allowed(path)
        if allowed:
            method = ", ".join(sorted(allowed))
            head = ResponseHead(405, [(CONTENT_TYPE, JSON), (b"allow", method.encode())])
            exchange.respond(head, error_json(f"this path is not there for this method: use {method}"))
        else:
            text = f"{path[:200]!a} is not a path of this server: /openapi.json lists those there are"
            exchange.respond(json_head(404), error_json(text))

    def _allowed(self, path: str) -> set[str]:
        if not self._paths and self._routes is not None:
            found: dict[str, set[str]] = {}
            for method, plain in self._routes.listed():
                found.setdefault(plain, set()).update({method, "HEAD"} if method == "GET" else {method})
            self._paths = [
                (re.compile(re.escape(plain).replace(r"\{\}", "[^/]+")), methods) for plain, methods in found.items()
            ]
        return {method for pattern, methods in self._paths if pattern.fullmatch(path) for method in methods}


class _Early:
    """What came of a body before it could be passed on."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ended = False

    def end(self) -> None:
        self.ended = True


def _passed_on(head: RequestHead, facade: bool) -> RequestHead:
    """The head without what is not the service's business. On v2, answers have to be read, so they come as they are."""
    kept_back = _KEPT_BACK | {b"accept-encoding"} if facade else _KEPT_BACK
    fields = [field for field in head.fields if field[0] not in kept_back]
    return RequestHead(b"POST", _TARGET, fields, version=head.version, scheme=head.scheme, authority=head.authority)


def _initializing(job_id: str) -> dict[str, Any]:
    return {"job_id": job_id, "status": "initializing", "message": _INITIALIZING}


def _respond_error(exchange: Exchange, status: int, job_id: str, text: str, facade: bool) -> None:
    now = now_text()
    progress = {"stage": "error", "message": text, "remaining_steps": [], "details": {}, "timestamp": now}
    body = {"status": "error", "error": text, "job_id": job_id, "timestamp": now, "progress": progress}
    respond(exchange, status, body, facade)
