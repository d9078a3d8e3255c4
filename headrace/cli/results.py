# SPDX-License-Identifier: Apache-2.0
"""The option `--json`, and what a verb prints with it: its result alone, on standard output.

Nothing else changes: progress, warnings and errors stay lines on standard error, and exit codes are the same.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of lines and tables.")]


def print_json(value: Any) -> None:
    """A result as a whole. What is not ASCII is escaped, so that every terminal and every file name will do."""
    typer.echo(json.dumps(value, indent=2))


def print_json_line(value: Any) -> None:
    """One of several, or one that is looked for among other lines."""
    typer.echo(json.dumps(value))


def print_result(value: Any, said: str, as_json: bool) -> None:
    """A result that is one line for people."""
    if as_json:
        print_json(value)
    else:
        typer.echo(said)
