# SPDX-License-Identifier: Apache-2.0
"""v2 over gRPC: health and infer of `inference.GRPCInferenceService`; the other methods are in rooms of their own."""

from __future__ import annotations

from headrace.api.v2.errors import told
from headrace.api.v2.grpc_codec import GrpcCodec, encode_response
from headrace.api.v2.grpc_messages import parse
from headrace.api.v2.grpc_models import GrpcModels
from headrace.api.v2.grpc_repository import GrpcRepository
from headrace.api.v2.grpc_server import GrpcServerMethods
from headrace.api.v2.grpc_stream import GrpcStreams
from headrace.api.v2.outputs import OutputPlan, SpecialOutputs
from headrace.api.v2.parameters import forwarding
from headrace.api.v2.schema import SERVICE, inference_schema
from headrace.api.v2.shared import V2Shared
from headrace.api.v2.tracing import infer_traced
from headrace.core.errors import HeadraceError
from headrace.core.messages import InferRequest, InferResponse
from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.engine.dataplane import DataPlane
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Buffer

_DOOR = "ModelInfer RPC"


class V2Grpc:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, tracer: Tracer = NO_TRACING, shared: V2Shared | None = None) -> None:
        self._shared = shared = shared or V2Shared(plane, tracer=tracer)
        self._plane = plane
        self._tracing = shared.tracing
        self._planner = shared.outputs
        self._codec = GrpcCodec(shared.memory)
        self._decode = self._codec.decode_request
        shared.decode_times.follow(self._time_decoding)
        self._forwarding = forwarding(shared.settings.grpc_header_forward_pattern)
        self._streams = GrpcStreams(shared, self._codec, self._forwarding)
        schema = inference_schema()
        self._live = schema.message("inference.ServerLiveResponse")
        self._ready = schema.message("inference.ServerReadyResponse")
        self._model_ready_request = schema.message("inference.ModelReadyRequest")
        self._model_ready = schema.message("inference.ModelReadyResponse")

    def add_to(self, services: Services) -> None:
        """Serve the methods."""
        gate = self._shared.grpc_gate
        services.unary(SERVICE, "ServerLive", gate.grpc("health", self.server_live))
        services.unary(SERVICE, "ServerReady", gate.grpc("health", self.server_ready))
        services.unary(SERVICE, "ModelReady", gate.grpc("health", self.model_ready))
        services.unary(SERVICE, "ModelInfer", gate.grpc("inference", self.model_infer))
        self._streams.add_to(services)
        GrpcModels(self._shared).add_to(services)
        GrpcRepository(self._shared).add_to(services)
        GrpcServerMethods(self._shared).add_to(services)

    def drain(self) -> None:
        """The server is about to stop: streams end when what they were sent is answered."""
        self._streams.drain()

    def server_live(self, call: GrpcCall, message: Buffer) -> None:
        """The process answers."""
        call.reply(self._live(live=True).SerializeToString())

    def server_ready(self, call: GrpcCall, message: Buffer) -> None:
        """Requests will be served."""
        call.reply(self._ready(ready=self._plane.ready).SerializeToString())

    def model_ready(self, call: GrpcCall, message: Buffer) -> None:
        """Requests for this model will be served."""
        request = parse(self._model_ready_request, message)
        ready = self._plane.is_ready(request.name, request.version)
        call.reply(self._model_ready(ready=ready).SerializeToString())

    def model_infer(self, call: GrpcCall, message: Buffer) -> None:
        """Compute one request."""
        request = self._decode(message)
        if self._forwarding is not None:
            request.parameters = self._forwarding.merged(call.head, request.parameters)
        if not self._tracing.enabled:
            answer = self._plane.answer(request)
            if answer is not None:
                call.reply(encode_response(answer))
                return
        self._infer_later(call, request)

    def _time_decoding(self, on: bool) -> None:
        decode = self._codec.decode_request
        self._decode = self._shared.decode_times.timed(decode) if on else decode

    def _infer_later(self, call: GrpcCall, request: InferRequest) -> None:
        plan: OutputPlan | None = None
        if type(request.outputs) is SpecialOutputs:
            plan = self._planner.plan(request)

        def done(result: InferResponse | BaseException) -> None:
            if isinstance(result, BaseException):
                call.fail(result)
                return
            try:
                if plan is None:
                    call.reply(encode_response(result))
                else:
                    call.reply(encode_response(plan.carried_out(result), plan.placed))
            except Exception as error:
                call.fail(error)

        tracing = self._tracing
        try:
            if tracing.enabled and tracing.wants(request.model_name):
                pending = infer_traced(self._plane, tracing.tracer, call.head, request, done)
            else:
                pending = self._plane.infer(request, done)
        except HeadraceError as error:
            raise told(self._plane, request, error, _DOOR) from None
        call.on_cancel = pending.cancel
