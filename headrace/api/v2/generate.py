# SPDX-License-Identifier: Apache-2.0
"""`generate` and `generate_stream` over HTTP: plain JSON such as `{"text": "hello"}` instead of tensors.

A member of the request with the name of an input becomes that input, any other a parameter. A response is one JSON
object with the outputs by name; a stream of responses is sent as server-sent events.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import orjson

from headrace.api.model_waits import waiting_http
from headrace.api.v2.http_codec import NOT_A_STRING, json_data, parse_body, tensor_from_json
from headrace.api.v2.models import MODEL_PATHS, model_of
from headrace.api.v2.requests import HeaderForwarding, checked_parameters, with_request_id
from headrace.api.v2.shared_state import V2State
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, InvalidArgument
from headrace.core.requests import NO_PARAMETERS, InferRequest, InferResponse, Parameters
from headrace.core.tensors import Buffer, Tensor
from headrace.engine.scheduling.pending_request import PendingRequest, StreamCallback
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
"""Triton's message."""


class V2Generate:
    """Handlers over one data plane."""

    def __init__(self, shared: V2State, forwarding: HeaderForwarding | None = None) -> None:
        self._shared = shared
        self._plane = shared.plane
        self._gate = shared.http_gate
        self._forwarding = forwarding
        self._unread_bytes = shared.settings.stream_unread_bytes

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        for path in MODEL_PATHS:
            generate = self._gate.http("inference", waiting_http(self._plane, self.generate))
            routes.add("POST", f"{path}/generate", generate, scope="infer")
            stream = self._gate.http("inference", waiting_http(self._plane, self.generate_stream))
            routes.add("POST", f"{path}/generate_stream", stream, scope="infer")

    def generate(self, exchange: Exchange) -> None:
        """Answer a request with one response."""
        request = self._request(exchange)
        response: InferResponse | None = None

        def on_response(result: InferResponse | BaseException | None, final: bool) -> None:
            nonlocal response
            if exchange.closed:
                return
            if isinstance(result, BaseException):
                exchange.fail(result)
                return
            if result is not None:
                if response is not None:
                    exchange.fail(InvalidArgument(_NOT_ONE))
                    pending.cancel()
                    return
                response = result
            if final:
                self._respond(exchange, response)

        pending = self._start(exchange, request, on_response)
        exchange.on_disconnect = pending.cancel

    def generate_stream(self, exchange: Exchange) -> None:
        """Answer a request with a stream of responses."""
        request = self._request(exchange)
        stream = _ResponseEvents(exchange, self._unread_bytes)
        stream.pending = self._start(exchange, request, stream.on_response)
        exchange.on_disconnect = stream.pending.cancel

    def _start(self, exchange: Exchange, request: InferRequest, on_response: StreamCallback) -> PendingRequest:
        try:
            return self._shared.infer_stream(exchange.head, request, on_response)
        except HeadraceError as error:
            raise with_request_id(self._plane, request, error, "generate") from None

    def _respond(self, exchange: Exchange, response: InferResponse | None) -> None:
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
        document = parse_body(exchange.body)
        _check_members(document, exchange.body)
        exchange.body = b""
        request = decode_request(name, version, document, self._plane.config(name, version))
        if self._forwarding is not None:
            request.parameters = self._forwarding.merged(exchange.head, request.parameters)
        return request


class _ResponseEvents:
    """Responses as server-sent events. The head goes out with the first one, so that an earlier error has a status."""

    pending: PendingRequest

    def __init__(self, exchange: Exchange, unread_bytes: int) -> None:
        self._exchange = exchange
        self._most = unread_bytes
        self._events: EventStream | None = None

    def on_response(self, result: InferResponse | BaseException | None, final: bool) -> None:
        """Send one response, or finish the stream."""
        if self._exchange.closed:
            return
        if isinstance(result, BaseException):
            self._fail(result)
            return
        if result is not None:
            try:
                # A model cannot be paused, and a client that does not read must not fill the memory.
                self._open().send_within(self._most, response_json(result))
            except Exception as error:
                self._fail(error)
                self.pending.cancel()
                return
        if final and not self._exchange.closed:
            self._open().finish()

    def _fail(self, error: BaseException) -> None:
        if self._events is None:
            self._exchange.fail(error)
            return
        text = INTERNAL_TEXT
        if isinstance(error, HeadraceError):
            text = error.message.encode(errors="replace").decode()
        else:
            log.error("response stream failed", exc_info=error)
        self._events.send(orjson.dumps({"error": text}))
        self._events.finish()

    def _open(self) -> EventStream:
        if self._events is None:
            self._events = EventStream(self._exchange)
        return self._events


def decode_request(name: str, version: str, document: Mapping[str, Any], config: ModelConfig) -> InferRequest:
    """Return a request from the members of a JSON object."""
    specs = {spec.name: spec for spec in config.inputs}
    inputs: list[Tensor] = []
    parameters: dict[str, Any] = {}
    request_id = ""
    for member, value in document.items():
        if member in specs:
            inputs.append(_tensor(specs[member], value, batched=config.max_batch_size > 0))
        elif member == "id":
            if not isinstance(value, str):
                raise InvalidArgument(f"{NOT_A_STRING}: 'id' must be a string")
            request_id = value
        elif member == "parameters" and isinstance(value, dict):
            parameters |= value
        else:
            parameters[member] = value
    checked: Parameters = checked_parameters(parameters) if parameters else NO_PARAMETERS
    return InferRequest(name, inputs, version, request_id, (), checked)


def _check_members(document: Mapping[str, Any], body: Buffer) -> None:
    """Raise for a member that the body has twice: the parser keeps the last one only."""
    text = bytes(body)
    if all(text.count(b'"%b"' % name.encode()) < 2 for name in document):
        return
    try:
        names = json.loads(text, object_pairs_hook=lambda pairs: [name for name, _ in pairs])
    except RecursionError:
        raise InvalidArgument("the request JSON nests too deeply") from None
    twice = next((name for name in document if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidArgument(f"'{twice[:256]}' already exists in request: give it once")


def response_json(response: InferResponse) -> bytes:
    """Return a response as one JSON object; an output of one element is that element."""
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
        raise InvalidArgument(
            f"input '{spec.name}' takes any type and shape: use 'infer', where a request declares them"
        )
    shape: list[int] = []
    inner = value
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    # Missing leading dimensions are 1: a number for a row, a row for a batch.
    missing = len(spec.dims) + batched - len(shape)
    return tensor_from_json(spec.name, spec.dtype, [*[1] * max(missing, 0), *shape], value)
