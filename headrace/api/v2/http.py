# SPDX-License-Identifier: Apache-2.0
"""v2 over HTTP: the routes, and the way of an infer request from an exchange to the data plane and back."""

from __future__ import annotations

from headrace.api.v2.json_codec import JsonCodec, encode_response
from headrace.api.v2.models import MODEL_PATHS, V2Models
from headrace.api.v2.repository import V2Repository
from headrace.api.v2.statistics import V2Statistics
from headrace.api.v2.tracing import infer_traced
from headrace.core.messages import InferResponse
from headrace.core.names import check_name
from headrace.engine.dataplane import DataPlane
from headrace.telemetry.tracing import NO_TRACING, Tracer
from headrace.wire.http.exchange import Exchange
from headrace.wire.http.heads import CONTENT_TYPE, OK_EMPTY, OK_JSON, ResponseHead
from headrace.wire.http.routes import Routes

_HEADER_LENGTH = b"inference-header-content-length"
_OK_BINARY = ResponseHead(200, [(CONTENT_TYPE, b"application/octet-stream")])
_NOT_READY = ResponseHead(400)


class V2Http:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, tracer: Tracer = NO_TRACING) -> None:
        self._plane = plane
        self._tracer = tracer
        self._codec = JsonCodec()

    def add_to(self, routes: Routes) -> None:
        """Serve the v2 paths."""
        routes.add("GET", "/v2/health/live", self.live)
        routes.add("GET", "/v2/health/ready", self.ready)
        for model in MODEL_PATHS:
            routes.add("GET", f"{model}/ready", self.model_ready)
            routes.add("POST", f"{model}/infer", self.infer)
        V2Models(self._plane).add_to(routes)
        V2Statistics(self._plane).add_to(routes)
        V2Repository(self._plane).add_to(routes)

    def live(self, exchange: Exchange) -> None:
        """The process answers."""
        exchange.respond(OK_EMPTY)

    def ready(self, exchange: Exchange) -> None:
        """Requests will be served; the protocol says 400 when not."""
        exchange.respond(OK_EMPTY if self._plane.ready else _NOT_READY)

    def model_ready(self, exchange: Exchange) -> None:
        """Requests for this model will be served."""
        params = exchange.params
        ready = self._plane.is_ready(check_name(params[0]), params[1] if len(params) > 1 else "")
        exchange.respond(OK_EMPTY if ready else _NOT_READY)

    def infer(self, exchange: Exchange) -> None:
        """Compute one request."""
        params = exchange.params
        version = params[1] if len(params) > 1 else ""
        request = self._codec.decode_request(
            params[0], version, exchange.body, exchange.head.by_name.get(_HEADER_LENGTH)
        )
        exchange.body = b""

        def done(result: InferResponse | BaseException) -> None:
            if isinstance(result, BaseException):
                exchange.fail(result)
                return
            try:
                json_length, buffers = encode_response(result, request)
            except Exception as error:
                exchange.fail(error)
                return
            if json_length is None:
                exchange.respond(OK_JSON, buffers)
            else:
                exchange.respond(_OK_BINARY, buffers, ((_HEADER_LENGTH, b"%d" % json_length),))

        if self._tracer.enabled:
            pending = infer_traced(self._plane, self._tracer, exchange.head, request, done)
        else:
            pending = self._plane.infer(request, done)
        exchange.on_disconnect = pending.cancel
