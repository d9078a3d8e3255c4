# SPDX-License-Identifier: Apache-2.0
"""Shared by the fleet commands: options, how to open a fleet, and exit codes of errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from headrace.cli.checks import BAD_USE, FAILED, print_error, print_warning

if TYPE_CHECKING:
    from headrace.fleet.client import FleetTarget
    from headrace.fleet.client.contract import Fleet
    from headrace.fleet.explain import LocatedProblem
    from headrace.fleet.yaml_documents import ParsedFiles
    from headrace.platforms.kubernetes_client.objects import Document

_FLEET = "Fleet"
_INTERRUPTED = 130
T = TypeVar("T")

Kube = Annotated[
    bool, typer.Option("--kube", help="Use the cluster of your kubeconfig, not this machine.", rich_help_panel=_FLEET)
]
Kubeconfig = Annotated[
    str,
    typer.Option(
        "--kubeconfig",
        metavar="FILE",
        help="Kubeconfig file (default: the pod's service account, $KUBECONFIG, or ~/.kube/config).",
        rich_help_panel=_FLEET,
    ),
]
Context = Annotated[
    str,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Context of the kubeconfig (default: its current context).",
        rich_help_panel=_FLEET,
    ),
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Namespace (default: that of the context).", rich_help_panel=_FLEET
    ),
]
Files = Annotated[
    list[str] | None,
    typer.Option(
        "-f",
        "--filename",
        metavar="FILE",
        help="File, folder (recursive), or - for standard input. Repeatable.",
        show_default=False,
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Maximum time to wait, with --wait.")
]
Component = Annotated[
    str, typer.Option("--component", metavar="NAME", help="engine, decoder or router (default: all).")
]


def where_of(kube: bool, kubeconfig: str, context: str) -> FleetTarget:
    """Return the fleet that the options select."""
    from headrace.fleet.client import FleetTarget

    return FleetTarget(kube, kubeconfig, context)


def with_fleet(target: FleetTarget, work: Callable[[Fleet], Awaitable[T]]) -> T:
    """Run a function with the fleet; report errors with their exit code."""
    import asyncio

    from headrace.fleet import client

    # The error has what the user needs; log lines would only clutter the terminal.
    log = logging.getLogger("headrace")
    if not log.hasHandlers():
        log.addHandler(logging.NullHandler())

    async def run() -> T:
        fleet = client.open_fleet(target)
        try:
            return await work(fleet)
        finally:
            await fleet.close()

    with report_fleet_errors():
        try:
            return asyncio.run(run())
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None


@contextmanager
def report_fleet_errors() -> Iterator[None]:
    """Report an error: exit with 2 if the request is invalid or an extra is missing, with 1 if it failed."""
    from headrace.core.errors import HeadraceError, InvalidArgument
    from headrace.core.extras import MissingExtra
    from headrace.core.telemetry.logs import one_line

    try:
        yield
    except HeadraceError as error:
        print_error(one_line(error.message))
        raise typer.Exit(BAD_USE if isinstance(error, InvalidArgument | MissingExtra) else FAILED) from None


def read_files(files: list[str]) -> ParsedFiles:
    """Read the documents of files, folders and standard input."""
    from pathlib import Path

    from headrace.fleet.yaml_documents import ParsedFiles, parse, read

    documents = ParsedFiles([], [])
    for path in files:
        parsed = parse(sys.stdin.read(), "<stdin>") if path == "-" else read([Path(path)])
        documents = ParsedFiles([*documents.sources, *parsed.sources], [*documents.problems, *parsed.problems])
    return documents


def print_problems(errors: list[LocatedProblem], warnings: list[LocatedProblem]) -> None:
    """Print problems to standard error, one line each."""
    for problem in warnings:
        print_warning(str(problem))
    for problem in errors:
        print_error(str(problem))


def object_name(document: Document) -> str:
    """Return the name of an object as kubectl prints it: `inferenceservice.ome.io/digits`."""
    from headrace.core.telemetry.logs import one_line
    from headrace.platforms.kubernetes_client.objects import get_str, kind_of, name_of

    group = get_str(document, "apiVersion").rpartition("/")[0]
    return one_line(f"{kind_of(document).lower()}{f'.{group}' if group else ''}/{name_of(document)}")


class Progress:
    """Progress lines on standard error: rewritten in place on a terminal, one after the other elsewhere."""

    def __init__(self, *, silent: bool = False) -> None:
        self._silent = silent
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def __call__(self, line: str) -> None:
        """Show the current progress."""
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

    def __exit__(self, *exception: object) -> None:
        """Remove the line from the terminal."""
        if self._shown:
            typer.echo("\r\x1b[K", nl=False, err=True)
            self._shown = False
