# SPDX-License-Identifier: Apache-2.0
"""v2 over HTTP: `generate` and `generate_stream`, for callers who would rather write `{"text": "hello"}` than a tensor.

Registered by `http`. A member of the request that has the name of an input becomes that input, any other a parameter. An
answer is one JSON object with the outputs by their names; a stream of answers is Server-Sent Events.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson

from headrace.api.v2.documents import read_document
from headrace.api.v2.errors import told
from headrace.api.v2.json_codec import json_data
from headrace.api.v2.models import MODEL_PATHS, model_of
from headrace.api.v2.parameters import HeaderForwarding, checked
from headrace.api.v2.shared import V2Shared
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, InvalidArgument
from headrace.core.messages import NO_PARAMETERS, InferRequest, InferResponse, Parameters
from headrace.core.tensors import Tensor, tensor_from_values
from headrace.engine.scheduling.pending import Answered, Pending
from headrace.models.config.types import InputSpec, ModelConfig
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON
from headrace.net.http.routes import Routes
from headrace.net.http.sse import EventStream

log = logging.getLogger("headrace.api")

_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
"""Triton's."""


class V2Generate:
    """Handlers over one data plane."""

    def __init__(self, shared: V2Shared, forwarding: HeaderForwarding | None = None) -> None:
        self._shared = shared
        self._plane = shared.plane
        self._gate = shared.http_gate
        self._forwarding = forwarding
        self._unread_bytes = shared.settings.stream_unread_bytes

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        for path in MODEL_PATHS:
            routes.add("POST", f"{path}/generate", self._gate.http("inference", self.generate))
            routes.add("POST", f"{path}/generate_stream", self._gate.http("inference", self.generate_stream))

    def generate(self, exchange: Exchange) -> None:
        """One request, one answer."""
        request = self._request(exchange)
        whole: InferResponse | None = None

        def answered(result: InferResponse | BaseException | None, final: bool) -> None:
            nonlocal whole
            if exchange.closed:
                return
            if isinstance(result, BaseException):
                exchange.fail(result)
                return
            if result is not None:
                if whole is not None:
                    exchange.fail(InvalidArgument(_NOT_ONE))
                    pending.cancel()
                    return
                whole = result
            if final:
                self._answer(exchange, whole)

        pending = self._start(exchange, request, answered)
        exchange.on_disconnect = pending.cancel

    def generate_stream(self, exchange: Exchange) -> None:
        """One request, any number of answers."""
        request = self._request(exchange)
        stream = _Answers(exchange, self._unread_bytes)
        stream.pending = self._start(exchange, request, stream.answered)
        exchange.on_disconnect = stream.pending.cancel

    def _start(self, exchange: Exchange, request: InferRequest, answered: Answered) -> Pending:
        try:
            return self._shared.infer_stream(exchange.head, request, answered)
        except HeadraceError as error:
            raise told(self._plane, request, error, "generate") from None

    def _answer(self, exchange: Exchange, response: InferResponse | None) -> None:
        if response is None:
            exchange.fail(InvalidArgument(_NOT_ONE))
            return
        try:
            text = response_json(response)
        except Exception as error:
            exchange.fail(error)
            return
        exchange.respond(OK_JSON, text)

    def _request(self, exchange: Exchange) -> InferRequest:
        name, version = model_of(exchange)
        document = read_document(exchange.body)
        exchange.body = b""
        request = decode_request(name, version, document, self._plane.config(name, version))
        if self._forwarding is not None:
            request.parameters = self._forwarding.merged(exchange.head, request.parameters)
        return request


class _Answers:
    """A stream of answers as events. The head goes out with the first of them, so that an error before it has a status."""

    pending: Pending

    def __init__(self, exchange: Exchange, unread_bytes: int) -> None:
        self._exchange = exchange
        self._most = unread_bytes
        self._events: EventStream | None = None

    def answered(self, result: InferResponse | BaseException | None, final: bool) -> None:
        """See `Answered`."""
        if self._exchange.closed:
            return
        if isinstance(result, BaseException):
            self._failed(result)
            return
        if result is not None:
            try:
                # A model cannot be held back; a client that does not read must not fill the server's memory.
                self._open().send_within(self._most, response_json(result))
            except Exception as error:
                self._failed(error)
                self.pending.cancel()
                return
        if final and not self._exchange.closed:
            self._open().finish()

    def _failed(self, error: BaseException) -> None:
        if self._events is None:
            self._exchange.fail(error)
            return
        text = INTERNAL_TEXT
        if isinstance(error, HeadraceError):
            text = error.message.encode(errors="replace").decode()
        else:
            log.error("a stream of answers failed", exc_info=error)
        self._events.send(orjson.dumps({"error": text}))
        self._events.finish()

    def _open(self) -> EventStream:
        if self._events is None:
            self._events = EventStream(self._exchange)
        return self._events


def decode_request(name: str, version: str, document: Mapping[str, Any], config: ModelConfig) -> InferRequest:
    """A request from the members of a JSON object."""
    specs = {spec.name: spec for spec in config.inputs}
    inputs: list[Tensor] = []
    parameters: dict[str, Any] = {}
    request_id = ""
    for member, value in document.items():
        if member in specs:
            inputs.append(_tensor(specs[member], value, batched=config.max_batch_size > 0))
        elif member == "id":
            if not isinstance(value, str):
                raise InvalidArgument("'id' must be a string")
            request_id = value
        elif member == "parameters" and isinstance(value, dict):
            parameters |= value
        else:
            parameters[member] = value
    given: Parameters = checked(parameters) if parameters else NO_PARAMETERS
    return InferRequest(name, inputs, version, request_id, (), given)


def response_json(response: InferResponse) -> bytes:
    """An answer as one JSON object; an output of one element is that element."""
    members: dict[str, bytes] = {
        "model_name": orjson.dumps(response.model_name),
        "model_version": orjson.dumps(response.model_version),
    }
    if response.id:
        members["id"] = orjson.dumps(response.id)
    for name, value in response.parameters.items():
        members[name] = orjson.dumps(value)
    for tensor in response.outputs:
        text = json_data(tensor)
        members[tensor.name] = text[1:-1] if tensor.array.size == 1 else text
    return b"{%b}" % b",".join(b"%b:%b" % (orjson.dumps(name), text) for name, text in members.items())


def _tensor(spec: InputSpec, value: Any, *, batched: bool) -> Tensor:
    if spec.dtype is None or spec.dims is None:
        raise InvalidArgument(f"input '{spec.name}' takes any type and shape: use 'infer', where a request says which")
    shape: list[int] = []
    inner = value
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    # A number for a row, a row for a batch: what is left out at the front is 1.
    missing = len(spec.dims) + batched - len(shape)
    return tensor_from_values(spec.name, spec.dtype, [*[1] * max(missing, 0), *shape], value)
