# SPDX-License-Identifier: Apache-2.0
"""The routes of TAO's inference microservice, and two of OpenAI's, over a `Microservice`.

The state is looked at before the body: while a model loads, even a wrong request is told to come back. JSON is expected
whatever the Content-Type says.
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
from headrace.core.ids import REQUEST_ID_FIELD, request_id
from headrace.jobs.microservice.service import Microservice
from headrace.jobs.microservice.states import NotReady
from headrace.jobs.microservice.streaming import ChatStream, wants_stream, wants_usage
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, OK_PLAIN, Fields, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.http.status import HTTP_STATUS

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
# TAO's clients know 400 for what is wrong with a request, and nothing finer.
_STATUS = HTTP_STATUS | dict.fromkeys(
    (Code.FAILED_PRECONDITION, Code.TOO_LARGE, Code.PERMISSION_DENIED, Code.NOT_FOUND, Code.UNIMPLEMENTED), 400
)
_TYPES = {400: "invalid_request", 429: "too_many_requests", 503: "unavailable", 504: "timeout", 499: "cancelled"}
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
Work = Callable[[Mapping[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
Failed = Callable[[Exchange, int, str, Fields], None]
Answering = Callable[[Exchange, Mapping[str, Any], Failed], Coroutine[Any, Any, None]]


class MicroserviceHttp:
    """Handlers. Every request that computes is a task of its own, cancelled when its client goes."""

    def __init__(self, service: Microservice) -> None:
        self._service = service
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, routes: Routes) -> None:
        """Take the routes; all others are answered 404 or 405."""
        routes.add("GET", "/api/v1/health/liveness", lambda exchange: _json(exchange, 200, self._service.liveness()))
        routes.add("GET", "/api/v1/health/readiness", self.readiness)
        routes.add("GET", "/api/v1/status", lambda exchange: _json(exchange, 200, self._service.status()))
        routes.add("POST", _INFERENCE, self.inference)
        routes.add("POST", _CHAT, self.chat)
        routes.add("GET", "/v1/models", lambda exchange: _json(exchange, 200, self._service.models()))
        routes.add("GET", "/metrics", self.scrape)
        routes.mount("", _elsewhere)

    def readiness(self, exchange: Exchange) -> None:
        """200, or 503 with why not: 202 would make a probe take a loading service for a ready one."""
        service = self._service
        told = service.gate()
        common = {"job_id": service.settings.job_id, "timestamp": service.now()}
        if told is None:
            ready = {"status": "ready", "message": "Model is ready", "model_type": service.model_type, **common}
            _json(exchange, 200, ready)
            return
        error = {"type": told.error_type, "message": told.message}
        body: dict[str, Any] = {
            "status": "not_ready",
            "reason": told.reason,
            "message": told.message,
            "error": error,
            **common,
        }
        _json(exchange, 503, body, _retry(told.retry_after_seconds))

    def scrape(self, exchange: Exchange) -> None:
        """The model's numbers, for Prometheus; there are none before it loads."""
        if self._service.metrics is None:
            exchange.respond(OK_PLAIN)
        else:
            self._service.metrics.scrape(exchange)

    def inference(self, exchange: Exchange) -> None:
        """See `Microservice.infer`."""
        told = self._service.gate()
        if told is not None:
            key = "error" if told.word == "error" else "message"
            body = {"job_id": self._service.settings.job_id, "status": told.word, key: told.message}
            _json(exchange, told.status_code, body, _retry(told.retry_after_seconds))
            return
        self._compute(exchange, partial(self._answer, self._service.infer), self._inference_failed)

    def chat(self, exchange: Exchange) -> None:
        """See `Microservice.chat` and `Microservice.stream`."""
        told = self._service.gate()
        if told is not None:
            _chat_not_ready(exchange, told)
            return
        self._compute(exchange, self._chat, _chat_failed)

    def _compute(self, exchange: Exchange, answer: Answering, failed: Failed) -> None:
        try:
            body = _body(exchange)
        except InvalidArgument as error:
            failed(exchange, 400, error.message, ())
            return
        task = asyncio.get_running_loop().create_task(answer(exchange, body, failed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = partial(_cancel, task)

    async def _answer(self, work: Work, exchange: Exchange, body: Mapping[str, Any], failed: Failed) -> None:
        try:
            _json(exchange, 200, await work(body))
        except Exception as error:
            failed(exchange, *self._told(exchange, error))

    async def _chat(self, exchange: Exchange, body: Mapping[str, Any], failed: Failed) -> None:
        service = self._service
        if not wants_stream(body):
            await self._answer(service.chat, exchange, body, failed)
            return
        stream = ChatStream(exchange, service.model, service.wall())
        try:
            stream.with_usage = wants_usage(body)
            await service.stream(body, stream.begin)
            stream.end()
        except Exception as error:
            status, text, extra = self._told(exchange, error)
            if exchange.started:
                stream.fail(_encoded(_error_body(status, text)))
            else:
                failed(exchange, status, text, extra)

    def _told(self, exchange: Exchange, error: Exception) -> tuple[int, str, Fields]:
        """Status, text and fields; what is not ours goes to the log and says nothing of itself."""
        if isinstance(error, HeadraceError):
            text = self._service.settings.secrets.hide(error.message)
            return _STATUS[error.code], text, _retry(error.retry_after_seconds)
        found_by = request_id(exchange.head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": found_by, "path": exchange.head.path.decode("latin-1"), "peer": exchange.peer}
        log.error("a request failed", exc_info=error, extra=details)
        return 500, INTERNAL_TEXT, ((REQUEST_ID_FIELD.encode(), found_by.encode()),)

    def _inference_failed(self, exchange: Exchange, status: int, text: str, extra: Fields) -> None:
        service = self._service
        body = {"status": "error", "error": text, "job_id": service.settings.job_id, "timestamp": service.now()}
        _json(exchange, status, body, extra)


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


def _chat_not_ready(exchange: Exchange, told: NotReady) -> None:
    _chat_error(exchange, told.status_code, told.error_type, told.message, _retry(told.retry_after_seconds))


def _chat_failed(exchange: Exchange, status: int, text: str, extra: Fields) -> None:
    _json(exchange, status, _error_body(status, text), extra)


def _error_body(status: int, text: str) -> dict[str, Any]:
    return {"error": {"type": _TYPES.get(status, "internal_error"), "message": text}}


def _chat_error(exchange: Exchange, status: int, type_: str, text: str, extra: Fields) -> None:
    _json(exchange, status, {"error": {"type": type_, "message": text}}, extra)


def _elsewhere(exchange: Exchange) -> None:
    path = exchange.head.path.decode("latin-1")
    method = _METHODS.get(path)
    if method is None:
        status, type_ = 404, "not_found"
        text = f"there is no {path[:128]!a} here; there are {', '.join(_METHODS)}"
        extra: Fields = ()
    else:
        status, type_, text = 405, "method_not_allowed", f"use {method} for {path}"
        extra = ((b"allow", b"GET, HEAD" if method == "GET" else b"POST"),)
    if path.startswith("/v1/"):
        _chat_error(exchange, status, type_, text, extra)
    else:
        _json(exchange, status, {"status": "error", "error": text}, extra)


def _retry(seconds: float | None) -> Fields:
    return () if seconds is None else ((b"retry-after", b"%d" % max(1, ceil(seconds))),)


def _json(exchange: Exchange, status: int, body: Mapping[str, Any], extra: Fields = ()) -> None:
    head = _HEADS.get(status) or ResponseHead(status, [(CONTENT_TYPE, JSON)])
    exchange.respond(head, _encoded(body), extra)


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body, option=_OPTIONS)
    except TypeError:
        # Half a surrogate pair that a client sent and an error quotes, or a number over 64 bits.
        return json.dumps(body, default=str).encode()


_HEADS = {status: ResponseHead(status, [(CONTENT_TYPE, JSON)]) for status in (200, 202, 400, 404, 405, 429, 500, 503)}
