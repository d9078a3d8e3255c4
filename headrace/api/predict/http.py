# SPDX-License-Identifier: Apache-2.0
"""`POST /predict` over HTTP; the WebSocket is registered here, too.

Made by composition roots. The way of a request is: fields, question, data plane, JSON; nothing else happens here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter

from headrace.api.predict.asking import Asking
from headrace.api.predict.checks import Checker
from headrace.api.predict.documents import read_fields
from headrace.api.predict.events import AnswerEvents
from headrace.api.predict.health import PredictHealth
from headrace.api.predict.models import Models
from headrace.api.predict.reading import FIELDS, KeyOf, Question, Reader
from headrace.api.predict.settings import PredictSettings
from headrace.api.predict.websocket import PredictWebSocket
from headrace.api.predict.writing import answer_json
from headrace.core.errors import Unimplemented
from headrace.core.messages import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, OK_JSON, ResponseHead
from headrace.net.http.routes import Routes

_USE_POST = ResponseHead(405, [(CONTENT_TYPE, JSON), (b"allow", b"POST")])
_USE_POST_TEXT = (
    b'{"error":"Method Not Allowed: send a prediction with POST, as {\\"inputs\\": [...]}; '
    b'a WebSocket is at /predict/stream"}'
)


class PredictHttp:
    """Handlers over one data plane. `more_fields` are fields of a body that `key_of` looks for."""

    def __init__(
        self,
        plane: DataPlane,
        settings: PredictSettings | None = None,
        key_of: KeyOf | None = None,
        *,
        more_fields: Collection[str] = (),
    ) -> None:
        settings = settings or PredictSettings()
        self._plane = plane
        self._checker = Checker(settings.checks)
        self._models = Models(plane, settings, self._checker)
        self._reader = Reader(self._models, self._checker, key_of, more_fields)
        self._asking = Asking(plane, settings.timeout_seconds)
        self.health = PredictHealth(plane, self._models, settings)
        """For `routes` of their own: they tell nothing that need be hidden where `/predict` is."""
        # Browsers send `cache-control: no-cache` whenever they open a WebSocket: it says nothing about its messages.
        stream_reader = Reader(
            self._models, self._checker, key_of, more_fields, fields=FIELDS | {"id"}, obeys_cache_control=False
        )
        self._websocket = PredictWebSocket(plane, settings, self._models, stream_reader, self._checker, self._asking)

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        for path in ("/predict", "/predict/{model}"):
            routes.add("POST", path, self.predict)
            routes.add("GET", path, self.use_post)
        self._websocket.add_to(routes)

    def use_post(self, exchange: Exchange) -> None:
        """What a browser gets that is pointed at the path."""
        exchange.respond(_USE_POST, _USE_POST_TEXT)

    def predict(self, exchange: Exchange) -> None:
        """Compute one prediction, or a batch of them."""
        started = perf_counter()
        params = exchange.params
        fields = read_fields(exchange.body, self._checker)
        exchange.body = b""
        question = self._reader.question(params[0] if params else self._models.default(), exchange.head, fields)
        answer = self._asking.at_once(question)
        if answer is not None:
            exchange.respond(OK_JSON, answer_json(question, (answer,), started))
        elif question.known.decoupled:
            self._stream(exchange, question, started)
        else:
            self._later(exchange, question, started)

    def _later(self, exchange: Exchange, question: Question, started: float) -> None:
        def answered(result: Sequence[InferResponse] | BaseException) -> None:
            if isinstance(result, BaseException):
                exchange.fail(result)
                return
            try:
                text = answer_json(question, result, started)
            except Exception as error:
                exchange.fail(error)
                return
            exchange.respond(OK_JSON, text)

        exchange.on_disconnect = self._asking.later(question, answered).cancel

    def _stream(self, exchange: Exchange, question: Question, started: float) -> None:
        if b"text/event-stream" not in (exchange.head.by_name.get(b"accept") or b""):
            raise Unimplemented(
                f"model '{question.known.name}' is decoupled: it may answer several times or not at all. "
                "Send 'accept: text/event-stream', or use the WebSocket /predict/stream"
            )
        AnswerEvents(exchange, question, started, self._asking.deadlines).begin(self._plane)
