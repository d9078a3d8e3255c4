# SPDX-License-Identifier: Apache-2.0
"""The way of a question to the data plane and back, with an end to waiting.

Used by every way in for questions that were not answered at once. A batch of several parts is asked part by part, a few at
a time; all of them of the version that answered the first, so that one answer is of one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from headrace.api.predict.reading import Part, Question
from headrace.core.errors import DeadlineExceeded, HeadraceError
from headrace.core.messages import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending import Pending

Answers = Callable[[Sequence[InferResponse] | BaseException], None]
"""Who waits for the answers to all parts of a question."""

_AT_ONCE = 8
"""Parts of one batch in the engine at the same time: it must not fill a queue that others wait in."""


class Cancellable(Protocol):
    """What can be given up."""

    def cancel(self, reason: HeadraceError | None = None) -> None:
        """Nobody waits any more, or not longer."""


class Deadlines:
    """Gives up what waits for too long. All wait equally long, so the first to come is the first to go: one timer does."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[Cancellable, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiting: Cancellable) -> None:
        """Give this up when its time is over; if it was there, its time begins anew."""
        if self._seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        self._waiting.pop(waiting, None)
        self._waiting[waiting] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._sweep, loop)

    def forget(self, waiting: Cancellable) -> None:
        """It waits no more."""
        self._waiting.pop(waiting, None)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        late = []
        for waiting, until in self._waiting.items():
            if until > now:
                self._timer = loop.call_later(until - now, self._sweep, loop)
                break
            late.append(waiting)
        for waiting in late:
            self._waiting.pop(waiting, None)
            waiting.cancel(
                DeadlineExceeded(
                    f"no prediction within {self._seconds:g} seconds: try again later or send less at once; "
                    "the server's limit is inference_timeout_s"
                )
            )


class Asking:
    """Asks, for one server."""

    def __init__(self, plane: DataPlane, timeout_seconds: float) -> None:
        self._plane = plane
        self.deadlines = Deadlines(timeout_seconds)

    def at_once(self, question: Question) -> InferResponse | None:
        """The answer, if the model is quick and idle and one request is all it takes."""
        return None if question.many else self._plane.answer(question.request)

    def later(self, question: Question, answered: Answers) -> Cancellable:
        """Ask, and tell later. Raises at once for a question that is wrong."""
        if question.many and question.parts is not None:
            whole = _Whole(self._plane, self.deadlines, question, question.parts, answered)
            whole.begin()
            self.deadlines.add(whole)
            return whole
        deadlines = self.deadlines

        def done(result: InferResponse | BaseException) -> None:
            deadlines.forget(pending)
            answered(result if isinstance(result, BaseException) else (result,))

        pending = self._plane.infer(question.request, done)
        deadlines.add(pending)
        return pending


class _Whole:
    """A batch of several parts."""

    def __init__(
        self, plane: DataPlane, deadlines: Deadlines, question: Question, parts: Sequence[Part], answered: Answers
    ) -> None:
        self._plane = plane
        self._deadlines = deadlines
        self._question = question
        self._answered: Answers | None = answered
        self._answers: list[InferResponse | None] = [None] * len(parts)
        self._left = len(parts)
        self._parts = parts
        self._next = 1
        self._running: dict[int, Pending] = {}
        self._version = ""

    def begin(self) -> None:
        """Ask for the first part, which tells the version."""
        self._running[0] = self._plane.infer(self._question.request, partial(self._told, 0))

    def cancel(self, reason: HeadraceError | None = None) -> None:
        """See `Cancellable`."""
        self._end(reason)

    def _told(self, index: int, result: InferResponse | BaseException) -> None:
        if self._answered is None:
            return
        self._running.pop(index, None)
        if isinstance(result, BaseException):
            self._end(result)
            return
        self._answers[index] = result
        self._left -= 1
        self._version = result.model_version
        if not self._left:
            self._end([answer for answer in self._answers if answer is not None])
            return
        try:
            self._go_on()
        except Exception as error:
            self._end(error)

    def _go_on(self) -> None:
        parts = self._parts
        while self._next < len(parts) and len(self._running) < _AT_ONCE:
            index = self._next
            self._next += 1
            request = self._question.request_for(parts[index].row, self._version)
            self._running[index] = self._plane.infer(request, partial(self._told, index))

    def _end(self, result: Sequence[InferResponse] | BaseException | None) -> None:
        answered, self._answered = self._answered, None
        running, self._running = self._running, {}
        self._deadlines.forget(self)
        for pending in running.values():
            pending.cancel()
        if answered is not None and result is not None:
            answered(result)
