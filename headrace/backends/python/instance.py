# SPDX-License-Identifier: Apache-2.0
"""One instance of a Python model: sends batches to its process, answers requests, restarts the process."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from headrace.backends.contract import EngineServices, Placement, Work
from headrace.backends.python.model_calls import Calls, MetricFamilies, SelfCalls, error_of
from headrace.backends.python.process import Launch, Process
from headrace.backends.python.protocol import Arena, Buffer, Frame, Kind, Packed, Unpacker, pack
from headrace.backends.restart_backoff import Backoff
from headrace.core.errors import INTERNAL_TEXT, FailedPrecondition, HeadraceError, Internal, Unavailable
from headrace.core.requests import NO_PARAMETERS, InferRequest

_Numbered = tuple[int, Work]

_START, _END = 1, 2
# Parameters that the protocols add and that Triton does not pass to models.
_NOT_PARAMETERS = frozenset(
    {
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "binary_data_output",
        "binary_data",
        "triton_enable_empty_final_response",
    }
)


def packed_request(number: int, request: InferRequest, arena: Arena | None, pieces: list[Buffer]) -> Packed:
    """Encode a request with everything that a model may read from it, and place its tensors."""
    parameters = request.parameters
    correlation_id: object = 0
    flags = timeout = 0
    rest = None
    if parameters:
        given = parameters.get("timeout")
        correlation_id = parameters.get("sequence_id", 0)
        flags = _START * bool(parameters.get("sequence_start")) + _END * bool(parameters.get("sequence_end"))
        timeout = given if isinstance(given, int) else 0
        rest = {name: value for name, value in parameters.items() if name not in _NOT_PARAMETERS}
    return [
        number,
        request.id,
        correlation_id,
        flags,
        timeout,
        rest,
        [output.name for output in request.outputs],
        request.model_name,
        int(request.model_version or -1),
        pack(request.inputs, arena, pieces),
    ]


class Outstanding:
    """The unanswered requests of one process, by number."""

    def __init__(self, max_batch_size: int) -> None:
        self.works: dict[int, Work] = {}
        self.rescheduled: list[int] = []
        """Requests to execute again (rescheduled). A thread of the model may still send their last response meanwhile."""
        self._max_batch_size = max_batch_size
        self._last = 0
        self._reported: set[int] = set()

    def number_batch(self, batch: Sequence[Work]) -> list[_Numbered]:
        """Number the requests of a batch, and add rescheduled ones as far as they fit."""
        first = self._last + 1
        self._last += len(batch)
        numbered = list(enumerate(batch, first))
        if self.rescheduled:
            free_rows = self._max_batch_size - sum(_rows(work.request) for work in batch)
            numbered += self._waiting(free_rows)
        self.works.update(numbered)
        return numbered

    def rescheduled_batches(self) -> Iterator[list[_Numbered]]:
        """Yield batches of rescheduled requests that no other batch has taken."""
        while self.rescheduled:
            first = self._waiting(self._max_batch_size)
            # Without batching, or too large for it: one by one.
            batch = first or [(number, self.works[number]) for number in self.rescheduled[:1]]
            self.rescheduled = self.rescheduled[0 if first else 1 :]
            if batch:
                yield batch

    def answered(self, number: int) -> Work | None:
        """Remove a request after its last response and return it."""
        self._reported.discard(number)
        return self.works.pop(number, None)

    def newly_cancelled(self) -> list[int]:
        """Return the numbers of cancelled requests, each once."""
        cancelled = [number for number, work in self.works.items() if work.cancelled and number not in self._reported]
        self._reported.update(cancelled)
        return cancelled

    def fail_all(self, error: HeadraceError) -> None:
        """Fail all requests: the process cannot answer them any more."""
        works = list(self.works.values())
        self.works.clear()
        self._reported.clear()
        self.rescheduled.clear()
        for work in works:
            work.reply(error)

    def _waiting(self, free_rows: int) -> list[_Numbered]:
        waiting = [number for number in self.rescheduled if number in self.works]
        taken: list[_Numbered] = []
        while waiting and free_rows >= (rows := _rows(self.works[waiting[0]].request)):
            free_rows -= rows
            number = waiting.pop(0)
            taken.append((number, self.works[number]))
        self.rescheduled = waiting
        return taken


def _rows(request: InferRequest) -> int:
    for tensor in request.inputs:
        return tensor.shape[0] if tensor.shape else 1
    return 1


_log = logging.getLogger(__name__)

FINALIZE_SECONDS = 30.0
_BUSY_SECONDS = 2.0
_KILL_SECONDS = 2.0
_LOOP_SECONDS = 30.0
_HOLD_SECONDS = 1.0
_CANCEL_POLL_SECONDS = 0.05
_RESCHEDULED = 2

Finished = Callable[[], None]
_Batch = tuple[Sequence[Work], Finished]


class PythonInstance:
    """A `contract.RequestInstance` with a child process."""

    def __init__(
        self,
        launch: Launch,
        placement: Placement,
        services: EngineServices,
        families: MetricFamilies,
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
        """Why the starting process failed."""
        self._abandoned = False
        self._opened: Future[None] | None = None
        self._closed: Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancel_poll: asyncio.TimerHandle | None = None
        self._backoff = Backoff((0.0, 0.1), longest=30.0, lived=60.0)
        self._down: Unavailable | None = None
        """The error for requests while there is no process."""
        self._outstanding = Outstanding(launch.max_batch_size)
        self._batches: dict[int, Finished] = {}
        self._last_batch = 0
        self._waiting: list[_Batch] = []

    # Called from loader threads

    def open(self) -> None:
        """Start the process and wait until its model is initialised."""
        opened: Future[None] = Future()
        self._opened = opened
        self._self_calls.opened(self)
        self._loop.call_soon_threadsafe(self._start)
        try:
            opened.result(self._launch.init_timeout_seconds + _LOOP_SECONDS)
        except TimeoutError:
            # The loop limits this wait itself, so it must have stopped.
            self._kill_without_loop()
            raise Unavailable("the server stopped while a model was being loaded") from None

    def abandon(self) -> None:
        """Make `open` fail soon. Call from the loop's thread."""
        self._abandoned = True
        self._kill()

    def close(self) -> None:
        """Finalise the model and stop the process."""
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

    # Called by the engine

    def execute(self, batch: Sequence[Work], finished: Finished) -> None:
        """Send a batch to the process; see `contract.RequestInstance.execute`."""
        if self._ready:
            self._send(self._outstanding.number_batch(batch), finished)
        elif self._down is not None or self._closed is not None:
            error = self._down or Unavailable(f"model '{self._launch.model_name}' is being unloaded")
            for work in batch:
                work.reply(error)
            # Deferred: `finished` called at once would recurse into the engine.
            self._loop.call_soon(finished)
        else:
            self._waiting.append((batch, finished))

    def _send(self, batch: Sequence[tuple[int, Work]], finished: Finished) -> None:
        process = self._process
        pieces: list[Buffer] = []
        entries: list[Packed] = []
        for number, work in batch:
            before = len(pieces)
            try:
                entries.append(packed_request(number, work.request, process.arena if process else None, pieces))
            except Exception:
                _log.exception("could not send a request to model instance '%s'", self._placement.name)
                del pieces[before:]
                self._outstanding.answered(number)
                work.reply(Internal(INTERNAL_TEXT))
        if not entries or process is None:
            self._loop.call_soon(finished)
            return
        self._last_batch += 1
        self._batches[self._last_batch] = finished
        process.send(Kind.EXECUTE, {"batch": self._last_batch, "requests": entries}, pieces)
        if self._cancel_poll is None:
            self._cancel_poll = self._loop.call_later(_CANCEL_POLL_SECONDS, self._poll_cancelled)

    def _run_again(self) -> None:
        """Execute rescheduled requests that no other batch has taken."""
        if self._ready:
            for batch in self._outstanding.rescheduled_batches():
                self._send(batch, _no_op)

    def _poll_cancelled(self) -> None:
        self._cancel_poll = None
        process = self._process
        if process is None or not self._outstanding.works:
            return
        cancelled = self._outstanding.newly_cancelled()
        if cancelled:
            process.send(Kind.CANCEL, {"requests": cancelled})
        self._cancel_poll = self._loop.call_later(_CANCEL_POLL_SECONDS, self._poll_cancelled)

    # Called by the process

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
            self._failure = f"failed to {meta['stage']} model '{self._launch.model_name}': {meta['text']}"
            self._calls.log({**meta, "text": self._failure})
            # The process exits by itself, unless the model left threads behind.
            self._set_timer(_KILL_SECONDS, self._kill)
        elif kind == Kind.BYE:
            # Only the interpreter's exit remains, which is quick unless the model left threads behind.
            self._set_timer(_KILL_SECONDS, self._terminate)
        else:
            self._calls.frame(process, frame)

    def _answered(self, process: Process, frame: Frame) -> None:
        unpacker = Unpacker(frame.payload, process.view)
        for number, last, error, parameters, packed in frame.meta["answers"]:
            # Always unpack: that frees the shared memory.
            outputs = None if packed is None else unpacker.tensors(packed)
            if last == _RESCHEDULED:
                self._outstanding.rescheduled.append(number)
                continue
            work = self._outstanding.answered(number) if last or error else self._outstanding.works.get(number)
            if work is None:
                continue
            try:
                if error is not None:
                    work.reply(error_of(*error))
                else:
                    work.reply(outputs, final=bool(last), parameters=parameters or NO_PARAMETERS)
            except Exception:
                # One response that cannot be delivered must not block the other requests of the batch.
                _log.exception("could not deliver a response of model instance '%s'", self._placement.name)
        done = frame.meta.get("done")
        if done is not None:
            finished = self._batches.pop(done, None)
            if finished is not None:
                finished()
            if self._outstanding.rescheduled:
                self._loop.call_soon(self._run_again)

    # Life cycle of the process

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
        self._set_timer(self._launch.init_timeout_seconds, self._init_timed_out)

    def _became_ready(self) -> None:
        self._set_timer(0, None)
        self._ready = True
        self._down = None
        self._backoff.started(self._loop.time())
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.set_result(None)
        else:
            _log.info("restarted the process of model instance '%s'", self._placement.name)
        waiting, self._waiting = self._waiting, []
        for batch, finished in waiting:
            if batch:
                self._send(self._outstanding.number_batch(batch), finished)
            else:
                finished()

    def _init_timed_out(self) -> None:
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
            self._stop_process()
        elif was_ready:
            self._died(status)
        else:
            self._start_failed(self._failure or f"its process died while it was initialised ({status})")

    def _died(self, status: str) -> None:
        delay = self._backoff.next_delay(self._loop.time())
        name = self._placement.name
        _log.error("the process of model instance '%s' died (%s); a new one starts in %.1f s", name, status, delay)
        text = f"the process of model instance '{name}' died ({status}); it is being restarted, retry"
        self._outstanding.fail_all(Unavailable(text, retry_after_seconds=max(delay, 0.1)))
        # An empty batch keeps the slot of the dead process's work until a new process is there.
        self._waiting += [((), finished) for finished in self._batches.values()]
        self._batches.clear()
        if delay > _HOLD_SECONDS:
            self._mark_down(f"its process keeps dying ({status})", delay)
        self._set_timer(delay, self._start)

    def _start_failed(self, reason: str) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.set_exception(FailedPrecondition(f"model instance '{self._placement.name}': {reason}"))
            return
        delay = self._backoff.next_delay(self._loop.time())
        _log.error("model instance '%s': %s; the next try is in %.1f s", self._placement.name, reason, delay)
        self._mark_down(reason.split("\n", 1)[0], delay)
        self._set_timer(delay, self._start)

    def _mark_down(self, reason: str, delay: float) -> None:
        text = f"model instance '{self._placement.name}' is not running: {reason}; retry later"
        self._down = Unavailable(text, retry_after_seconds=max(1.0, delay))
        self._drop_waiting(self._down)

    def _drop_waiting(self, error: HeadraceError) -> None:
        waiting, self._waiting = self._waiting, []
        for batch, finished in waiting:
            for work in batch:
                work.reply(error)
            finished()

    # Shutdown

    def _begin_close(self, closed: Future[None]) -> None:
        self._closed = closed
        was_ready, self._ready = self._ready, False
        busy = bool(self._outstanding.works or self._batches)
        error = Unavailable(f"model '{self._launch.model_name}' is being unloaded")
        self._outstanding.fail_all(error)
        self._waiting += [((), finished) for finished in self._batches.values()]
        self._batches.clear()
        self._drop_waiting(error)
        process = self._process
        if process is None:
            self._stop_process()
            return
        if not was_ready:
            process.signal(signal.SIGKILL)
            return
        process.send(Kind.CLOSE, {})
        self._set_timer(_BUSY_SECONDS if busy else FINALIZE_SECONDS, self._terminate)

    def _terminate(self) -> None:
        if self._process is not None:
            if self._closed is not None:
                _log.warning("model instance '%s' did not stop in time; terminating it", self._placement.name)
            self._process.signal(signal.SIGTERM)
            self._set_timer(_KILL_SECONDS, self._kill)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    def _stop_process(self) -> None:
        self._set_timer(0, None)
        self._calls.close()
        if self._cancel_poll is not None:
            self._cancel_poll.cancel()
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

    def _set_timer(self, seconds: float, then: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if then is None else self._loop.call_later(seconds, then)


def _no_op() -> None:
    """Do nothing: the `finished` callback of batches that the engine does not know."""
