# SPDX-License-Identifier: Apache-2.0
"""HTTP routes of TAO's inference microservice, and two of OpenAI's.

The state is checked before the body: while a model loads, even an invalid request gets "try again". The Content-Type is
ignored.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from math import ceil
from typing import Any

import orjson

from headrace.core.errors import INTERNAL_TEXT, Code, HeadraceError, InvalidArgument
from headrace.core.names import REQUEST_ID_FIELD, request_id
from headrace.jobs.microservice.chat import ChatStream, wants_stream, wants_usage
from headrace.jobs.microservice.lifecycle import NotReady
from headrace.jobs.microservice.service import Microservice
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, HTTP_STATUS, JSON, OK_PLAIN, Fields, ResponseHead
from headrace.net.http.routes import Routes

log = logging.getLogger("headrace.microservice")

BODY_REQUIRED = "Request body is required"
NOT_JSON = 'Request body is not a JSON object: send one, like {"prompt": "..."}'

_INFERENCE, _CHAT = "/api/v1/inference", "/v1/chat/completions"
_METHODS: Mapping[str, str] = {
    "/api/v1/health/liveness": "GET",
    "/api/v1/health/readiness": "GET",
    "/api/v1/status": "GET",
    _INFERENCE: "POST",
    _CHAT: "POST",
    "/v1/models": "GET",
    "/metrics": "GET",
}
# TAO's clients only know 400 for an invalid request.
_STATUS = HTTP_STATUS | dict.fromkeys(
    (Code.FAILED_PRECONDITION, Code.TOO_LARGE, Code.PERMISSION_DENIED, Code.NOT_FOUND, Code.UNIMPLEMENTED), 400
)
_TYPES = {400: "invalid_request", 429: "too_many_requests", 503: "unavailable", 504: "timeout", 499: "cancelled"}
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
Work = Callable[[Mapping[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
Failed = Callable[[Exchange, int, str, Fields], None]
Respond = Callable[[Exchange, Mapping[str, Any], Failed], Coroutine[Any, Any, None]]

_HEADS = {status: ResponseHead(status, [(CONTENT_TYPE, JSON)]) for status in (200, 202, 400, 404, 405, 429, 500, 503)}


class MicroserviceHttp:
    """The routes. Every inference request is a task, which is cancelled when its client disconnects."""

    def __init__(self, service: Microservice) -> None:
        self._service = service
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, routes: Routes) -> None:
        """Add the routes; all others respond 404 or 405."""
        routes.add(
            "GET", "/api/v1/health/liveness", lambda exchange: _respond_json(exchange, 200, self._service.liveness())
        )
        routes.add("GET", "/api/v1/health/readiness", self.readiness)
        routes.add("GET", "/api/v1/status", lambda exchange: _respond_json(exchange, 200, self._service.status()))
        routes.add("POST", _INFERENCE, self.inference)
        routes.add("POST", _CHAT, self.chat)
        routes.add("GET", "/v1/models", lambda exchange: _respond_json(exchange, 200, self._service.models()))
        routes.add("GET", "/metrics", self.scrape)
        routes.mount("", _respond_unknown_path)

    def readiness(self, exchange: Exchange) -> None:
        """Respond 200, or 503 with a reason: a probe would take 202 for ready."""
        service = self._service
        not_ready = service.not_ready_response()
        common = {"job_id": service.settings.job_id, "timestamp": service.now()}
        if not_ready is None:
            ready = {"status": "ready", "message": "Model is ready", "model_type": service.model_type, **common}
            _respond_json(exchange, 200, ready)
            return
        error = {"type": not_ready.error_type, "message": not_ready.message}
        body: dict[str, Any] = {
            "status": "not_ready",
            "reason": not_ready.reason,
            "message": not_ready.message,
            "error": error,
            **common,
        }
        _respond_json(exchange, 503, body, _retry(not_ready.retry_after_seconds))

    def scrape(self, exchange: Exchange) -> None:
        """Send metrics to Prometheus; empty before the model loads."""
        if self._service.metrics is None:
            exchange.respond(OK_PLAIN)
        else:
            self._service.metrics.scrape(exchange)

    def inference(self, exchange: Exchange) -> None:
        """Handle an inference request."""
        not_ready = self._service.not_ready_response()
        if not_ready is not None:
            key = "error" if not_ready.status == "error" else "message"
            body = {"job_id": self._service.settings.job_id, "status": not_ready.status, key: not_ready.message}
            _respond_json(exchange, not_ready.status_code, body, _retry(not_ready.retry_after_seconds))
            return
        self._compute(exchange, partial(self._respond, self._service.infer), self._inference_failed)

    def chat(self, exchange: Exchange) -> None:
        """Handle a chat request, streamed or not."""
        not_ready = self._service.not_ready_response()
        if not_ready is not None:
            _chat_not_ready(exchange, not_ready)
            return
        self._compute(exchange, self._chat, _chat_failed)

    def _compute(self, exchange: Exchange, respond: Respond, failed: Failed) -> None:
        try:
            body = _body(exchange)
        except InvalidArgument as error:
            failed(exchange, 400, error.message, ())
            return
        task = asyncio.get_running_loop().create_task(respond(exchange, body, failed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = partial(_cancel, task)

    async def _respond(self, work: Work, exchange: Exchange, body: Mapping[str, Any], failed: Failed) -> None:
        try:
            _respond_json(exchange, 200, await work(body))
        except Exception as error:
            failed(exchange, *self._describe_error(exchange, error))

    async def _chat(self, exchange: Exchange, body: Mapping[str, Any], failed: Failed) -> None:
        service = self._service
        if not wants_stream(body):
            await self._respond(service.chat, exchange, body, failed)
            return
        stream = ChatStream(exchange, service.model, service.wall())
        try:
            stream.with_usage = wants_usage(body)
            await service.stream(body, stream.begin)
            stream.end()
        except Exception as error:
            status, text, extra = self._describe_error(exchange, error)
            if exchange.started:
                stream.fail(_encode(_error_body(status, text)))
            else:
                failed(exchange, status, text, extra)

    def _describe_error(self, exchange: Exchange, error: Exception) -> tuple[int, str, Fields]:
        """Return status, message and header fields; log unexpected errors and hide their message."""
        if isinstance(error, HeadraceError):
            text = self._service.settings.secrets.redact(error.message)
            return _STATUS[error.code], text, _retry(error.retry_after_seconds)
        error_id = request_id(exchange.head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": error_id, "path": exchange.head.path.decode("latin-1"), "peer": exchange.peer}
        log.error("Request failed.", exc_info=error, extra=details)
        return 500, INTERNAL_TEXT, ((REQUEST_ID_FIELD.encode(), error_id.encode()),)

    def _inference_failed(self, exchange: Exchange, status: int, text: str, extra: Fields) -> None:
        service = self._service
        body = {"status": "error", "error": text, "job_id": service.settings.job_id, "timestamp": service.now()}
        _respond_json(exchange, status, body, extra)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _body(exchange: Exchange) -> Mapping[str, Any]:
    if not exchange.body:
        raise InvalidArgument(BODY_REQUIRED)
    try:
        body = orjson.loads(exchange.body)
    except orjson.JSONDecodeError:
        raise InvalidArgument(NOT_JSON) from None
    if body is None or body == {}:
        raise InvalidArgument(BODY_REQUIRED)
    if not isinstance(body, dict):
        raise InvalidArgument(NOT_JSON)
    return body


def _chat_not_ready(exchange: Exchange, not_ready: NotReady) -> None:
    _chat_error(
        exchange, not_ready.status_code, not_ready.error_type, not_ready.message, _retry(not_ready.retry_after_seconds)
    )


def _chat_failed(exchange: Exchange, status: int, text: str, extra: Fields) -> None:
    _respond_json(exchange, status, _error_body(status, text), extra)


def _error_body(status: int, text: str) -> dict[str, Any]:
    return {"error": {"type": _TYPES.get(status, "internal_error"), "message": text}}


def _chat_error(exchange: Exchange, status: int, type_: str, text: str, extra: Fields) -> None:
    _respond_json(exchange, status, {"error": {"type": type_, "message": text}}, extra)


def _respond_unknown_path(exchange: Exchange) -> None:
    path = exchange.head.path.decode("latin-1")
    method = _METHODS.get(path)
    if method is None:
        status, type_ = 404, "not_found"
        text = f"unknown path {path[:128]!a}: use one of {', '.join(_METHODS)}"
        extra: Fields = ()
    else:
        status, type_, text = 405, "method_not_allowed", f"use {method} for {path}"
        extra = ((b"allow", b"GET, HEAD" if method == "GET" else b"POST"),)
    if path.startswith("/v1/"):
        _chat_error(exchange, status, type_, text, extra)
    else:
        _respond_json(exchange, status, {"status": "error", "error": text}, extra)


def _retry(seconds: float | None) -> Fields:
    return () if seconds is None else ((b"retry-after", b"%d" % max(1, ceil(seconds))),)


def _respond_json(exchange: Exchange, status: int, body: Mapping[str, Any], extra: Fields = ()) -> None:
    head = _HEADS.get(status) or ResponseHead(status, [(CONTENT_TYPE, JSON)])
    exchange.respond(head, _encode(body), extra)


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body, option=_OPTIONS)
    except TypeError:
        # A lone surrogate that an error message quotes, or a number over 64 bits.
        return json.dumps(body, default=str).encode()
