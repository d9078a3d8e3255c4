# SPDX-License-Identifier: Apache-2.0
"""What the verbs for a fleet share: options, how a fleet is opened, which error is which exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from headrace.cli.checks import BAD_USE, FAILED, complain

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Fleet
    from headrace.fleet.client.opening import Where
    from headrace.fleet.documents import Read
    from headrace.fleet.explaining import Told
    from headrace.fleet.words import Document

_FLEET = "Fleet"
_INTERRUPTED = 130
T = TypeVar("T")

Kube = Annotated[
    bool, typer.Option("--kube", help="The cluster of your kubeconfig, not this machine.", rich_help_panel=_FLEET)
]
Kubeconfig = Annotated[
    str,
    typer.Option(
        "--kubeconfig",
        metavar="FILE",
        help="In a pod its service account, else $KUBECONFIG, else ~/.kube/config.",
        rich_help_panel=_FLEET,
    ),
]
Context = Annotated[
    str,
    typer.Option("--context", metavar="NAME", help="The kubeconfig's own unless told.", rich_help_panel=_FLEET),
]
Namespace = Annotated[
    str,
    typer.Option("--namespace", "-n", metavar="NAME", help="The context's own unless told.", rich_help_panel=_FLEET),
]
Files = Annotated[
    list[str] | None,
    typer.Option(
        "-f",
        "--filename",
        metavar="FILE",
        help="A file, a folder with all below it, or - for standard input. Repeatable.",
        show_default=False,
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help="With --wait: the longest.")]
Component = Annotated[
    str, typer.Option("--component", metavar="NAME", help="engine, decoder or router; all unless told.")
]


def where_of(kube: bool, kubeconfig: str, context: str) -> Where:
    """What was said of the fleet."""
    from headrace.fleet.client.opening import Where

    return Where(kube, kubeconfig, context)


def with_fleet(where: Where, work: Callable[[Fleet], Awaitable[T]]) -> T:
    """Do something with a fleet; an error becomes a sentence and an exit code."""
    import asyncio

    from headrace.fleet.client import opening

    # What a person has to know is in the error; what else is logged would stand around it.
    log = logging.getLogger("headrace")
    if not log.hasHandlers():
        log.addHandler(logging.NullHandler())

    async def run() -> T:
        fleet = opening.open_fleet(where)
        try:
            return await work(fleet)
        finally:
            await fleet.close()

    with or_sentence():
        try:
            return asyncio.run(run())
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None


@contextmanager
def or_sentence() -> Iterator[None]:
    """Turn an error into its text: exit code 2 for what was asked wrongly, 1 for what did not work."""
    from headrace.core.errors import HeadraceError, InvalidArgument
    from headrace.core.telemetry.logs import one_line

    try:
        yield
    except HeadraceError as error:
        complain(one_line(error.message))
        raise typer.Exit(BAD_USE if isinstance(error, InvalidArgument) else FAILED) from None


def read_files(files: list[str]) -> Read:
    """The documents of files, folders and standard input."""
    from pathlib import Path

    from headrace.fleet.documents import Read, parse, read

    found = Read([], [])
    for each in files:
        one = parse(sys.stdin.read(), "<stdin>") if each == "-" else read([Path(each)])
        found = Read([*found.sources, *one.sources], [*found.problems, *one.problems])
    return found


def show_told(errors: list[Told], warnings: list[Told]) -> None:
    """Problems on standard error, one line each."""
    from headrace.core.telemetry.logs import one_line

    for each in warnings:
        typer.secho(f"warning: {one_line(str(each))}", fg="yellow", err=True)
    for each in errors:
        typer.secho(f"error: {one_line(str(each))}", fg="red", err=True)


def object_name(document: Document) -> str:
    """`inferenceservice.ome.io/digits`, as kubectl names it."""
    from headrace.core.telemetry.logs import one_line
    from headrace.fleet.words import kind_of, name_of, text

    group = text(document, "apiVersion").rpartition("/")[0]
    return one_line(f"{kind_of(document).lower()}{f'.{group}' if group else ''}/{name_of(document)}")


class Progress:
    """Lines for who waits: rewritten in place on a terminal, one after the other elsewhere. On standard error."""

    def __init__(self, *, silent: bool = False) -> None:
        self._silent = silent
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def __call__(self, line: str) -> None:
        """Show where it is now."""
        from headrace.core.telemetry.logs import one_line

        if self._silent:
            return
        if not self._terminal:
            typer.echo(one_line(line), err=True)
            return
        import shutil

        width = shutil.get_terminal_size().columns
        typer.echo(f"\r\x1b[K{one_line(line)[: max(width - 1, 20)]}", nl=False, err=True)
        self._shown = True

    def __enter__(self) -> None: ...

    def __exit__(self, *told: object) -> None:
        """Take the line off the terminal, whatever comes next."""
        if self._shown:
            typer.echo("\r\x1b[K", nl=False, err=True)
            self._shown = False
