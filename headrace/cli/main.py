# SPDX-License-Identifier: Apache-2.0
"""Entry point of the `headrace` command; its subcommands are listed in `commands`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from headrace.cli.root import MARKUP, Root
from headrace.version import __version__

app = typer.Typer(
    name="headrace",
    cls=Root,
    epilog="Every command has examples: headrace serve --help",
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    context_settings={"max_content_width": 120},
)


def main() -> None:
    """Run the console script."""
    if os.getpid() == 1:
        # The kernel drops SIGTERM for the first process of a container until it has a handler. Programs set theirs when they
        # have started; a pod that is deleted before that would start, serve, and last until its grace period is over.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    app()


def _print_version(print_it: bool) -> None:
    if print_it:
        typer.echo(f"headrace {__version__} (Python {sys.version.split()[0]})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve machine-learning models: from a folder on a laptop to a fleet on Kubernetes."""
