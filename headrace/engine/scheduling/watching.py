# SPDX-License-Identifier: Apache-2.0
"""One request's timeline, while somebody watches its model: when it came, waited, was computed with whom, and went.

A version takes requests here (`Watch.take`) where it looks at special ones anyway, and runners tell when they computed them
(`Watch.computed`) where they look at followed ones anyway; so requests of a model that nobody watches pass no line of this.
Everything is in the loop's thread. Must not know who watches, nor for how long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic_ns
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.messages import InferRequest, InferResponse
from headrace.engine.scheduling.batches import BatchRecord
from headrace.engine.scheduling.pending import Answered, Done, Pending, StreamPending

KEPT = 200
"""Timelines of a watch; of more, the oldest are forgotten."""
IDS = 64
"""Requests that can be waited for by their ids at a time."""

Received = Callable[[InferRequest], int | None]
"""When the bytes of a request were handed to who decodes them, if that is known."""

_ENDINGS = {
    "arrived": "decoded",
    "formed": "queued",
    "started": "handed to the instance",
    "joined": "joined",
    "computed": "computed",
    "split": "cut apart",
    "first": "computed, to the first answer",
    "answered": "brought back",
    "sent": "encoded and sent",
}
"""What a request was doing until this mark."""


class Timeline:
    """One request."""

    def __init__(self, number: int, request: InferRequest, version: str, rows: int, arrived_ns: int) -> None:
        self.number = number
        self.id = request.id
        self.model = request.model_name
        self.version = version
        self.rows = rows
        self.answers = 0
        self.outcome = ""
        """What became of it: `ok`, or the name of an error; "" while it is on its way."""
        self.record: BatchRecord | None = None
        self.without_batch = "queued"
        """What it did until its answer if it never was in a batch."""
        self.began = time.time() - (monotonic_ns() - arrived_ns) / 1e9
        self._marks = {"arrived": arrived_ns}

    def mark(self, name: str, at_ns: int = 0) -> None:
        """It has come to a place; the first time counts."""
        self._marks.setdefault(name, at_ns or monotonic_ns())

    def ended(self, result: object) -> None:
        """Its last answer is there."""
        self.mark("answered")
        self.outcome = type(result).__name__ if isinstance(result, BaseException) else "ok"

    def document(self) -> dict[str, Any]:
        """As JSON, without its batch; times in microseconds since its beginning."""
        marks = sorted(self._marks.items(), key=lambda mark: mark[1])
        begin_ns = before_ns = marks[0][1]
        phases = []
        for name, at_ns in marks[1:]:
            phases.append(
                {
                    "name": self._ending(name),
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

    def _ending(self, name: str) -> str:
        if name != "answered" or "computed" in self._marks:
            return _ENDINGS[name]
        if "first" in self._marks:
            return "the other answers"
        return "computed" if "formed" in self._marks else self.without_batch


class _Watched:
    """A request whose batch is noted in its timeline."""

    timeline: Timeline

    @property
    def formed(self) -> BatchRecord | None:
        """See `Pending.formed`."""
        return self.timeline.record

    @formed.setter
    def formed(self, record: BatchRecord | None) -> None:
        self.timeline.record = record
        self.timeline.mark("formed")


class WatchedPending(_Watched, Pending):
    """One with one answer."""


class WatchedStream(_Watched, StreamPending):
    """One with any number of answers."""


class Watch:
    """The timelines of one model's next requests: so many, whichever they are, and those with certain ids."""

    def __init__(self, received: Received, over: Callable[[], None]) -> None:
        self.left = 0
        """Requests still to be taken."""
        self.ids: set[str] = set()
        """Of requests that are to be taken besides."""
        self.timelines: deque[Timeline] = deque(maxlen=KEPT)
        self.open = 0
        """Of those, requests that are on their way."""
        self._received = received
        self._over = over
        self._numbers = count(1)

    def take(self, pending: Pending, without_batch: str) -> Pending:
        """A request has come and was found right. Returns what is to go its way in its place."""
        if not self._wants(pending.request):
            return pending
        timeline = self._timeline(pending.request, pending.owner.version_text, pending.rows, pending.arrived_ns)
        timeline.without_batch = without_batch
        self.open += 1
        owner, request, rows, key, arrived_ns = (
            pending.owner, pending.request, pending.rows, pending.key, pending.arrived_ns,
        )  # fmt: skip
        made: WatchedPending | WatchedStream
        if isinstance(pending, StreamPending):
            made = WatchedStream(owner, request, rows, key, self._told_some(timeline, pending.answered), arrived_ns)
        else:
            made = WatchedPending(owner, request, rows, key, self._told(timeline, pending.done), arrived_ns)
        made.timeline = timeline
        return made

    def refused(self, request: InferRequest | Pending, version: str, error: HeadraceError, arrived_ns: int) -> None:
        """A request has come and was not let in: as such, or (a `Pending`) by its queue."""
        if isinstance(request, _Watched):
            request.timeline.ended(error)
            self._closed()
        elif isinstance(request, InferRequest) and self._wants(request):
            timeline = self._timeline(request, version, 0, arrived_ns)
            timeline.without_batch = "checked"
            timeline.ended(error)
            self._look_whether_over()

    def computed(
        self, batch: Sequence[Pending], started_ns: int, joined_ns: int, computed_ns: int, split_ns: int
    ) -> None:
        """A runner has computed a batch."""
        for pending in batch:
            if isinstance(pending, _Watched):
                timeline = pending.timeline
                timeline.mark("started", started_ns)
                if joined_ns != started_ns:
                    timeline.mark("joined", joined_ns)
                timeline.mark("computed", computed_ns)
                timeline.mark("split", split_ns)

    def documents(self) -> list[dict[str, Any]]:
        """Every timeline with its batch, the newest first."""
        by_record: dict[int, list[Timeline]] = {}
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
        if self.left > 0:
            self.left -= 1
            return True
        return False

    def _timeline(self, request: InferRequest, version: str, rows: int, arrived_ns: int) -> Timeline:
        timeline = Timeline(next(self._numbers), request, version, rows, arrived_ns)
        received_ns = self._received(request)
        if received_ns is not None:
            timeline.mark("received", received_ns)
        self.timelines.append(timeline)
        return timeline

    def _told(self, timeline: Timeline, done: Done) -> Done:
        def told(result: InferResponse | BaseException) -> None:
            timeline.ended(result)
            timeline.answers = int(isinstance(result, InferResponse))
            try:
                done(result)
            finally:
                timeline.mark("sent")
                self._closed()

        return told

    def _told_some(self, timeline: Timeline, answered: Answered) -> Answered:
        def told(result: InferResponse | BaseException | None, final: bool) -> None:
            if isinstance(result, InferResponse):
                timeline.answers += 1
                if not final:
                    timeline.mark("first")
            if final:
                timeline.ended(result)
            try:
                answered(result, final)
            finally:
                if final:
                    timeline.mark("sent")
                    self._closed()

        return told

    def _closed(self) -> None:
        self.open -= 1
        self._look_whether_over()

    def _look_whether_over(self) -> None:
        # Not before the last has been answered: until then its runner is to tell when it computed it.
        if not self.left and not self.ids and self.open <= 0:
            self._over()


def _batch(timeline: Timeline, members: Sequence[Timeline]) -> dict[str, Any] | None:
    record = timeline.record
    if record is None:
        return None
    mates = [each for each in members if each is not timeline]
    return {
        "reason": record.reason,
        "requests": record.requests,
        "rows": record.rows,
        "left_waiting": record.left_waiting,
        "oldest_waited_us": record.oldest_waited_ns / 1000,
        "instance": record.instance,
        "with": [{"number": each.number, "id": each.id, "rows": each.rows} for each in mates],
        "others": record.requests - 1 - len(mates),
    }
