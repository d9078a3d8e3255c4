# SPDX-License-Identifier: Apache-2.0
"""`/predict` over gRPC: `InferenceService`, with `Predict` and `PredictStream`.

Made by composition roots. The model is the default one, or the one that the metadata key `model` names. A stream answers in
the order of its messages; a message that cannot be answered ends it with that error, since gRPC has no other way to say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from weakref import WeakSet

from headrace.api.predict.asking import Asking
from headrace.api.predict.checks import Checker
from headrace.api.predict.flat import FlatReader, only_output
from headrace.api.predict.grpc_codec import PredictCodec
from headrace.api.predict.lanes import MOST_UNREAD_BYTES, Lane, Slot
from headrace.api.predict.models import Models
from headrace.api.predict.reading import KeyOf, Question, Reader
from headrace.api.predict.schema import SERVICE
from headrace.api.predict.settings import PredictSettings
from headrace.core.errors import ResourceExhausted, Unavailable
from headrace.core.messages import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Buffer
from headrace.net.http.heads import RequestHead

_MODEL = b"model"


class PredictGrpc:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, settings: PredictSettings | None = None, key_of: KeyOf | None = None) -> None:
        settings = settings or PredictSettings()
        checker = Checker(settings.checks)
        self._models = Models(plane, settings, checker)
        self._reader = FlatReader(Reader(self._models, checker, key_of), checker)
        self._codec = PredictCodec()
        self.asking = Asking(plane, settings.timeout_seconds)
        self.draining = False
        self._streams: WeakSet[_Stream] = WeakSet()

    def add_to(self, services: Services) -> None:
        """Serve the methods."""
        services.unary(SERVICE, "Predict", self.predict)
        services.streaming(SERVICE, "PredictStream", self.open_stream)

    def drain(self) -> None:
        """The server is about to stop: streams end when what they were sent is answered."""
        self.draining = True
        for stream in list(self._streams):
            stream.finish_if_over()

    def predict(self, call: GrpcCall, message: Buffer) -> None:
        """One prediction."""
        started = perf_counter()
        question = self.question(call.head, message)
        answer = self.asking.at_once(question)
        if answer is not None:
            call.reply(self.encoded(question, answer, started))
            return

        def answered(result: Sequence[InferResponse] | BaseException) -> None:
            if isinstance(result, BaseException):
                call.fail(result)
                return
            try:
                call.reply(self.encoded(question, result[0], started))
            except Exception as error:
                call.fail(error)

        call.on_cancel = self.asking.later(question, answered).cancel

    def open_stream(self, call: GrpcCall) -> None:
        """Any number of predictions."""
        self._streams.add(_Stream(self, call))

    def question(self, head: RequestHead, message: Buffer) -> Question:
        """What a message asks."""
        numbers, wanted = self._codec.decode(message)
        model = head.by_name.get(_MODEL)
        name = self._models.default() if model is None else model.decode("latin-1")
        return self._reader.floats(name, wanted, head, numbers)

    def encoded(self, question: Question, answer: InferResponse, started: float) -> list[Buffer]:
        """The message of an answer."""
        tensor = only_output(question, answer)
        label = question.known.labels.label(answer.model_version)
        return self._codec.encode(tensor, label, (perf_counter() - started) * 1000)


class _Stream:
    """One call of `PredictStream`."""

    def __init__(self, owner: PredictGrpc, call: GrpcCall) -> None:
        self._owner = owner
        self._call = call
        self._ended = False
        self._lane = Lane(self._begin, self._send, call.pause, call.resume, self._overflow)
        self._lane.on_empty = self.finish_if_over
        call.on_message = self._on_message
        call.on_half_close = self._on_half_close
        call.on_writable = self._lane.writable
        call.on_cancel = self._lane.close

    def finish_if_over(self) -> None:
        """End the call if all is answered and nothing more is to come, or to be taken."""
        if not self._lane.empty or self._call.over:
            return
        if self._ended:
            self._call.finish()
        elif self._owner.draining:
            self._call.fail(Unavailable("the server is stopping: open the stream again to reach another one"))

    def _on_message(self, message: Buffer) -> None:
        self._lane.ask(message, len(message))

    def _on_half_close(self) -> None:
        self._ended = True
        self.finish_if_over()

    def _begin(self, slot: Slot, message: Buffer) -> None:
        started = perf_counter()
        try:
            question = self._owner.question(self._call.head, message)
            answer = self._owner.asking.at_once(question)
            if answer is not None:
                self._put(slot, self._owner.encoded(question, answer, started))
                return
            waiting = self._owner.asking.later(question, partial(self._answered, slot, question, started))
            slot.cancel = waiting.cancel
        except Exception as error:
            slot.put(error)

    def _answered(
        self, slot: Slot, question: Question, started: float, result: Sequence[InferResponse] | BaseException
    ) -> None:
        if slot.over:
            return
        if isinstance(result, BaseException):
            slot.put(result)
            return
        try:
            self._put(slot, self._owner.encoded(question, result[0], started))
        except Exception as error:
            slot.put(error)

    def _put(self, slot: Slot, message: list[Buffer]) -> None:
        slot.put(message, sum(map(len, message)))

    def _send(self, message: list[Buffer] | BaseException) -> bool:
        if isinstance(message, BaseException):
            self._lane.close()
            self._call.fail(message)
            return True
        return self._call.send(message)

    def _overflow(self) -> None:
        self._lane.close()
        self._call.fail(ResourceExhausted(f"more than {MOST_UNREAD_BYTES} bytes of answers were not read: read faster"))
