# SPDX-License-Identifier: Apache-2.0
"""The terminal: a progress bar, and the two tables of a finished run."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.report import number
from bench.sentences import sentences
from bench.summary import Figure, LoadingFigure, Summary
from bench.verdicts import Verdict
from bench.workloads import WORKLOADS

WIDTH_ELSEWHERE = 140
COLOURS = {"pass": "green", "pass (disturbed)": "yellow", "not measured": "yellow"}


def console() -> Console:
    """The terminal; output that goes elsewhere (a file, a CI log) is wide enough for the tables."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=WIDTH_ELSEWHERE)


class Bar:
    """One progress bar; where there is no terminal, each new step is a printed line instead."""

    def __init__(self, console: Console, progress: Progress, total: int) -> None:
        self._console = console
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def tell(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(text)

    def tick(self) -> None:
        self._progress.advance(self._task)


@contextmanager
def bar(console: Console, total: int) -> Iterator[Bar]:
    """Show a bar of this many steps for the length of a with block."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield Bar(console, progress, total)


def show(console: Console, summary: Summary, verdicts: list[Verdict], refused: dict[str, str]) -> None:
    """Print what was measured, how it compares, and what was refused."""
    if summary.figures:
        console.print(_figures(summary.figures))
    if summary.loadings:
        console.print(_loadings(summary.loadings))
    for sentence in sentences(summary):
        console.print(sentence, highlight=False)
    console.print(_verdicts(verdicts))
    for what, why in refused.items():
        console.print(f"[red]refused[/red] {what}: {why}", highlight=False)


def _figures(figures: list[Figure]) -> Table:
    table = Table(title="Measured (medians)")
    table.add_column("workload")
    table.add_column("server")
    for name in (
        "requests/s",
        "p50 ms",
        "p99 ms",
        "server CPU ms/1,000",
        "client CPU",
        "PSS MB",
        "errors",
        "others",
    ):
        table.add_column(name, justify="right")
    order = list(WORKLOADS)
    previous = None
    for f in sorted(figures, key=lambda f: (order.index(f.workload), f.server_cpu_ms_per_1000)):
        if previous not in (None, f.workload):
            table.add_section()
        previous = f.workload
        table.add_row(
            f.workload, f.server, number(f.requests_per_second), f"{f.p50_ms:.2f}", f"{f.p99_ms:.2f}",
            f"{f.server_cpu_ms_per_1000:,.1f}", f"{f.client_cpu_ms_per_1000:,.1f}", f"{f.pss_mb:,.0f}",
            str(f.errors), f"{f.other_cores:.2f}",
        )  # fmt: skip
    return table


def _loadings(loadings: list[LoadingFigure]) -> Table:
    table = Table(title="Seconds from asking for a model to its first answer (medians)")
    for name in ("workload", "server", "seconds", "of that, loading", "quickest", "slowest", "CPU s", "others"):
        table.add_column(name, justify="left" if name in {"workload", "server"} else "right")
    for f in loadings:
        times = (
            f"{seconds:.3f}"
            for seconds in (f.seconds, f.load_seconds, f.lowest_seconds, f.highest_seconds, f.cpu_seconds)
        )
        table.add_row(f.workload, f.server, *times, f"{f.other_cores:.2f}")
    return table


def _verdicts(verdicts: list[Verdict]) -> Table:
    table = Table(title="Headrace against the targets (server CPU per request, unless another figure is named)")
    for name in ("workload", "against", "ratio or figure", "target", "result"):
        table.add_column(name)
    for verdict in verdicts:
        colour = COLOURS.get(verdict.result, "red")
        table.add_row(
            verdict.workload,
            verdict.against,
            verdict.compared_text,
            verdict.target,
            f"[{colour}]{verdict.result}[/{colour}]",
        )
    return table
