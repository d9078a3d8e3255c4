# SPDX-License-Identifier: Apache-2.0
"""Progress events of long tasks: downloads, model loading, rollouts.

Long-running code takes a `Progress` and reports through a `Reporter`; `cli` turns the events into bars or JSON lines,
`api` into status and event streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Literal

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """The progress of one task."""

    task: str
    """The task's name, the same in all its events: "download resnet50"."""
    done: float = 0
    total: float | None = None
    """None while unknown."""
    unit: str = ""
    """What is counted: "bytes", "files", "layers"."""
    message: str = ""
    """The current phase, or the result, for people."""
    state: Literal["running", "finished", "failed"] = "running"


Progress = Callable[[ProgressEvent], None]
"""A function that receives events, in the thread of the task. It must return quickly and never raise."""


def silent(event: ProgressEvent) -> None:
    """Ignore progress."""


class RunningTasks:
    """A `Progress` that keeps the last event of each running task and passes all events on. Thread-safe."""

    def __init__(self, forward: Progress = silent) -> None:
        self._forward = forward
        self._lock = Lock()
        self._tasks: dict[str, ProgressEvent] = {}

    def __call__(self, event: ProgressEvent) -> None:
        """Receive an event."""
        with self._lock:
            if event.state == "running":
                self._tasks[event.task] = event
            else:
                self._tasks.pop(event.task, None)
        self._forward(event)

    def tasks(self) -> list[ProgressEvent]:
        """Return the last event of each running task, the oldest task first."""
        with self._lock:
            return list(self._tasks.values())


class Reporter:
    """Report one task: at most one event in `every_seconds`, and always the first and the last.

    As a context manager it ends the task: finished, or failed after an exception.
    """

    def __init__(
        self,
        progress: Progress,
        clock: Clock,
        task: str,
        *,
        total: float | None = None,
        unit: str = "",
        every_seconds: float = 0.1,
    ) -> None:
        self._progress = progress
        self._clock = clock
        self._task = task
        self._unit = unit
        self._every_seconds = every_seconds
        self._due = clock.monotonic()
        self._ended = False
        self.done: float = 0
        self.total = total
        self.message = ""

    def advance(self, amount: float = 1) -> None:
        """Add to what is done."""
        self.done += amount
        self._report_when_due()

    def update(self, *, done: float | None = None, total: float | None = None, message: str | None = None) -> None:
        """Set values. A new message is a new phase and is reported at once."""
        new_phase = message is not None and message != self.message
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.message = self.message if message is None else message
        self._report_when_due(now=new_phase)

    def finish(self, message: str = "") -> None:
        """End the task as finished."""
        self._end("finished", message)

    def fail(self, message: str) -> None:
        """End the task as failed; `message` says why."""
        self._end("failed", message)

    def __enter__(self) -> Reporter:
        """Report the start."""
        self._report_when_due()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report the end, unless it was reported."""
        if error is None:
            self.finish()
        else:
            # The text of other exceptions may contain secrets.
            self.fail(error.message if isinstance(error, HeadraceError) else type(error).__name__)

    def _report_when_due(self, *, now: bool = False) -> None:
        if self._ended:
            return
        time = self._clock.monotonic()
        if now or time >= self._due:
            self._due = time + self._every_seconds
            self._emit("running")

    def _end(self, state: Literal["finished", "failed"], message: str) -> None:
        if not self._ended:
            self._ended = True
            self.message = message or self.message
            self._emit(state)

    def _emit(self, state: Literal["running", "finished", "failed"]) -> None:
        self._progress(ProgressEvent(self._task, self.done, self.total, self._unit, self.message, state))
