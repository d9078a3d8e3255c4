# SPDX-License-Identifier: Apache-2.0
"""One instance: gives batches to its process and replies to the requests; replaces the process when it dies.

Opened and closed from loader threads, otherwise called by the engine in the loop's thread. What the process asks for
itself is for `calls`; when it is started again is for `restarts` to say.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from headrace.backends.contract import EngineServices, Placement, Work
from headrace.backends.python.calls import Calls
from headrace.backends.python.errors import error_of
from headrace.backends.python.frames import Buffer, Frame, Kind
from headrace.backends.python.launch import Launch
from headrace.backends.python.measures import Families
from headrace.backends.python.packing import Packed, Unpacker
from headrace.backends.python.process import Process
from headrace.backends.python.self_calls import SelfCalls
from headrace.backends.python.work import Outstanding, packed_request
from headrace.backends.restarts import Backoff
from headrace.core.errors import INTERNAL_TEXT, FailedPrecondition, HeadraceError, Internal, Unavailable
from headrace.core.messages import NO_PARAMETERS

_log = logging.getLogger(__name__)

FINALIZE_SECONDS = 30.0
_BUSY_SECONDS = 2.0
_KILL_SECONDS = 2.0
_LOOP_SECONDS = 30.0
_HOLD_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_AGAIN = 2

Finished = Callable[[], None]
_Batch = tuple[Sequence[Work], Finished]


class PythonInstance:
    """See `contract.RequestInstance`."""

    def __init__(
        self,
        launch: Launch,
        placement: Placement,
        services: EngineServices,
        families: Families,
        self_calls: SelfCalls,
    ) -> None:
        self._launch = launch
        self._placement = placement
        self._loop = services.loop
        self._process: Process | None = None
        self._calls = Calls(services, families, launch.model_name, self_calls)
        self._self_calls = self_calls
        self._ready = False
        self._failure = ""
        """Why the process that is starting could not."""
        self._abandoned = False
        self._opened: Future[None] | None = None
        self._closed: Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._backoff = Backoff((0.0, 0.1), longest=30.0, lived=60.0)
        self._down: Unavailable | None = None
        """What requests are told while there is no process, nor one within reach."""
        self._out = Outstanding(launch.max_batch_size)
        self._batches: dict[int, Finished] = {}
        self._last_batch = 0
        self._waiting: list[_Batch] = []

    # From loader threads

    def open(self) -> None:
        """Start the process; returns when its model is initialised."""
        opened: Future[None] = Future()
        self._opened = opened
        self._self_calls.opened(self)
        self._loop.call_soon_threadsafe(self._start)
        try:
            opened.result(self._launch.init_timeout_seconds + _LOOP_SECONDS)
        except TimeoutError:
            # The loop itself has an end to this; it has stopped, then.
            self._kill_without_loop()
            raise Unavailable("the server stopped while a model was being loaded") from None

    def abandon(self) -> None:
        """Let `open` fail soon: nobody waits for it any more. From the loop's thread."""
        self._abandoned = True
        self._kill()

    def close(self) -> None:
        """Have the model finalised and end the process."""
        closed: Future[None] = Future()
        self._self_calls.closed(self)
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._begin_close, closed)
            try:
                closed.result(FINALIZE_SECONDS + _LOOP_SECONDS)
                return
            except TimeoutError:
                pass
        self._kill_without_loop()

    def _kill_without_loop(self) -> None:
        if self._process is not None:
            self._process.kill_and_wait()

    # The engine's side

    def execute(self, batch: Sequence[Work], finished: Finished) -> None:
        """See `contract.RequestInstance.execute`."""
        if self._ready:
            self._give(self._out.entered(batch), finished)
        elif self._down is not None or self._closed is not None:
            error = self._down or Unavailable(f"model '{self._launch.model_name}' is being unloaded")
            for work in batch:
                work.reply(error)
            # Not at once: the engine may have more, and would be deeper inside itself with each.
            self._loop.call_soon(finished)
        else:
            self._waiting.append((batch, finished))

    def _give(self, batch: Sequence[tuple[int, Work]], finished: Finished) -> None:
        process = self._process
        pieces: list[Buffer] = []
        entries: list[Packed] = []
        for number, work in batch:
            before = len(pieces)
            try:
                entries.append(packed_request(number, work.request, process.arena if process else None, pieces))
            except Exception:
                _log.exception("a request could not be given to model instance '%s'", self._placement.name)
                del pieces[before:]
                self._out.answered(number)
                work.reply(Internal(INTERNAL_TEXT))
        if not entries or process is None:
            self._loop.call_soon(finished)
            return
        self._last_batch += 1
        self._batches[self._last_batch] = finished
        process.send(Kind.EXECUTE, {"batch": self._last_batch, "requests": entries}, pieces)
        if self._look is None:
            self._look = self._loop.call_later(_LOOK_SECONDS, self._look_for_cancelled)

    def _run_again(self) -> None:
        """Execute once more what no other batch has taken along."""
        if self._ready:
            for batch in self._out.left_over():
                self._give(batch, _nothing)

    def _look_for_cancelled(self) -> None:
        self._look = None
        process = self._process
        if process is None or not self._out.works:
            return
        cancelled = self._out.newly_cancelled()
        if cancelled:
            process.send(Kind.CANCEL, {"requests": cancelled})
        self._look = self._loop.call_later(_LOOK_SECONDS, self._look_for_cancelled)

    # The process's side

    def _on_frame(self, process: Process, frame: Frame) -> None:
        kind, meta = frame.kind, frame.meta
        measures = meta.get("measures")
        if measures:
            self._calls.measured(measures)
        if kind == Kind.ANSWER:
            self._answered(process, frame)
        elif kind == Kind.READY:
            self._became_ready()
        elif kind == Kind.FAILED:
            self._failure = f"failed to {meta['stage']} model '{self._launch.model_name}': {meta['text'].strip()}"
            # It ends by itself, unless the model has left threads behind.
            self._set_timer(_KILL_SECONDS, self._kill)
        elif kind == Kind.BYE:
            # What is left is the interpreter's own end, which takes no time unless the model has left threads behind.
            self._set_timer(_KILL_SECONDS, self._terminate)
        else:
            self._calls.frame(process, frame)

    def _answered(self, process: Process, frame: Frame) -> None:
        unpacker = Unpacker(frame.payload, process.view)
        for number, last, error, parameters, packed in frame.meta["answers"]:
            # Unpacked in any case: it gives the shared memory back.
            outputs = None if packed is None else unpacker.tensors(packed)
            if last == _AGAIN:
                self._out.again.append(number)
                continue
            work = self._out.answered(number) if last or error else self._out.works.get(number)
            if work is None:
                continue
            try:
                if error is not None:
                    work.reply(error_of(*error))
                else:
                    work.reply(outputs, final=bool(last), parameters=parameters or NO_PARAMETERS)
            except Exception:
                # The other requests of the batch must not wait forever for one that cannot be answered.
                _log.exception("an answer of model instance '%s' could not be given", self._placement.name)
        done = frame.meta.get("done")
        if done is not None:
            finished = self._batches.pop(done, None)
            if finished is not None:
                finished()
            if self._out.again:
                self._loop.call_soon(self._run_again)

    # The life of the process

    def _start(self) -> None:
        self._timer = None
        self._failure = ""
        if self._abandoned:
            self._start_failed("the server is closing")
            return
        try:
            self._process = Process(
                self._loop, self._on_frame, self._on_exit, self._launch.python, self._placement.name
            )
        except OSError as error:
            self._start_failed(f"its process cannot be started ({error.strerror})")
            return
        self._process.send(Kind.INIT, self._launch.settings(self._placement))
        self._set_timer(self._launch.init_timeout_seconds, self._init_too_long)

    def _became_ready(self) -> None:
        self._set_timer(0, None)
        self._ready = True
        self._down = None
        self._backoff.started(self._loop.time())
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.set_result(None)
        else:
            _log.info("model instance '%s' has a new process", self._placement.name)
        waiting, self._waiting = self._waiting, []
        for batch, finished in waiting:
            if batch:
                self._give(self._out.entered(batch), finished)
            else:
                finished()

    def _init_too_long(self) -> None:
        self._failure = (
            f"initialize of model '{self._launch.model_name}' took longer than "
            f"{self._launch.init_timeout_seconds:g} seconds; the parameter INIT_TIMEOUT_SECONDS allows more"
        )
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    def _on_exit(self, process: Process, status: str) -> None:
        was_ready, self._ready = self._ready, False
        self._process = None
        self._set_timer(0, None)
        self._calls.process_died()
        if self._closed is not None:
            self._end()
        elif was_ready:
            self._died(status)
        else:
            self._start_failed(self._failure or f"its process died while it was initialised ({status})")

    def _died(self, status: str) -> None:
        delay = self._backoff.next_delay(self._loop.time())
        name = self._placement.name
        _log.error("the process of model instance '%s' died (%s); a new one starts in %.1f s", name, status, delay)
        text = f"the process of model instance '{name}' died ({status}); it is being restarted, retry"
        self._out.fail_all(Unavailable(text, retry_after_seconds=max(delay, 0.1)))
        # What the dead process was busy with is over when there is a new one: an empty batch waits for that.
        self._waiting += [((), finished) for finished in self._batches.values()]
        self._batches.clear()
        if delay > _HOLD_SECONDS:
            self._go_down(f"its process keeps dying ({status})", delay)
        self._set_timer(delay, self._start)

    def _start_failed(self, reason: str) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.set_exception(FailedPrecondition(f"model instance '{self._placement.name}': {reason}"))
            return
        delay = self._backoff.next_delay(self._loop.time())
        _log.error("model instance '%s': %s; the next try is in %.1f s", self._placement.name, reason, delay)
        self._go_down(reason.split("\n", 1)[0], delay)
        self._set_timer(delay, self._start)

    def _go_down(self, reason: str, delay: float) -> None:
        text = f"model instance '{self._placement.name}' is not running: {reason}; retry later"
        self._down = Unavailable(text, retry_after_seconds=max(1.0, delay))
        self._drop_waiting(self._down)

    def _drop_waiting(self, error: HeadraceError) -> None:
        waiting, self._waiting = self._waiting, []
        for batch, finished in waiting:
            for work in batch:
                work.reply(error)
            finished()

    # The end

    def _begin_close(self, closed: Future[None]) -> None:
        self._closed = closed
        was_ready, self._ready = self._ready, False
        busy = bool(self._out.works or self._batches)
        error = Unavailable(f"model '{self._launch.model_name}' is being unloaded")
        self._out.fail_all(error)
        self._waiting += [((), finished) for finished in self._batches.values()]
        self._batches.clear()
        self._drop_waiting(error)
        process = self._process
        if process is None:
            self._end()
            return
        if not was_ready:
            process.signal(signal.SIGKILL)
            return
        process.send(Kind.CLOSE, {})
        self._set_timer(_BUSY_SECONDS if busy else FINALIZE_SECONDS, self._terminate)

    def _terminate(self) -> None:
        if self._process is not None:
            if self._closed is not None:
                _log.warning("model instance '%s' does not end by itself; it is terminated", self._placement.name)
            self._process.signal(signal.SIGTERM)
            self._set_timer(_KILL_SECONDS, self._kill)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    def _end(self) -> None:
        self._set_timer(0, None)
        self._calls.close()
        if self._look is not None:
            self._look.cancel()
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

    def _set_timer(self, seconds: float, then: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if then is None else self._loop.call_later(seconds, then)


def _nothing() -> None:
    """For batches the engine does not know of."""
