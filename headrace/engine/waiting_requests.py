# SPDX-License-Identifier: Apache-2.0
"""Requests that wait until their model is loaded. The data plane makes them for models that load on demand.

To its caller such a request is a `PendingRequest` like any other. When the model serves it is sent on, with the callbacks
here between the version and the caller, so that the caller is answered only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Self

from headrace.core.errors import HeadraceError
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.repository.on_demand import OnDemandModels
from headrace.engine.scheduling.pending_request import (
    ANSWERED,
    RUNNING,
    ComputeListener,
    PendingRequest,
    ResponseCallback,
    StreamCallback,
)


class _AbsentModel:
    """The owner of a waiting request: no version counts it yet."""

    version_text = ""
    tracks_requests = False
    recorder: ComputeListener | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def settle(self, pending: PendingRequest, outputs: Sequence[Tensor] | BaseException | None) -> None:
        """Count nothing."""


class _Waiting(PendingRequest):
    """A request whose model is being loaded."""

    waits_for_model = True

    def __init__(self, request: InferRequest, done: ResponseCallback) -> None:
        super().__init__(_AbsentModel(request.model_name), request, 0, None, done, monotonic_ns())
        self.give_up: Callable[[], None] | None = None
        """Stops waiting for the model; the load goes on."""
        self.on_loaded: Callable[[float], None] | None = None
        """Called with the seconds that the request waited, before it is sent to the model."""
        self._sent: PendingRequest | None = None
        self.on_cancel = self._stop

    def wait(self, models: OnDemandModels) -> Self:
        """Wait for the model; raise if it cannot be loaded."""
        try:
            self.give_up = models.wait(self.request.model_name, self.loaded)
        except HeadraceError:
            self._release()
            raise
        return self

    def loaded(self, problem: HeadraceError | None) -> None:
        """Send the request to its model, or answer why that was not loaded."""
        self.give_up = None
        if self.state == ANSWERED:
            return
        if problem is None:
            if self.on_loaded is not None:
                self.on_loaded((monotonic_ns() - self.arrived_ns) / 1e9)
            self.state = RUNNING
            try:
                self._sent = self._send()
            except Exception as error:
                self._fail(error)
        else:
            self._fail(problem)

    def _send(self) -> PendingRequest:
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        self.on_cancel = None
        self.finish(error)
        self._release()

    def _release(self) -> None:
        """Drop what refers back to this object, so that nothing of a request stays until a collection."""
        self.on_cancel = self.on_loaded = self._sent = None

    def _stop(self) -> None:
        give_up, self.give_up = self.give_up, None
        if give_up is not None:
            give_up()
        if self._sent is not None:
            self._sent.cancel()
        self._release()


class WaitingRequest(_Waiting):
    """A waiting request with one response."""

    def __init__(
        self,
        request: InferRequest,
        done: ResponseCallback,
        infer: Callable[[InferRequest, ResponseCallback], PendingRequest],
    ) -> None:
        super().__init__(request, done)
        self._infer = infer

    def _send(self) -> PendingRequest:
        return self._infer(self.request, self._answered)

    def _answered(self, result: InferResponse | BaseException) -> None:
        if self.state != ANSWERED:
            self.state = ANSWERED
            done, self.done = self.done, _ignore
            self._release()
            done(result)


class WaitingStream(_Waiting):
    """A waiting request with any number of responses."""

    def __init__(
        self,
        request: InferRequest,
        on_response: StreamCallback,
        infer_stream: Callable[[InferRequest, StreamCallback], PendingRequest],
    ) -> None:
        super().__init__(request, lambda result: on_response(result, True))
        self._callback = on_response
        self._infer_stream = infer_stream

    def _send(self) -> PendingRequest:
        return self._infer_stream(self.request, self._receive)

    def _receive(self, result: InferResponse | BaseException | None, final: bool) -> None:
        if self.state == ANSWERED:
            return
        callback = self._callback
        if final:
            self.state = ANSWERED
            self._callback, self.done = _ignore_stream, _ignore
            self._release()
        callback(result, final)


def _ignore(result: InferResponse | BaseException | None) -> None:
    """The callback of a request that is already answered."""


def _ignore_stream(result: InferResponse | BaseException | None, final: bool) -> None:
    """The callback of a stream that is already answered."""
