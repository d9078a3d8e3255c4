# SPDX-License-Identifier: Apache-2.0
"""The WebSocket `/predict/stream`: each message is a request, and its response is a message.

JSON is answered in JSON, binary in binary. An error in a message is answered with a message, and the connection
stays open. A client that is silent, sends too fast for too long, or does not read is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import orjson

from headrace.api.model_waits import wait_for_model, waiting_http
from headrace.api.predict.models import Models
from headrace.api.predict.ordered_responses import MOST_UNREAD_BYTES, OrderedResponses, ResponseSlot
from headrace.api.predict.predictor import Predictor
from headrace.api.predict.requests import (
    MISSING,
    FlatRequestParser,
    ParsedRequest,
    RequestParser,
    only_output,
    parse_json,
)
from headrace.api.predict.responses import response_json
from headrace.api.predict.settings import PredictSettings
from headrace.api.predict.validation import InputValidator
from headrace.core.errors import HeadraceError, InvalidArgument, ResourceExhausted
from headrace.core.requests import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.residency import ModelNotLoaded
from headrace.net.http.exchange import Exchange
from headrace.net.http.routes import Routes
from headrace.net.websocket.contract import CloseCode, WebSocket
from headrace.net.websocket.handshake import accept

log = logging.getLogger("headrace.api")

_INTERNAL_ERROR = "internal error; the server's log has the details"


FLOODING_SECONDS = 5.0
"""A client that exceeds the rate limit for this long without a pause is disconnected."""
_PAUSE_SECONDS = 1.0


class PredictWebSocket:
    """Opens WebSocket connections."""

    def __init__(
        self,
        plane: DataPlane,
        settings: PredictSettings,
        models: Models,
        parser: RequestParser,
        validator: InputValidator,
        predictor: Predictor,
    ) -> None:
        self.plane = plane
        self.settings = settings.stream
        self.parser = parser
        self.flat_parser = FlatRequestParser(parser, validator)
        self.validator = validator
        self.predictor = predictor
        self._models = models

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        for path in ("/predict/stream", "/predict/{model}/stream"):
            routes.add("GET", path, waiting_http(self.plane, self.open), scope="infer")

    def open(self, exchange: Exchange) -> None:
        """Open a connection; for an unknown model, respond with an error instead."""
        name = exchange.params[0] if exchange.params else self._models.default()
        self._models.find(name)
        # Messages are short and many: compressing them would cost more than it saves.
        accept(exchange, partial(self._begin, name), compression=False)

    def _begin(self, name: str, connection: WebSocket) -> None:
        _Stream(self, name, connection)  # the connection's callbacks keep a reference


class _RateLimited:
    """A message above the rate limit."""

    def __init__(self, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds


class _Stream:
    """One connection."""

    def __init__(self, owner: PredictWebSocket, name: str, connection: WebSocket) -> None:
        self._owner = owner
        self._name = name
        self._connection = connection
        self._responses = OrderedResponses(
            self._begin, self._send, connection.pause_messages, connection.resume_messages, self._overflow
        )
        self._rate = MessageRate(owner.settings.messages_per_second, perf_counter())
        self._active_at = perf_counter()
        self._timer: asyncio.TimerHandle | None = None
        connection.on_message = self._on_message
        connection.on_writable = self._responses.writable
        connection.on_close = self._on_close
        self._start_timer(owner.settings.idle_seconds)

    # Events of the connection.

    def _on_message(self, message: str | bytes) -> None:
        now = self._active_at = perf_counter()
        wait_seconds = self._rate.take(now)
        if wait_seconds and self._rate.flooding:
            self._close(CloseCode.POLICY, f"more than {self._rate.rate:g} messages per second, for too long")
            return
        self._responses.submit(_RateLimited(wait_seconds) if wait_seconds else message, len(message))

    def _on_close(self, code: int, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._responses.close()

    def _send(self, message: str | bytes) -> bool:
        self._active_at = perf_counter()
        return self._connection.send(message)

    def _overflow(self) -> None:
        self._close(CloseCode.POLICY, f"more than {MOST_UNREAD_BYTES} bytes of responses are unread: read faster")

    def _close(self, code: int, reason: str) -> None:
        self._connection.close(code, reason)
        self._on_close(code, reason)

    def _start_timer(self, seconds: float) -> None:
        if self._owner.settings.idle_seconds > 0:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._check_idle)

    def _check_idle(self) -> None:
        """Close the connection if the client is idle; while it waits for a response it is not."""
        idle_seconds = self._owner.settings.idle_seconds
        left = idle_seconds - (perf_counter() - self._active_at)
        if not self._responses.empty:
            left = idle_seconds
        if left > 0:
            self._start_timer(left)
        else:
            self._close(CloseCode.NORMAL, "Timeout")

    # Requests.

    def _begin(self, slot: ResponseSlot, message: str | bytes | _RateLimited) -> None:
        started = perf_counter()
        extra = b""
        binary = isinstance(message, bytes)
        try:
            if isinstance(message, _RateLimited):
                raise ResourceExhausted(
                    f"too many messages: at most {self._rate.rate:g} per second; "
                    f"send it again in {message.wait_seconds:.2f} seconds",
                    retry_after_seconds=message.wait_seconds,
                )
            if isinstance(message, bytes):
                request = self._binary(message)
            else:
                fields = parse_json(message, self._owner.validator)
                if "id" in fields:
                    extra = b',"id":%b' % orjson.dumps(fields["id"])
                if "inputs" not in fields and "batch" not in fields and fields.keys() <= {"id", "model_version"}:
                    raise InvalidArgument(MISSING)
                request = self._owner.parser.parse(self._name, self._connection.head, fields)
            if request.model.decoupled:
                self._predict_stream(slot, request, started, extra, binary)
                return
            response = self._owner.predictor.predict_now(request)
            if response is not None:
                self._put(slot, _encode(request, (response,), started, extra, binary))
                return
            waiting = self._owner.predictor.predict(
                request, partial(self._on_responses, slot, request, started, extra, binary)
            )
            slot.cancel = waiting.cancel
        except ModelNotLoaded as missing:
            slot.cancel = wait_for_model(self._owner.plane, missing, partial(self._resume, slot, message, extra))
        except Exception as error:
            self._fail(slot, error, extra)

    def _resume(
        self, slot: ResponseSlot, message: str | bytes | _RateLimited, extra: bytes, problem: HeadraceError | None
    ) -> None:
        """Continue a message when its model is loaded again."""
        if slot.over:
            return
        if problem is not None:
            self._fail(slot, problem, extra)
        else:
            self._begin(slot, message)

    def _binary(self, message: bytes) -> ParsedRequest:
        if not self._owner.settings.binary:
            raise InvalidArgument("binary messages are disabled: send JSON, as text")
        return self._owner.flat_parser.parse_raw(self._name, self._connection.head, message)

    def _on_responses(
        self,
        slot: ResponseSlot,
        request: ParsedRequest,
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
            self._put(slot, _encode(request, result, started, extra, binary))
        except Exception as error:
            self._fail(slot, error, extra)

    def _predict_stream(
        self, slot: ResponseSlot, request: ParsedRequest, started: float, extra: bytes, binary: bool
    ) -> None:
        if request.is_split:
            raise InvalidArgument(f"model '{request.model.name}' is decoupled: send fewer rows at once")
        deadlines = self._owner.predictor.deadlines

        def on_response(result: InferResponse | BaseException | None, final: bool) -> None:
            if final or slot.over:
                deadlines.remove(pending)
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
                self._put(slot, _encode(request, (result,), started, more, binary), last=final)
            except Exception as error:
                pending.cancel()
                self._fail(slot, error, extra)

        pending = self._owner.plane.infer_stream(request.engine_request, on_response)
        slot.cancel = pending.cancel
        deadlines.add(pending)

    # Responses.

    def _put(self, slot: ResponseSlot, message: str | bytes, *, last: bool = True) -> None:
        slot.put(message, len(message), last=last)

    def _fail(self, slot: ResponseSlot, error: BaseException, extra: bytes) -> None:
        if not isinstance(error, HeadraceError):
            log.error("WebSocket prediction failed", exc_info=error, extra={"peer": self._connection.peer})
            self._close(CloseCode.INTERNAL, _INTERNAL_ERROR)
            return
        document: dict[str, Any] = {"error": error.message.encode(errors="replace").decode()}
        if error.retry_after_seconds is not None:
            document["retry_after_seconds"] = error.retry_after_seconds
        self._put(slot, (orjson.dumps(document)[:-1] + extra + b"}").decode())


def _encode(
    request: ParsedRequest, responses: Sequence[InferResponse], started: float, extra: bytes, binary: bool
) -> str | bytes:
    if binary:
        return bytes(only_output(request, responses[0]).to_buffer())
    return response_json(request, responses, started, extra).decode()


class MessageRate:
    """A token bucket that holds one second's messages. A `rate` of 0 is unlimited."""

    __slots__ = ("_refused_at", "_since", "_tokens", "_updated_at", "flooding", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.flooding = False
        """Whether the client has exceeded the limit for too long."""
        self._tokens = max(rate, 1.0)
        self._updated_at = now
        self._refused_at = self._since = -_PAUSE_SECONDS

    def take(self, now: float) -> float:
        """Return 0 if a message is allowed now; else the seconds until it is."""
        rate = self.rate
        if rate <= 0:
            return 0.0
        tokens = min(max(rate, 1.0), self._tokens + (now - self._updated_at) * rate)
        self._updated_at = now
        if tokens >= 1.0:
            self._tokens = tokens - 1.0
            return 0.0
        self._tokens = tokens
        if now - self._refused_at > _PAUSE_SECONDS:
            self._since = now
        self._refused_at = now
        self.flooding = now - self._since >= FLOODING_SECONDS
        return (1.0 - tokens) / rate
