# SPDX-License-Identifier: Apache-2.0
"""Brings requests to the engine behind a model and its answers back, as they come.

Opened and closed from loader threads, otherwise called by the engine room in the loop's thread. A request is a `Flight`:
the receiver of one answer of HTTP. When nobody waits for it any more its connection is closed, and the other engine stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headrace.backends.contract import EngineServices, Placement, Work
from headrace.backends.openai_proxy.answers import Answer, error_in, refusal
from headrace.backends.openai_proxy.client import Call, Fields
from headrace.backends.openai_proxy.engine import Engine
from headrace.backends.openai_proxy.events import EventReader
from headrace.backends.openai_proxy.requests import Question, question_of
from headrace.backends.openai_proxy.settings import ProxySettings
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, Internal, Unavailable

log = logging.getLogger("headrace.backends.openai_proxy")

EVENT_BYTES = 16 << 20
ANSWER_BYTES = 256 << 20
_ERROR_BYTES = 1 << 20
_LOOK_SECONDS = 0.05
_LOOP_SECONDS = 30.0
_DONE = b"[DONE]"

Finished = Callable[[], None]


class Flight:
    """One request with the engine. See `client.Receiver`."""

    def __init__(self, instance: ProxyInstance, work: Work, question: Question) -> None:
        self._instance = instance
        self.work = work
        self._question = question
        self.call: Call | None = None
        self._status = 0
        self._fields: Fields = {}
        self._events: EventReader | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._finished = False
        self.answered = False
        """Whether the last reply is given."""

    def begun(self, status: int, fields: Fields) -> None:
        """See `Receiver`."""
        self._status = status
        self._fields = fields
        kind = fields.get(b"content-type", b"").lower()
        if status == 200 and self._question.streams and kind.startswith(b"text/event-stream"):
            self._events = EventReader(EVENT_BYTES)

    def piece(self, data: bytes) -> None:
        """See `Receiver`."""
        if self.answered:
            return
        events = self._events
        if events is None:
            self._size += len(data)
            if self._size <= (ANSWER_BYTES if self._status == 200 else _ERROR_BYTES):
                self._body.append(data)
            elif self._status == 200:
                self.end(Unavailable(f"the engine sent an answer of more than {ANSWER_BYTES} bytes"))
            return
        try:
            for name, event in events.feed(data):
                self._event(name, event)
        except Exception as error:
            self.end(_told(error))

    def ended(self) -> None:
        """See `Receiver`."""
        try:
            if self._status != 200:
                self.end(refusal(self._status, self._fields, b"".join(self._body)))
            elif self._events is None:
                self._whole(b"".join(self._body))
            else:
                for name, event in self._events.finish():
                    self._event(name, event)
                if self._finished:
                    self.end(None)
                else:
                    self.end(Unavailable("the engine ended its stream before the answer was whole"))
        except Exception as error:
            self.end(_told(error))
        self._instance.landed(self)

    def failed(self, why: str) -> None:
        """See `Receiver`."""
        self.end(
            Unavailable(f"the engine of model '{self._instance.model_name}' {why}: retry", retry_after_seconds=1.0)
        )
        self._instance.landed(self)

    def end(self, error: HeadraceError | None) -> None:
        """The last reply: there is no more, or something went wrong."""
        if not self.answered:
            self.answered = True
            self.work.reply(error)
            if error is not None and self.call is not None:
                self.call.cancel()
                self._instance.landed(self)

    def _event(self, name: bytes, data: bytes) -> None:
        if self.answered:
            return
        if data == _DONE:
            self.end(None)
            return
        error = error_in(data) if name != b"error" else error_in(data) or refusal(500, {}, data)
        if error is not None:
            self.end(error)
            return
        answer = Answer(data, passed_on=self._question.passed_on)
        self._finished = self._finished or answer.finished
        self.work.reply(answer.outputs, final=False, parameters=answer.parameters)

    def _whole(self, body: bytes) -> None:
        error = error_in(body)
        if error is not None:
            self.end(error)
            return
        answer = Answer(body, passed_on=self._question.passed_on)
        if not self.answered:
            self.answered = True
            self.work.reply(answer.outputs, parameters=answer.parameters)


class ProxyInstance:
    """See `contract.RequestInstance`."""

    def __init__(self, settings: ProxySettings, placement: Placement, services: EngineServices) -> None:
        self._settings = settings
        self._placement = placement
        self._loop = services.loop
        self._engine: Engine | None = None
        self._flights: set[Flight] = set()
        self._waiting: Finished | None = None
        """Told when there is room for another request."""
        self._look: asyncio.TimerHandle | None = None
        self._abandoned = False
        self.model_name = settings.model_name

    # From loader threads

    def open(self) -> None:
        """Start the engine, or look for it; returns when it is healthy."""
        self._wait(self._open(), self._settings.start_seconds + self._settings.stop_seconds + _LOOP_SECONDS)

    def close(self) -> None:
        """End the engine, if it is ours, and every connection."""
        if self._loop.is_running():
            try:
                self._wait(self._close(), self._settings.stop_seconds + _LOOP_SECONDS)
                return
            except Unavailable:
                pass
        if self._engine is not None:
            self._engine.kill_without_loop()

    def _wait(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            future.result(seconds)
        except TimeoutError:
            future.cancel()
            # The loop itself has an end to this; it has stopped, then.
            if self._engine is not None:
                self._engine.kill_without_loop()
            raise Unavailable("the server stopped while a model was being loaded or unloaded") from None

    async def _open(self) -> None:
        if self._abandoned:
            raise Unavailable("the server is closing")
        self._engine = Engine(self._settings, self._placement, self._loop, self._lost)
        await self._engine.open()

    async def _close(self) -> None:
        for flight in tuple(self._flights):
            flight.end(Unavailable(f"model '{self.model_name}' is being unloaded"))
        if self._look is not None:
            self._look.cancel()
        if self._engine is not None:
            await self._engine.close()

    # From the loop's thread

    def abandon(self) -> None:
        """Let `open` fail soon: nobody waits for it any more."""
        self._abandoned = True
        if self._engine is not None:
            self._engine.abandon()

    def execute(self, batch: Sequence[Work], finished: Finished) -> None:
        """See `contract.RequestInstance.execute`."""
        for work in batch:
            try:
                self._begin(work)
            except HeadraceError as error:
                work.reply(error)
            except Exception:
                log.exception("a request could not be given to the engine of '%s'", self._placement.name)
                work.reply(Internal(INTERNAL_TEXT))
        if len(self._flights) < self._settings.max_in_flight:
            # Not at once: the engine room may have more, and would be deeper inside itself with each.
            self._loop.call_soon(finished)
        else:
            self._waiting = finished

    def landed(self, flight: Flight) -> None:
        """A request has come to its end, and its connection is free or closed."""
        self._flights.discard(flight)
        flight.call = None
        if self._waiting is not None and len(self._flights) < self._settings.max_in_flight:
            waiting, self._waiting = self._waiting, None
            self._loop.call_soon(waiting)

    def _begin(self, work: Work) -> None:
        engine = self._engine
        if engine is None or engine.down is not None or engine.pool is None:
            # Not raised: one error for many requests would grow with each.
            down = engine.down if engine is not None else None
            work.reply(
                down or Unavailable(f"the engine of model '{self.model_name}' is not there", retry_after_seconds=1.0)
            )
            return
        question = question_of(work.request, engine.served_model)
        flight = Flight(self, work, question)
        self._flights.add(flight)
        flight.call = engine.pool.post(question.path, question.body, flight)
        if self._look is None:
            self._look = self._loop.call_later(_LOOK_SECONDS, self._look_around)

    def _look_around(self) -> None:
        """Give up what nobody waits for, and what the engine has fallen silent on."""
        self._look = None
        oldest = self._loop.time() - self._settings.idle_seconds
        for flight in tuple(self._flights):
            call = flight.call
            if call is None:
                continue
            if flight.work.cancelled:
                flight.end(Unavailable("nobody waits for the answer any more"))
                call.cancel()
                self.landed(flight)
            elif call.since < oldest:
                flight.end(
                    Unavailable(
                        f"the engine of model '{self.model_name}' was silent for {self._settings.idle_seconds:g} seconds"
                    )
                )
        if self._flights:
            self._look = self._loop.call_later(_LOOK_SECONDS, self._look_around)

    def _lost(self, why: Unavailable) -> None:
        """The engine has died with everything it was asked."""
        for flight in tuple(self._flights):
            flight.end(why)


def _told(error: Exception) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error.with_traceback(None)
    log.error("an answer of the engine could not be passed on", exc_info=error)
    return Internal(INTERNAL_TEXT)
