# SPDX-License-Identifier: Apache-2.0
"""`InferenceRequest`: a request from the server, or one that the model creates to call another model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

from headrace.backends.python.child.channel import Call, Channel, Reply
from headrace.backends.python.child.errors import ErrorCode, TritonError, TritonModelException
from headrace.backends.python.child.responses import (
    InferenceResponse,
    InferenceResponseSender,
    RequestState,
    checked_parameters,
)
from headrace.backends.python.child.session import current
from headrace.backends.python.child.tensors import Tensor, received
from headrace.backends.python.protocol import Buffer, Unpacker, encode_json, pack

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_NOT_ONE = (
    "Model {} is using the decoupled. The current BLS request call doesn't support models using the decoupled "
    "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models."
)


class MemoryType(IntEnum):
    """The preferred memory of another model's outputs; only CPU memory exists here."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


class PreferredMemory:
    """Accept the arguments and ignore them: tensors are always in CPU memory."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request; empty here."""

    def get_context(self) -> str | None:
        """Return the trace's context."""
        return None


class InferenceRequest:
    """A request."""

    _state: RequestState | None = None
    release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("InferenceRequest needs inputs, requested_output_names and model_name")
        if not all(isinstance(tensor, Tensor) for tensor in inputs):
            raise TypeError("inputs must be a list of pb_utils.Tensor")
        if isinstance(requested_output_names, str):
            raise TypeError("requested_output_names must be a list of strings")
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._wanted = list(requested_output_names)
        self._model_name = model_name
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._trace = trace
        self._parameters = checked_parameters(parameters)

    def inputs(self) -> list[Tensor]:
        """Return the inputs."""
        return self._inputs

    def request_id(self) -> str:
        """Return the client's id of the request, or ""."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the sequence's id, or 0."""
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        """Return the names of the requested outputs."""
        return self._wanted

    def model_name(self) -> str:
        """Return the model's name."""
        return self._model_name

    def flags(self) -> int:
        """Return the sum of TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags."""
        self._flags = int(flags)

    def timeout(self) -> int:
        """Return the timeout in microseconds, or 0."""
        return self._timeout

    def parameters(self) -> str:
        """Return the request's parameters as JSON."""
        return encode_json(self._parameters).decode()

    def trace(self) -> InferenceTrace:
        """Return its trace."""
        return self._trace or InferenceTrace()

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the sender for late or multiple responses."""
        if self._state is None:
            raise TritonModelException("only requests that were given to execute() have a response sender")
        return InferenceResponseSender(self._state)

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled."""
        return self._state is not None and self._state.is_cancelled()

    def set_release_flags(self, flags: int) -> None:
        """Set whether the request is complete or is to be executed again."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"Unable to set release flags. Unsupported flag {flags} provided.")
        self.release_flags = flags

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Run the request on another model and wait. A failure is a response with an error."""
        channel = current().channel
        call = self._call(channel, None)
        if decoupled:
            return ResponseIterator(channel, call)
        replies: list[Reply] = []
        while (reply := channel.next_reply(call)) is not None:
            replies.append(reply)
        return self._only(replies)

    def async_exec(self, decoupled: bool = False) -> asyncio.Future[InferenceResponse | ResponseIterator]:
        """Run the request on another model; return an awaitable."""
        loop = asyncio.get_running_loop()
        channel = current().channel
        future: asyncio.Future[InferenceResponse | ResponseIterator] = loop.create_future()
        if decoupled:
            future.set_result(ResponseIterator(channel, self._call(channel, None)))
            return future
        calls: list[Call] = []

        def finish() -> None:
            if not future.done():
                future.set_result(self._only(list(calls[0].replies)))

        def wake(_: Reply) -> None:
            # Runs in the reading thread, which must continue even if the loop was closed meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(finish)

        calls.append(self._call(channel, wake))
        return future

    def _call(self, channel: Channel, wake: Any) -> Call:
        parameters = dict(self._parameters)
        if self._correlation_id:
            parameters["sequence_id"] = self._correlation_id
            parameters["sequence_start"] = bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
            parameters["sequence_end"] = bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        if self._timeout:
            parameters["timeout"] = int(self._timeout)
        pieces: list[Buffer] = []
        meta = {
            "op": "infer",
            "model": self._model_name,
            "version": "" if int(self._model_version) < 0 else str(self._model_version),
            "id": self._request_id,
            "outputs": self._wanted,
            "parameters": parameters,
            "blocks": current().blocks(),
            "tensors": pack([tensor.core for tensor in self._inputs], channel.arena, pieces),
        }
        return channel.call(meta, pieces, wake)

    def _only(self, replies: list[Reply]) -> InferenceResponse:
        if replies and (len(replies) == 1 or replies[-1].meta.get("error")) and not replies[-1].meta.get("empty"):
            return response_of(replies[-1])
        return InferenceResponse([], TritonError(_NOT_ONE.format(self._model_name), ErrorCode.UNSUPPORTED))


class ResponseIterator:
    """The responses of a decoupled model, in order of arrival. The last may be empty and only mark the end."""

    def __init__(self, channel: Channel, call: Call) -> None:
        self._channel = channel
        self._call = call

    def __iter__(self) -> Iterator[InferenceResponse]:
        """Return itself."""
        return self

    def __next__(self) -> InferenceResponse:
        """Wait for the next response."""
        reply = self._channel.next_reply(self._call)
        if reply is None:
            raise StopIteration
        return response_of(reply)

    def cancel(self) -> None:
        """Stop receiving responses."""
        self._channel.abandon(self._call)


def response_of(reply: Reply) -> InferenceResponse:
    """Convert a reply of the server to a response."""
    error = reply.meta.get("error")
    if error:
        return InferenceResponse([], TritonError(error[1], ErrorCode(error[0])))
    return InferenceResponse.received(
        [received(tensor) for tensor in reply.tensors], reply.meta.get("parameters") or {}
    )


def received_request(
    entry: list[Any], unpacker: Unpacker, state: RequestState | None = None
) -> tuple[InferenceRequest, RequestState]:
    """Decode a request that `instance.packed_request` encoded; a rescheduled request keeps its state."""
    session = current()
    number, request_id, correlation_id, flags, timeout, parameters, wanted, model, version, packed = entry
    request = InferenceRequest.__new__(InferenceRequest)
    request._request_id = request_id
    request._correlation_id = correlation_id
    request._inputs = [received(tensor) for tensor in unpacker.tensors(packed)]
    request._wanted = wanted or list(session.output_names)
    request._model_name = model
    request._model_version = version
    request._flags = flags
    request._timeout = timeout
    request._trace = None
    request._parameters = parameters or {}
    if state is None:
        state = RequestState(number, session.channel, wanted or (), session.decoupled)
    request._state = state
    return request, state
