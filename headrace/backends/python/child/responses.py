# SPDX-License-Identifier: Apache-2.0
"""`InferenceResponse` and its sender, and the state of a request that the server waits for."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.backends.python.child.channel import Channel
from headrace.backends.python.child.errors import ErrorCode, TritonError, TritonModelException
from headrace.backends.python.child.tensors import Tensor
from headrace.backends.python.protocol import Buffer, Kind, encode_json, pack

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

MORE, FINAL, AGAIN = 0, 1, 2
"""What a response says about later ones; AGAIN: none yet, execute the request again."""

_NEVER_ANSWERED = "the model released the request without a response: return a response, or send one"


class InferenceResponse:
    """Outputs, or an error."""

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        outputs = list(output_tensors)
        if not all(isinstance(output, Tensor) for output in outputs):
            raise TypeError("output_tensors must be a list of pb_utils.Tensor")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error must be a pb_utils.TritonError, not {type(error).__name__}")
        self._outputs = outputs
        self._error = error
        self._parameters = checked_parameters(parameters)

    @classmethod
    def received(cls, outputs: list[Tensor], parameters: dict[str, Any]) -> InferenceResponse:
        """Create a response that came from the server."""
        response = cls(outputs)
        response._parameters = parameters
        return response

    def output_tensors(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs

    def has_error(self) -> bool:
        """Return whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return encode_json(self._parameters).decode()

    def packed(self, requested: Sequence[str], channel: Channel, pieces: list[Buffer]) -> list[Any]:
        """Encode error, parameters and tensors."""
        if self._error is not None:
            return [[int(self._error.code()), self._error.message()], None, ()]
        outputs = [output.core for output in self._outputs if not requested or output.name() in requested]
        return [None, self._parameters or None, pack(outputs, channel.arena, pieces)]


def checked_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the parameters as a dictionary; raise an error for invalid ones."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


class RequestState:
    """A received request until its last response; the request, its sender and `main` share it."""

    def __init__(self, number: int, channel: Channel, wanted: Sequence[str], decoupled: bool) -> None:
        self.number = number
        self.wanted = wanted
        self.over = False
        """Whether the server has the last response."""
        self._channel = channel
        self._decoupled = decoupled
        self._closed = False
        self._sent = 0
        self._lock = threading.Lock()

    def __del__(self) -> None:
        """Send an error when nothing is left that could respond, so that the client does not wait forever."""
        if not self.over and not self._channel.closing:
            error = None if self._decoupled else [int(ErrorCode.INTERNAL), _NEVER_ANSWERED]
            self._channel.send(Kind.ANSWER, {"answers": [[self.number, FINAL, error, None, None]]})

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled."""
        return self._channel.is_cancelled(self.number)

    def close(self) -> None:
        """Mark the request as complete: `main` has sent its last response."""
        self._closed = self.over = True
        self._channel.remove_request(self.number)

    def count(self, response: InferenceResponse | None, final: bool) -> None:
        """Check that a response may be sent now, and record it."""
        with self._lock:
            if not self._decoupled:
                if response is not None and self._sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send more than one response."
                    )
                if response is None and not self._sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                        "response."
                    )
            if self._closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self._closed = final
            self._sent += 1

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Send a response on its own."""
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"response must be a pb_utils.InferenceResponse, not {type(response).__name__}")
        self.count(response, bool(flags))
        if self.over:
            return
        pieces: list[Buffer] = []
        # A model that is not decoupled has one response, so its first is the last whatever the flags say.
        last = FINAL if flags or not self._decoupled else MORE
        if response is None:
            answer = [self.number, last, None, None, None]
        else:
            answer = [self.number, last, *response.packed(self.wanted, self._channel, pieces)]
        if last == FINAL:
            self.over = True
            self._channel.remove_request(self.number)
        self._channel.send(Kind.ANSWER, {"answers": [answer]}, pieces)
        self._channel.apply_backpressure()


class InferenceResponseSender:
    """Sends responses at any time, from any thread."""

    __slots__ = ("_state",)

    def __init__(self, state: RequestState) -> None:
        self._state = state

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL marks the last one."""
        self._state.send(response, flags)

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled."""
        return self._state.is_cancelled()
