# SPDX-License-Identifier: Apache-2.0
"""`headrace top`: a server or a router while it works, on the terminal, until Ctrl-C."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import told
from headrace.cli.results import print_json_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.cli.top_polling import Poller
    from headrace.cli.top_rates import View

_URL = "http://127.0.0.1:8000"


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the HTTP port of a server or a router.")] = _URL,
    named: Annotated[str, typer.Option("--url", metavar="URL", help="The same, as other verbs have it.")] = "",
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="From one look to the next.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print one table, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each look.")] = False,
) -> None:
    """Watch a server: requests, failures, latencies, queues and batches of each model, CPU, memory and GPUs.

    All numbers are of the time between two looks. Latencies are worked out from the server's histograms, so they are as
    exact as its buckets. Of a router the backends are shown. Ctrl-C ends it; off a terminal, tables follow each other.

    Examples:

        headrace top

        headrace top http://10.0.0.7:8000 --interval 5

        headrace top --once

        headrace top http://127.0.0.1:8070 --json
    """
    from headrace.cli.tables import open_console
    from headrace.cli.top_polling import open_poller
    from headrace.cli.top_view import painted

    with told():
        poller = open_poller(named or url)
    console = open_console()
    try:
        if not once and not as_json and console.is_terminal:
            _live(poller, interval)
            return
        with told():
            for view in _views(poller, interval):
                if as_json:
                    print_json_line(view.document())
                else:
                    console.print(painted(view, console.width))
                if once:
                    return
    except KeyboardInterrupt:
        raise typer.Exit from None


def _views(poller: Poller, interval: float) -> Iterator[View]:
    """One after each interval, for ever."""
    before = poller.look()
    while True:
        time.sleep(interval)
        after = poller.look()
        yield poller.view(before, after)
        before = after


def _live(poller: Poller, interval: float) -> None:
    """On the whole terminal. A server that does not answer may come back: it is asked again."""
    from rich.console import Console
    from rich.live import Live

    from headrace.cli.top_view import lost, painted
    from headrace.core.errors import HeadraceError

    with told():
        before = poller.look()
    console = Console(highlight=False)
    with Live(
        painted(poller.view(before, before), console.width), console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            time.sleep(interval)
            try:
                after = poller.look()
            except HeadraceError as error:
                live.update(lost(poller.url, error.message), refresh=True)
                continue
            live.update(painted(poller.view(before, after), console.width), refresh=True)
            before = after
