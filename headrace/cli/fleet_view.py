# SPDX-License-Identifier: Apache-2.0
"""Output of `headrace get`: a table, JSON or YAML like kubectl's, or names; all at once or change by change."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import typer
from rich.text import Text

from headrace.cli.common_options import print_json, print_json_line
from headrace.cli.fleet_options import object_name
from headrace.cli.tables import open_console, table
from headrace.core.telemetry.logs import one_line
from headrace.fleet.client.tables import Column, cells, columns_of
from headrace.fleet.schema.fields import Kind
from headrace.fleet.yaml_documents import write
from headrace.platforms.kubernetes_client.objects import Document, without_managed_fields

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
    """Prints documents of given kinds in one format."""

    def __init__(
        self, kinds: Sequence[Kind], output: str, *, spaces: bool = False, single: bool = False, notes: bool = False
    ) -> None:
        self._kinds = kinds
        self._output = output
        self._one = single
        self._notes = notes
        self._columns: list[Column] = columns_of([kinds[0].name], wide=output == "wide", spaces=spaces)
        self._widths: list[int] = []

    def all(self, documents: Sequence[Document], location: str) -> None:
        """Print all documents."""
        if self._output in ("json", "yaml"):
            shown = [ordered(document if self._notes else without_managed_fields(document)) for document in documents]
            output_document = shown[0] if self._one and len(shown) == 1 else _list(shown)
            if self._output == "json":
                print_json(output_document)
            else:
                typer.echo(write([output_document]), nl=False)
        elif self._output == "name":
            for document in documents:
                typer.echo(object_name(document))
        elif not documents:
            typer.echo(f"no {' or '.join(kind.plural for kind in self._kinds)} in {location}", err=True)
        else:
            now = datetime.now(UTC)
            rows = [[_cell(text) for text in cells(document, self._columns, now)] for document in documents]
            show_table([column.name for column in self._columns], rows)

    def change(self, change: str, document: Document) -> None:
        """Print one change on a line of its own."""
        shown = ordered(document if self._notes else without_managed_fields(document))
        if self._output == "json":
            print_json_line({"type": change, "object": shown})
        elif self._output == "yaml":
            typer.echo(f"---\n# {change}\n{write([shown])}", nl=False)
        elif self._output == "name":
            typer.echo(object_name(document))
        else:
            row = [one_line(text) for text in cells(document, self._columns, datetime.now(UTC))]
            if change == "DELETED":
                row[-1] = "deleted"
            self._line(row)
        # The reader of a pipe needs each line now, not when the buffer is full.
        sys.stdout.flush()

    def _line(self, row: Sequence[str]) -> None:
        """Print a row; columns only grow wider, because later rows are unknown."""
        heads = [column.name for column in self._columns]
        lines = [row] if self._widths else [heads, row]
        self._widths = self._widths or [len(head) for head in heads]
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        for cells_ in lines:
            padded = (cell.ljust(width) for cell, width in zip(cells_, self._widths, strict=True))
            typer.echo("  ".join(padded).rstrip())


def show_table(heads: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Print a table in which only the last column is folded: a folded URL cannot be copied.

    A terminal that is too narrow wraps the lines itself, as with kubectl.
    """
    from rich.measure import Measurement

    console, result = open_console(), table(heads, rows)
    for column in result.columns[:-1]:
        column.no_wrap = True
    least = Measurement.get(console, console.options.update(max_width=_WIDEST), result).minimum
    console.width = max(console.width, min(least, _WIDEST))
    console.print(result)


def _list(documents: Sequence[Document]) -> dict[str, Any]:
    return {"apiVersion": "v1", "items": list(documents), "kind": "List", "metadata": {"resourceVersion": ""}}


def ordered(value: Any) -> Any:
    """Return a document with its keys sorted, as kubectl prints them."""
    if isinstance(value, dict):
        return {name: ordered(value[name]) for name in sorted(value)}
    return [ordered(item) for item in value] if isinstance(value, list) else value


def _cell(text: str) -> Text:
    return Text(one_line(text), _STYLES.get(text, ""))


def state_text(text: str) -> Text:
    """Return a state in its colour."""
    return _cell(text or "-")
