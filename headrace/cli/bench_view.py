# SPDX-License-Identifier: Apache-2.0
"""How `headrace bench` shows its numbers: tables and bars of text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from headrace.cli.tables import heading, line, open_console, table
from headrace.programs.loadtest.measured import PERCENTILES, Measured, percentile
from headrace.programs.loadtest.plots import curve, histogram, milliseconds, sweep
from headrace.programs.loadtest.server_view import ServerView

_MOST_BATCHES = 8


def show_run(title: str, run: Measured) -> None:
    """One run, with all there is to say."""
    console = open_console()
    console.print(heading(title))
    console.print(line(_what(run)))
    console.print()
    rate = f"{run.throughput:.1f} requests/s"
    if run.rows > 1:
        rate += f", {run.throughput * run.rows:.1f} rows/s"
    console.print(line(f"{rate}, {run.requests} requests, {run.failed} failed", "bold"))
    _show_errors(console, run)
    console.print()
    console.print(table([*_names(), "MAX", "MEAN"], [_latencies(run)], right=[*_names(), "MAX", "MEAN"]))
    console.print(line("milliseconds", "dim"))
    _show_server(console, run.server)
    _show_client(console, run)
    if len(run.latencies_ms):
        console.print()
        _show_lines(console, "How many requests took how long", histogram(run.latencies_ms))
        console.print()
        _show_lines(console, "Percentiles", curve(run.latencies_ms))
    _show_warnings(console, run.warnings())


def show_sweep(title: str, runs: Sequence[Measured]) -> None:
    """Several runs, beside each other."""
    console = open_console()
    console.print(heading(title))
    console.print()
    load = "CONNECTIONS" if runs[0].mode == "closed" else "DUE/S"
    columns = [load, "REQUESTS/S", "ERRORS", *_names(), "MAX", "QUEUE", "COMPUTE", "BATCH", "CLIENT CPU"]
    console.print(table(columns, [_row(run) for run in runs], right=columns))
    console.print(line("latencies, queue and compute in milliseconds; the server's are means of a request", "dim"))
    for run in runs:
        _show_errors(console, run)
    console.print()
    _show_lines(console, "Throughput and latency", sweep(runs))
    _show_warnings(console, [f"{run.load:g}: {text}" for run in runs for text in run.warnings()])


def _row(run: Measured) -> list[str]:
    view = run.server
    server = ["-", "-", "-"]
    if view is not None:
        compute = sum(value for name, value in view.phases_ms.items() if name != "queue")
        server = [milliseconds(view.phases_ms["queue"]), milliseconds(compute), f"{view.mean_batch:.1f}"]
    percentiles = [milliseconds(run.at(share)) for share in PERCENTILES]
    ahead = [f"{run.load:g}", f"{run.throughput:.1f}", str(run.failed)]
    return [*ahead, *percentiles, milliseconds(run.max_ms), *server, f"{run.cpu.process:.0%}"]


def _names() -> list[str]:
    return [f"P{share:g}" for share in PERCENTILES]


def _latencies(run: Measured) -> list[str]:
    values = [*(run.at(share) for share in PERCENTILES), run.max_ms, run.mean_ms]
    return [milliseconds(value) for value in values]


def _what(run: Measured) -> str:
    loop = (
        f"closed loop of {run.load:g} connections"
        if run.mode == "closed"
        else f"open loop, {run.load:g} requests/s due"
    )
    return f"{loop}, {run.rows} row{'s' if run.rows != 1 else ''} a request, {run.seconds:g} s"


def _show_errors(console: Console, run: Measured) -> None:
    for kind, count in run.errors.items():
        console.print(line(f"  {count} x {kind}: {run.examples.get(kind, '')}", "red"))


def _show_server(console: Console, view: ServerView | None) -> None:
    if view is None:
        console.print(line("server: tells nothing of this time", "dim"))
        return
    phases = view.phases_ms
    compute = sum(value for name, value in phases.items() if name != "queue")
    parts = ", ".join(
        f"{name.removeprefix('compute_')} {milliseconds(phases[name])}" for name in phases if name != "queue"
    )
    console.print(
        line(
            f"server: queue {milliseconds(phases['queue'])} ms, compute {milliseconds(compute)} ms ({parts}), a request"
        )
    )
    common = sorted(view.batches.items(), key=lambda pair: -pair[1])[:_MOST_BATCHES]
    sizes = ", ".join(f"{count} of {size}" for size, count in sorted(common))
    more = ", ..." if len(view.batches) > _MOST_BATCHES else ""
    console.print(line(f"batches: {view.mean_batch:.1f} rows on average; {sizes}{more}"))


def _show_client(console: Console, run: Measured) -> None:
    console.print(line(f"client: {run.cpu.process:.0%} of a core, {run.cpu.thread:.0%} in its one busy thread"))
    if run.mode == "open":
        late = [milliseconds(percentile(run.late_ms, share)) for share in (50, 99, 100)]
        console.print(line(f"sent after it was due: p50 {late[0]} ms, p99 {late[1]} ms, at most {late[2]} ms"))


def _show_lines(console: Console, name: str, lines: Sequence[str]) -> None:
    console.print(line(name, "bold"))
    for each in lines:
        console.print(Text(each), no_wrap=True, overflow="crop")


def _show_warnings(console: Console, warnings: Sequence[str]) -> None:
    if warnings:
        console.print()
    for each in warnings:
        console.print(line(f"note: {each}", "yellow"))
