# SPDX-License-Identifier: Apache-2.0
"""v2 over gRPC: ModelStreamInfer, any number of requests and answers on one call.

Registered by `grpc`. Requests of a stream are computed at the same time. Answers of models that give one each are written
in the order of the requests, as Triton does; those of decoupled models as they come. A client that does not read its
answers is not read from either; one that lets more than a limit pile up is broken off, since a model cannot be held back.
"""

from __future__ import annotations

import logging
from collections import deque
from weakref import WeakSet

from headrace.api.v2.errors import told
from headrace.api.v2.grpc_codec import GrpcCodec, encode_response, encoded_parameters, varint
from headrace.api.v2.outputs import OutputPlan, SpecialOutputs
from headrace.api.v2.parameters import EMPTY_FINAL, FINAL, HeaderForwarding
from headrace.api.v2.schema import SERVICE, inference_schema
from headrace.api.v2.shared import V2Shared
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, ResourceExhausted, Unavailable
from headrace.core.messages import InferRequest, InferResponse
from headrace.engine.scheduling.pending import Pending
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Buffer

log = logging.getLogger("headrace.api")

MOST_REQUESTS = 1024
"""Of one stream at the same time; more wait unread."""
MOST_REQUEST_BYTES = 64 * 1024 * 1024
"""The same in bytes. One request alone may be as large as a message may be."""

_RESPONSE_TAG = bytes((2 << 3 | 2,))
_REAL_STATUS = b"triton_grpc_error"


class GrpcStreams:
    """Opens streams."""

    def __init__(self, shared: V2Shared, codec: GrpcCodec, forwarding: HeaderForwarding | None) -> None:
        self.shared = shared
        self.plane = shared.plane
        self.codec = codec
        self.forwarding = forwarding
        self.unread_bytes = shared.settings.stream_unread_bytes
        self.error_response = inference_schema().message("inference.ModelStreamInferResponse")
        self.draining = False
        self._opened: WeakSet[_InferStream] = WeakSet()
        self.final_parameter = {final: encoded_parameters({FINAL: final}) for final in (False, True)}

    def add_to(self, services: Services) -> None:
        """Serve the method."""
        services.streaming(SERVICE, "ModelStreamInfer", self.shared.grpc_gate.grpc("inference", self.open))

    def open(self, call: GrpcCall) -> None:
        """Begin a stream."""
        self._opened.add(_InferStream(self, call))

    def drain(self) -> None:
        """The server is about to stop: end every stream, now or as soon as what it has been sent is answered.

        A client may leave a stream open for as long as it lives, and the server would wait for it.
        """
        self.draining = True
        for stream in list(self._opened):
            stream.finish_if_over()


class _Slot:
    """One request of a stream and what has come of it."""

    __slots__ = (
        "done",
        "empty_final",
        "id",
        "kept",
        "model_name",
        "ordered",
        "pending",
        "plan",
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
        self.pending: Pending | None = None
        self.kept: list[list[Buffer]] = []
        """Answers that wait for those of earlier requests."""
        self.done = False

    def answered(self, result: InferResponse | BaseException | None, final: bool) -> None:
        """See `Answered`."""
        self.stream.answered(self, result, final)


class _InferStream:
    """One call."""

    def __init__(self, streams: GrpcStreams, call: GrpcCall) -> None:
        self._streams = streams
        self._call = call
        self._real_status = (call.head.get(_REAL_STATUS) or b"").lower() == b"true"
        self._order: deque[_Slot] = deque()
        self._running: set[_Slot] = set()
        self._running_bytes = 0
        self._kept_bytes = 0
        self._backlog: deque[Buffer] = deque()
        self._blocked = False
        self._going_on = False
        self._ended = False
        call.on_message = self._on_message
        call.on_half_close = self._on_half_close
        call.on_cancel = self._cancel
        call.on_writable = self._on_writable

    # What the client does.

    def _on_message(self, message: Buffer) -> None:
        if self._backlog or self._full:
            self._backlog.append(message)
        else:
            self._start(message)
        if self._full:
            self._call.pause()

    def _on_half_close(self) -> None:
        self._ended = True
        self.finish_if_over()

    def _on_writable(self) -> None:
        self._blocked = False
        self._go_on()

    def _cancel(self) -> None:
        """The call is over: nobody waits for what is still computed."""
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

    def _go_on(self) -> None:
        """Take what waits, and let the client send more, as far as there is room."""
        if self._going_on:  # a request that was refused at once: whoever took it goes on by itself
            return
        self._going_on = True
        try:
            while self._backlog and not self._full:
                self._start(self._backlog.popleft())
        finally:
            self._going_on = False
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
            slot.answered(error, True)
            return
        plane = self._streams.plane
        version = plane.find(request.model_name, request.model_version)
        if version is not None:
            slot.version = version.version_text
            slot.ordered = not version.config.decoupled
        if slot.ordered:
            self._order.append(slot)
        try:
            slot.pending = self._streams.shared.infer_stream(self._call.head, request, slot.answered)
        except HeadraceError as error:
            slot.answered(told(plane, request, error, "ModelStreamInfer RPC"), True)

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

    # Answers.

    def answered(self, slot: _Slot, result: InferResponse | BaseException | None, final: bool) -> None:
        """A request has one more answer, or its last."""
        if slot not in self._running:
            return
        try:
            message = self._encoded(slot, result, final)
        except Exception as error:
            # What cannot be written is the request's end, whatever else its model has to say.
            result, message, final = error, self._error(slot, error), True
        if isinstance(result, BaseException) and self._real_status:
            self._break_off(result)
            return
        if message is not None:
            if slot.ordered and self._order[0] is not slot:
                slot.kept.append(message)
                self._kept_bytes += sum(map(len, message))
            else:
                self._write(message)
        if final:
            slot.done = True
            self._running.discard(slot)
            self._running_bytes -= slot.size
            pending, slot.pending = slot.pending, None
            if pending is not None and isinstance(result, BaseException):
                pending.cancel()  # without effect but in that case
            self._flush()
        if self._call.pending_bytes + self._kept_bytes > self._streams.unread_bytes:
            self._break_off(
                ResourceExhausted(f"more than {self._streams.unread_bytes} bytes of answers were not read: read faster")
            )
        elif final:
            self._go_on()

    def _encoded(self, slot: _Slot, result: InferResponse | BaseException | None, final: bool) -> list[Buffer] | None:
        if result is None:
            if not slot.empty_final:
                return None
            result = InferResponse(slot.model_name, slot.version, (), slot.id)
        if isinstance(result, BaseException):
            return self._error(slot, result)
        if slot.plan is None:
            pieces = encode_response(result)
        else:
            pieces = encode_response(slot.plan.carried_out(result), slot.plan.placed)
        pieces.append(self._streams.final_parameter[final])
        return [_RESPONSE_TAG + varint(sum(map(len, pieces))), *pieces]

    def _error(self, slot: _Slot, error: BaseException) -> list[Buffer]:
        if isinstance(error, HeadraceError):
            text = error.message.encode(errors="replace").decode()
        else:
            log.error("a request of a stream failed", exc_info=error)
            text = INTERNAL_TEXT
        response = self._streams.error_response(error_message=text)
        response.infer_response.id = slot.id
        response.infer_response.model_name = slot.model_name
        response.infer_response.parameters[FINAL].bool_param = True
        return [response.SerializeToString()]

    def _flush(self) -> None:
        """Write what waited for the requests before it."""
        order = self._order
        while order:
            slot = order[0]
            for message in slot.kept:
                self._kept_bytes -= sum(map(len, message))
                self._write(message)
            slot.kept = []
            if not slot.done:
                return
            order.popleft()

    def _write(self, message: list[Buffer]) -> None:
        if not self._call.send(message):
            self._blocked = True
            self._call.pause()

    def _break_off(self, error: BaseException) -> None:
        self._cancel()
        self._call.fail(error)

    def finish_if_over(self) -> None:
        """End the call if all is answered and nothing more is to come, or to be taken."""
        if self._running or self._backlog or self._call.over:
            return
        if self._ended:
            self._call.finish()
        elif self._streams.draining:
            self._call.fail(Unavailable("the server is stopping: open the stream again to reach another one"))
