# SPDX-License-Identifier: Apache-2.0
"""`/predict` over gRPC: `InferenceService` with `Predict` and `PredictStream`.

The model is the default one, or the one that the metadata key `model` names. A stream answers in the order of its
messages. The codec reads the floats of a `PredictRequest` in place when they are all it has, as generated clients write
it; protobuf parses any other form.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache, partial
from importlib.resources import files
from time import perf_counter
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from headrace.api.model_waits import wait_for_model, waiting_unary
from headrace.api.predict.models import Models
from headrace.api.predict.ordered_responses import MOST_UNREAD_BYTES, OrderedResponses, ResponseSlot
from headrace.api.predict.predictor import Predictor
from headrace.api.predict.requests import FlatRequestParser, ParsedRequest, RequestParser, StickyKeyOf, only_output
from headrace.api.predict.settings import PredictSettings
from headrace.api.predict.validation import InputValidator
from headrace.core.dtypes import BF16, FP32, bf16_to_float32
from headrace.core.errors import HeadraceError, InvalidArgument, ResourceExhausted, Unavailable
from headrace.core.protobuf import Schema
from headrace.core.requests import InferResponse
from headrace.core.tensors import Buffer, Tensor
from headrace.core.wire_format import InvalidMessage, decode_varint, encode_varint
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.residency import ModelNotLoaded
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.heads import RequestHead

_MODEL = b"model"


_FLOATS_TAG = 0x0A
_VERSION_TAG = b"\x12"
_LATENCY = struct.Struct("<Bf")
_LATENCY_TAG = 0x1D
_FLOAT_BYTES = 4
SERVICE = "InferenceService"


class PredictGrpc:
    """Handlers over one data plane."""

    def __init__(
        self, plane: DataPlane, settings: PredictSettings | None = None, key_of: StickyKeyOf | None = None
    ) -> None:
        settings = settings or PredictSettings()
        validator = InputValidator(settings.checks)
        self.plane = plane
        self._models = Models(plane, settings, validator)
        self._parser = FlatRequestParser(RequestParser(self._models, validator, key_of), validator)
        self._codec = PredictCodec()
        self.predictor = Predictor(plane, settings.timeout_seconds)
        self.draining = False
        self._streams: WeakSet[_Stream] = WeakSet()

    def add_to(self, services: Services) -> None:
        """Register the methods."""
        services.unary(SERVICE, "Predict", waiting_unary(self.plane, self.predict), scope="infer")
        services.streaming(SERVICE, "PredictStream", self.open_stream, scope="infer")

    def drain(self) -> None:
        """End each stream once its requests are answered: the server is stopping."""
        self.draining = True
        for stream in list(self._streams):
            stream.finish_if_over()

    def predict(self, call: GrpcCall, message: Buffer) -> None:
        """Answer one prediction."""
        started = perf_counter()
        request = self.request(call.head, message)
        response = self.predictor.predict_now(request)
        if response is not None:
            call.reply(self.encoded(request, response, started))
            return

        def on_responses(result: Sequence[InferResponse] | BaseException) -> None:
            if isinstance(result, BaseException):
                call.fail(result)
                return
            try:
                call.reply(self.encoded(request, result[0], started))
            except Exception as error:
                call.fail(error)

        call.on_cancel = self.predictor.predict(request, on_responses).cancel

    def open_stream(self, call: GrpcCall) -> None:
        """Open a stream of predictions."""
        self._streams.add(_Stream(self, call))

    def request(self, head: RequestHead, message: Buffer) -> ParsedRequest:
        """Parse a message."""
        numbers, wanted = self._codec.decode(message)
        model = head.by_name.get(_MODEL)
        name = self._models.default() if model is None else model.decode("latin-1")
        return self._parser.parse_floats(name, wanted, head, numbers)

    def encoded(self, request: ParsedRequest, response: InferResponse, started: float) -> list[Buffer]:
        """Encode a response."""
        tensor = only_output(request, response)
        label = request.model.labels.label(response.model_version)
        return self._codec.encode(tensor, label, (perf_counter() - started) * 1000)


class _Stream:
    """One call of `PredictStream`."""

    def __init__(self, owner: PredictGrpc, call: GrpcCall) -> None:
        self._owner = owner
        self._call = call
        self._half_closed = False
        self._responses = OrderedResponses(self._begin, self._send, call.pause, call.resume, self._overflow)
        self._responses.on_empty = self.finish_if_over
        call.on_message = self._on_message
        call.on_half_close = self._on_half_close
        call.on_writable = self._responses.writable
        call.on_cancel = self._responses.close

    def finish_if_over(self) -> None:
        """End the call if all requests are answered and no more are accepted."""
        if not self._responses.empty or self._call.over:
            return
        if self._half_closed:
            self._call.finish()
        elif self._owner.draining:
            self._call.fail(Unavailable("the server is stopping: open the stream again to reach another one"))

    def _on_message(self, message: Buffer) -> None:
        self._responses.submit(message, len(message))

    def _on_half_close(self) -> None:
        self._half_closed = True
        self.finish_if_over()

    def _begin(self, slot: ResponseSlot, message: Buffer) -> None:
        started = perf_counter()
        try:
            request = self._owner.request(self._call.head, message)
            response = self._owner.predictor.predict_now(request)
            if response is not None:
                self._put(slot, self._owner.encoded(request, response, started))
                return
            waiting = self._owner.predictor.predict(request, partial(self._on_responses, slot, request, started))
            slot.cancel = waiting.cancel
        except ModelNotLoaded as missing:
            slot.cancel = wait_for_model(self._owner.plane, missing, partial(self._resume, slot, message))
        except Exception as error:
            slot.put(error)

    def _resume(self, slot: ResponseSlot, message: Buffer, problem: HeadraceError | None) -> None:
        """Continue a message when its model is loaded."""
        if slot.over:
            return
        if problem is not None:
            slot.put(problem)
        else:
            self._begin(slot, message)

    def _on_responses(
        self,
        slot: ResponseSlot,
        request: ParsedRequest,
        started: float,
        result: Sequence[InferResponse] | BaseException,
    ) -> None:
        if slot.over:
            return
        if isinstance(result, BaseException):
            slot.put(result)
            return
        try:
            self._put(slot, self._owner.encoded(request, result[0], started))
        except Exception as error:
            slot.put(error)

    def _put(self, slot: ResponseSlot, message: list[Buffer]) -> None:
        slot.put(message, sum(map(len, message)))

    def _send(self, message: list[Buffer] | BaseException) -> bool:
        if isinstance(message, BaseException):
            self._responses.close()
            self._call.fail(message)
            return True
        return self._call.send(message)

    def _overflow(self) -> None:
        self._responses.close()
        self._call.fail(ResourceExhausted(f"more than {MOST_UNREAD_BYTES} bytes of responses are unread: read faster"))


class PredictCodec:
    """Decodes `PredictRequest` and encodes `PredictResponse`."""

    def __init__(self) -> None:
        self._request = predict_schema().message("PredictRequest")

    def decode(self, message: Buffer) -> tuple[npt.NDArray[np.float32], str]:
        """Return the inputs and the requested version."""
        try:
            if len(message) > 2 and message[0] == _FLOATS_TAG:
                size, start = decode_varint(message, 1, len(message))
                if start + size == len(message) and size % _FLOAT_BYTES == 0:
                    return np.frombuffer(message, np.float32, offset=start), ""
            request = self._request.FromString(bytes(message))
        except (DecodeError, InvalidMessage):
            raise InvalidArgument("the message is not a PredictRequest") from None
        return np.array(request.inputs, np.float32), request.model_version

    def encode(self, tensor: Tensor, version: str, latency_ms: float) -> list[Buffer]:
        """Encode the output's numbers as floats."""
        numbers: Any = tensor.array
        if tensor.dtype is BF16:
            numbers = bf16_to_float32(numbers)
        elif tensor.dtype is not FP32:
            with np.errstate(over="ignore"):
                numbers = numbers.astype(np.float32)
        data = numbers.tobytes()
        label = version.encode()
        head = b"\x0a%b" % encode_varint(len(data)) if data else b""
        return [
            head,
            data,
            b"%b%b%b" % (_VERSION_TAG, encode_varint(len(label)), label) + _LATENCY.pack(_LATENCY_TAG, latency_ms),
        ]


@cache
def predict_schema() -> Schema:
    """Return the protobuf schema, loaded at first use."""
    return Schema((files("headrace.api.predict") / "_generated" / "predict.binpb").read_bytes())
