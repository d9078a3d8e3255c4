# SPDX-License-Identifier: Apache-2.0
"""What a person sees while models load: bars on a terminal, a log line now and then elsewhere.

Called by `serve`. The bars stand below the log lines and are gone when nothing loads any more; while they stand, log
lines go through rich, which writes them above.
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
"""A load that takes longer is worth a line in the log."""


@contextmanager
def logging_beside_bars(
    level: str, format: LogFormat, *, bars: bool, stream: TextIO | None = None
) -> Iterator[Progress]:
    """Configure the logs; gives where progress goes. No bar is left behind at the end."""
    target = sys.stderr if stream is None else stream
    shown = _bars_on(target) if bars and format != "json" and target.isatty() else None
    if shown is None:
        configure_logging(level, format, stream)
        yield LoadingLines(SystemClock())
        return
    configure_logging(level, format, cast("TextIO", BesideBars(shown, target)))
    try:
        yield shown
    finally:
        shown.close()


def _bars_on(stream: TextIO) -> LoadingBars | None:
    from rich.console import Console

    console = Console(file=stream)
    return None if console.is_dumb_terminal else LoadingBars(console)


class LoadingBars:
    """One line per load that runs. A `Progress`: may be called from any thread."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._lock = threading.Lock()
        self._bars: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    @property
    def visible(self) -> bool:
        """Whether bars stand on the terminal now."""
        return self._bars is not None

    def __call__(self, event: ProgressEvent) -> None:
        """Paint an event. A model must not fail to load because of its bar, so what goes wrong here stays here."""
        with self._lock:
            try:
                self._take(event)
            except Exception:
                log.debug("cannot paint %s", event, exc_info=True)

    def _take(self, event: ProgressEvent) -> None:
        if event.state == "running":
            self._paint(event)
        elif event.task in self._tasks and self._bars is not None:
            self._bars.remove_task(self._tasks.pop(event.task))
            if not self._tasks:
                self._stop()

    def close(self) -> None:
        """Take what still stands off the terminal, and give it its cursor back."""
        with self._lock:
            self._tasks.clear()
            self._stop()

    def _stop(self) -> None:
        bars, self._bars = self._bars, None
        if bars is not None:
            bars.stop()

    def _paint(self, event: ProgressEvent) -> None:
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


class BesideBars(io.TextIOBase):
    """The stream for log lines: as it is, or above the bars while there are some."""

    def __init__(self, bars: LoadingBars, stream: TextIO) -> None:
        self._bars = bars
        self._stream = stream

    def isatty(self) -> bool:
        """As the stream behind it."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Write whole lines, as a log handler does."""
        if not self._bars.visible:
            return self._stream.write(text)
        from rich.text import Text

        # Long lines are left to the terminal: what is copied from there stays one line.
        self._bars.console.print(Text.from_ansi(text.removesuffix("\n")), soft_wrap=True, highlight=False)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept here."""
        self._stream.flush()


class LoadingLines:
    """Log lines for loads that take long. A `Progress`: may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: dict[str, float] = {}

    def __call__(self, event: ProgressEvent) -> None:
        """Log an event if the last line of its task is long ago."""
        if event.state != "running":
            self._told.pop(event.task, None)
            return
        now = self._clock.monotonic()
        if now - self._told.setdefault(event.task, now) >= _LINE_SECONDS:
            self._told[event.task] = now
            share = f" ({event.done:g} of {event.total:g})" if event.total else ""
            log.info("%s: %s%s", event.task, event.message or "going on", share)
