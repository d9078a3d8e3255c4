# SPDX-License-Identifier: Apache-2.0
"""The WebSocket of `/predict/stream`: a message is a question, and its answer a message.

Registered by `http`. JSON is answered in JSON, binary in binary. What is wrong with a message is told in a message, and the
connection lives on; who stays silent, floods, or does not read loses it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import orjson

from headrace.api.predict.asking import Asking
from headrace.api.predict.checks import Checker
from headrace.api.predict.documents import read_fields
from headrace.api.predict.flat import FlatReader, only_output
from headrace.api.predict.lanes import MOST_UNREAD_BYTES, Lane, Slot
from headrace.api.predict.models import Models
from headrace.api.predict.pacing import Pace
from headrace.api.predict.reading import MISSING, Question, Reader
from headrace.api.predict.settings import PredictSettings
from headrace.api.predict.writing import answer_json
from headrace.core.errors import HeadraceError, InvalidArgument, ResourceExhausted
from headrace.core.messages import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange
from headrace.net.http.routes import Routes
from headrace.net.websocket.accept import accept
from headrace.net.websocket.closing import INTERNAL, NORMAL, POLICY
from headrace.net.websocket.contract import WebSocket

log = logging.getLogger("headrace.api")

_FAULT = "internal error; the server's log has the details"


class PredictWebSocket:
    """Opens streams."""

    def __init__(
        self,
        plane: DataPlane,
        settings: PredictSettings,
        models: Models,
        reader: Reader,
        checker: Checker,
        asking: Asking,
    ) -> None:
        self.plane = plane
        self.settings = settings.stream
        self.reader = reader
        self.flat = FlatReader(reader, checker)
        self.checker = checker
        self.asking = asking
        self._models = models

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        routes.add("GET", "/predict/stream", self.open)
        routes.add("GET", "/predict/{model}/stream", self.open)

    def open(self, exchange: Exchange) -> None:
        """Begin a stream; for a model that is not there, answer so instead."""
        name = exchange.params[0] if exchange.params else self._models.default()
        self._models.find(name)
        # Messages are short and many: to deflate them would cost more than it saves.
        accept(exchange, partial(self._begin, name), compression=False)

    def _begin(self, name: str, connection: WebSocket) -> None:
        _Stream(self, name, connection)  # which the connection's callbacks keep


class _Late:
    """A message that came too soon after those before it."""

    def __init__(self, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds


class _Stream:
    """One connection."""

    def __init__(self, owner: PredictWebSocket, name: str, connection: WebSocket) -> None:
        self._owner = owner
        self._name = name
        self._connection = connection
        self._lane = Lane(
            self._begin, self._send, connection.pause_messages, connection.resume_messages, self._overflow
        )
        self._pace = Pace(owner.settings.messages_per_second, perf_counter())
        self._active_at = perf_counter()
        self._timer: asyncio.TimerHandle | None = None
        connection.on_message = self._on_message
        connection.on_writable = self._lane.writable
        connection.on_close = self._on_close
        self._watch(owner.settings.idle_seconds)

    # The client.

    def _on_message(self, message: str | bytes) -> None:
        now = self._active_at = perf_counter()
        wait_seconds = self._pace.take(now)
        if wait_seconds and self._pace.flooding:
            self._close(POLICY, f"more than {self._pace.rate:g} messages per second, for too long")
            return
        self._lane.ask(_Late(wait_seconds) if wait_seconds else message, len(message))

    def _on_close(self, code: int, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._lane.close()

    def _send(self, message: str | bytes) -> bool:
        self._active_at = perf_counter()
        return self._connection.send(message)

    def _overflow(self) -> None:
        self._close(POLICY, f"more than {MOST_UNREAD_BYTES} bytes of answers were not read: read faster")

    def _close(self, code: int, reason: str) -> None:
        self._connection.close(code, reason)
        self._on_close(code, reason)

    def _watch(self, seconds: float) -> None:
        """Look again whether the client is silent; while it waits for us it is not."""
        if self._owner.settings.idle_seconds > 0:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        idle_seconds = self._owner.settings.idle_seconds
        left = idle_seconds - (perf_counter() - self._active_at)
        if not self._lane.empty:
            left = idle_seconds
        if left > 0:
            self._watch(left)
        else:
            self._close(NORMAL, "Timeout")

    # Questions.

    def _begin(self, slot: Slot, message: str | bytes | _Late) -> None:
        started = perf_counter()
        extra = b""
        binary = isinstance(message, bytes)
        try:
            if isinstance(message, _Late):
                raise ResourceExhausted(
                    f"too many messages: at most {self._pace.rate:g} per second; "
                    f"send it again in {message.wait_seconds:.2f} seconds",
                    retry_after_seconds=message.wait_seconds,
                )
            if isinstance(message, bytes):
                question = self._binary(message)
            else:
                fields = read_fields(message, self._owner.checker)
                if "id" in fields:
                    extra = b',"id":%b' % orjson.dumps(fields["id"])
                if "inputs" not in fields and "batch" not in fields and fields.keys() <= {"id", "model_version"}:
                    raise InvalidArgument(MISSING)
                question = self._owner.reader.question(self._name, self._connection.head, fields)
            if question.known.decoupled:
                self._ask_stream(slot, question, started, extra, binary)
                return
            answer = self._owner.asking.at_once(question)
            if answer is not None:
                self._put(slot, _written(question, (answer,), started, extra, binary))
                return
            waiting = self._owner.asking.later(
                question, partial(self._answered, slot, question, started, extra, binary)
            )
            slot.cancel = waiting.cancel
        except Exception as error:
            self._fail(slot, error, extra)

    def _binary(self, message: bytes) -> Question:
        if not self._owner.settings.binary:
            raise InvalidArgument("binary messages are not taken here: send JSON, as text")
        return self._owner.flat.raw(self._name, self._connection.head, message)

    def _answered(
        self,
        slot: Slot,
        question: Question,
        started: float,
        extra: bytes,
        binary: bool,
        result: Sequence[InferResponse] | BaseException,
    ) -> None:
        if slot.over:
            return
        try:
            if isinstance(result, BaseException):
                raise result
            self._put(slot, _written(question, result, started, extra, binary))
        except Exception as error:
            self._fail(slot, error, extra)

    def _ask_stream(self, slot: Slot, question: Question, started: float, extra: bytes, binary: bool) -> None:
        if question.many:
            raise InvalidArgument(f"model '{question.known.name}' is decoupled: send fewer rows at once")
        deadlines = self._owner.asking.deadlines

        def answered(result: InferResponse | BaseException | None, final: bool) -> None:
            if final or slot.over:
                deadlines.forget(pending)
            else:
                deadlines.add(pending)
            if slot.over:
                return
            try:
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    if not binary:
                        self._put(slot, (b'{"predictions":[]%b,"final":true}' % extra).decode())
                    slot.end()
                    return
                more = extra + (b',"final":true' if final else b',"final":false')
                self._put(slot, _written(question, (result,), started, more, binary), last=final)
            except Exception as error:
                pending.cancel()
                self._fail(slot, error, extra)

        pending = self._owner.plane.infer_stream(question.request, answered)
        slot.cancel = pending.cancel
        deadlines.add(pending)

    # Answers.

    def _put(self, slot: Slot, message: str | bytes, *, last: bool = True) -> None:
        slot.put(message, len(message), last=last)

    def _fail(self, slot: Slot, error: BaseException, extra: bytes) -> None:
        if not isinstance(error, HeadraceError):
            log.error("a prediction of a WebSocket failed", exc_info=error, extra={"peer": self._connection.peer})
            self._close(INTERNAL, _FAULT)
            return
        document: dict[str, Any] = {"error": error.message.encode(errors="replace").decode()}
        if error.retry_after_seconds is not None:
            document["retry_after_seconds"] = error.retry_after_seconds
        self._put(slot, (orjson.dumps(document)[:-1] + extra + b"}").decode())


def _written(
    question: Question, answers: Sequence[InferResponse], started: float, extra: bytes, binary: bool
) -> str | bytes:
    if binary:
        return bytes(only_output(question, answers[0]).to_buffer())
    return answer_json(question, answers, started, extra).decode()
