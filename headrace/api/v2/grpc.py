# SPDX-License-Identifier: Apache-2.0
"""v2 over gRPC: the methods of `inference.GRPCInferenceService`."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.v2.grpc_codec import GrpcCodec, encode_response
from headrace.api.v2.schema import SERVICE, inference_schema
from headrace.api.v2.tracing import infer_traced
from headrace.core.errors import InvalidArgument
from headrace.core.messages import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.telemetry.tracing import NO_TRACING, Tracer
from headrace.wire.grpc.call import GrpcCall
from headrace.wire.grpc.services import Services
from headrace.wire.http.exchange import Buffer


class V2Grpc:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, tracer: Tracer = NO_TRACING) -> None:
        self._plane = plane
        self._tracer = tracer
        self._codec = GrpcCodec()
        schema = inference_schema()
        self._live = schema.message("inference.ServerLiveResponse")
        self._ready = schema.message("inference.ServerReadyResponse")
        self._model_ready_request = schema.message("inference.ModelReadyRequest")
        self._model_ready = schema.message("inference.ModelReadyResponse")

    def add_to(self, services: Services) -> None:
        """Serve the methods."""
        services.unary(SERVICE, "ServerLive", self.server_live)
        services.unary(SERVICE, "ServerReady", self.server_ready)
        services.unary(SERVICE, "ModelReady", self.model_ready)
        services.unary(SERVICE, "ModelInfer", self.model_infer)

    def server_live(self, call: GrpcCall, message: Buffer) -> None:
        """The process answers."""
        call.reply(self._live(live=True).SerializeToString())

    def server_ready(self, call: GrpcCall, message: Buffer) -> None:
        """Requests will be served."""
        call.reply(self._ready(ready=self._plane.ready).SerializeToString())

    def model_ready(self, call: GrpcCall, message: Buffer) -> None:
        """Requests for this model will be served."""
        request = _parse(self._model_ready_request, message)
        ready = self._plane.is_ready(request.name, request.version)
        call.reply(self._model_ready(ready=ready).SerializeToString())

    def model_infer(self, call: GrpcCall, message: Buffer) -> None:
        """Compute one request."""
        request = self._codec.decode_request(message)

        def done(result: InferResponse | BaseException) -> None:
            if isinstance(result, BaseException):
                call.fail(result)
                return
            try:
                call.reply(encode_response(result))
            except Exception as error:
                call.fail(error)

        if self._tracer.enabled:
            pending = infer_traced(self._plane, self._tracer, call.head, request, done)
        else:
            pending = self._plane.infer(request, done)
        call.on_cancel = pending.cancel


def _parse(message_class: Any, message: Buffer) -> Any:
    try:
        return message_class.FromString(message)
    except DecodeError:
        raise InvalidArgument(f"the message is not a {message_class.DESCRIPTOR.name}") from None
