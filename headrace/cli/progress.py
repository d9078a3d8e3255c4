# SPDX-License-Identifier: Apache-2.0
"""Progress of model loads: bars on a terminal, occasional log lines elsewhere.

Used by `serve`. Bars are drawn below the log lines and removed when nothing loads; meanwhile log lines go through rich,
which prints them above.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, cast

from headrace.core.clock import Clock, SystemClock
from headrace.core.telemetry.logs import LogFormat, configure_logging
from headrace.core.telemetry.progress import Progress, ProgressEvent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

log = logging.getLogger("headrace.cli")

_LINE_SECONDS = 5.0
"""Loads that take longer get a log line."""


@contextmanager
def logging_beside_bars(
    level: str, format: LogFormat, *, bars: bool, stream: TextIO | None = None
) -> Iterator[Progress]:
    """Configure logging and yield the progress callback. Remove all bars at the end."""
    target = sys.stderr if stream is None else stream
    shown = _bars_on(target) if bars and format != "json" and target.isatty() else None
    if shown is None:
        configure_logging(level, format, stream)
        yield LoadingLines(SystemClock())
        return
    configure_logging(level, format, cast("TextIO", LogStream(shown, target)))
    try:
        yield shown
    finally:
        shown.close()


def _bars_on(stream: TextIO) -> LoadingBars | None:
    from rich.console import Console

    console = Console(file=stream)
    return None if console.is_dumb_terminal else LoadingBars(console)


class LoadingBars:
    """One bar per load. A `Progress`: it may be called from any thread."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._lock = threading.Lock()
        self._bars: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    @property
    def visible(self) -> bool:
        """Return whether bars are on the terminal now."""
        return self._bars is not None

    def __call__(self, event: ProgressEvent) -> None:
        """Draw an event. Errors are only logged: a model must not fail to load because of its bar."""
        with self._lock:
            try:
                self._update(event)
            except Exception:
                log.debug("Could not draw %s.", event, exc_info=True)

    def _update(self, event: ProgressEvent) -> None:
        if event.state == "running":
            self._draw(event)
        elif event.task in self._tasks and self._bars is not None:
            self._bars.remove_task(self._tasks.pop(event.task))
            if not self._tasks:
                self._stop()

    def close(self) -> None:
        """Remove all bars and restore the cursor."""
        with self._lock:
            self._tasks.clear()
            self._stop()

    def _stop(self) -> None:
        bars, self._bars = self._bars, None
        if bars is not None:
            bars.stop()

    def _draw(self, event: ProgressEvent) -> None:
        if self._bars is None:
            self._bars = _new_bars(self.console)
            self._bars.start()
        task = self._tasks.get(event.task)
        if task is None:
            task = self._tasks[event.task] = self._bars.add_task(event.task, total=None, phase="")
        self._bars.update(task, completed=event.done, total=event.total, phase=event.message)


def _new_bars(console: Console) -> RichProgress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[phase]}", style="dim", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


class LogStream(io.TextIOBase):
    """The stream for log lines: writes them above the bars while there are some."""

    def __init__(self, bars: LoadingBars, stream: TextIO) -> None:
        self._bars = bars
        self._stream = stream

    def isatty(self) -> bool:
        """Return whether the underlying stream is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Write complete lines, as a log handler does."""
        if not self._bars.visible:
            return self._stream.write(text)
        from rich.text import Text

        # The terminal wraps long lines, so that a copied line stays one line.
        self._bars.console.print(Text.from_ansi(text.removesuffix("\n")), soft_wrap=True, highlight=False)
        return len(text)

    def flush(self) -> None:
        """Flush the underlying stream."""
        self._stream.flush()


class LoadingLines:
    """Log lines for slow loads. A `Progress`: it may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def __call__(self, event: ProgressEvent) -> None:
        """Log an event if the last line of its task is long ago."""
        if event.state != "running":
            self._logged_at.pop(event.task, None)
            return
        now = self._clock.monotonic()
        if now - self._logged_at.setdefault(event.task, now) >= _LINE_SECONDS:
            self._logged_at[event.task] = now
            share = f" ({event.done:g} of {event.total:g})" if event.total else ""
            log.info("%s: %s%s", event.task, event.message or "in progress", share)
