# SPDX-License-Identifier: Apache-2.0
"""`headrace top`: live statistics of a server or router on the terminal, until Ctrl-C."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import report_errors
from headrace.cli.common_options import SERVER_URL, print_json_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.cli.top_view import Poller, View


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of the HTTP port of a server or a router.")
    ] = SERVER_URL,
    named: Annotated[str, typer.Option("--url", metavar="URL", help="Same as the argument URL.")] = "",
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time between two polls.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Poll twice, print one table, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per poll.")] = False,
) -> None:
    """Watch a server: requests, failures, latencies, queues and batches per model, CPU, memory and GPUs.

    All numbers cover the time between two polls. Latencies are computed from the server's histograms and are as exact
    as its buckets. For a router, the backends are shown. Press Ctrl-C to stop; without a terminal, one table per poll
    is printed.

    Examples:

        headrace top

        headrace top http://10.0.0.7:8000 --interval 5

        headrace top --once

        headrace top http://127.0.0.1:8070 --json
    """
    from headrace.cli.tables import open_console
    from headrace.cli.top_view import open_poller, render

    with report_errors():
        poller = open_poller(named or url)
    console = open_console()
    try:
        if not once and not as_json and console.is_terminal:
            _live(poller, interval)
            return
        with report_errors():
            for view in _views(poller, interval):
                if as_json:
                    print_json_line(view.document())
                else:
                    console.print(render(view, console.width))
                if once:
                    return
    except KeyboardInterrupt:
        raise typer.Exit from None


def _views(poller: Poller, interval: float) -> Iterator[View]:
    """Yield one view per interval, without end."""
    before = poller.poll()
    while True:
        time.sleep(interval)
        after = poller.poll()
        yield poller.view(before, after)
        before = after


def _live(poller: Poller, interval: float) -> None:
    """Use the whole terminal. Keep polling a server that does not answer: it may come back."""
    from rich.console import Console
    from rich.live import Live

    from headrace.cli.top_view import render, render_error
    from headrace.core.errors import HeadraceError

    with report_errors():
        before = poller.poll()
    console = Console(highlight=False)
    with Live(
        render(poller.view(before, before), console.width), console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            time.sleep(interval)
            try:
                after = poller.poll()
            except HeadraceError as error:
                live.update(render_error(poller.url, error.message), refresh=True)
                continue
            live.update(render(poller.view(before, after), console.width), refresh=True)
            before = after
