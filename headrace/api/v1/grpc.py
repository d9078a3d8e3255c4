# SPDX-License-Identifier: Apache-2.0
"""Both generations of the protocol over gRPC: the methods of `nvidia.inferenceserver.GRPCService`.

Every call that reaches its method ends with gRPC's OK; the `request_status` of the response says whether it succeeded.
An InferRequest is parsed with its header still encoded, which then shows the generation. A response is encoded around
its tensors, which are not copied.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace.api.model_waits import wait_for_model, waiting_unary
from headrace.api.v1.headers import Header, header_from_bytes
from headrace.api.v1.messages import SERVICE, message_class
from headrace.api.v1.requests import AcceptedRequest, RawInputs, RequestNumber, decode_request
from headrace.api.v1.responses import empty_header, encode_response
from headrace.api.v1.shared_memory import SharedMemory, control_shared_memory
from headrace.api.v1.status import V1Statistics, health, profile, repository_index, server_status
from headrace.core.errors import HeadraceError, InvalidArgument, Unavailable
from headrace.core.requests import InferResponse
from headrace.core.tensors import Buffer
from headrace.core.wire_format import encode_varint
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.residency import ModelNotLoaded
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services

_LOAD = 1


_MOST_REQUESTS = 64
_MOST_BYTES = 16 * 1024 * 1024
"""Unanswered requests of one stream, and their bytes, before the client is paused."""
_VERSION_FIELD = 2
_DELIMITED = 2
_STATUS_TAG, _HEADER_TAG, _RAW_TAG = (bytes((number << 3 | _DELIMITED,)) for number in (1, 2, 3))


class V1Grpc:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, statistics: V1Statistics, memory: SharedMemory | None = None) -> None:
        self._plane = plane
        self._statistics = statistics
        self._memory = memory
        # The event loop keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[Any]] = set()

    def add_to(self, services: Services) -> None:
        """Register the methods."""
        services.unary(SERVICE, "Status", self.status, scope="read", workers="gather")
        services.unary(SERVICE, "Profile", self.profile, scope="admin")
        services.unary(SERVICE, "Health", self.health, scope=None)
        infer = waiting_unary(self._plane, self.infer, self._fail_waiting)
        services.unary(SERVICE, "Infer", infer, scope="infer")
        services.streaming(SERVICE, "StreamInfer", self.stream_infer, scope="infer")
        services.unary(SERVICE, "ModelControl", self.model_control, scope="admin")
        services.unary(SERVICE, "SharedMemoryControl", self.shared_memory_control, scope="admin", workers="all")
        services.unary(SERVICE, "Repository", self.repository, scope="read")

    def status(self, call: GrpcCall, message: Buffer) -> None:
        """Return the status of the server, with one model or all."""
        request = _parse("StatusRequest", message)

        def work() -> dict[str, Any]:
            return {"server_status": server_status(self._plane, self._statistics, request.model_name)}

        self._reply(call, "StatusResponse", "status", work)

    def profile(self, call: GrpcCall, message: Buffer) -> None:
        """Start or stop profiling."""
        request = _parse("ProfileRequest", message)

        def work() -> dict[str, Any]:
            profile(self._statistics.settings, request.cmd)
            return {}

        self._reply(call, "ProfileResponse", "profile", work)

    def health(self, call: GrpcCall, message: Buffer) -> None:
        """Return whether the server is live or ready."""
        request = _parse("HealthRequest", message)
        self._reply(call, "HealthResponse", "health", lambda: {"health": health(self._plane, request.mode)})

    def shared_memory_control(self, call: GrpcCall, message: Buffer) -> None:
        """Register, unregister or list regions of shared memory."""
        request = _parse("SharedMemoryControlRequest", message)

        def work() -> dict[str, Any]:
            status = control_shared_memory(self._memory, request)
            return {} if status is None else {"shared_memory_status": status}

        self._reply(call, "SharedMemoryControlResponse", "shm", work)

    def model_control(self, call: GrpcCall, message: Buffer) -> None:
        """Load or unload a model."""
        request = _parse("ModelControlRequest", message)
        action = self._plane.load if request.type == _LOAD else self._plane.unload

        async def work() -> dict[str, Any]:
            await action(request.model_name)
            return {}

        self._reply_later(call, "ModelControlResponse", "model_control", work())

    def repository(self, call: GrpcCall, message: Buffer) -> None:
        """Return the names of all models in the repository."""
        _parse("RepositoryRequest", message)

        async def work() -> dict[str, Any]:
            return {"index": await repository_index(self._plane)}

        self._reply_later(call, "RepositoryResponse", "repository", work())

    def infer(self, call: GrpcCall, message: Buffer) -> None:
        """Run inference."""
        envelope = parse_infer_request(message, self._plane)
        header = envelope.header
        number = RequestNumber(self._statistics)

        def fail(error: BaseException) -> None:
            call.reply(encode_infer_response(self._statistics.status(number.value, error), empty_header(header), []))

        def done(result: InferResponse | BaseException) -> None:
            if isinstance(result, BaseException):
                fail(result)
                return
            try:
                encoded = encode_response(accepted, result)
                reply = encode_infer_response(self._statistics.status(number.value), encoded.header, encoded.raw)
            except Exception as error:
                fail(error)
            else:
                call.reply(reply)

        try:
            pieces = RawInputs(envelope.pieces)
            name, version = envelope.model_name, envelope.version
            accepted = decode_request(self._plane, number, name, version, header, pieces, self._memory)
            pending = self._plane.infer(accepted.request, done)
        except ModelNotLoaded:
            raise
        except Exception as error:
            fail(error)
        else:
            call.on_cancel = pending.cancel

    def _fail_waiting(self, call: GrpcCall, message: Buffer, error: BaseException) -> None:
        """Answer a request whose model could not be loaded."""
        header = parse_infer_request(message, self._plane).header
        number = RequestNumber(self._statistics)
        call.reply(encode_infer_response(self._statistics.status(number.value, error), empty_header(header), []))

    def stream_infer(self, call: GrpcCall) -> None:
        """Open a stream of inference requests."""
        InferStream(call, self._plane, self._statistics, self._memory)

    def _reply(self, call: GrpcCall, answer: str, kind: str, work: Callable[[], dict[str, Any]]) -> None:
        since = self._statistics.now()
        number = self._statistics.next_id()
        try:
            fields = work()
        except Exception as error:
            self._fail(call, answer, number, error)
            return
        self._statistics.succeeded(kind, since)
        message = message_class(answer)(request_status=self._statistics.status(number), **fields)
        call.reply(message.SerializeToString())

    def _reply_later(self, call: GrpcCall, answer: str, kind: str, work: Awaitable[dict[str, Any]]) -> None:
        since = self._statistics.now()
        number = self._statistics.next_id()
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def done(task: asyncio.Future[dict[str, Any]]) -> None:
            self._tasks.discard(task)
            error = Unavailable("the server is stopping") if task.cancelled() else task.exception()
            if error is not None:
                self._fail(call, answer, number, error)
                return
            self._statistics.succeeded(kind, since)
            message = message_class(answer)(request_status=self._statistics.status(number), **task.result())
            call.reply(message.SerializeToString())

        task.add_done_callback(done)

    def _fail(self, call: GrpcCall, answer: str, number: int, error: BaseException) -> None:
        message = message_class(answer)(request_status=self._statistics.status(number, error))
        call.reply(message.SerializeToString())


def _parse(name: str, message: Buffer) -> Any:
    try:
        return message_class(name).FromString(message)
    except DecodeError:
        raise InvalidArgument(f"the message is not a {name}") from None


class _Slot:
    """A request of a stream, in order."""

    __slots__ = ("accepted", "cancel", "header", "number", "over", "responses", "size")

    def __init__(self, size: int, number: RequestNumber) -> None:
        self.size = size
        self.number = number
        self.header: Header | None = None
        self.accepted: AcceptedRequest | None = None
        self.cancel: Callable[[], object] | None = None
        self.responses: list[list[Buffer]] = []
        """Responses that wait for those of earlier requests."""
        self.over = False


class InferStream:
    """One call of StreamInfer: requests are computed concurrently and answered in order.

    An invalid request has a response with its error, and the stream continues. A decoupled model may send any number of
    responses to a request. A client that sends faster than the server computes, or does not read, is paused.
    """

    def __init__(self, call: GrpcCall, plane: DataPlane, statistics: V1Statistics, memory: SharedMemory | None) -> None:
        self._call = call
        self._plane = plane
        self._statistics = statistics
        self._memory = memory
        self._slots: deque[_Slot] = deque()
        self._bytes = 0
        self._paused = False
        self._half_closed = False
        self._writable = True
        call.on_message = self._on_message
        call.on_half_close = self._on_half_close
        call.on_writable = self._on_writable
        call.on_cancel = self._on_cancel

    def _on_message(self, message: Buffer) -> None:
        slot = _Slot(len(message), RequestNumber(self._statistics))
        envelope = parse_infer_request(message, self._plane)
        slot.header = envelope.header
        self._slots.append(slot)
        self._bytes += slot.size
        if len(self._slots) >= _MOST_REQUESTS or self._bytes >= _MOST_BYTES:
            self._paused = True
            self._call.pause()

        self._start(slot, envelope)

    def _start(self, slot: _Slot, envelope: InferEnvelope) -> None:
        def on_response(result: InferResponse | BaseException | None, final: bool) -> None:
            self._on_response(slot, result, final)

        name, version, pieces = envelope.model_name, envelope.version, RawInputs(envelope.pieces)
        try:
            slot.accepted = decode_request(self._plane, slot.number, name, version, slot.header, pieces, self._memory)
            slot.cancel = self._plane.infer_stream(slot.accepted.request, on_response).cancel
        except ModelNotLoaded as missing:
            slot.cancel = wait_for_model(self._plane, missing, partial(self._resume, slot, envelope))
        except Exception as error:
            self._on_response(slot, error, True)

    def _resume(self, slot: _Slot, envelope: InferEnvelope, problem: HeadraceError | None) -> None:
        """Continue a request when its model is loaded."""
        if slot.over:
            return
        if problem is not None:
            self._on_response(slot, problem, True)
        else:
            self._start(slot, envelope)

    def _on_response(self, slot: _Slot, result: InferResponse | BaseException | None, final: bool) -> None:
        if slot.over:
            return
        slot.over = final
        if isinstance(result, InferResponse):
            try:
                slot.responses.append(self._encode(slot, result))
            except Exception as error:
                result = error
        if isinstance(result, BaseException):
            status = self._statistics.status(slot.number.value, result)
            slot.responses.append(encode_infer_response(status, empty_header(slot.header), []))
        self._flush()

    def _encode(self, slot: _Slot, result: InferResponse) -> list[Buffer]:
        if slot.accepted is None:
            raise RuntimeError("a response to a request that was not started")
        encoded = encode_response(slot.accepted, result)
        return encode_infer_response(self._statistics.status(slot.number.value), encoded.header, encoded.raw)

    def _flush(self) -> None:
        """Send responses in order."""
        slots = self._slots
        while slots and self._writable:
            slot = slots[0]
            while slot.responses and self._writable:
                self._writable = self._call.send(slot.responses.pop(0))
            if slot.responses or not slot.over:
                break
            slots.popleft()
            self._bytes -= slot.size
        if self._paused and len(slots) <= _MOST_REQUESTS // 2 and self._bytes <= _MOST_BYTES // 2:
            self._paused = False
            self._call.resume()
        if self._half_closed and not slots:
            self._call.finish()

    def _on_half_close(self) -> None:
        self._half_closed = True
        self._flush()

    def _on_writable(self) -> None:
        self._writable = True
        self._flush()

    def _on_cancel(self) -> None:
        slots, self._slots = self._slots, deque()
        for slot in slots:
            slot.over = True
            if slot.cancel is not None:
                slot.cancel()


@dataclass(frozen=True, slots=True)
class InferEnvelope:
    """A parsed InferRequest, with its tensors as bytes."""

    model_name: str
    version: str
    """"" for the newest version."""
    header: Header | None
    """None if it is invalid."""
    pieces: list[bytes]


def parse_infer_request(message: Buffer, plane: DataPlane) -> InferEnvelope:
    """Parse an InferRequest."""
    try:
        envelope = message_class("v0.InferEnvelope").FromString(message)
    except DecodeError:
        raise InvalidArgument("the message is not an InferRequest") from None
    header = header_from_bytes(envelope.meta_data)
    version = _text_version(envelope) if header is not None and header.is_v0 else None
    if version is None:
        version = _number_version(envelope, plane)
    return InferEnvelope(envelope.model_name, version, header, list(envelope.raw_input))


def encode_infer_response(status: Any, header: Any, raw: list[Buffer]) -> list[Buffer]:
    """Encode an InferResponse."""
    pieces: list[Buffer] = [_delimited(_STATUS_TAG, status), _delimited(_HEADER_TAG, header)]
    for data in raw:
        pieces.append(_RAW_TAG + encode_varint(len(data)))
        pieces.append(data)
    return pieces


def _text_version(envelope: Any) -> str | None:
    """Return the version that 0.7 and 0.8 send as text; None if there is none. A negative one is the newest."""
    fields = UnknownFieldSet(envelope)
    for index in range(len(fields)):
        field = fields[index]
        if field.field_number == _VERSION_FIELD and isinstance(field.data, bytes):
            text = field.data.decode(errors="replace").strip()
            return "" if text.startswith("-") else text
    return None


def _number_version(envelope: Any, plane: DataPlane) -> str:
    """Return the version that later clients send: negative is the newest. 0, the default, is too, unless it exists."""
    number: int = envelope.model_version
    if number < 0 or (number == 0 and plane.find(envelope.model_name, "0") is None):
        return ""
    return str(number)


def _delimited(tag: bytes, message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return tag + encode_varint(len(data)) + data
