# SPDX-License-Identifier: Apache-2.0
"""A pending request: from the data plane, through a queue and an instance, to its response.

A version creates one for each validated request; queues and batches hold it, and runners answer it. It is also the caller's
handle for `cancel`. With it: the record of how its batch was formed, and responses in request order. Everything runs in the
event loop's thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

from headrace.core.errors import Cancelled, HeadraceError, Internal
from headrace.core.requests import NO_PARAMETERS, InferRequest, InferResponse, Parameters
from headrace.core.tensors import Tensor

log = logging.getLogger("headrace.engine")

ResponseCallback = Callable[[InferResponse | BaseException], None]
"""Receives the one response of a request."""

StreamCallback = Callable[[InferResponse | BaseException | None, bool], None]
"""Receives each response of a request, and whether it is the last; the last one may be empty (None)."""

QUEUED, RUNNING, ANSWERED = range(3)


class ComputeListener(Protocol):
    """Records when batches were computed; implemented by `request_timeline.TimelineRecorder`."""

    def computed(
        self, batch: Sequence[PendingRequest], started_ns: int, concatenated_ns: int, computed_ns: int, split_ns: int
    ) -> None:
        """Record the times of a computed batch."""


class Owner(Protocol):
    """The version that a request is for: it keeps the statistics, and its name is in the response."""

    name: str
    version_text: str
    tracks_requests: bool
    """Whether `settle` must be called for every request; otherwise a runner may count a request and answer it directly."""

    @property
    def recorder(self) -> ComputeListener | None:
        """The recorder of timelines, if there is one; then `tracks_requests` is true."""

    def settle(self, pending: PendingRequest, outputs: Sequence[Tensor] | BaseException | None) -> None:
        """Count a request that has its last response. Called just before the response is delivered."""


class PendingRequest:
    """A request with one response."""

    # Defaults that most requests never change are class attributes: each assignment in `__init__` costs every request.
    state = QUEUED
    batch_record: BatchRecord | None = None
    """How its batch was formed, once it is in one."""
    on_cancel: Callable[[], None] | None = None
    cache_key: bytes | None = None
    cache_lookup_ns = 0
    """Duration of a cache lookup that was a miss."""
    sequence: object | None = None
    """Set by the sequence scheduler."""
    expires_ns = 0
    level = 0
    """Priority level. This and `expires_ns` are set by queues with policies."""
    waits_for_model = False
    """Whether its model is being loaded (`engine.waiting_requests`)."""

    def __init__(
        self, owner: Owner, request: InferRequest, rows: int, key: Hashable, done: ResponseCallback, arrived_ns: int
    ) -> None:
        self.owner = owner
        self.request = request
        self.rows = rows
        self.key = key
        """Requests with different keys cannot be in the same batch."""
        self.done: Callable[[Any], None] = done
        """Receives the one response, or the last one of a stream, which may be None."""
        self.arrived_ns = arrived_ns

    @property
    def cancelled(self) -> bool:
        """Whether the caller has its last response or has cancelled."""
        return self.state == ANSWERED

    def cancel(self, reason: HeadraceError | None = None) -> None:
        """Cancel the request: if queued, it is not computed; if running, its result is dropped. No effect once answered."""
        if self.state == ANSWERED:
            return
        on_cancel, self.on_cancel = self.on_cancel, None
        queued = self.state == QUEUED
        try:
            self.finish(reason or Cancelled("the request was cancelled"))
        except Exception:  # an error in one caller's callback must not stop other cancellations
            log.exception("Could not notify the caller of a cancelled request.")
        if queued:
            self.request = _NO_REQUEST  # free its tensors now, not when its place in the queue is reached
        if on_cancel is not None:
            on_cancel()

    def reply(
        self,
        outputs: Sequence[Tensor] | BaseException | None,
        *,
        final: bool = True,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """Deliver the response. More than one, or none, is an error of a model that is not decoupled."""
        if self.state == ANSWERED:
            return
        if outputs is None or not (final or isinstance(outputs, BaseException)):
            outputs = _not_decoupled(self.owner.name)
        self.finish(outputs, parameters)

    def finish(self, outputs: Sequence[Tensor] | BaseException, parameters: Parameters = NO_PARAMETERS) -> None:
        """Count the request and deliver its last response."""
        self.state = ANSWERED
        owner = self.owner
        owner.settle(self, outputs)
        # Drop the callback: the caller often holds this object for `cancel`, and the cycle would stay until a collection.
        done, self.done = self.done, _ignore_response
        if isinstance(outputs, BaseException):
            done(outputs)
        else:
            done(InferResponse(owner.name, owner.version_text, outputs, self.request.id, parameters))

    def deliver(self, outputs: Sequence[Tensor]) -> None:
        """Deliver the response of a request that is already counted."""
        self.state = ANSWERED
        owner = self.owner
        done, self.done = self.done, _ignore_response
        done(InferResponse(owner.name, owner.version_text, outputs, self.request.id))


class PendingStream(PendingRequest):
    """A request with any number of responses."""

    def __init__(
        self,
        owner: Owner,
        request: InferRequest,
        rows: int,
        key: Hashable,
        on_response: StreamCallback,
        arrived_ns: int,
    ) -> None:
        super().__init__(owner, request, rows, key, partial(_call_final, on_response), arrived_ns)
        self.on_response = on_response

    def reply(
        self,
        outputs: Sequence[Tensor] | BaseException | None,
        *,
        final: bool = True,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """Deliver one of the responses."""
        if self.state == ANSWERED:
            return
        if outputs is None:
            if final:
                self.state = ANSWERED
                self.owner.settle(self, None)
                done, self.on_response, self.done = self.done, _ignore_stream, _ignore_response
                done(None)
        elif final or isinstance(outputs, BaseException):
            self.finish(outputs, parameters)
        else:
            owner = self.owner
            response = InferResponse(owner.name, owner.version_text, outputs, self.request.id, parameters)
            self.on_response(response, False)

    def finish(self, outputs: Sequence[Tensor] | BaseException, parameters: Parameters = NO_PARAMETERS) -> None:
        """Count the request and deliver its last response."""
        self.on_response = _ignore_stream
        super().finish(outputs, parameters)


_NO_REQUEST = InferRequest("", ())


def _ignore_response(result: InferResponse | BaseException | None) -> None:
    """The callback of a request that is already answered."""


def _ignore_stream(result: InferResponse | BaseException | None, final: bool) -> None:
    """The callback of a stream that is already answered."""


def _call_final(on_response: StreamCallback, result: InferResponse | BaseException | None) -> None:
    on_response(result, True)


def _not_decoupled(name: str) -> HeadraceError:
    return Internal(
        f"model '{name}' did not give exactly one response: a model that gives none or several needs "
        "'model_transaction_policy { decoupled: true }' in its configuration"
    )


BatchReason = Literal[
    "full", "preferred", "delay expired", "shape change", "idle instance", "one at a time", "sequence"
]
"""Why a batch was not larger: it was full; it had a preferred size; the queue delay of its oldest request expired; the next
request had another shape; an instance was idle and there is no queue delay; the model does not batch; it has one request of
each ready sequence."""


class BatchRecord(NamedTuple):
    """How one batch was formed."""

    reason: BatchReason
    requests: int
    rows: int
    left_waiting: int
    """Requests left in the queue."""
    oldest_waited_ns: int
    instance: str

    def __str__(self) -> str:
        return (
            f"{self.rows} row(s) of {self.requests} request(s) on {self.instance}: {self.reason}, oldest waited "
            f"{self.oldest_waited_ns / 1000:.0f} us, {self.left_waiting} left waiting"
        )


class BatchLog:
    """The most recent batches of a version, and the number of batches by reason."""

    def __init__(self) -> None:
        self.recent: deque[BatchRecord] = deque(maxlen=256)
        self.reasons: dict[str, int] = dict.fromkeys(get_args(BatchReason), 0)

    def add(self, record: BatchRecord) -> None:
        """Add a record; the oldest one is dropped."""
        self.recent.append(record)
        self.reasons[record.reason] += 1


class ResponseOrder:
    """Delivers responses in request order (`preserve_ordering`): holds each (last) response until earlier ones are done."""

    def __init__(self) -> None:
        self._responses: deque[_OrderedResponse] = deque()

    def track(self, pending: PendingRequest) -> None:
        """Deliver this request's response after those of the requests tracked before."""
        response = _OrderedResponse(pending.done)
        self._responses.append(response)
        pending.done = partial(self._answered, response)

    def _answered(self, response: _OrderedResponse, result: InferResponse | BaseException | None) -> None:
        response.result = result
        response.ready = True
        while self._responses and self._responses[0].ready:
            first = self._responses.popleft()
            try:
                first.done(first.result)
            except Exception:  # an error in one caller's callback must not affect the other responses
                log.exception("Could not deliver a response.")


class _OrderedResponse:
    __slots__ = ("done", "ready", "result")

    def __init__(self, done: Callable[[Any], None]) -> None:
        self.done = done
        self.ready = False
        self.result: InferResponse | BaseException | None = None
