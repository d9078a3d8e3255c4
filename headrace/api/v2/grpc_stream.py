# SPDX-License-Identifier: Apache-2.0
"""ModelStreamInfer over gRPC: any number of requests and responses on one call.

Requests of a stream are computed concurrently. Responses of models with one response per request are sent in the order
of the requests, as Triton does; those of decoupled models at once. A client that does not read its responses is paused;
one that leaves too many unread is disconnected, since a model cannot be paused.
"""

from __future__ import annotations

import logging
from collections import deque
from weakref import WeakSet

from headrace.api.v2.grpc_codec import GrpcCodec, encode_parameters, encode_response
from headrace.api.v2.grpc_messages import SERVICE, inference_schema
from headrace.api.v2.outputs import OutputPlan, SpecialOutputs
from headrace.api.v2.requests import EMPTY_FINAL, FINAL, HeaderForwarding, with_request_id
from headrace.api.v2.shared_state import V2State
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, ResourceExhausted, Unavailable
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.wire_format import encode_varint
from headrace.engine.scheduling.pending_request import PendingRequest
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.heads import Buffer

log = logging.getLogger("headrace.api")

MOST_REQUESTS = 1024
"""Concurrent requests of one stream, before the client is paused."""
MOST_REQUEST_BYTES = 64 * 1024 * 1024
"""Bytes of concurrent requests of one stream, before the client is paused. One request alone may be larger."""

_RESPONSE_TAG = bytes((2 << 3 | 2,))
_REAL_STATUS = b"triton_grpc_error"


class GrpcStreams:
    """Opens and drains streams."""

    def __init__(self, shared: V2State, codec: GrpcCodec, forwarding: HeaderForwarding | None) -> None:
        self.shared = shared
        self.plane = shared.plane
        self.codec = codec
        self.forwarding = forwarding
        self.unread_bytes = shared.settings.stream_unread_bytes
        self.error_response = inference_schema().message("inference.ModelStreamInferResponse")
        self.draining = False
        self._opened: WeakSet[_InferStream] = WeakSet()
        self.final_parameter = {final: encode_parameters({FINAL: final}) for final in (False, True)}

    def add_to(self, services: Services) -> None:
        """Register the method."""
        handler = self.shared.grpc_gate.grpc("inference", self.open)
        services.streaming(SERVICE, "ModelStreamInfer", handler, scope="infer")

    def open(self, call: GrpcCall) -> None:
        """Open a stream."""
        self._opened.add(_InferStream(self, call))

    def drain(self) -> None:
        """End each stream once its requests are answered; clients may never close theirs."""
        self.draining = True
        for stream in list(self._opened):
            stream.finish_if_over()


class _Slot:
    """One request of a stream, and its responses."""

    __slots__ = (
        "done",
        "empty_final",
        "id",
        "model_name",
        "ordered",
        "pending",
        "plan",
        "queued",
        "size",
        "stream",
        "version",
    )

    def __init__(self, stream: _InferStream, size: int) -> None:
        self.stream = stream
        self.size = size
        self.id = ""
        self.model_name = self.version = ""
        self.ordered = True
        self.empty_final = False
        self.plan: OutputPlan | None = None
        self.pending: PendingRequest | None = None
        self.queued: list[list[Buffer]] = []
        """Responses that wait for those of earlier requests."""
        self.done = False

    def on_response(self, result: InferResponse | BaseException | None, final: bool) -> None:
        """Handle a response of the model."""
        self.stream.on_response(self, result, final)


class _InferStream:
    """One call."""

    def __init__(self, streams: GrpcStreams, call: GrpcCall) -> None:
        self._streams = streams
        self._call = call
        self._real_status = (call.head.get(_REAL_STATUS) or b"").lower() == b"true"
        self._order: deque[_Slot] = deque()
        self._running: set[_Slot] = set()
        self._running_bytes = 0
        self._queued_bytes = 0
        self._backlog: deque[Buffer] = deque()
        self._blocked = False
        self._starting = False
        self._half_closed = False
        call.on_message = self._on_message
        call.on_half_close = self._on_half_close
        call.on_cancel = self._cancel
        call.on_writable = self._on_writable

    # Events of the call.

    def _on_message(self, message: Buffer) -> None:
        if self._backlog or self._full:
            self._backlog.append(message)
        else:
            self._start(message)
        if self._full:
            self._call.pause()

    def _on_half_close(self) -> None:
        self._half_closed = True
        self.finish_if_over()

    def _on_writable(self) -> None:
        self._blocked = False
        self._start_queued()

    def _cancel(self) -> None:
        """Cancel all requests: the call is over."""
        running, self._running = self._running, set()
        self._order.clear()
        self._backlog.clear()
        for slot in running:
            if slot.pending is not None:
                slot.pending.cancel()

    # Requests.

    @property
    def _full(self) -> bool:
        return self._blocked or len(self._running) >= MOST_REQUESTS or self._running_bytes >= MOST_REQUEST_BYTES

    def _start_queued(self) -> None:
        """Start queued requests and resume the client, as far as there is capacity."""
        if self._starting:  # called for a request that was refused at once: the outer call continues
            return
        self._starting = True
        try:
            while self._backlog and not self._full:
                self._start(self._backlog.popleft())
        finally:
            self._starting = False
        if not self._backlog and not self._full:
            self._call.resume()
        self.finish_if_over()

    def _start(self, message: Buffer) -> None:
        slot = _Slot(self, len(message))
        self._running.add(slot)
        self._running_bytes += slot.size
        try:
            request = self._request(slot, message)
        except HeadraceError as error:
            self._order.append(slot)
            slot.on_response(error, True)
            return
        plane = self._streams.plane
        version = plane.find(request.model_name, request.model_version)
        if version is not None:
            slot.version = version.version_text
            slot.ordered = not version.config.decoupled
        if slot.ordered:
            self._order.append(slot)
        try:
            slot.pending = self._streams.shared.infer_stream(self._call.head, request, slot.on_response)
        except HeadraceError as error:
            slot.on_response(with_request_id(plane, request, error, "ModelStreamInfer RPC"), True)

    def _request(self, slot: _Slot, message: Buffer) -> InferRequest:
        streams = self._streams
        request = streams.codec.decode_request(message)
        slot.id, slot.model_name = request.id, request.model_name
        if EMPTY_FINAL in request.parameters:
            slot.empty_final = request.parameters[EMPTY_FINAL] is True
            request.parameters = {name: value for name, value in request.parameters.items() if name != EMPTY_FINAL}
        if streams.forwarding is not None:
            request.parameters = streams.forwarding.merged(self._call.head, request.parameters)
        if type(request.outputs) is SpecialOutputs:
            slot.plan = streams.shared.outputs.plan(request)
        return request

    # Responses.

    def on_response(self, slot: _Slot, result: InferResponse | BaseException | None, final: bool) -> None:
        """Send a response of a request, or queue it."""
        if slot not in self._running:
            return
        try:
            message = self._encode(slot, result, final)
        except Exception as error:
            # A response that cannot be encoded ends the request.
            result, message, final = error, self._error(slot, error), True
        if isinstance(result, BaseException) and self._real_status:
            self._abort(result)
            return
        if message is not None:
            if slot.ordered and self._order[0] is not slot:
                slot.queued.append(message)
                self._queued_bytes += sum(map(len, message))
            else:
                self._write(message)
        if final:
            slot.done = True
            self._running.discard(slot)
            self._running_bytes -= slot.size
            pending, slot.pending = slot.pending, None
            if pending is not None and isinstance(result, BaseException):
                pending.cancel()  # no effect unless encoding failed
            self._flush()
        if self._call.pending_bytes + self._queued_bytes > self._streams.unread_bytes:
            self._abort(
                ResourceExhausted(f"more than {self._streams.unread_bytes} bytes of responses are unread: read faster")
            )
        elif final:
            self._start_queued()

    def _encode(self, slot: _Slot, result: InferResponse | BaseException | None, final: bool) -> list[Buffer] | None:
        if result is None:
            if not slot.empty_final:
                return None
            result = InferResponse(slot.model_name, slot.version, (), slot.id)
        if isinstance(result, BaseException):
            return self._error(slot, result)
        plan = slot.plan
        pieces = encode_response(result) if plan is None else encode_response(plan.apply(result), plan.placed)
        pieces.append(self._streams.final_parameter[final])
        return [_RESPONSE_TAG + encode_varint(sum(map(len, pieces))), *pieces]

    def _error(self, slot: _Slot, error: BaseException) -> list[Buffer]:
        if isinstance(error, HeadraceError):
            text = error.message.encode(errors="replace").decode()
        else:
            log.error("stream request failed", exc_info=error)
            text = INTERNAL_TEXT
        response = self._streams.error_response(error_message=text)
        response.infer_response.id = slot.id
        response.infer_response.model_name = slot.model_name
        response.infer_response.parameters[FINAL].bool_param = True
        return [response.SerializeToString()]

    def _flush(self) -> None:
        """Send queued responses in order."""
        order = self._order
        while order:
            slot = order[0]
            for message in slot.queued:
                self._queued_bytes -= sum(map(len, message))
                self._write(message)
            slot.queued = []
            if not slot.done:
                return
            order.popleft()

    def _write(self, message: list[Buffer]) -> None:
        if not self._call.send(message):
            self._blocked = True
            self._call.pause()

    def _abort(self, error: BaseException) -> None:
        self._cancel()
        self._call.fail(error)

    def finish_if_over(self) -> None:
        """End the call if all requests are answered and no more are accepted."""
        if self._running or self._backlog or self._call.over:
            return
        if self._half_closed:
            self._call.finish()
        elif self._streams.draining:
            self._call.fail(Unavailable("the server is stopping: open the stream again to reach another one"))
