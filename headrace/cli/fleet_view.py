# SPDX-License-Identifier: Apache-2.0
"""How `headrace get` prints documents: a table, JSON or YAML like kubectl's, names; all at once or change by change."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import typer
from rich.text import Text

from headrace.cli.fleet_options import object_name
from headrace.cli.results import print_json, print_json_line
from headrace.cli.tables import open_console, table
from headrace.core.telemetry.logs import one_line
from headrace.fleet.client.rows import Column, cells, columns_of
from headrace.fleet.documents import write
from headrace.fleet.schema.fields import Kind
from headrace.fleet.words import Document, without_notes

_WIDEST = 1000
_STYLES = {
    "True": "green",
    "False": "red",
    "Unknown": "yellow",
    "Ready": "green",
    "Failed": "red",
    "Completed": "green",
    "Running": "yellow",
    "Loaded": "green",
    "Loading": "yellow",
    "Pending": "yellow",
    "FailedToLoad": "red",
    "Warning": "yellow",
    "rolled out": "green",
}


class Printer:
    """Prints documents of some kinds in one of the formats."""

    def __init__(
        self, kinds: Sequence[Kind], output: str, *, spaces: bool = False, one: bool = False, notes: bool = False
    ) -> None:
        self._kinds = kinds
        self._output = output
        self._one = one
        self._notes = notes
        self._columns: list[Column] = columns_of([kinds[0].name], wide=output == "wide", spaces=spaces)
        self._widths: list[int] = []

    def all(self, found: Sequence[Document], where: str) -> None:
        """What there is, at once."""
        if self._output in ("json", "yaml"):
            shown = [ordered(each if self._notes else without_notes(each)) for each in found]
            made = shown[0] if self._one and len(shown) == 1 else _list(shown)
            if self._output == "json":
                print_json(made)
            else:
                typer.echo(write([made]), nl=False)
        elif self._output == "name":
            for each in found:
                typer.echo(object_name(each))
        elif not found:
            typer.echo(f"no {' or '.join(each.plural for each in self._kinds)} in {where}", err=True)
        else:
            now = datetime.now(UTC)
            rows = [[_cell(each) for each in cells(document, self._columns, now)] for document in found]
            show_table([each.name for each in self._columns], rows)

    def change(self, change: str, document: Document) -> None:
        """One that came, changed or went, on a line of its own."""
        shown = ordered(document if self._notes else without_notes(document))
        if self._output == "json":
            print_json_line({"type": change, "object": shown})
        elif self._output == "yaml":
            typer.echo(f"---\n# {change}\n{write([shown])}", nl=False)
        elif self._output == "name":
            typer.echo(object_name(document))
        else:
            row = [one_line(each) for each in cells(document, self._columns, datetime.now(UTC))]
            if change == "DELETED":
                row[-1] = "deleted"
            self._line(row)
        # Whoever reads this through a pipe reads it now, not when the pipe is full.
        sys.stdout.flush()

    def _line(self, row: Sequence[str]) -> None:
        """Columns that only ever get wider, as the rows to come are not known."""
        heads = [each.name for each in self._columns]
        lines = [row] if self._widths else [heads, row]
        self._widths = self._widths or [len(each) for each in heads]
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        for each in lines:
            padded = (cell.ljust(width) for cell, width in zip(each, self._widths, strict=True))
            typer.echo("  ".join(padded).rstrip())


def show_table(heads: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """A table of which only the last column is folded: an address in pieces can neither be read nor copied.

    Where a terminal is too narrow for that it wraps the lines itself, as it does for kubectl.
    """
    from rich.measure import Measurement

    console, made = open_console(), table(heads, rows)
    for each in made.columns[:-1]:
        each.no_wrap = True
    least = Measurement.get(console, console.options.update(max_width=_WIDEST), made).minimum
    console.width = max(console.width, min(least, _WIDEST))
    console.print(made)


def _list(found: Sequence[Document]) -> dict[str, Any]:
    return {"apiVersion": "v1", "items": list(found), "kind": "List", "metadata": {"resourceVersion": ""}}


def ordered(value: Any) -> Any:
    """Names in the order of the alphabet, as kubectl prints them, so that the two can be compared."""
    if isinstance(value, dict):
        return {name: ordered(value[name]) for name in sorted(value)}
    return [ordered(each) for each in value] if isinstance(value, list) else value


def _cell(said: str) -> Text:
    return Text(one_line(said), _STYLES.get(said, ""))


def state_text(said: str) -> Text:
    """A word for a state, in its colour."""
    return _cell(said or "-")
