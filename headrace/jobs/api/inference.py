# SPDX-License-Identifier: Apache-2.0
"""Inference through the gateway: authorise a request, find its service and proxy it there.

`InferenceRoutes` is the fallback route: only a fallback gets short bodies in one piece and long bodies as a stream. It
responds 404 or 405 to all other requests. The plan of a request is cached with its head: clients repeat their heads, so the
usual request costs a few lookups. On v1 the service's response is forwarded unchanged. On v2, whose client only knows 200, a
loading service gives 200 and a failed one 500.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import orjson

from headrace.core.errors import HeadraceError
from headrace.fleet.router.backend import Outcome
from headrace.fleet.router.proxied_request import ProxiedRequest, body_length_error
from headrace.fleet.router.requests import RequestPlan, plan_request
from headrace.jobs.api.connections import ServiceConnection, ServiceConnections, Target
from headrace.jobs.api.handlers import token_of
from headrace.jobs.api.requests import parse_organisation, parse_uuid
from headrace.jobs.api.responses import error_json, fail, json_head, now_text
from headrace.jobs.records import Endpoint
from headrace.net.http.heads import CONTENT_TYPE, JSON, RequestHead, ResponseHead

if TYPE_CHECKING:
    from headrace.api.access.roles import Principal
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.jobs.api.handlers import Authorisation
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.heads import Buffer
    from headrace.net.http.routes import Routes

log = logging.getLogger("headrace.api")

V1 = "/api/v1/orgs/{org}/experiments/{experiment}/jobs/{job}/inference_microservice/inference"
V2 = "/api/v2/orgs/{org}/inference_microservices/{job}:inference"
OPERATION = "services.infer"

_V1 = re.compile(r"/api/v1/orgs/([^/]+)/experiments/([^/]+)/jobs/([^/]+)/inference_microservice/inference")
_V2 = re.compile(r"/api/v2/orgs/([^/]+)/inference_microservices/([^/]+):inference")
_TARGET = b"/api/v1/inference"
_WITHHELD = frozenset((b"authorization", b"cookie", b"x-api-key"))
"""Request fields that the service must not see."""
_LOADING = (202, 503)
_INITIALIZING = "Server is initializing (downloading files, setting up), please wait"


class InferencePlan:
    """What a request head asks for: the service, and the head that the service gets."""

    __slots__ = ("is_v2", "principal", "request", "service", "target", "token")

    def __init__(self, target: Target, is_v2: bool, request: RequestPlan, token: str) -> None:
        self.target = target
        self.token = token
        self.is_v2 = is_v2
        self.request = request
        self.service: ServiceConnection | None = None
        self.principal: Principal | None = None
        """The principal that was authorised with this token."""


class InferenceRoutes:
    """The inference routes and the fallback for unknown paths."""

    def __init__(self, authorisation: Authorisation, connections: ServiceConnections) -> None:
        self._authorisation = authorisation
        self._connections = connections
        connections.on_failure = self._failed
        self._clock = connections.clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes: Routes | None = None
        self._paths: list[tuple[re.Pattern[str], set[str]]] = []

    def add_to(self, routes: Routes, described: Routes) -> None:
        """Add the fallback route, and the two paths to `described`, the routes of the OpenAPI document."""
        routes.fallback(self.whole, self.streamed, whole_bytes=self._connections.router_settings.whole_bytes)
        self._routes = described
        for path in (V1, V2):
            described.add("POST", path, self.whole)

    def whole(self, exchange: Exchange) -> None:
        """Handle a request with its complete body. The hot path, with everything cached, is all in here."""
        plan: Any = exchange.head.memo
        if plan is None:
            plan = self._plan(exchange)
            if plan is None:
                return
        service = plan.service
        if len(exchange.body) != plan.request.buffered_length:
            # The server guarantees this; a wrong length would swallow the next request on the connection.
            fail(exchange, body_length_error())
        elif (
            service is not None
            and service.fresh_until > self._clock.now
            and plan.principal is not None
            and self._authorisation.cached_principal(plan.token, monotonic()) is plan.principal
        ):
            self._send(exchange, plan, service)
        else:
            self._spawn(self._prepare(exchange, plan, self._send))

    def streamed(self, exchange: Exchange) -> None:
        """Handle a request whose body follows as a stream."""
        plan = cast("InferencePlan | None", exchange.head.memo) or self._plan(exchange)
        if plan is None:
            return
        # The client pauses until there is a connection to the service.
        exchange.pause_body()
        early = _EarlyBody()
        exchange.on_body = early.pieces.append
        exchange.on_body_end = early.end
        self._spawn(self._prepare(exchange, plan, partial(self._send_streamed, early)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, exchange: Exchange, plan: InferencePlan, send: Any) -> None:
        target = plan.target
        try:
            plan.principal = await self._authorisation.authorise(exchange, OPERATION, target[0], target[2])
            service = await self._connections.find(target)
            if exchange.closed:
                return
            if isinstance(service, ServiceConnection):
                plan.service = service
                send(exchange, plan, service)
            else:
                self._respond_not_ready(exchange, service, plan.is_v2)
        except Exception as error:
            fail(exchange, error)

    def _send(self, exchange: Exchange, plan: InferencePlan, service: ServiceConnection) -> None:
        if service.backend.outstanding >= service.limit:
            fail(exchange, service.overload_error())
            return
        service.used = self._clock.now
        request = V2ServiceRequest() if plan.is_v2 else ServiceRequest()
        request.forward(service, exchange, plan.request)

    def _send_streamed(
        self, early: _EarlyBody, exchange: Exchange, plan: InferencePlan, service: ServiceConnection
    ) -> None:
        if service.in_flight >= service.limit:
            raise service.overload_error()
        service.used = self._clock.now
        request = V2ServiceRequest() if plan.is_v2 else ServiceRequest()
        request.prepare(service, exchange, plan.request)
        request.stream_body()
        request.start()
        for piece in early.pieces:
            if exchange.on_body is not None:
                exchange.on_body(piece)
        if early.ended and exchange.on_body_end is not None:
            exchange.on_body_end()

    def _failed(self, exchange: Exchange, service: ServiceConnection, reason: str, reached: bool) -> None:
        plan = cast("InferencePlan", exchange.head.memo)
        self._connections.drop(service.job_id)
        self._spawn(self._respond_for_failed(exchange, plan, reason, reached))

    async def _respond_for_failed(self, exchange: Exchange, plan: InferencePlan, reason: str, reached: bool) -> None:
        """Respond for a service that failed: it may be stopped, dead or still starting."""
        try:
            service = await self._connections.find(plan.target)
        except Exception as error:
            fail(exchange, error)
            return
        if exchange.closed or exchange.started:
            return
        if isinstance(service, Endpoint):
            self._respond_not_ready(exchange, service, plan.is_v2)
            return
        if not reached:
            # It runs but does not listen yet: respond as its status does.
            respond_as_service(exchange, 202, _initializing(service.job_id), plan.is_v2)
            return
        text = f"the inference microservice {reason}: check its status and logs, then try again or stop and start it"
        _respond_error(exchange, 500, service.job_id, text, plan.is_v2)

    def _respond_not_ready(self, exchange: Exchange, endpoint: Endpoint, is_v2: bool) -> None:
        if endpoint.state == "failed":
            body = {"job_id": endpoint.job.id, "status": "error", "error": endpoint.error}
            respond_as_service(exchange, 503, body, is_v2)
        else:
            respond_as_service(exchange, 202, _initializing(endpoint.job.id), is_v2)

    def _plan(self, exchange: Exchange) -> InferencePlan | None:
        """Parse the head; None if an error response was sent."""
        head = exchange.head
        path = head.path.decode("latin-1")
        v1 = _V1.fullmatch(path)
        v2 = _V2.fullmatch(path) if v1 is None else None
        match = v1 or v2
        if match is None or head.method != b"POST":
            self._respond_unknown_path(exchange, path)
            return None
        try:
            org = parse_organisation(match[1])
            experiment = parse_uuid(match[2], "Experiment") if v1 is not None else None
            job = parse_uuid(match[3] if v1 is not None else match[2], "Job")
            token = token_of(head)
            request = plan_request(_upstream_head(head, v2 is not None), self._connections.router_settings)
        except HeadraceError as error:
            fail(exchange, error)
            return None
        request.repeatable = True  # inference changes nothing
        plan = InferencePlan((org, experiment, job), v2 is not None, request, token)
        head.memo = plan
        return plan

    def _respond_unknown_path(self, exchange: Exchange, path: str) -> None:
        allowed = self._allowed_methods(path)
        if allowed:
            method = ", ".join(sorted(allowed))
            head = ResponseHead(405, [(CONTENT_TYPE, JSON), (b"allow", method.encode())])
            exchange.respond(head, error_json(f"method not allowed for this path: use {method}"))
        else:
            text = f"unknown path {path[:200]!a}: /openapi.json lists all paths"
            exchange.respond(json_head(404), error_json(text))

    def _allowed_methods(self, path: str) -> set[str]:
        if not self._paths and self._routes is not None:
            methods_of: dict[str, set[str]] = {}
            for method, template in self._routes.listed():
                methods_of.setdefault(template, set()).update({method, "HEAD"} if method == "GET" else {method})
            self._paths = [
                (re.compile(re.escape(template).replace(r"\{\}", "[^/]+")), methods)
                for template, methods in methods_of.items()
            ]
        return {method for pattern, methods in self._paths if pattern.fullmatch(path) for method in methods}


class _EarlyBody:
    """Pieces of a body that arrived before the connection to the service."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ended = False

    def end(self) -> None:
        self.ended = True


def _upstream_head(head: RequestHead, is_v2: bool) -> RequestHead:
    """Return the head for the service. On v2 the response is read, so it must not be compressed."""
    withheld = _WITHHELD | {b"accept-encoding"} if is_v2 else _WITHHELD
    fields = [field for field in head.fields if field[0] not in withheld]
    return RequestHead(b"POST", _TARGET, fields, version=head.version, scheme=head.scheme, authority=head.authority)


def _initializing(job_id: str) -> dict[str, Any]:
    return {"job_id": job_id, "status": "initializing", "message": _INITIALIZING}


def _respond_error(exchange: Exchange, status: int, job_id: str, text: str, is_v2: bool) -> None:
    now = now_text()
    progress = {"stage": "error", "message": text, "remaining_steps": [], "details": {}, "timestamp": now}
    body = {"status": "error", "error": text, "job_id": job_id, "timestamp": now, "progress": progress}
    respond_as_service(exchange, status, body, is_v2)


class ServiceRequest(ProxiedRequest):
    """A proxied request that reports failures in TAO's format and is not retried."""

    router: ServiceConnection

    def _retry_or_fail(self, status: int, reason: str, *, may_retry: bool) -> None:
        exchange, backend = self.exchange, self.backend
        if backend is None:
            return
        reached = self.connection is not None
        self.end_attempt(Outcome.FAILED)
        self.release()
        service = self.router
        log.warning("Service %s at %s %s.", service.job_id, backend.name, reason)
        if exchange.started:
            exchange.abort()
        else:
            service.on_failure(exchange, service, reason, reached)


class V2ServiceRequest(ServiceRequest):
    """A v2 request: maps the status of a service that is not ready."""

    def response_received(self, head: UpstreamHead, body: Buffer) -> None:
        """Send a response to the client, with another status if the service is not ready."""
        if head.status not in _LOADING:
            super().response_received(head, body)
            return
        self.end_attempt(Outcome.OK)
        self.release()
        status = v2_status(head.status, body)
        fields = head.head.fields
        self.exchange.respond(ResponseHead(status, fields, raw=True), body)


def v2_status(status: int, body: Buffer) -> int:
    """Return the v2 status for the status of a service that is not ready."""
    if status not in _LOADING:
        return status
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return status
    return 500 if isinstance(content, dict) and content.get("status") == "error" else 200


def respond_as_service(exchange: Exchange, status: int, body: dict[str, Any], is_v2: bool) -> None:
    """Respond on behalf of a service."""
    text = orjson.dumps(body)
    exchange.respond(json_head(v2_status(status, text) if is_v2 else status), text, _retry_after(status))


def _retry_after(status: int) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"retry-after", b"5"),) if status == 202 else ()
