# SPDX-License-Identifier: Apache-2.0
"""v2 over gRPC: health and inference of `inference.GRPCInferenceService`. The other methods are registered from here."""

from __future__ import annotations

from headrace.api.model_waits import report_wait_grpc
from headrace.api.v2.grpc_codec import GrpcCodec, encode_response
from headrace.api.v2.grpc_messages import SERVICE, inference_schema, parse
from headrace.api.v2.grpc_stream import GrpcStreams
from headrace.api.v2.models import GrpcModels
from headrace.api.v2.outputs import OutputPlan, SpecialOutputs
from headrace.api.v2.repository import GrpcRepository
from headrace.api.v2.requests import header_forwarding, with_request_id
from headrace.api.v2.server_control import GrpcServerMethods
from headrace.api.v2.shared_state import V2State
from headrace.api.v2.trace import infer_traced
from headrace.core.errors import HeadraceError
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.engine.dataplane import DataPlane
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.heads import Buffer

_ENDPOINT = "ModelInfer RPC"


class V2Grpc:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, tracer: Tracer = NO_TRACING, shared: V2State | None = None) -> None:
        self._shared = shared = shared or V2State(plane, tracer=tracer)
        self._plane = plane
        self._tracing = shared.tracing
        self._planner = shared.outputs
        self._codec = GrpcCodec(shared.memory)
        self._decode = self._codec.decode_request
        shared.decode_times.subscribe(self._time_decoding)
        self._forwarding = header_forwarding(shared.settings.grpc_header_forward_pattern, ignore_case=False)
        self._streams = GrpcStreams(shared, self._codec, self._forwarding)
        schema = inference_schema()
        self._live = schema.message("inference.ServerLiveResponse")
        self._ready = schema.message("inference.ServerReadyResponse")
        self._model_ready_request = schema.message("inference.ModelReadyRequest")
        self._model_ready = schema.message("inference.ModelReadyResponse")

    def add_to(self, services: Services) -> None:
        """Register the methods."""
        gate = self._shared.grpc_gate
        services.unary(SERVICE, "ServerLive", gate.grpc("health", self.server_live), scope=None)
        services.unary(SERVICE, "ServerReady", gate.grpc("health", self.server_ready), scope=None)
        services.unary(SERVICE, "ModelReady", gate.grpc("health", self.model_ready), scope="read")
        services.unary(SERVICE, "ModelInfer", gate.grpc("inference", self.model_infer), scope="infer")
        self._streams.add_to(services)
        GrpcModels(self._shared).add_to(services)
        GrpcRepository(self._shared).add_to(services)
        GrpcServerMethods(self._shared).add_to(services)

    def drain(self) -> None:
        """End each stream once its requests are answered: the server is stopping."""
        self._streams.drain()

    def server_live(self, call: GrpcCall, message: Buffer) -> None:
        """Answer: the process is live."""
        call.reply(self._live(live=True).SerializeToString())

    def server_ready(self, call: GrpcCall, message: Buffer) -> None:
        """Answer whether the server is ready."""
        call.reply(self._ready(ready=self._plane.ready).SerializeToString())

    def model_ready(self, call: GrpcCall, message: Buffer) -> None:
        """Answer whether a model is ready."""
        request = parse(self._model_ready_request, message)
        ready = self._plane.is_ready(request.name, request.version)
        call.reply(self._model_ready(ready=ready).SerializeToString())

    def model_infer(self, call: GrpcCall, message: Buffer) -> None:
        """Run inference."""
        request = self._decode(message)
        if self._forwarding is not None:
            request.parameters = self._forwarding.merged(call.head, request.parameters)
        if not self._tracing.enabled:
            response = self._plane.answer(request)
            if response is not None:
                call.reply(encode_response(response))
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
                    call.reply(encode_response(plan.apply(result), plan.placed))
            except Exception as error:
                call.fail(error)

        tracing = self._tracing
        try:
            if tracing.enabled and tracing.wants(request.model_name):
                pending = infer_traced(self._plane, tracing.tracer, call.head, request, done)
            else:
                pending = self._plane.infer(request, done)
        except HeadraceError as error:
            raise with_request_id(self._plane, request, error, _ENDPOINT) from None
        if pending.waits_for_model:
            report_wait_grpc(call, pending)
        call.on_cancel = pending.cancel
