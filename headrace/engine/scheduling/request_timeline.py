# SPDX-License-Identifier: Apache-2.0
"""Timelines of single requests, recorded on demand: received, queued, batched, computed, answered.

A version gives requests to the recorder (`TimelineRecorder.record`) on the path for special requests, and runners report
computed batches on the path for tracked requests. Requests of a model without a recorder execute no line of this. Everything
runs in the event loop's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic_ns
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.requests import InferRequest, InferResponse
from headrace.engine.scheduling.pending_request import (
    BatchRecord,
    PendingRequest,
    PendingStream,
    ResponseCallback,
    StreamCallback,
)

MAX_TIMELINES = 200
"""Timelines that a recorder keeps; the oldest are dropped."""
MAX_REQUEST_IDS = 64
"""Request ids that a recorder can wait for at a time."""

ReceivedTime = Callable[[InferRequest], int | None]
"""Returns when the bytes of a request were passed to the decoder, if that is known."""

_PHASES = {
    "arrived": "decoded",
    "batched": "queued",
    "started": "dispatched",
    "concatenated": "concatenated",
    "computed": "computed",
    "split": "split",
    "first": "computed, to the first answer",
    "answered": "returned to the event loop",
    "sent": "encoded and sent",
}
"""The phase that ends with each mark."""


class RequestTimeline:
    """The timeline of one request."""

    def __init__(self, number: int, request: InferRequest, version: str, rows: int, arrived_ns: int) -> None:
        self.number = number
        self.id = request.id
        self.model = request.model_name
        self.version = version
        self.rows = rows
        self.answers = 0
        self.outcome = ""
        """`ok`, or the class of the error; "" while the request is in flight."""
        self.record: BatchRecord | None = None
        self.phase_without_batch = "queued"
        """The phase before the answer if the request was never in a batch."""
        self.began = time.time() - (monotonic_ns() - arrived_ns) / 1e9
        self._marks = {"arrived": arrived_ns}

    def mark(self, name: str, at_ns: int = 0) -> None:
        """Record a time; only the first one of each name counts."""
        self._marks.setdefault(name, at_ns or monotonic_ns())

    def finish(self, result: object) -> None:
        """Record the last answer."""
        self.mark("answered")
        self.outcome = type(result).__name__ if isinstance(result, BaseException) else "ok"

    def document(self) -> dict[str, Any]:
        """Return the timeline as JSON, without its batch; times are microseconds since the first mark."""
        marks = sorted(self._marks.items(), key=lambda mark: mark[1])
        begin_ns = before_ns = marks[0][1]
        phases = []
        for name, at_ns in marks[1:]:
            phases.append(
                {
                    "name": self._phase(name),
                    "start_us": (before_ns - begin_ns) / 1000,
                    "end_us": (at_ns - begin_ns) / 1000,
                }
            )
            before_ns = at_ns
        return {
            "number": self.number,
            "id": self.id,
            "model": self.model,
            "version": self.version,
            "rows": self.rows,
            "answers": self.answers,
            "outcome": self.outcome,
            "began": self.began,
            "total_us": (before_ns - begin_ns) / 1000,
            "phases": phases,
        }

    def _phase(self, mark: str) -> str:
        if mark != "answered" or "computed" in self._marks:
            return _PHASES[mark]
        if "first" in self._marks:
            return "the other answers"
        return "computed" if "batched" in self._marks else self.phase_without_batch


class _Recorded:
    """A pending request that stores its batch record in its timeline."""

    timeline: RequestTimeline

    @property
    def batch_record(self) -> BatchRecord | None:
        """How its batch was formed, once it is in one."""
        return self.timeline.record

    @batch_record.setter
    def batch_record(self, record: BatchRecord | None) -> None:
        self.timeline.record = record
        self.timeline.mark("batched")


class RecordedRequest(_Recorded, PendingRequest):
    """A recorded request with one response."""


class RecordedStream(_Recorded, PendingStream):
    """A recorded request with any number of responses."""


class TimelineRecorder:
    """Records the timelines of one model's next requests: a number of any requests, and requests with certain ids."""

    def __init__(self, received: ReceivedTime, on_finished: Callable[[], None]) -> None:
        self.remaining = 0
        """Requests still to be recorded."""
        self.ids: set[str] = set()
        """Ids of requests that are recorded in addition."""
        self.timelines: deque[RequestTimeline] = deque(maxlen=MAX_TIMELINES)
        self.open = 0
        """Recorded requests that are in flight."""
        self._received = received
        self._on_finished = on_finished
        self._numbers = count(1)

    def record(self, pending: PendingRequest, phase_without_batch: str) -> PendingRequest:
        """Return the request to schedule in place of a valid new request: a recorded copy, or the request itself."""
        if not self._wants(pending.request):
            return pending
        timeline = self._timeline(pending.request, pending.owner.version_text, pending.rows, pending.arrived_ns)
        timeline.phase_without_batch = phase_without_batch
        self.open += 1
        owner, request, rows, key, arrived_ns = (
            pending.owner, pending.request, pending.rows, pending.key, pending.arrived_ns,
        )  # fmt: skip
        recorded: RecordedRequest | RecordedStream
        if isinstance(pending, PendingStream):
            callback = self._stream_callback(timeline, pending.on_response)
            recorded = RecordedStream(owner, request, rows, key, callback, arrived_ns)
        else:
            recorded = RecordedRequest(owner, request, rows, key, self._callback(timeline, pending.done), arrived_ns)
        recorded.timeline = timeline
        return recorded

    def rejected(
        self, request: InferRequest | PendingRequest, version: str, error: HeadraceError, arrived_ns: int
    ) -> None:
        """Record a request that validation rejected, or (a `PendingRequest`) its queue."""
        if isinstance(request, _Recorded):
            request.timeline.finish(error)
            self._closed()
        elif isinstance(request, InferRequest) and self._wants(request):
            timeline = self._timeline(request, version, 0, arrived_ns)
            timeline.phase_without_batch = "checked"
            timeline.finish(error)
            self._check_finished()

    def computed(
        self, batch: Sequence[PendingRequest], started_ns: int, concatenated_ns: int, computed_ns: int, split_ns: int
    ) -> None:
        """Record the times of a computed batch."""
        for pending in batch:
            if isinstance(pending, _Recorded):
                timeline = pending.timeline
                timeline.mark("started", started_ns)
                if concatenated_ns != started_ns:
                    timeline.mark("concatenated", concatenated_ns)
                timeline.mark("computed", computed_ns)
                timeline.mark("split", split_ns)

    def documents(self) -> list[dict[str, Any]]:
        """Return every timeline with its batch, the newest first."""
        by_record: dict[int, list[RequestTimeline]] = {}
        for timeline in self.timelines:
            if timeline.record is not None and timeline.record.requests > 1:
                by_record.setdefault(id(timeline.record), []).append(timeline)
        return [
            {**timeline.document(), "batch": _batch(timeline, by_record.get(id(timeline.record), []))}
            for timeline in reversed(self.timelines)
        ]

    def _wants(self, request: InferRequest) -> bool:
        if request.id and request.id in self.ids:
            self.ids.discard(request.id)
            return True
        if self.remaining > 0:
            self.remaining -= 1
            return True
        return False

    def _timeline(self, request: InferRequest, version: str, rows: int, arrived_ns: int) -> RequestTimeline:
        timeline = RequestTimeline(next(self._numbers), request, version, rows, arrived_ns)
        received_ns = self._received(request)
        if received_ns is not None:
            timeline.mark("received", received_ns)
        self.timelines.append(timeline)
        return timeline

    def _callback(self, timeline: RequestTimeline, done: ResponseCallback) -> ResponseCallback:
        def callback(result: InferResponse | BaseException) -> None:
            timeline.finish(result)
            timeline.answers = int(isinstance(result, InferResponse))
            try:
                done(result)
            finally:
                timeline.mark("sent")
                self._closed()

        return callback

    def _stream_callback(self, timeline: RequestTimeline, on_response: StreamCallback) -> StreamCallback:
        def callback(result: InferResponse | BaseException | None, final: bool) -> None:
            if isinstance(result, InferResponse):
                timeline.answers += 1
                if not final:
                    timeline.mark("first")
            if final:
                timeline.finish(result)
            try:
                on_response(result, final)
            finally:
                if final:
                    timeline.mark("sent")
                    self._closed()

        return callback

    def _closed(self) -> None:
        self.open -= 1
        self._check_finished()

    def _check_finished(self) -> None:
        # Not before the last request is answered: until then its runner reports when it was computed.
        if not self.remaining and not self.ids and self.open <= 0:
            self._on_finished()


def _batch(timeline: RequestTimeline, members: Sequence[RequestTimeline]) -> dict[str, Any] | None:
    record = timeline.record
    if record is None:
        return None
    others = [member for member in members if member is not timeline]
    return {
        "reason": record.reason,
        "requests": record.requests,
        "rows": record.rows,
        "left_waiting": record.left_waiting,
        "oldest_waited_us": record.oldest_waited_ns / 1000,
        "instance": record.instance,
        "with": [{"number": other.number, "id": other.id, "rows": other.rows} for other in others],
        "others": record.requests - 1 - len(others),
    }
