# SPDX-License-Identifier: Apache-2.0
"""Predictions of a decoupled model as Server-Sent Events: each answer is an event, as the WebSocket would send it.

Made by `http` for one request. The head goes out with the first answer, so that an error before it has a status.
"""

from __future__ import annotations

import logging

import orjson

from headrace.api.predict.asking import Deadlines
from headrace.api.predict.reading import Question
from headrace.api.predict.writing import answer_json
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, InvalidArgument
from headrace.core.messages import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending import Pending
from headrace.net.http.exchange import Exchange
from headrace.net.http.sse import EventStream

log = logging.getLogger("headrace.api")

MOST_UNREAD = 16 * 1024 * 1024
"""Bytes of answers that a client may leave unread: a model cannot be held back."""


class AnswerEvents:
    """One request and its answers."""

    def __init__(self, exchange: Exchange, question: Question, started: float, deadlines: Deadlines) -> None:
        self._exchange = exchange
        self._question = question
        self._started = started
        self._deadlines = deadlines
        self._pending: Pending | None = None
        self._events: EventStream | None = None

    def begin(self, plane: DataPlane) -> None:
        """Ask."""
        if self._question.many:
            raise InvalidArgument(f"model '{self._question.known.name}' is decoupled: send fewer rows at once")
        self._pending = plane.infer_stream(self._question.request, self._answered)
        self._deadlines.add(self._pending)
        self._exchange.on_disconnect = self._give_up

    def _answered(self, result: InferResponse | BaseException | None, final: bool) -> None:
        if self._pending is not None and (final or self._exchange.closed):
            self._deadlines.forget(self._pending)
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
                self._open().send_within(MOST_UNREAD, answer_json(self._question, (result,), self._started, extra))
            if final and not self._exchange.closed:
                self._open().finish()
        except Exception as error:
            self._fail(error)
            self._give_up()

    def _fail(self, error: BaseException) -> None:
        if self._events is None:
            self._exchange.fail(error)
            return
        if self._exchange.closed:
            return
        text = error.message if isinstance(error, HeadraceError) else INTERNAL_TEXT
        if not isinstance(error, HeadraceError):
            log.error("a stream of predictions failed", exc_info=error)
        self._events.send(orjson.dumps({"error": text.encode(errors="replace").decode(), "final": True}))
        self._events.finish()

    def _open(self) -> EventStream:
        if self._events is None:
            self._events = EventStream(self._exchange)
        return self._events

    def _give_up(self) -> None:
        if self._pending is not None:
            self._deadlines.forget(self._pending)
            self._pending.cancel()
