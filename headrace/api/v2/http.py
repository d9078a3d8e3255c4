# SPDX-License-Identifier: Apache-2.0
"""v2 over HTTP: health and inference. The other routes are registered from here."""

from __future__ import annotations

from functools import lru_cache

from headrace.api.model_waits import handle_when_loaded, report_wait_http
from headrace.api.v2.generate import V2Generate
from headrace.api.v2.http_codec import HttpCodec, RawRequestDecoder, encode_response
from headrace.api.v2.models import MODEL_PATHS, V2Models, V2Statistics
from headrace.api.v2.outputs import OutputPlan, SpecialOutputs
from headrace.api.v2.repository import V2Repository
from headrace.api.v2.requests import header_forwarding, with_request_id
from headrace.api.v2.server_control import V2ServerSettings, V2SharedMemory
from headrace.api.v2.shared_state import V2State
from headrace.api.v2.trace import infer_traced
from headrace.core.errors import HeadraceError
from headrace.core.names import check_name
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.residency import ModelNotLoaded
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, OK_EMPTY, OK_JSON, ResponseHead
from headrace.net.http.routes import Routes

_HEADER_LENGTH = b"inference-header-content-length"
_NOT_READY = ResponseHead(400)
_ENDPOINT = "HTTP end point"


@lru_cache(maxsize=256)
def _binary_head(json_length: int) -> ResponseHead:
    fields = ((CONTENT_TYPE, b"application/octet-stream"), (_HEADER_LENGTH, b"%d" % json_length))
    return ResponseHead(200, fields)


class V2Http:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, tracer: Tracer = NO_TRACING, shared: V2State | None = None) -> None:
        self._shared = shared = shared or V2State(plane, tracer=tracer)
        self._plane = plane
        self._tracing = shared.tracing
        self._planner = shared.outputs
        self._codec = HttpCodec(shared.memory, RawRequestDecoder(plane))
        self._decode = self._codec.decode_request
        shared.decode_times.subscribe(self._time_decoding)
        self._forwarding = header_forwarding(shared.settings.http_header_forward_pattern, ignore_case=True)

    def add_to(self, routes: Routes) -> None:
        """Register the v2 routes."""
        gate = self._shared.http_gate
        routes.add("GET", "/v2/health/live", gate.http("health", self.live), scope=None)
        routes.add("GET", "/v2/health/ready", gate.http("health", self.ready), scope=None)
        for model in MODEL_PATHS:
            routes.add("GET", f"{model}/ready", gate.http("health", self.model_ready), scope="read")
            routes.add("POST", f"{model}/infer", gate.http("inference", self.infer), scope="infer")
        V2Generate(self._shared, self._forwarding).add_to(routes)
        V2Models(self._shared).add_to(routes)
        V2Statistics(self._shared).add_to(routes)
        V2Repository(self._shared).add_to(routes)
        V2ServerSettings(self._shared).add_to(routes)
        V2SharedMemory(self._shared).add_to(routes)

    def live(self, exchange: Exchange) -> None:
        """Answer: the process is live."""
        exchange.respond(OK_EMPTY)

    def ready(self, exchange: Exchange) -> None:
        """Answer whether the server is ready; 400 if not, as the protocol says."""
        exchange.respond(OK_EMPTY if self._plane.ready else _NOT_READY)

    def model_ready(self, exchange: Exchange) -> None:
        """Answer whether a model is ready."""
        params = exchange.params
        ready = self._plane.is_ready(check_name(params[0]), params[1] if len(params) > 1 else "")
        exchange.respond(OK_EMPTY if ready else _NOT_READY)

    def infer(self, exchange: Exchange) -> None:
        """Run inference."""
        params = exchange.params
        version = params[1] if len(params) > 1 else ""
        try:
            request = self._decode(params[0], version, exchange.body, exchange.head.by_name.get(_HEADER_LENGTH))
        except ModelNotLoaded as missing:  # a raw request, whose type and shape are those of the model
            handle_when_loaded(self._plane, exchange, self.infer, missing)
            return
        exchange.body = b""
        if self._forwarding is not None:
            request.parameters = self._forwarding.merged(exchange.head, request.parameters)
        if not self._tracing.enabled:
            response = self._plane.answer(request)
            if response is not None:
                json_length, buffers = encode_response(response, request)
                if json_length is None:
                    exchange.respond(OK_JSON, buffers)
                else:
                    exchange.respond(_binary_head(json_length), buffers)
                return
        self._infer_later(exchange, request)

    def _time_decoding(self, on: bool) -> None:
        decode = self._codec.decode_request
        self._decode = self._shared.decode_times.timed(decode) if on else decode

    def _infer_later(self, exchange: Exchange, request: InferRequest) -> None:
        plan: OutputPlan | None = None
        if type(request.outputs) is SpecialOutputs:
            plan = self._planner.plan(request)

        def done(result: InferResponse | BaseException) -> None:
            if isinstance(result, BaseException):
                exchange.fail(result)
                return
            try:
                if plan is None:
                    json_length, buffers = encode_response(result, request)
                else:
                    json_length, buffers = encode_response(plan.apply(result), request, plan.placed)
            except Exception as error:
                exchange.fail(error)
                return
            if json_length is None:
                exchange.respond(OK_JSON, buffers)
            else:
                exchange.respond(_binary_head(json_length), buffers)

        tracing = self._tracing
        try:
            if tracing.enabled and tracing.wants(request.model_name):
                pending = infer_traced(self._plane, tracing.tracer, exchange.head, request, done)
            else:
                pending = self._plane.infer(request, done)
        except HeadraceError as error:
            raise with_request_id(self._plane, request, error, _ENDPOINT) from None
        if pending.waits_for_model:
            report_wait_http(exchange, pending)
        exchange.on_disconnect = pending.cancel
