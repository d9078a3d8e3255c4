# SPDX-License-Identifier: Apache-2.0
"""`POST /predict` over HTTP; it also registers the WebSocket.

A decoupled model answers with server-sent events, one per response, in the form of the WebSocket's messages. The
response head goes out with the first one, so that an earlier error has an HTTP status.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from time import perf_counter

import orjson

from headrace.api.model_waits import handle_when_loaded
from headrace.api.predict.health import PredictHealth
from headrace.api.predict.models import Models
from headrace.api.predict.predictor import Deadlines, Predictor
from headrace.api.predict.requests import FIELDS, ParsedRequest, RequestParser, StickyKeyOf, parse_json
from headrace.api.predict.responses import response_json
from headrace.api.predict.settings import PredictSettings
from headrace.api.predict.validation import InputValidator
from headrace.api.predict.websocket import PredictWebSocket
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, InvalidArgument, Unimplemented
from headrace.core.requests import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.residency import ModelNotLoaded
from headrace.engine.scheduling.pending_request import PendingRequest
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, OK_JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.http.sse import EventStream

_USE_POST = ResponseHead(405, [(CONTENT_TYPE, JSON), (b"allow", b"POST")])
_USE_POST_TEXT = (
    b'{"error":"Method Not Allowed: send a prediction with POST, as {\\"inputs\\": [...]}; '
    b'a WebSocket is at /predict/stream"}'
)


log = logging.getLogger("headrace.api")
MOST_UNREAD = 16 * 1024 * 1024
"""Unread bytes of a stream, above which it is aborted: a decoupled model cannot be paused."""


class PredictHttp:
    """Handlers over one data plane. `more_fields` are additional fields of a body that `key_of` uses."""

    def __init__(
        self,
        plane: DataPlane,
        settings: PredictSettings | None = None,
        key_of: StickyKeyOf | None = None,
        *,
        more_fields: Collection[str] = (),
    ) -> None:
        settings = settings or PredictSettings()
        self._plane = plane
        self._validator = InputValidator(settings.checks)
        self._models = Models(plane, settings, self._validator)
        self._parser = RequestParser(self._models, self._validator, key_of, more_fields)
        self._predictor = Predictor(plane, settings.timeout_seconds)
        self.health = PredictHealth(plane, self._models, settings)
        """Registered separately: health checks need not be protected like `/predict`."""
        # Browsers send `cache-control: no-cache` whenever they open a WebSocket; it does not apply to the messages.
        stream_parser = RequestParser(
            self._models, self._validator, key_of, more_fields, fields=FIELDS | {"id"}, obeys_cache_control=False
        )
        self._websocket = PredictWebSocket(
            plane, settings, self._models, stream_parser, self._validator, self._predictor
        )

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        for path in ("/predict", "/predict/{model}"):
            routes.add("POST", path, self.predict, scope="infer")
            routes.add("GET", path, self.use_post, scope="infer")
        self._websocket.add_to(routes)

    def use_post(self, exchange: Exchange) -> None:
        """Answer a GET, for example of a browser, with 405."""
        exchange.respond(_USE_POST, _USE_POST_TEXT)

    def predict(self, exchange: Exchange) -> None:
        """Answer one prediction, or a batch of them."""
        started = perf_counter()
        params = exchange.params
        body = exchange.body
        fields = parse_json(body, self._validator)
        exchange.body = b""
        try:
            request = self._parser.parse(params[0] if params else self._models.default(), exchange.head, fields)
        except ModelNotLoaded as missing:
            exchange.body = body
            handle_when_loaded(self._plane, exchange, self.predict, missing)
            return
        response = self._predictor.predict_now(request)
        if response is not None:
            exchange.respond(OK_JSON, response_json(request, (response,), started))
        elif request.model.decoupled:
            self._stream(exchange, request, started)
        else:
            self._respond_later(exchange, request, started)

    def _respond_later(self, exchange: Exchange, request: ParsedRequest, started: float) -> None:
        def on_responses(result: Sequence[InferResponse] | BaseException) -> None:
            if isinstance(result, BaseException):
                exchange.fail(result)
                return
            try:
                text = response_json(request, result, started)
            except Exception as error:
                exchange.fail(error)
                return
            exchange.respond(OK_JSON, text)

        exchange.on_disconnect = self._predictor.predict(request, on_responses).cancel

    def _stream(self, exchange: Exchange, request: ParsedRequest, started: float) -> None:
        if b"text/event-stream" not in (exchange.head.by_name.get(b"accept") or b""):
            raise Unimplemented(
                f"model '{request.model.name}' is decoupled: it may answer several times or not at all. "
                "Send 'accept: text/event-stream', or use the WebSocket /predict/stream"
            )
        PredictionEvents(exchange, request, started, self._predictor.deadlines).begin(self._plane)


class PredictionEvents:
    """One request to a decoupled model, and its responses as server-sent events."""

    def __init__(self, exchange: Exchange, request: ParsedRequest, started: float, deadlines: Deadlines) -> None:
        self._exchange = exchange
        self._request = request
        self._started = started
        self._deadlines = deadlines
        self._pending: PendingRequest | None = None
        self._events: EventStream | None = None

    def begin(self, plane: DataPlane) -> None:
        """Send the request."""
        if self._request.is_split:
            raise InvalidArgument(f"model '{self._request.model.name}' is decoupled: send fewer rows at once")
        self._pending = plane.infer_stream(self._request.engine_request, self._on_response)
        self._deadlines.add(self._pending)
        self._exchange.on_disconnect = self._cancel

    def _on_response(self, result: InferResponse | BaseException | None, final: bool) -> None:
        if self._pending is not None and (final or self._exchange.closed):
            self._deadlines.remove(self._pending)
        elif self._pending is not None:
            self._deadlines.add(self._pending)
        if self._exchange.closed:
            return
        if isinstance(result, BaseException):
            self._fail(result)
            return
        try:
            if result is not None:
                extra = b',"final":true' if final else b',"final":false'
                self._open().send_within(MOST_UNREAD, response_json(self._request, (result,), self._started, extra))
            if final and not self._exchange.closed:
                self._open().finish()
        except Exception as error:
            self._fail(error)
            self._cancel()

    def _fail(self, error: BaseException) -> None:
        if self._events is None:
            self._exchange.fail(error)
            return
        if self._exchange.closed:
            return
        text = error.message if isinstance(error, HeadraceError) else INTERNAL_TEXT
        if not isinstance(error, HeadraceError):
            log.error("prediction stream failed", exc_info=error)
        self._events.send(orjson.dumps({"error": text.encode(errors="replace").decode(), "final": True}))
        self._events.finish()

    def _open(self) -> EventStream:
        if self._events is None:
            self._events = EventStream(self._exchange)
        return self._events

    def _cancel(self) -> None:
        if self._pending is not None:
            self._deadlines.remove(self._pending)
            self._pending.cancel()
