# SPDX-License-Identifier: Apache-2.0
"""Output tables and lines: coloured and wrapped on a terminal, plain and as wide as needed elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.core.telemetry.logs import one_line

_PLAIN_WIDTH = 1000

STATE_STYLES = {"READY": "green", "LOADING": "yellow", "UNLOADING": "yellow", "UNAVAILABLE": "red"}


def open_console() -> Console:
    """Return a console for standard output."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    plain = cast("TextIO", _Trimmed(sys.stdout))
    return Console(file=plain, highlight=False, width=_PLAIN_WIDTH, color_system=None)


class _Trimmed(io.TextIOBase):
    """Standard output without the spaces that pad a table's last column."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write("\n".join(line.rstrip(" ") for line in text.split("\n")))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> Table:
    """Return a table without a frame. Cells are untrusted text: markup and escape sequences in them have no effect."""
    result = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        # Fold long cells: a shortened value would be unreadable.
        result.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Text) else Text(one_line(str(cell))) for cell in row))
    return result


def state_cell(state: str) -> Text:
    """Return a state in its colour."""
    return Text(one_line(state), STATE_STYLES.get(state, "dim"))


def heading(text: str) -> Text:
    """Return the line above a table."""
    return Text(one_line(text), "bold underline")


def line(text: str, style: str = "") -> Text:
    """Return a line of text; escape sequences in it have no effect."""
    return Text(one_line(text), style)


def average_ms(nanoseconds: int, count: int) -> str:
    """Return the mean of durations, in milliseconds."""
    return f"{nanoseconds / count / 1e6:.2f}" if count else "-"
